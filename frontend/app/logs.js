/** What ElChe decided and why, and everything that happened. */
import { count, timeOfDay } from "./format.js";
import { html, useMemo, useState } from "./html.js";
import { Icon } from "./icons.js";
import { Choice, Empty, Panel } from "./ui.js";

const SHOWN = 60;

/** Decisions newest first; the same sentence again is counted, not repeated. Pure. */
export function decisionLog(rounds) {
  const log = [];
  for (const row of rounds) {
    if (!row.decision) continue;
    const last = log.at(-1);
    if (last && last.text === row.decision) Object.assign(last, { to: row.round, times: last.times + 1 });
    else log.push({ from: row.round, to: row.round, text: row.decision, anchor: row.anchor, times: 1 });
  }
  return log.reverse();
}

export function Decisions({ live }) {
  const rounds = live.get("rounds").value;
  const log = useMemo(() => decisionLog(rounds).slice(0, SHOWN), [rounds]);
  return html`<${Panel} title="Decisions" note="Why ElChe dealt as it did">
    ${log.length === 0 ? html`<${Empty}>ElChe decides when a round closes. Its reasons are kept here.<//>`
      : html`<ol class="log tall-scroll" tabindex="0" aria-label="Decisions, newest first">${log.map((item) => html`<li key=${item.from}>
          <span class="log-when tabular">${item.times > 1 ? `${count(item.from)}–${count(item.to)}` : `round ${count(item.from)}`}</span>
          <span>${item.text}</span></li>`)}</ol>`}
  <//>`;
}

const LEVELS = { info: "info", warning: "warn", error: "cross" };
const FILTERS = [["all", "All"], ["trouble", "Trouble"]];

export function Events({ live }) {
  const [filter, setFilter] = useState("all");
  const events = live.get("events").value;
  const wanted = events.filter((event) => filter === "all" || event.level !== "info").slice(-200).reverse();
  return html`<${Panel} title="Events" aside=${html`<${Choice} legend="Show" value=${filter} options=${FILTERS} onPick=${setFilter} />`}>
    ${wanted.length === 0 ? html`<${Empty}>${filter === "all" ? "Nothing has happened yet." : "No trouble so far."}<//>`
      : html`<ol class="log tall-scroll" tabindex="0" aria-label="Events, newest first">${wanted.map((event) => html`<li key=${event.id ?? `${event.at}${event.text}`} class=${`level-${event.level}`}>
          <time class="log-when tabular" dateTime=${event.at} title=${event.at}>${timeOfDay(event.at)}</time>
          <span>${event.level !== "info" && html`<${Icon} name=${LEVELS[event.level] ?? "info"} size=${14} /><span class="offscreen">${event.level}: </span>`}${event.text}</span></li>`)}</ol>`}
  <//>`;
}
