/** What is left of a run: how it ended, its model, its dead, its epochs, its configuration. */
import { MISSING, bytes, count, figure, leadMetric, metric, span, words } from "./format.js";
import { html } from "./html.js";
import { Icon } from "./icons.js";
import { newest } from "./resume.js";
import { Table, column } from "./table.js";
import { Empty, Notice, Panel, Time } from "./ui.js";

const ENDINGS = { done: ["good", "Done"], failed: ["bad", "Failed"], interrupted: ["warn", "Interrupted"] };
const SHOWN_METRICS = 3;
const SHOWN_WAITERS = 4;

/** The end in a sentence, with the model at hand. */
export function Outcome({ live, phase }) {
  const [tone, title] = ENDINGS[phase];
  const by = live.of("stopped_by").value;
  const reason = live.of("reason").value || (phase === "done" ? "All epochs were trained." : "No reason was recorded.");
  const model = newest(live.of("checkpoints").value);
  const size = model && `Model, ${bytes(model.bytes)}`;
  const download = model && html`<${Download} id=${live.id} row=${model} kind="button-primary">${size}<//>`;
  return html`
    <${Notice} tone=${tone} title=${`${title}${sentence(live, phase)}`} action=${download}>
      ${reason}${by && ` Stopped by ${by}.`}
    <//>
    <${Deaths} live=${live} />
  `;
}

/** " in 49 s with accuracy 97.7 %". */
function sentence(live, phase) {
  const done = phase === "done";
  const trained = live.of("seconds").value;
  const score = done && leadMetric(live.of("eval").value?.metrics);
  const time = trained ? ` ${done ? "in" : "after"} ${span(trained)}` : "";
  return score ? `${time} with ${score.name} ${metric(score.name, score.value)}` : time;
}

function Download({ id, row, kind = "", children, label }) {
  const address = `/api/v1/runs/${id}/checkpoints/${row.checkpoint}/model`;
  return html`
    <a class=${`button ${kind}`} href=${address} download aria-label=${label}>
      <${Icon} name="down" /><span>${children}</span>
    </a>
  `;
}

export function Checkpoints({ live }) {
  const rows = live.of("checkpoints").value ?? [];
  if (!rows.length) return null;
  const download = (row) => {
    if (row.pruned) return html`<span class="muted">removed for newer ones</span>`;
    const label = `Download the model of checkpoint ${row.checkpoint}`;
    return html`<${Download} id=${live.id} row=${row} label=${label}>${bytes(row.bytes)}<//>`;
  };
  const columns = [
    column("Checkpoint", (row) => html`<strong>${row.checkpoint}</strong>`),
    column("Why", (row) => words(row.reason ?? "")),
    column("Round", (row) => count(row.round), { number: true }),
    column("Step", (row) => count(row.global_step), { number: true }),
    column("Written", (row) => html`<${Time} iso=${row.at} />`, { number: true }),
    column("SHA-256", (row) => html`<code title=${row.sha256}>${(row.sha256 ?? "").slice(0, 12)}</code>`),
    column("Download", download, { quiet: true, number: true }),
  ];
  return html`
    <${Panel} title="Checkpoints" note="safetensors: opens with any framework">
      <${Table} caption="Checkpoints" columns=${columns} rows=${[...rows].reverse()} keyOf=${(row) => row.checkpoint} />
    <//>
  `;
}

/** Who died, why, where, and what they said last. */
export function Deaths({ live }) {
  const deaths = live.of("deaths").value ?? [];
  if (!deaths.length) return null;
  return html`
    <${Panel} title="Deaths" className="deaths">
      <ul>${deaths.map((death) => html`<${Death} key=${death.id ?? death.rank} death=${death} />`)}</ul>
    <//>
  `;
}

function Death({ death }) {
  const exit = exitOf(death);
  const facts = [
    ...(death.reason.includes(exit) ? [] : [["Exit", exit]]),
    ["Last step", count(death.last_step)],
    ["Last round", death.last_round < 0 ? "none" : count(death.last_round)],
    ["Samples given back", count(death.returned_samples)],
    ["Peak memory", death.peak_rss_bytes ? bytes(death.peak_rss_bytes) : MISSING],
    ...(death.memory_kills ? [["Memory limit", death.memory_limit_bytes ? `${bytes(death.memory_limit_bytes)}, reached` : "reached"]] : []),
    ...(death.waited ? [["Waited for it", waitedFor(death.waited)]] : []),
  ];
  const place = death.host_name || `host ${death.host}`;
  const said = death.exception && [death.exception, death.message].filter(Boolean).join(": ");
  return html`
    <li class="death">
      <div class="death-head">
        <${Icon} name="skull" size=${20} /><strong>Rank ${death.rank}</strong>
        <span>on ${place} <span class="mono muted">${death.device}</span></span>
        <span class="muted"><${Time} iso=${death.at} /></span>
      </div>
      <p class="death-reason">${death.reason}</p>
      ${said && !death.reason.includes(said) && html`<p><code class="code">${said}</code></p>`}
      <${Facts} facts=${facts} />
      <${Recovery} recovery=${death.recovery ?? {}} />
      ${death.last_lines && html`<${LastLines} death=${death} />`}
    </li>
  `;
}

