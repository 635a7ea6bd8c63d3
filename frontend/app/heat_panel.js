/** The allotments, round by round and rank by rank: the picture of the whole idea. */
import { count, plural } from "./format.js";
import { cellAt, describe, cellOf, lastRounds, layout, peak, ramp, rowHeight, spreadLabel } from "./heat.js";
import { draw } from "./heat_draw.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./html.js";
import { Icon } from "./icons.js";
import { isEnded } from "./store.js";
import { Table } from "./table.js";
import { dark } from "./theme.js";
import { Button, Emulated, Panel, say } from "./ui.js";

const TABLE_ROUNDS = 100;
export const placeOf = (rank) => `${rank.host_name ?? `host ${rank.host}`} ${rank.device ?? ""}`;
const labelOf = (rank) => `rank ${rank.rank} (${placeOf(rank)})`;

export function HeatPanel({ live, phase }) {
  const [asTable, setAsTable] = useState(false);
  const rounds = live.get("rounds").value;
  const ranks = live.of("ranks").value ?? [];
  const decision = live.of("decision").value;
  const aside = html`${live.of("emulated").value && html`<${Emulated} />`}<${Button} kind="quiet" onPress=${() => setAsTable(!asTable)} aria-pressed=${asTable}>${asTable ? "As a map" : "As a table"}<//>`;
  return html`<${Panel} title="Allotments" id="allotments" className="heat" aside=${aside} note="Batches given to each rank, round by round">
    <p class="decision"><${Icon} name="anchor" size=${20} /><span><span class="offscreen">ElChe's last decision: </span>${decision || "ElChe measures every rank before it deals unequal windows."}</span></p>
    ${asTable
      ? html`<${HeatTable} rounds=${rounds} ranks=${ranks} />`
      : html`<${Map} rounds=${rounds} ranks=${ranks} deaths=${live.of("deaths").value} live=${live} phase=${phase} />`}
  <//>`;
}

function Map({ rounds, ranks, deaths, live, phase }) {
  const height = rowHeight(ranks.length);
  const every = spreadLabel(ranks.length);
  const gone = useMemo(() => lastRounds(deaths), [deaths]);
  const most = Math.max(1, ...ranks.map((rank) => rank.planned ?? 0));
  const over = isEnded(phase);
  return html`<div class=${`heat-grid ${height < 20 ? "dense" : ""} ${over ? "over" : ""}`}>
      <div class="heat-captions" aria-hidden="true"><span>Rank</span><span>Closed rounds</span>${!over && html`<span>This window</span>`}</div>
      <ul class="heat-labels" aria-hidden="true">${ranks.map((rank, i) => html`<li key=${rank.rank} style=${{ height: `${height}px` }} class=${gone.has(rank.rank) ? "gone" : ""}>
        ${i % every === 0 && html`<strong>r${rank.rank}</strong> <span>${placeOf(rank)}</span>`}${rank.anchor && html`<${Icon} name="anchor" size=${Math.min(14, height)} />`}</li>`)}</ul>
      <${Canvas} rounds=${rounds} ranks=${ranks} gone=${gone} />
      ${!over && html`<ul class="heat-now" aria-label="This window, batches done of those planned">${ranks.map((rank) => html`<li key=${rank.rank} style=${{ height: `${height}px` }}>
        <${Now} rank=${rank} most=${most} text=${height >= 20} /></li>`)}</ul>`}
    </div>
    <${Legend} rounds=${rounds} live=${live} />`;
}

/** The window in progress: planned batches as a frame, realized ones filling it. Frames share one scale. */
function Now({ rank, most, text }) {
  if (rank.state === "dead" || rank.state === "left") return html`<span class="now-words muted">${rank.state}</span>`;
  const planned = rank.planned ?? 0;
  const done = Math.min(rank.realized ?? 0, planned);
  return html`<span class="now-bar" aria-hidden="true"><i class="now-planned" style=${{ width: `${(planned / most) * 100}%` }}><b style=${{ width: `${planned ? (done / planned) * 100 : 0}%` }} /></i></span>
    <span class=${text ? "now-words tabular" : "offscreen"}><span class="offscreen">rank ${rank.rank}: </span>${count(rank.realized ?? 0)} / ${count(rank.planned ?? 0)}</span>`;
}

