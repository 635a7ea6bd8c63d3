/** Runs: what is going on now, and everything that went before. */
import { get } from "./api.js";
import { Chip, Veil } from "./connection.js";
import { between, clock, count, figure, jobParts, leadMetric, metric, plural, words } from "./format.js";
import { html, useEffect, useMemo, useState } from "./html.js";
import { Mark } from "./icons.js";
import { LiveOverview } from "./live.js";
import { isEnded } from "./store.js";
import { Table } from "./table.js";
import { Choice, Copy, Emulated, Meter, Notice, Panel, Phase, Time, Button } from "./ui.js";

export function RunsPage() {
  const live = useMemo(() => new LiveOverview(), []);
  useEffect(() => () => live.close(), [live]);
  useEffect(() => {
    document.title = "Runs · Marchline";
  }, []);
  const runs = merged(live.of("runs").value ?? [], live.older.value);
  return html`<div class="page-head"><h1 tabindex="-1">Runs</h1><${Chip} live=${live} />
      <a class="button button-primary" href="#/runs/new">New run</a></div>
    <${Veil} live=${live}>
      ${live.problem.value && html`<${Notice} tone="bad" title="The runs could not be loaded" live=${true}>${live.problem.value.message}<//>`}
      ${!live.loaded.value && !live.problem.value && html`<${Skeleton} />`}
      ${live.loaded.value && (runs.length ? html`<${Lists} runs=${runs} live=${live} />` : html`<${FirstSteps} />`)}
    <//>`;
}

/** The live list over the older pages, newest first. */
function merged(recent, older) {
  const byId = new Map(older.map((run) => [run.id, run]));
  for (const run of recent) byId.set(run.id, run);
  return [...byId.values()].sort((a, b) => b.id - a.id);
}

function Lists({ runs, live }) {
  const now = runs.filter((run) => !isEnded(run.phase));
  const past = runs.filter((run) => isEnded(run.phase));
  return html`${now.length > 0 && html`<section aria-labelledby="now-title"><h2 id="now-title" class="section-title">Now</h2>
      <ul class="run-cards">${now.map((run) => html`<li key=${run.id}><${RunCard} run=${run} /></li>`)}</ul></section>`}
    ${past.length > 0 && html`<${History} runs=${past} live=${live} />`}`;
}

function RunCard({ run }) {
  const job = jobParts(run.job);
  const training = run.phase === "training";
  return html`<a class="run-card" href=${`#/runs/${run.id}`}>
    <span class="run-card-head"><strong>${run.name || `Run ${run.id}`}</strong><${Phase} phase=${run.phase} /></span>
    <span class="muted">${job.name} · ${words(run.mode)} ${run.emulated && html`<${Emulated} />`}</span>
    ${training
      ? html`<${Meter} value=${run.epochs_done} most=${run.epochs} label="Epochs done" />
        <span class="run-card-facts">epoch ${count(run.epochs_done)} of ${count(run.epochs)} · round ${count(run.rounds_done)} · loss ${figure(run.loss)}</span>`
      : html`<span class="run-card-facts">${waitingWords(run)}</span>`}
  </a>`;
}

function waitingWords(run) {
  if (run.phase === "forming") return "The world is forming: processes start on every host";
  return run.phase === "staging" ? "Enough ranks are here; it waits for Start" : "The join window is open";
}

const FILTERS = [["all", "All"], ["done", "Done"], ["failed", "Failed"]];

function History({ runs, live }) {
  const [filter, setFilter] = useState("all");
  const [text, setText] = useState("");
  const wanted = runs.filter((run) => (filter === "all" || (filter === "done") === (run.phase === "done")) &&
    `${run.name} ${run.job} ${run.mode} ${run.id}`.toLowerCase().includes(text.toLowerCase()));
  const aside = runs.length > 4 && html`<input type="search" placeholder="Filter by name or job" aria-label="Filter runs by name or job"
      value=${text} onInput=${(event) => setText(event.target.value)} />
    <${Choice} legend="Show" value=${filter} options=${FILTERS} onPick=${setFilter} />`;
  return html`<${Panel} title="History" aside=${aside}>
    ${wanted.length
      ? html`<${Table} caption="Finished runs, newest first" columns=${COLUMNS} rows=${wanted} keyOf=${(run) => run.id} rowClass=${() => "linked"} />`
      : html`<p class="empty">No run matches. <button type="button" class="link" onClick=${() => { setText(""); setFilter("all"); }}>Show all</button></p>`}
    ${live.cursor.value && html`<div class="panel-foot"><${Button} onPress=${() => live.page()}>Load older runs<//></div>`}
  <//>`;
}