const short = (seconds) => (seconds < 1 ? `${Math.round(seconds * 1000)} ms` : span(seconds));

/** Who had nothing to do meanwhile, the longest first. */
function waitedFor(waited) {
  const ranks = Object.entries(waited).sort(([, a], [, b]) => b - a);
  if (!ranks.length) return "nobody";
  const shown = ranks.slice(0, SHOWN_WAITERS).map(([rank, seconds]) => `r${rank} ${short(seconds)}`);
  const rest = ranks.length - shown.length;
  return rest > 0 ? `${shown.join(", ")} and ${rest} more` : shown.join(", ");
}

const PHASES = [
  ["detect", "found after", "Since its end, or since its host was last heard"],
  ["decide", "round asked for after", "Until the others were asked for a round without it"],
  ["resume", "closed after", "Until that round was closed"],
  ["first_step", "next batch after", "Until a survivor had done the next batch"],
];

/** How long each step took until the others were at work again. */
function Recovery({ recovery }) {
  const known = PHASES.filter(([name]) => name in recovery);
  if (!known.length) return null;
  return html`
    <ol class="recovery" aria-label="Recovery">
      ${known.map(([name, text, title]) => html`
        <li key=${name} title=${title}><span class="muted">${text}</span> <strong>${short(recovery[name])}</strong></li>
      `)}
    </ol>
  `;
}

function exitOf({ signal, exit_code: code }) {
  if (signal) return `killed by ${signal}`;
  return code === null || code === undefined ? "not seen" : `exit code ${code}`;
}

const LastLines = ({ death }) => html`
  <details>
    <summary><${Icon} name="chevron" />Last lines it wrote</summary>
    <pre tabindex="0" role="region" aria-label=${`Last lines of rank ${death.rank}`}>${death.last_lines}</pre>
  </details>
`;

function Facts({ facts, mono = false }) {
  const style = mono ? "mono" : "tabular";
  const fact = ([name, value]) => html`<div key=${name}><dt>${name}</dt><dd class=${style}>${value}</dd></div>`;
  return html`<dl class="facts-list">${facts.map(fact)}</dl>`;
}

export function Epochs({ live, epochs }) {
  const rows = epochs.value;
  const each = live.of("samples_total").value;
  const metrics = [...new Set(rows.flatMap((row) => Object.keys(row.metrics ?? {})))].slice(0, SHOWN_METRICS);
  const score = (name) => (row) => (row.metrics && name in row.metrics ? metric(name, row.metrics[name]) : MISSING);
  const columns = [
    column("Epoch", (row) => html`<strong>${row.epoch + 1}</strong>`),
    column("Loss", (row) => figure(row.loss), { number: true }),
    ...metrics.map((name) => column(`Eval ${name}`, score(name), { number: true })),
    column("Samples", samples, { number: true }),
    column("Time", (row) => span(row.seconds), { number: true }),
  ];
  return html`
    <${Panel} title="Epochs" note=${each ? `${count(each)} samples each, accepted exactly once or listed lost` : ""}>
      ${rows.length
        ? html`<div class="tall-scroll steady" tabindex="0" role="region" aria-label="Finished epochs">
            <${Table}
              caption="Finished epochs"
              columns=${columns}
              rows=${[...rows].reverse()}
              keyOf=${(row) => row.epoch}
            />
          </div>`
        : html`<${Empty} className="steady">The first epoch is being trained.<//>`}
    <//>
  `;
}

function samples(row) {
  const lost = row.samples_lost ?? [];
  const size = lost.reduce((sum, piece) => sum + piece.size, 0);
  const why = lost.map((piece) => `${piece.offset} to ${piece.offset + piece.size - 1}: ${piece.reason}, r${piece.rank}`);
  const note = size > 0 && html` <span class="tone-bad ink" title=${why.join("; ")}>${count(size)} lost</span>`;
  return html`${count(row.samples_accepted)}${note}`;
}

/** Everything that was decided before the run began. */
export function Config({ live }) {
  const config = live.of("config").value ?? {};
  const params = live.of("params").value ?? config.params ?? {};
  const { params: _, ...settings } = config;
  const told = (value) => (value === null || value === "" ? MISSING : String(value));
  const facts = (values) => Object.entries(values).map(([name, value]) => [words(name), told(value)]);
  return html`
    <details class="panel advanced">
      <summary>
        <${Icon} name="chevron" /><h2>Configuration</h2><span class="muted">parameters and settings of this run</span>
      </summary>
      <h3 class="sub-title">Parameters of the job</h3>
      ${Object.keys(params).length
        ? html`<${Facts} facts=${facts(params)} mono=${true} />`
        : html`<p class="muted">This job has none.</p>`}
      <h3 class="sub-title">Settings of the run</h3>
      <${Facts} facts=${facts(settings)} mono=${true} />
    </details>
  `;
}
