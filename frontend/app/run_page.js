/** Run: one page through a run's whole life, from the open window to the history. */
import { Confirm } from "./acts.js";
import { post } from "./api.js";
import { Chip, Veil, seconds } from "./connection.js";
import { clock, jobParts, plural, words } from "./format.js";
import { html, useEffect, useMemo, useRef } from "./html.js";
import { Icon } from "./icons.js";
import { LiveRun } from "./live.js";
import { Outcome } from "./outcome.js";
import { Origin, Resume, SaveNow, Trouble } from "./resume.js";
import { Staging } from "./staging.js";
import { isEnded } from "./store.js";
import { Training } from "./training.js";
import { say, toast } from "./toasts.js";
import { Emulated, NotDurable, Notice, Phase, Time } from "./ui.js";

export function RunPage({ id }) {
  const live = useMemo(() => new LiveRun(id), [id]);
  useEffect(() => () => live.close(), [live]);
  const phase = live.of("phase").value;
  const problem = live.problem.value;
  if (!phase) return problem ? html`<${Missing} id=${id} problem=${problem} />` : html`<${Loading} id=${id} />`;
  const trained = live.of("started_at").value || live.get("points").value.length;
  const Body = phase === "training" || (isEnded(phase) && trained) ? Training : Staging;
  return html`
    <${Head} live=${live} phase=${phase} />
    <${Announcer} live=${live} phase=${phase} />
    <${Veil} live=${live}>
      <${Track} phase=${phase} />
      <${NotDurable} text=${live.of("not_durable").value} />
      <${Trouble} live=${live} />
      ${isEnded(phase) && html`<${Outcome} live=${live} phase=${phase} />`}
      <${Body} live=${live} phase=${phase} />
    <//>
  `;
}

function Missing({ id, problem }) {
  const title = problem.status === 404 ? "There is no such run" : "The run could not be loaded";
  const all = html`<a class="button" href="#/">All runs</a>`;
  return html`
    <div class="page-head"><h1 tabindex="-1">Run ${id}</h1></div>
    <${Notice} tone="bad" title=${title} live=${true} action=${all}>${problem.message}<//>
  `;
}

const Loading = ({ id }) => html`
  <div class="page-head"><h1 tabindex="-1">Run ${id}</h1></div>
  <div class="skeletons" aria-hidden="true"><i class="skeleton" /><i class="skeleton tall" /></div>
  <p class="offscreen" role="status">Loading the run</p>
`;

function Head({ live, phase }) {
  const name = live.of("name").value || `Run ${live.id}`;
  const job = jobParts(live.of("job").value);
  useEffect(() => {
    document.title = `${name} · ${words(phase)} · Marchline`;
  }, [name, phase]);
  return html`
    <div class="page-head run-head">
      <nav aria-label="Breadcrumb" class="crumbs">
        <a href="#/">Runs</a><${Icon} name="chevron" size=${12} /><span aria-current="page">Run ${live.id}</span>
      </nav>
      <div class="run-title">
        <h1 tabindex="-1">${name}</h1>
        <${Phase} phase=${phase} large=${true} />
        ${live.of("emulated").value && html`<${Emulated} />`}
        <${Leaving} live=${live} phase=${phase} />
        <${Chip} live=${live} />
      </div>
      <p class="facts">
        <span title=${job.where}><strong>${job.name}</strong> ${words(live.of("mode").value)}</span>
        <span>created <${Time} iso=${live.of("created_at").value} /></span>
        <${Elapsed} live=${live} phase=${phase} />
        <${Origin} live=${live} />
      </p>
      <div class="run-actions"><${Acts} live=${live} phase=${phase} /></div>
    </div>
  `;
}

const ENDING = {
  scoring: "scoring the model",
  saving: "saving the model",
  leaving: "hosts are leaving",
  over: "ending",
};

