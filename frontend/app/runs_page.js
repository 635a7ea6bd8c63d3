/** Runs: what is going on now, and everything that went before. */
import { Button } from "./acts.js";
import { Chip, Veil } from "./connection.js";
import { FirstSteps } from "./first_steps.js";
import { MISSING, between, clock, count, figure, jobParts, leadMetric, metric, plural, words } from "./format.js";
import { html, useEffect, useMemo, useState } from "./html.js";
import { LiveOverview } from "./live.js";
import { isEnded } from "./store.js";
import { Table, column } from "./table.js";
import { Choice, Emulated, Meter, NotDurable, Notice, Panel, Phase, Time } from "./ui.js";

const FILTER_FROM = 5;

export function RunsPage() {
  const live = useMemo(() => new LiveOverview(), []);
  useEffect(() => () => live.close(), [live]);
  useEffect(() => {
    document.title = "Runs · Marchline";
  }, []);
  const runs = merged(live.of("runs").value ?? [], live.older.value);
  const problem = live.problem.value;
  const loaded = live.loaded.value;
  return html`
    <div class="page-head">
      <h1 tabindex="-1">Runs</h1>
      <${Chip} live=${live} />
      <a class="button button-primary" href="#/runs/new">New run</a>
    </div>
    <${Veil} live=${live}>
      <${NotDurable} text=${live.of("controller").value?.not_durable} />
      ${problem && html`<${Notice} tone="bad" title="The runs could not be loaded" live=${true}>${problem.message}<//>`}
      ${!loaded && !problem && html`<${Skeleton} />`} ${loaded && !runs.length && html`<${FirstSteps} />`}
      ${loaded && html`<${Now} runs=${runs.filter((run) => !isEnded(run.phase))} />`}
      ${loaded && html`<${History} runs=${runs.filter((run) => isEnded(run.phase))} live=${live} />`}
    <//>
  `;
}

const Skeleton = () => html`
  <div class="skeletons" aria-hidden="true">
    <i class="skeleton tall" /><i class="skeleton" /><i class="skeleton" />
  </div>
  <p class="offscreen" role="status">Loading runs</p>
`;

/** The live list over the older pages, newest first. */
function merged(recent, older) {
  const byId = new Map([...older, ...recent].map((run) => [run.id, run]));
  return [...byId.values()].sort((a, b) => b.id - a.id);
}

const nameOf = (run) => run.name || `Run ${run.id}`;

function Now({ runs }) {
  if (!runs.length) return null;
  return html`
    <section aria-labelledby="now-title">
      <h2 id="now-title" class="section-title">Now</h2>
      <ul class="run-cards">${runs.map((run) => html`<li key=${run.id}><${RunCard} run=${run} /></li>`)}</ul>
    </section>
  `;
}

const WAITING = {
  waiting: "The join window is open",
  staging: "Enough ranks are here; it waits for Start",
  forming: "The world is forming: processes start on every host",
};

function RunCard({ run }) {
  const progress = `epoch ${count(run.epochs_done)} of ${count(run.epochs)} · round ${count(run.rounds_done)}`;
  return html`
    <a class="run-card" href=${`#/runs/${run.id}`}>
      <span class="run-card-head"><strong>${nameOf(run)}</strong><${Phase} phase=${run.phase} /></span>
      <span class="muted">
        ${jobParts(run.job).name} · ${words(run.mode)} ${run.emulated && html`<${Emulated} />`}
      </span>
      ${run.phase === "training" && html`<${Meter} value=${run.epochs_done} most=${run.epochs} label="Epochs done" />`}
      <span class="run-card-facts">${WAITING[run.phase] ?? `${progress} · loss ${figure(run.loss)}`}</span>
    </a>
  `;
}

const FILTERS = [
  ["all", "All"],
  ["done", "Done"],
  ["failed", "Failed"],
];

function History({ runs, live }) {
  const [filter, setFilter] = useState("all");
  const [text, setText] = useState("");
  if (!runs.length) return null;
  const fits = (run) => filter === "all" || (filter === "done") === (run.phase === "done");
  const says = (run) => `${run.name} ${run.job} ${run.mode} ${run.id}`.toLowerCase().includes(text.toLowerCase());
  const wanted = runs.filter((run) => fits(run) && says(run));
  const all = () => {
    setText("");
    setFilter("all");
  };
  const aside = html`
    <input
      type="search"
      placeholder="Filter by name or job"
      aria-label="Filter runs by name or job"
      value=${text}
      onInput=${(event) => setText(event.target.value)}
    />
    <${Choice} legend="Show" value=${filter} options=${FILTERS} onPick=${setFilter} />
  `;
  return html`
    <${Panel} title="History" aside=${runs.length >= FILTER_FROM && aside}>
      ${wanted.length
        ? html`<${Table}
            caption="Finished runs, newest first"
            columns=${COLUMNS}
            rows=${wanted}
            keyOf=${(run) => run.id}
            rowClass=${() => "linked"}
          />`
        : html`<p class="empty">
            No run matches. <button type="button" class="link" onClick=${all}>Show all</button>
          </p>`}
      ${live.cursor.value &&
      html`<div class="panel-foot"><${Button} onPress=${() => live.once()}>Load older runs<//></div>`}
    <//>
  `;
}

const seconds = (run) => between(run.started_at, run.ended_at);
const started = (run) => run.started_at ?? run.created_at;
const figures = (label, cell, sort) => column(label, cell, { number: true, sort });

function lead(run) {
  const best = leadMetric(run.metrics);
  return best ? html`<span title=${words(best.name)}>${metric(best.name, best.value)}</span>` : MISSING;
}

const link = (run) => html`
  <a href=${`#/runs/${run.id}`} class="row-link">${nameOf(run)}</a> <span class="muted">#${run.id}</span>
`;
const job = (run) => html`
  <span title=${run.job}>${jobParts(run.job).name}</span> <span class="muted">${words(run.mode)}</span>
`;
const ranks = (run) => html`${count(run.world_size)} ${run.emulated && html`<${Emulated} brief=${true} />`}`;
const deaths = (run) =>
  run.deaths
    ? html`<span class="tone-bad ink">${plural(run.deaths, "death")}</span>`
    : html`<span class="muted">none</span>`;

const COLUMNS = [
  column("Run", link, { sort: nameOf }),
  column("Phase", (run) => html`<span title=${run.reason}><${Phase} phase=${run.phase} /></span>`, {
    sort: (run) => run.phase,
  }),
  column("Job", job, { sort: (run) => run.job }),
  figures("Ranks", ranks, (run) => run.world_size),
  figures("Epochs", (run) => `${count(run.epochs_done ?? 0)} / ${count(run.epochs)}`, (run) => run.epochs_done),
  figures("Loss", (run) => figure(run.loss), (run) => run.loss),
  figures("Metric", lead, (run) => leadMetric(run.metrics)?.value),
  figures("Started", (run) => html`<${Time} iso=${started(run)} />`, started),
  figures("Trained", (run) => clock(seconds(run)), seconds),
  figures("Deaths", deaths, (run) => run.deaths),
];
