/** What is left of a run: how it ended, its model, its dead, its epochs, its configuration. */
import { bytes, count, figure, leadMetric, metric, plural, span, words } from "./format.js";
import { html } from "./html.js";
import { Icon } from "./icons.js";
import { Table } from "./table.js";
import { Empty, Notice, Panel, Time } from "./ui.js";

const ENDINGS = { done: ["good", "Done"], failed: ["bad", "Failed"], interrupted: ["warn", "Interrupted"] };

export function Outcome({ live, phase }) {
  const [tone, title] = ENDINGS[phase];
  const by = live.of("stopped_by").value;
  const checkpoints = live.of("checkpoints").value ?? [];
  const model = checkpoints.at(-1);
  const action = model && html`<a class="button button-primary" href=${modelAddress(live.id, model)} download><${Icon} name="down" /><span>Model, ${bytes(model.bytes)}</span></a>`;
  return html`<${Notice} tone=${tone} title=${`${title}${sentence(live, phase)}`} action=${action}>
      ${live.of("reason").value || (phase === "done" ? "All epochs were trained." : "No reason was recorded.")}${by && ` Stopped by ${by}.`}<//>
    <${Deaths} live=${live} /><${Checkpoints} live=${live} rows=${checkpoints} />`;
}

function sentence(live, phase) {
  const trained = live.of("seconds").value;
  const first = leadMetric(live.of("eval").value?.metrics);
  const parts = [trained ? `${phase === "done" ? "in" : "after"} ${span(trained)}` : "", first && phase === "done" ? `with ${first.name} ${metric(first.name, first.value)}` : ""].filter(Boolean);
  return parts.length ? ` ${parts.join(" ")}` : "";
}

const modelAddress = (id, row) => `/api/v1/runs/${id}/checkpoints/${row.checkpoint}/model`;

function Checkpoints({ live, rows }) {
  if (!rows.length) return null;
  const columns = [
    { key: "checkpoint", label: "Checkpoint", cell: (row) => html`<strong>${row.checkpoint}</strong>` },
    { key: "reason", label: "Why", cell: (row) => words(row.reason ?? "") },
    { key: "round", label: "Round", number: true, cell: (row) => count(row.round) },
    { key: "step", label: "Step", number: true, cell: (row) => count(row.global_step) },
    { key: "at", label: "Written", number: true, cell: (row) => html`<${Time} iso=${row.at} />` },
    { key: "sha", label: "SHA-256", cell: (row) => html`<code title=${row.sha256}>${(row.sha256 ?? "").slice(0, 12)}</code>` },
    { key: "get", label: "Download", quiet: true, number: true, cell: (row) => html`<a class="button" href=${modelAddress(live.id, row)} download aria-label=${`Download model.safetensors of checkpoint ${row.checkpoint}`}><${Icon} name="down" /><span>${bytes(row.bytes)}</span></a>` },
  ];
  return html`<${Panel} title="Checkpoints" note="safetensors: opens with any framework"><${Table} caption="Checkpoints" columns=${columns} rows=${[...rows].reverse()} keyOf=${(row) => row.checkpoint} /><//>`;
}

/** Who died, why, where, and what they said last. */
export function Deaths({ live }) {
  const deaths = live.of("deaths").value ?? [];
  if (!deaths.length) return null;
  return html`<${Panel} title="Deaths" className="deaths"><ul>${deaths.map((death) => html`<${Death} key=${death.id ?? death.rank} death=${death} />`)}</ul><//>`;
}

function Death({ death }) {
  const exit = death.signal ? `killed by ${death.signal}` : death.exit_code === null || death.exit_code === undefined ? "no exit seen" : `exit code ${death.exit_code}`;
  const facts = [["Exit", exit], ["Last step", count(death.last_step)], ["Last round", count(death.last_round)], ["Samples given back", count(death.returned_samples)],
    ["Peak memory", death.peak_rss_bytes ? bytes(death.peak_rss_bytes) : "–"]];
  return html`<li class="death"><div class="death-head"><${Icon} name="skull" size=${20} /><strong>Rank ${death.rank}</strong>
      <span>on ${death.host_name ?? `host ${death.host}`} <span class="mono muted">${death.device}</span></span><span class="muted"><${Time} iso=${death.at} /></span></div>
    <p class="death-reason">${death.reason}</p>
    ${death.exception && html`<p><code class="code">${death.exception}</code> ${death.message}</p>`}
    <dl class="facts-list">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd class="tabular">${value}</dd></div>`)}</dl>
    ${death.last_lines && html`<details><summary><${Icon} name="chevron" />Last lines it wrote</summary><pre tabindex="0" role="region" aria-label=${`Last lines of rank ${death.rank}`}>${death.last_lines}</pre></details>`}</li>`;
}

export function Epochs({ live, epochs }) {
  const rows = epochs.value;
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.metrics ?? {})))].slice(0, 3);
  const columns = [
    { key: "epoch", label: "Epoch", cell: (row) => html`<strong>${row.epoch + 1}</strong>` },
    { key: "loss", label: "Loss", number: true, cell: (row) => figure(row.loss) },
    ...names.map((name) => ({ key: `m-${name}`, label: `Eval ${name}`, number: true, cell: (row) => (row.metrics && name in row.metrics ? metric(name, row.metrics[name]) : "–") })),
    { key: "samples", label: "Samples", number: true, cell: (row) => html`${count(row.samples_accepted)}${lost(row) > 0 && html` <span class="tone-bad ink">${plural(lost(row), "lost", "lost")}</span>`}` },
    { key: "seconds", label: "Time", number: true, cell: (row) => span(row.seconds) },
  ];
  return html`<${Panel} title="Epochs" note=${live.of("samples_total").value ? `${count(live.of("samples_total").value)} samples each, accepted exactly once` : ""}>
    ${rows.length ? html`<div class="tall-scroll" tabindex="0" role="region" aria-label="Finished epochs"><${Table} caption="Finished epochs" columns=${columns} rows=${[...rows].reverse()} keyOf=${(row) => row.epoch} /></div>`
      : html`<${Empty}>The first epoch is being trained.<//>`}<//>`;
}

const lost = (row) => (row.samples_lost ?? []).reduce((sum, item) => sum + (item.size ?? item.samples ?? item[1] ?? 0), 0);

export function Config({ live }) {
  const config = live.of("config").value ?? {};
  const params = live.of("params").value ?? config.params ?? {};
  const rows = (values) => Object.entries(values).filter(([, value]) => typeof value !== "object" || value === null || Array.isArray(value))
    .map(([name, value]) => html`<div key=${name}><dt>${words(name)}</dt><dd class="mono">${value === null || value === "" ? "–" : String(value)}</dd></div>`);
  return html`<details class="panel advanced"><summary><${Icon} name="chevron" /><h2>Configuration</h2><span class="muted">parameters and settings of this run</span></summary>
    <h3 class="sub-title">Parameters of the job</h3><dl class="facts-list">${Object.keys(params).length ? rows(params) : html`<p class="muted">None.</p>`}</dl>
    <h3 class="sub-title">Run</h3><dl class="facts-list">${rows(config)}</dl></details>`;
}