function Canvas({ rounds, ranks, gone }) {
  const box = useRef(null);
  const canvas = useRef(null);
  const [width, setWidth] = useState(0);
  const [cursor, setCursor] = useState(null);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  const place = layout({ width, ranks: ranks.length, rounds: rounds.length });
  const isDark = dark.value;
  useLayoutEffect(() => {
    if (width) draw(canvas.current, { place, rounds, ranks, gone, most: peak(rounds, place.first), dark: isDark, cursor });
  }, [width, rounds, ranks.map((r) => r.rank).join(), gone, isDark, cursor]);
  const cell = cursor && rounds[place.first + cursor.column] && ranks[cursor.row]
    ? tell(rounds[place.first + cursor.column], ranks[cursor.row], gone) : null;
  const point = (event) => setCursor(cellAt(place, event.offsetX, event.offsetY));
  const key = (event) => {
    const next = moved(event.key, cursor, place, ranks.length);
    if (!next) return;
    event.preventDefault();
    setCursor(next);
    say(tell(rounds[place.first + next.column], ranks[next.row], gone));
  };
  const last = rounds.at(-1);
  const text = last ? `Allotments of ${plural(ranks.length, "rank")} over ${plural(rounds.length, "round")}. Last round ${last.round}: ${ranks.map((r) => `rank ${r.rank} ${last.planned?.[r.rank] ?? 0}`).join(", ")} batches. Arrow keys read the cells.` : "No round has closed yet.";
  return html`<div class="heat-canvas" ref=${box}>
    <canvas ref=${canvas} tabindex=${rounds.length ? 0 : undefined} role="img" aria-label=${text} onMouseMove=${point} onMouseLeave=${() => setCursor(null)}
      onKeyDown=${key} onBlur=${() => setCursor(null)}>${text}</canvas>
    ${!rounds.length && html`<p class="heat-empty">The first round closes after a measuring window of the same size on every rank.</p>`}
    ${cell && html`<p class="tip" style=${tipStyle(place, cursor)}>${cell}</p>`}
  </div>`;
}

const tell = (round, rank, gone) => describe(round, rank.rank, labelOf(rank), cellOf(round, rank.rank, gone.get(rank.rank)));

function tipStyle(place, { row, column }) {
  const x = place.left + column * place.cell;
  const right = x > place.width / 2;
  return { top: `${(row + 1) * place.row + 4}px`, left: right ? "auto" : `${Math.max(0, x)}px`, right: right ? `${Math.max(0, place.width - x - place.cell)}px` : "auto" };
}

function moved(key, cursor, place, ranks) {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -1e9], End: [0, 1e9] }[key];
  if (!step || !place.columns || !ranks) return null;
  const from = cursor ?? { row: 0, column: place.columns };
  const clamp = (value, most) => Math.min(most, Math.max(0, value));
  return { row: clamp(from.row + step[0], ranks - 1), column: clamp(from.column + step[1], place.columns - 1) };
}

function Legend({ rounds }) {
  const isDark = dark.value;
  if (!rounds.length) return null;
  const most = peak(rounds, Math.max(0, rounds.length - 200));
  const steps = Array.from({ length: 24 }, (_, i) => `rgb(${ramp(i / 23, isDark).join(",")})`);
  return html`<div class="legend" aria-hidden="true"><span>fewer</span><span class="ramp" style=${{ backgroundImage: `linear-gradient(90deg, ${steps.join(",")})` }} /><span>${count(most)} batches</span>
    <span class="key"><i class="key-anchor" />anchor</span><span class="key"><i class="key-short" />given, not done</span><span class="key"><i class="key-dead" />dead</span></div>`;
}

function HeatTable({ rounds, ranks }) {
  const rows = rounds.slice(-TABLE_ROUNDS).reverse();
  const columns = [
    { key: "round", label: "Round", sort: (row) => row.round, cell: (row) => count(row.round) },
    { key: "epoch", label: "Epoch", number: true, cell: (row) => count(row.epoch + 1) },
    { key: "anchor", label: "Anchor", number: true, cell: (row) => `${count(row.anchor)} on r${row.anchor_rank ?? "–"}` },
    ...ranks.map((rank) => ({ key: `r${rank.rank}`, label: `r${rank.rank}`, number: true,
      cell: (row) => html`<span title="done / planned">${count(row.realized?.[rank.rank])} / ${count(row.planned?.[rank.rank])}</span>` })),
  ];
  return html`<div class="tall-scroll" tabindex="0" role="region" aria-label="Allotments as a table"><${Table} caption=${`Batches done and planned, last ${TABLE_ROUNDS} rounds`} columns=${columns} rows=${rows} keyOf=${(row) => row.round} /></div>`;
}
