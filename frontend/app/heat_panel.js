/** The allotments, round by round and rank by rank: the picture of the whole idea. */
import { AsTable } from "./acts.js";
import { count, plural } from "./format.js";
import { cellAt, cellOf, describe, lastRounds, layout, moved, peak, ramp, rowHeight, spreadLabel } from "./heat.js";
import { draw } from "./heat_draw.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./html.js";
import { Icon } from "./icons.js";
import { isEnded } from "./store.js";
import { Table, column } from "./table.js";
import { dark } from "./theme.js";
import { say } from "./toasts.js";
import { Emulated, Panel } from "./ui.js";

const TABLE_ROUNDS = 100;
const LABELLED = 20;
const LEGEND_STEPS = 24;
const NO_ROUND = "The first round closes after a measuring window, alike for every rank.";
const UNTIMED = "ElChe measures every rank before it deals unequal windows.";

export const placeOf = (rank) => `${rank.host_name || `host ${rank.host}`} ${rank.device ?? ""}`;

export function HeatPanel({ live, phase }) {
  const [asTable, setAsTable] = useState(false);
  const rounds = live.get("rounds").value;
  const ranks = live.of("ranks").value ?? [];
  const gone = useMemo(() => lastRounds(live.of("deaths").value), [live.of("deaths").value]);
  const aside = html`
    ${live.of("emulated").value && html`<${Emulated} />`}
    <${AsTable} on=${asTable} onPick=${setAsTable} otherwise="As a map" />
  `;
  const note = "Batches given to each rank, round by round";
  return html`
    <${Panel} title="Allotments" id="allotments" aside=${aside} note=${note}>
      <p class="decision">
        <${Icon} name="anchor" size=${20} />
        <span><span class="offscreen">ElChe's last decision: </span>${live.of("decision").value || UNTIMED}</span>
      </p>
      ${asTable
        ? html`<${HeatTable} rounds=${rounds} ranks=${ranks} />`
        : html`<${HeatMap} rounds=${rounds} ranks=${ranks} gone=${gone} over=${isEnded(phase)} />`}
    <//>
  `;
}

/** Labels, map and the window in progress, row by row on one grid. */
function HeatMap({ rounds, ranks, gone, over }) {
  const height = rowHeight(ranks.length);
  const every = spreadLabel(ranks.length);
  const most = Math.max(1, ...ranks.map((rank) => rank.planned ?? 0));
  const style = { height: `${height}px` };
  const label = (rank, i) => html`
    <li key=${rank.rank} style=${style} class=${gone.has(rank.rank) ? "gone" : ""}>
      ${i % every === 0 && html`<strong>r${rank.rank}</strong> <span>${placeOf(rank)}</span>`}
      ${rank.anchor && html`<${Icon} name="anchor" size=${Math.min(14, height)} />`}
    </li>
  `;
  const now = (rank) => html`
    <li key=${rank.rank} style=${style}><${Now} rank=${rank} most=${most} visible=${height >= LABELLED} /></li>
  `;
  return html`
    <div class=${`heat-grid ${height < LABELLED ? "dense" : ""} ${over ? "over" : ""}`}>
      <div class="heat-captions" aria-hidden="true">
        <span>Rank</span><span>Closed rounds</span>${!over && html`<span>This window</span>`}
      </div>
      <ul class="heat-labels" aria-hidden="true">${ranks.map(label)}</ul>
      <${Canvas} rounds=${rounds} ranks=${ranks} gone=${gone} />
      ${!over && html`<ul class="heat-now" aria-label="This window, batches done of those planned">
        ${ranks.map(now)}
      </ul>`}
    </div>
    ${rounds.length > 0 && html`<${Legend} rounds=${rounds} />`}
  `;
}

/** The window in progress: planned batches as a frame, realized ones filling it. All frames share one scale. */
function Now({ rank, most, visible }) {
  if (rank.state === "dead" || rank.state === "left") return html`<span class="now-words muted">${rank.state}</span>`;
  const planned = rank.planned ?? 0;
  const realized = rank.realized ?? 0;
  const share = planned ? Math.min(1, realized / planned) : 0;
  return html`
    <span class="now-bar" aria-hidden="true">
      <i style=${{ width: `${(planned / most) * 100}%` }}><b style=${{ width: `${share * 100}%` }} /></i>
    </span>
    <span class=${visible ? "now-words tabular" : "offscreen"}>
      <span class="offscreen">rank ${rank.rank}: </span>${count(realized)} / ${count(planned)}
    </span>
  `;
}

