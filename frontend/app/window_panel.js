/** The join window: the verdict in a sentence, the countdown, what is missing, and the switch. */
import { patch, post } from "./api.js";
import { seconds } from "./connection.js";
import { Field } from "./field.js";
import { clock, count, plural, words } from "./format.js";
import { html, useState } from "./html.js";
import { Icon } from "./icons.js";
import { parse } from "./schema.js";
import { Button, Notice, Panel, toast, useAct } from "./ui.js";

const EXTEND_SECONDS = 300;

export function WindowPanel({ live, phase }) {
  const window = live.of("window").value;
  if (!window) return null;
  return html`<${Panel} title="Join window" className="start-panel" note=${words(window.start_mode)}>
    <p class="verdict">${window.verdict}</p>
    <${Places} window=${window} />
    <${Countdown} live=${live} window=${window} />
    <${Checklist} window=${window} />
    <${Start} live=${live} window=${window} phase=${phase} />
    <${Change} live=${live} window=${window} />
  <//>`;
}

/** Joined ranks as places: filled, needed for the quorum, and up to the target. */
function Places({ window }) {
  const { joined_ranks: joined, quorum, target } = window;
  const most = Math.max(joined, quorum, target ?? 0);
  const label = `${plural(joined, "rank")} joined, ${quorum} needed${target ? `, starts at ${target}` : ""}`;
  const shown = most <= 32;
  return html`<div class="places" role="img" aria-label=${label}>
      ${shown && Array.from({ length: most }, (_, i) => html`<i key=${i} class=${`${i < joined ? "in" : ""} ${i === quorum - 1 ? "quorum" : ""}`} />`)}</div>
    <p class="places-words"><strong class="tabular">${count(joined)}</strong> ${joined === 1 ? "rank" : "ranks"} from ${plural(window.joined_hosts, "host")}
      <span class="muted">quorum ${quorum}${target ? ` · target ${target}` : ""}</span></p>`;
}

/** Runs on this browser's clock from the last frame, so that it never stutters. */
function Countdown({ live, window }) {
  const passed = Math.max(0, seconds.value - live.get("windowAt").value) / 1000;
  const left = (value) => (value === null || value === undefined ? null : Math.max(0, value - passed));
  const open = left(window.window_remaining_seconds);
  const cap = left(window.cap_remaining_seconds);
  const manual = window.start_mode === "manual";
  return html`<div class="countdown"><dl>
    ${!manual && html`<div><dt>${open === null ? "Window" : "Joining ends in"}</dt><dd class="tabular">${open === null ? "over" : clock(Math.ceil(open))}</dd></div>`}
    <div><dt>${manual ? "Waits for Start" : "Fails without a start in"}</dt><dd class="tabular">${cap === null ? "–" : clock(Math.ceil(cap))}</dd></div>
    </dl><${Extend} live=${live} /></div>`;
}

function Extend({ live }) {
  const { run, busy, problem } = useAct(async () => {
    await post(`runs/${live.id}/window/extend`, { seconds: EXTEND_SECONDS });
    toast("The window stays open for 5 more minutes.");
  });
  return html`<${Button} onPress=${run} busy=${busy} icon="plus" aria-label="Keep the window open for 5 more minutes">5 min<//>
    ${problem && html`<${Notice} tone="warn" live=${true}>${problem.message}<//>`}`;
}

function Checklist({ window }) {
  const ready = window.missing.length === 0;
  const quorum = window.joined_ranks >= window.quorum;
  return html`<div class="checklist"><h3 class="sub-title">${ready ? "Ready to start" : "Missing to start"}</h3>
    <ul>${window.missing.map((item) => html`<li key=${item.code} class="lacks"><${Icon} name="warn" /><div>${item.text}${item.cure && html`<p class="muted">${item.cure}</p>`}</div></li>`)}
      ${quorum && html`<li class="has"><${Icon} name="check" /><div>${plural(window.joined_ranks, "rank")} of the ${window.quorum} needed</div></li>`}
      ${window.armed && html`<li class="has"><${Icon} name="check" /><div>Start was pressed</div></li>`}
      ${ready && html`<li class="has"><${Icon} name="check" /><div>Job, model and data agree on every host</div></li>`}
    </ul></div>`;
}

/** Start is always there to be pressed: a press that comes too early is answered with what is missing. */
function Start({ live, window }) {
  const { run, busy, problem, clear } = useAct(async () => {
    await post(`runs/${live.id}/start`);
    toast("Start! The world forms now.", "good");
  });
  const ready = window.missing.length === 0;
  return html`<${Button} kind=${ready ? "primary" : "plain"} wide=${true} onPress=${run} busy=${busy} icon="play">Start training<//>
    ${problem && html`<${Notice} tone="warn" live=${true} title="Not yet" action=${html`<button type="button" class="icon-button" aria-label="Dismiss" onClick=${clear}><${Icon} name="cross" /></button>`}>
      ${problem.message}${problem.errors.length > 0 && html`<ul>${problem.errors.map((error) => html`<li key=${error.code}>${error.text}</li>`)}</ul>`}<//>`}`;
}

const QUORUM = { name: "quorum", label: "Quorum", kind: "integer", min: 2, required: true, help: "Ranks that must have joined" };
const TARGET = { name: "target", label: "Target", kind: "integer", min: 2, optional: true, help: "Starts at once with so many; empty: none" };

function Change({ live, window }) {
  const [typed, setTyped] = useState({});
  const [wrong, setWrong] = useState({});
  const manual = window.start_mode === "manual";
  const fields = manual ? [QUORUM] : [QUORUM, TARGET];
  const { run, busy, problem } = useAct(async (body) => {
    await patch(`runs/${live.id}/window`, body);
    setTyped({});
    toast("The window was changed.");
  });
  const submit = (event) => {
    event.preventDefault();
    const parsed = fields.filter((f) => f.name in typed).map((f) => [f.name, parse(f, typed[f.name])]);
    const problems = Object.fromEntries(parsed.filter(([, p]) => p.problem).map(([name, p]) => [name, p.problem]));
    setWrong(problems);
    if (!Object.keys(problems).length && !busy) run(Object.fromEntries(parsed.map(([name, p]) => [name, p.value ?? null])));
  };
  return html`<details class="change"><summary><${Icon} name="chevron" />Change ${manual ? "the quorum" : "quorum or target"}</summary>
    <form onSubmit=${submit} novalidate><div class="fields">${fields.map((f) => html`<${Field} key=${f.name} field=${f} value=${typed[f.name] ?? window[f.name] ?? ""}
        onInput=${(value) => setTyped({ ...typed, [f.name]: value })} problem=${wrong[f.name] ?? problem?.at(f.name)} />`)}</div>
      ${problem && !problem.errors.length && html`<${Notice} tone="bad" live=${true}>${problem.message}<//>`}
      <button type="submit" class="button" aria-busy=${busy ? "true" : undefined}>Change</button></form></details>`;
}
