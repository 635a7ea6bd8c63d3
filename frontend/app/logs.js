/** What ElChe decided and why, and everything that happened. */
import { decisionLog } from "./decisions.js";
import { count, timeOfDay } from "./format.js";
import { html, useMemo, useState } from "./html.js";
import { Icon } from "./icons.js";
import { Choice, Empty, Panel } from "./ui.js";

const DECISIONS_SHOWN = 60;
const EVENTS_SHOWN = 200;
const FILTERS = [
  ["all", "All"],
  ["trouble", "Trouble"],
];

export function Decisions({ live }) {
  const rounds = live.get("rounds").value;
  const log = useMemo(() => decisionLog(rounds).slice(0, DECISIONS_SHOWN), [rounds]);
  const item = ({ from, to, text, against }) => html`
    <li key=${from}>
      <span class="log-when tabular">${from === to ? `round ${count(from)}` : `${count(from)}–${count(to)}`}</span>
      <span>${text} ${against && html`<${Objection} ...${against} />`}</span>
    </li>
  `;
  return html`
    <${Panel} title="Decisions" note="Why ElChe dealt as it did">
      ${log.length
        ? html`<ol class="log tall-scroll steady" tabindex="0" aria-label="Decisions, newest first">
            ${log.map(item)}
          </ol>`
        : html`<${Empty} className="steady">ElChe decides when a round closes. Its reasons are kept here.<//>`}
    <//>
  `;
}

/** Why the window may not grow, or must shrink: what the guard or the meta-controller saw. */
const Objection = ({ heading, text }) => html`
  <span class="objection tone-warn"><${Icon} name="warn" size=${14} /><strong>${heading}:</strong> ${text}</span>
`;

export function Events({ live }) {
  const [filter, setFilter] = useState("all");
  const all = live.get("events").value;
  const wanted = all.filter((event) => filter === "all" || event.level !== "info");
  const shown = wanted.slice(-EVENTS_SHOWN).reverse();
  const aside = html`<${Choice} legend="Show" value=${filter} options=${FILTERS} onPick=${setFilter} />`;
  const nothing = filter === "all" ? "Nothing has happened yet." : "No trouble so far.";
  return html`
    <${Panel} title="Events" aside=${aside}>
      ${shown.length
        ? html`<ol class="log tall-scroll steady" tabindex="0" aria-label="Events, newest first">
            ${shown.map((event) => html`<${Event} key=${event.id ?? event.at + event.text} event=${event} />`)}
          </ol>`
        : html`<${Empty} className="steady">${nothing}<//>`}
    <//>
  `;
}

function Event({ event: { at, level, text } }) {
  const icon = level === "error" ? "cross" : "warn";
  const mark = html`<${Icon} name=${icon} size=${14} /><span class="offscreen">${level}: </span>`;
  return html`
    <li class=${`level-${level}`}>
      <time class="log-when tabular" dateTime=${at} title=${at}>${timeOfDay(at)}</time>
      <span>${level !== "info" && mark}${text}</span>
    </li>
  `;
}