function Canvas({ rounds, ranks, gone }) {
  const box = useRef(null);
  const canvas = useRef(null);
  const width = useWidth(box);
  const [cursor, setCursor] = useState(null);
  const place = layout({ width, ranks: ranks.length, rounds: rounds.length });
  const isDark = dark.value;
  const rows = ranks.map((rank) => rank.rank).join();
  useLayoutEffect(() => {
    const most = peak(rounds, place.first);
    if (width) draw(canvas.current, { place, rounds, ranks, gone, most, dark: isDark, cursor });
  }, [width, rounds, rows, gone, isDark, cursor]);
  const tell = ({ row, column: at }) => {
    const [round, rank] = [rounds[place.first + at], ranks[row]];
    if (!round || !rank) return null;
    const cell = cellOf(round, rank.rank, gone.get(rank.rank));
    return describe(round, rank.rank, `rank ${rank.rank} (${placeOf(rank)})`, cell);
  };
  const press = (event) => {
    const next = moved(place, cursor, event.key);
    if (!next) return;
    event.preventDefault();
    setCursor(next);
    say(tell(next));
  };
  return html`
    <div class="heat-canvas" ref=${box}>
      <canvas
        ref=${canvas}
        role="img"
        tabindex=${rounds.length ? 0 : undefined}
        aria-label=${inWords(rounds, ranks)}
        onMouseMove=${(event) => setCursor(cellAt(place, event.offsetX, event.offsetY))}
        onMouseLeave=${() => setCursor(null)}
        onBlur=${() => setCursor(null)}
        onKeyDown=${press}
      />
      ${!rounds.length && html`<p class="heat-empty">${NO_ROUND}</p>`}
      ${cursor && html`<p class="tip" style=${besides(place, cursor)}>${tell(cursor)}</p>`}
    </div>
  `;
}

function useWidth(box) {
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  return width;
}

function inWords(rounds, ranks) {
  const last = rounds.at(-1);
  if (!last) return "No round has closed yet.";
  const given = ranks.map((rank) => `rank ${rank.rank} ${last.planned?.[rank.rank] ?? 0}`).join(", ");
  const size = `${plural(ranks.length, "rank")} over ${plural(rounds.length, "round")}`;
  return `Allotments of ${size}. Last round ${last.round}: ${given} batches. Arrow keys read the cells.`;
}

/** Where the tip goes: under its cell, towards the middle of the map. */
function besides(place, { row, column: at }) {
  const left = place.left + at * place.cell;
  const top = `${(row + 1) * place.row + 4}px`;
  if (left <= place.width / 2) return { top, left: `${left}px`, right: "auto" };
  return { top, left: "auto", right: `${Math.max(0, place.width - left - place.cell)}px` };
}

function Legend({ rounds }) {
  const isDark = dark.value;
  const step = (_, i) => `rgb(${ramp(i / (LEGEND_STEPS - 1), isDark).join(",")})`;
  const steps = Array.from({ length: LEGEND_STEPS }, step);
  return html`
    <div class="legend" aria-hidden="true">
      <span>fewer</span>
      <span class="ramp" style=${{ backgroundImage: `linear-gradient(90deg, ${steps.join(",")})` }} />
      <span>${plural(peak(rounds), "batch", "batches")}</span>
      <span class="key"><i class="key-anchor" />anchor</span>
      <span class="key"><i class="key-short" />given, not done</span>
      <span class="key"><i class="key-dead" />dead</span>
    </div>
  `;
}

function HeatTable({ rounds, ranks }) {
  const done = ({ rank }) => (row) => `${count(row.realized?.[rank])} / ${count(row.planned?.[rank])}`;
  const columns = [
    column("Round", (row) => count(row.round)),
    column("Epoch", (row) => count(row.epoch + 1), { number: true }),
    column("Anchor", (row) => `${count(row.anchor)} on r${row.anchor_rank ?? "–"}`, { number: true }),
    ...ranks.map((rank) => column(`r${rank.rank}`, done(rank), { number: true })),
  ];
  return html`
    <div class="tall-scroll" tabindex="0" role="region" aria-label="Allotments as a table">
      <${Table}
        caption=${`Batches done and planned, last ${TABLE_ROUNDS} rounds`}
        columns=${columns}
        rows=${rounds.slice(-TABLE_ROUNDS).reverse()}
        keyOf=${(row) => row.round}
      />
    </div>
  `;
}
