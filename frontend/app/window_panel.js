/** The join window: the verdict in a sentence, the countdown, what is missing, and the switch. */
import { Button, useAct } from "./acts.js";
import { patch, post } from "./api.js";
import { seconds } from "./connection.js";
import { Field } from "./field.js";
import { MISSING, clock, count, plural, words } from "./format.js";
import { html, useEffect, useState } from "./html.js";
import { Icon } from "./icons.js";
import { parse } from "./schema.js";
import { toast } from "./toasts.js";
import { Notice, Panel } from "./ui.js";

const EXTEND_SECONDS = 300;
const MOST_PLACES = 32;

export function WindowPanel({ live }) {
  const terms = live.of("window").value;
  if (!terms) return null;
  return html`
    <${Panel} title="Join window" className="start-panel" note=${words(terms.start_mode)}>
      <p class="verdict">${terms.verdict}</p>
      <${Places} terms=${terms} />
      <${Countdown} live=${live} terms=${terms} />
      <${Checklist} terms=${terms} />
      <${Start} live=${live} terms=${terms} />
      <${Change} live=${live} terms=${terms} />
    <//>
  `;
}

/** Joined ranks as places: filled, needed for the quorum, and up to the target. */
function Places({ terms }) {
  const { joined_ranks: joined, joined_hosts: hosts, quorum, target } = terms;
  const most = Math.max(joined, quorum, target ?? 0);
  const goal = target ? `, starts at ${target}` : "";
  const ranks = joined === 1 ? "rank" : "ranks";
  const place = (_, i) => html`<i key=${i} class=${`${i < joined ? "in" : ""} ${i === quorum - 1 ? "quorum" : ""}`} />`;
  return html`
    <div class="places" role="img" aria-label=${`${plural(joined, "rank")} joined, ${quorum} needed${goal}`}>
      ${most <= MOST_PLACES && Array.from({ length: most }, place)}
    </div>
    <p class="places-words">
      <span>
        <strong class="tabular">${count(joined)}</strong> ${ranks} from ${plural(hosts, "host")}
      </span>
      <span class="muted">quorum ${quorum}${target ? ` · target ${target}` : ""}</span>
    </p>
  `;
}

/** Runs on this browser's clock from the last frame, so that it never stutters. */
function Countdown({ live, terms }) {
  const passed = Math.max(0, seconds.value - live.get("windowAt").value) / 1000;
  const left = (value) => (value === null || value === undefined ? null : Math.max(0, Math.ceil(value - passed)));
  const open = left(terms.window_remaining_seconds);
  const cap = left(terms.cap_remaining_seconds);
  const manual = terms.start_mode === "manual";
  return html`
    <div class="countdown">
      <dl>
        ${!manual &&
        html`<div>
          <dt>${open === null ? "Window" : "Joining ends in"}</dt>
          <dd class="tabular">${open === null ? "over" : clock(open)}</dd>
        </div>`}
        <div>
          <dt>${manual ? "Waits for Start" : "Fails without a start in"}</dt>
          <dd class="tabular">${cap === null ? MISSING : clock(cap)}</dd>
        </div>
      </dl>
      <${Extend} live=${live} />
    </div>
  `;
}

