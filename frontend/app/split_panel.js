/** The time split as stacked bars, one a rank, with patterns so that colour is not needed to read them. */
import { figure, percent, span } from "./format.js";
import { placeOf } from "./heat_panel.js";
import { html, useMemo, useState } from "./html.js";
import { PARTS, splitOf, verdict } from "./split.js";
import { Choice, Emulated, Empty, Panel } from "./ui.js";

const MANY = 16;
const RANGES = [
  ["1", "Last round"],
  ["10", "10"],
  ["100", "100"],
];

export function SplitPanel({ live }) {
  const [last, setLast] = useState("10");
  const rounds = live.get("rounds").value;
  const ranks = live.of("ranks").value ?? [];
  const sums = useMemo(() => splitOf(rounds, Number(last)), [rounds, last]);
  const aside = html`
    ${live.of("emulated").value && html`<${Emulated} />`}
    <${Choice} legend="Rounds counted" value=${last} options=${RANGES} onPick=${setLast} />
  `;
  return html`
    <${Panel} title="Where the time goes" aside=${aside} className="split">
      ${sums.size
        ? html`<p class="chart-summary">${verdict(sums, percent)}</p>
            <${Bars} ranks=${ranks} sums=${sums} /><${Key} />`
        : html`<${Empty}>Shown from the first closed round on.<//>`}
    <//>
  `;
}

function Bars({ ranks, sums }) {
  const longest = Math.max(...[...sums.values()].map((sum) => sum.total));
  const many = sums.size > MANY;
  return html`
    <ul class=${`bars ${many ? "tall-scroll" : ""}`} tabindex=${many ? 0 : undefined}>
      ${ranks
        .filter((rank) => sums.has(rank.rank))
        .map((rank) => html`<${Bar} key=${rank.rank} rank=${rank} sum=${sums.get(rank.rank)} longest=${longest} />`)}
    </ul>
  `;
}

function Bar({ rank, sum, longest }) {
  const shares = PARTS.map(([key, label]) => `${label} ${percent(sum[key] / sum.total)}`).join(", ");
  const width = (key) => ({ width: `${(sum[key] / longest) * 100}%` });
  const part = ([key]) => html`<i key=${key} class=${`part-${key}`} style=${width(key)} />`;
  return html`
    <li>
      <span class="bar-label"><strong>r${rank.rank}</strong> <span class="muted">${placeOf(rank)}</span></span>
      <span class="bar" role="img" aria-label=${`Rank ${rank.rank}: ${shares}`} title=${shares}>
        ${PARTS.map(part)}
      </span>
      <span class="bar-note tabular" title=${`${figure(sum.total)} s in all`}>${span(sum.total)}</span>
    </li>
  `;
}

function Key() {
  const item = ([key, label, what]) => html`
    <li key=${key} class="key" title=${what}><i class=${`part-${key}`} />${label}</li>
  `;
  return html`<ul class="legend">${PARTS.map(item)}</ul>`;
}
