/** The session of a run whose devices average among themselves: which one, how it came to be, and how they talk. */
import { count } from "./format.js";
import { html } from "./html.js";
import { talk, turns } from "./sessions.js";
import { Panel } from "./ui.js";

const TONES = { none: "quiet", naming: "warn", joining: "warn", live: "good", broken: "bad" };
const NOTE = "One communicator over the living ranks; made anew whenever one of them is lost";

/** Nothing where the controller averages. */
export function SessionPanel({ live }) {
  const session = live.of("session").value;
  if (!session) return null;
  return html`
    <${Panel} title="Session" note=${NOTE} className="session">
      <dl class="facts-list">
        <${Fact} name="State">
          <span class=${`state tone-${TONES[session.state] ?? "quiet"}`}><i class="dot" />${turns(session)}</span>
        <//>
        <${Fact} name="Generation">${count(session.generation)}<//>
        <${Fact} name="Made anew">${count(session.rebuilds)} ×<//>
        ${session.reason && html`<${Fact} name="Because">${session.reason}<//>`}
        ${talk(session.transports).map(
          ([transport, ranks]) => html`<${Fact} key=${transport} name=${transport}><span class="tabular">${ranks}</span><//>`,
        )}
      </dl>
    <//>
  `;
}

const Fact = ({ name, children }) => html`
  <div>
    <dt>${name}</dt>
    <dd>${children}</dd>
  </div>
`;