function Extend({ live }) {
  const { run, busy, problem } = useAct(async () => {
    await post(`runs/${live.id}/window/extend`, { seconds: EXTEND_SECONDS });
    toast("The window stays open for 5 more minutes.");
  });
  return html`
    <${Button} onPress=${run} busy=${busy} icon="plus" aria-label="Keep the window open for 5 more minutes">5 min<//>
    ${problem && html`<${Notice} tone="warn" live=${true}>${problem.message}<//>`}
  `;
}

function Checklist({ terms }) {
  const ready = terms.missing.length === 0;
  const title = terms.start_mode === "auto" ? "It starts by itself" : ready ? "Ready to start" : "Missing to start";
  return html`
    <div class="checklist">
      <h3 class="sub-title">${title}</h3>
      <ul>
        ${terms.missing.map((item) => html`<${Lacks} key=${item.code} item=${item} />`)}
        ${terms.joined_ranks >= terms.quorum &&
        html`<${Has}>${plural(terms.joined_ranks, "rank")} of the ${terms.quorum} needed<//>`}
        ${terms.armed && html`<${Has}>Start was pressed<//>`}
        ${ready && html`<${Has}>Job, model and data agree on every host<//>`}
      </ul>
    </div>
  `;
}

const Has = ({ children }) => html`<li class="has"><${Icon} name="check" /><div>${children}</div></li>`;

const Lacks = ({ item }) => html`
  <li class="lacks">
    <${Icon} name="warn" />
    <div>${item.text}${item.cure && html`<p class="muted">${item.cure}</p>`}</div>
  </li>
`;

/** Start is always there to be pressed: a press that comes too early is answered with what is missing. */
function Start({ live, terms }) {
  const { run, busy, problem, clear } = useAct(async () => {
    await post(`runs/${live.id}/start`);
    toast("Start! The world forms now.", "good");
  });
  useEffect(clear, [terms.verdict]); // what was missing then may be here now
  const dismiss = html`
    <button type="button" class="icon-button" aria-label="Dismiss" onClick=${clear}><${Icon} name="cross" /></button>
  `;
  const kind = terms.missing.length ? "plain" : "primary";
  return html`
    <${Button} kind=${kind} wide=${true} onPress=${run} busy=${busy} icon="play">Start training<//>
    ${problem &&
    html`<${Notice} tone="warn" live=${true} title="Not yet" action=${dismiss}>
      ${problem.message}
      ${problem.errors.length > 0 &&
      html`<ul>${problem.errors.map((error) => html`<li key=${error.code}>${error.text}</li>`)}</ul>`}
    <//>`}
  `;
}

const NUMBER = { kind: "integer", min: 2 };
const QUORUM = { ...NUMBER, name: "quorum", label: "Quorum", required: true, help: "Ranks that must have joined" };
const TARGET = { ...NUMBER, name: "target", label: "Target", optional: true, help: "Starts at once with so many" };

/** Quorum and target may change while the window is open. Only what was touched is sent. */
function Change({ live, terms }) {
  const [typed, setTyped] = useState({});
  const [wrong, setWrong] = useState({});
  const manual = terms.start_mode === "manual";
  const fields = manual ? [QUORUM] : [QUORUM, TARGET];
  const { run, busy, problem } = useAct(async (changes) => {
    await patch(`runs/${live.id}/window`, changes);
    setTyped({});
    toast("The window was changed.");
  });
  const submit = (event) => {
    event.preventDefault();
    const touched = fields.filter((field) => field.name in typed);
    const parsed = touched.map((field) => [field.name, parse(field, typed[field.name])]);
    const problems = Object.fromEntries(parsed.filter(([, p]) => p.problem).map(([name, p]) => [name, p.problem]));
    setWrong(problems);
    if (busy || !touched.length || Object.keys(problems).length) return;
    run(Object.fromEntries(parsed.map(([name, p]) => [name, p.value ?? null])));
  };
  const input = (field) => html`
    <${Field}
      key=${field.name}
      field=${field}
      value=${typed[field.name] ?? terms[field.name] ?? ""}
      onInput=${(value) => setTyped({ ...typed, [field.name]: value })}
      problem=${wrong[field.name] ?? problem?.at(field.name)}
    />
  `;
  return html`
    <details class="change">
      <summary><${Icon} name="chevron" />Change ${manual ? "the quorum" : "quorum or target"}</summary>
      <form onSubmit=${submit} novalidate>
        <div class="fields">${fields.map(input)}</div>
        ${problem && !problem.errors.length && html`<${Notice} tone="bad" live=${true}>${problem.message}<//>`}
        <button type="submit" class="button" aria-busy=${busy ? "true" : undefined}>Change</button>
      </form>
    </details>
  `;
}