/** The end that is under way, or asked for. */
function Leaving({ live, phase }) {
  const step = live.of("ending").value;
  if (isEnded(phase) || !(step || live.of("stopped_by").value)) return null;
  return html`
    <span class="badge tone-warn"><${Icon} name="stop" size=${12} />${ENDING[step] ?? "stops after this window"}</span>
  `;
}

/** Training time, ticking between frames while the run is live. */
function Elapsed({ live, phase }) {
  const trained = live.of("seconds").value ?? 0;
  if (!trained && phase !== "training") return null;
  const ticking = phase === "training" && live.get("status").value === "live";
  const since = ticking ? Math.max(0, seconds.value - live.state.peek().viewAt) / 1000 : 0;
  return html`<span>trained <span class="tabular">${clock(trained + Math.min(since, 5))}</span></span>`;
}

function Acts({ live, phase }) {
  if (isEnded(phase)) return html`<${Resume} live=${live} />`;
  const act = (verb, said) => async () => {
    await post(`runs/${live.id}/${verb}`);
    toast(said);
  };
  const ending = live.of("stopped_by").value || live.of("ending").value;
  const training = phase === "training";
  const effect = training ? ABORT_TRAINING : html`<p>${abortWords(live.of("members").value?.length ?? 0)}</p>`;
  return html`
    ${training && !ending && html`<${SaveNow} live=${live} />`}
    ${training &&
    !ending &&
    html`<${Confirm}
      label="Stop …"
      icon="stop"
      title="Stop after this window?"
      effect=${STOP}
      confirm="Stop the run"
      confirmKind="primary"
      act=${act("stop", "Stopping: the window in progress is finished and saved first.")}
    />`}
    <${Confirm}
      label="Abort …"
      icon="cross"
      kind="danger-quiet"
      title=${training ? "Abort now?" : "Abort this run?"}
      effect=${effect}
      confirm="Abort the run"
      act=${act("abort", "Aborting the run.")}
    />
  `;
}

const STOP = html`
  <p>
    The cohort finishes the window that it is working on, averages it and saves a checkpoint. Then the run ends as done
    and its hosts are released.
  </p>
  <p>Nothing that was computed is lost, and the run can be resumed from there.</p>
`;

const ABORT_TRAINING = html`
  <p>
    Every rank stops without another round and the run ends as failed.${" "}
    <strong>The work since the last checkpoint is dropped.</strong>
  </p>
  <p>Use Stop to keep it.</p>
`;

function abortWords(hosts) {
  const effect = hosts ? `${plural(hosts, "host")} will be sent away.` : "The join window closes.";
  return `${effect} Nothing has been trained yet, so nothing is lost.`;
}

const STEPS = ["Hosts join", "World forms", "Training", "Done"];
const AT = { waiting: 0, staging: 0, forming: 1 };

/** What comes before training, as a line with four marks. */
function Track({ phase }) {
  if (!(phase in AT)) return null;
  const at = AT[phase];
  const step = (label, i) => html`
    <li key=${label} class=${i < at ? "past" : i === at ? "here" : ""} aria-current=${i === at ? "step" : undefined}>
      <i aria-hidden="true">${i < at ? html`<${Icon} name="check" size=${12} />` : i + 1}</i>${label}
    </li>
  `;
  return html`<ol class="track" aria-label="Progress of the run">${STEPS.map(step)}</ol>`;
}

/** Speaks when the phase turns or somebody dies; never of ticking numbers. */
function Announcer({ live, phase }) {
  const before = useRef(phase);
  useEffect(() => {
    if (before.current !== phase) say(`The run is now ${phase}.`);
    before.current = phase;
  }, [phase]);
  const deaths = live.of("deaths").value ?? [];
  const known = useRef(deaths.length);
  useEffect(() => {
    for (const death of deaths.slice(known.current)) {
      toast(`Rank ${death.rank} on ${death.host_name || `host ${death.host}`} died: ${death.reason}`, "bad");
    }
    known.current = deaths.length;
  }, [deaths.length]);
  return null;
}