const seconds = (run) => between(run.started_at, run.ended_at);
const lead = (run) => leadMetric(run.metrics);

const COLUMNS = [
  { key: "name", label: "Run", sort: (run) => run.name || run.id,
    cell: (run) => html`<a href=${`#/runs/${run.id}`} class="row-link">${run.name || `Run ${run.id}`}</a> <span class="muted">#${run.id}</span>` },
  { key: "phase", label: "Phase", sort: (run) => run.phase, cell: (run) => html`<span title=${run.reason}><${Phase} phase=${run.phase} /></span>` },
  { key: "job", label: "Job", sort: (run) => run.job,
    cell: (run) => html`<span title=${run.job}>${jobParts(run.job).name}</span> <span class="muted">${words(run.mode)}</span>` },
  { key: "world", label: "Ranks", number: true, sort: (run) => run.world_size,
    cell: (run) => html`${count(run.world_size)} ${run.emulated && html`<${Emulated} brief=${true} />`}` },
  { key: "epochs", label: "Epochs", number: true, sort: (run) => run.epochs_done, cell: (run) => `${count(run.epochs_done ?? 0)} / ${count(run.epochs)}` },
  { key: "loss", label: "Loss", number: true, sort: (run) => run.loss, cell: (run) => figure(run.loss) },
  { key: "metric", label: "Metric", number: true, sort: (run) => lead(run)?.value,
    cell: (run) => (lead(run) ? html`<span title=${words(lead(run).name)}>${metric(lead(run).name, lead(run).value)}</span>` : "–") },
  { key: "started", label: "Started", number: true, sort: (run) => run.started_at ?? run.created_at,
    cell: (run) => html`<${Time} iso=${run.started_at ?? run.created_at} />` },
  { key: "time", label: "Trained", number: true, sort: seconds, cell: (run) => clock(seconds(run)) },
  { key: "deaths", label: "Deaths", number: true, sort: (run) => run.deaths,
    cell: (run) => (run.deaths ? html`<span class="tone-bad ink">${plural(run.deaths, "death")}</span>` : html`<span class="muted">none</span>`) },
];

function FirstSteps() {
  const [controller, setController] = useState(null);
  useEffect(() => {
    get("controller").then(setController, () => setController(null));
  }, []);
  return html`<section class="first-steps">
    <${Mark} size=${56} />
    <h2>No runs yet</h2>
    <p class="lead">Unequal devices, one model: the slow one sets the pace, the fast ones range ahead, and all meet at one line.
      Three steps lead to the first run.</p>
    <ol class="steps">
      <li><h3>Create a run</h3><p>Choose a job and its parameters. A join window opens.</p>
        <a class="button button-primary" href="#/runs/new">New run</a></li>
      <li><h3>Let hosts dial in</h3><p>On every machine that shall train, run:</p>
        ${controller ? html`<${Command} text=${controller.join_command} />` : html`<p class="muted">The command appears on the run's page.</p>`}</li>
      <li><h3>Start, and watch</h3><p>Press Start when all are here. Allotments settle within a few rounds.</p></li>
    </ol>
  </section>`;
}

/** A shell command that can be copied. */
export function Command({ text }) {
  return html`<div class="command"><code tabindex="0" role="group" aria-label="Shell command">${text}</code><${Copy} text=${text} label="Copy the command" /></div>`;
}

const Skeleton = () => html`<div class="skeletons" aria-hidden="true"><i class="skeleton tall" /><i class="skeleton" /><i class="skeleton" /></div>
  <p class="offscreen" role="status">Loading runs</p>`;
