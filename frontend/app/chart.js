/** uPlot with what it lacks: a title, a sentence, a keyboard cursor that speaks, and the same data as a table. */
import uPlot from "uplot";
import { html, useEffect, useId, useRef, useState } from "./html.js";
import { spread } from "./points.js";
import { Table } from "./table.js";
import { colour, dark } from "./theme.js";
import { Button, say } from "./ui.js";

const HEIGHT = 220;
const TABLE_ROWS = 100;

/**
 * `series`: [{key, label, colour, values, dash?, width?, fill?, points?, faint?, format}]; `axis`: {label, format}; `markers`: [{at, label}]
 * are drawn as dashed lines. `summary` is the chart in a sentence.
 */
export function Chart({ title, summary, x, series, axis, markers = [], zero = false, aside, sync = "run" }) {
  const [asTable, setAsTable] = useState(false);
  const [idx, setIdx] = useState(null);
  const [zoomed, setZoomed] = useState(false);
  const id = useId();
  const at = idx === null || idx >= x.length ? x.length - 1 : idx;
  return html`<figure class="chart panel" aria-labelledby=${`${id}-title`}>
    <figcaption class="panel-head"><h2 id=${`${id}-title`}>${title}</h2><div class="panel-aside">${aside}
      <${Button} kind="quiet" onPress=${() => setAsTable(!asTable)} aria-pressed=${asTable}>${asTable ? "As a chart" : "As a table"}<//></div></figcaption>
    <p class="chart-summary">${summary}</p>
    ${x.length === 0 ? html`<p class="empty chart-empty">The first round has not closed yet.</p>`
      : asTable ? html`<${Data} x=${x} series=${series} axis=${axis} title=${title} />`
      : html`<${Readout} series=${series} at=${at} x=${x} axis=${axis} pinned=${idx !== null} />
        <${Plot} label=${`${title}. ${summary} Arrow keys read the values.`} x=${x} series=${series} axis=${axis} markers=${markers} zero=${zero}
          sync=${sync} onCursor=${setIdx} onZoom=${setZoomed} zoomed=${zoomed} />`}
  </figure>`;
}

/** The value at a place, or the last one known before it: a score stays in force until the next. */
function inForce(values, at) {
  while (at > 0 && values[at] === null) at -= 1;
  return values[at];
}

function Readout({ series, at, x, axis, pinned }) {
  return html`<div class="readout" aria-hidden="true"><span class=${`readout-x tabular ${pinned ? "" : "muted"}`}>${axis.name} ${axis.format(x[at])}</span>
    ${series.filter((s) => !s.faint).map((s) => html`<span key=${s.key} class="readout-item"><i class=${`swatch ${s.dash ? "dashed" : ""}`} style=${{ "--c": `var(${s.colour})` }} />${s.label}
      <b class="tabular">${s.format(inForce(s.values, at))}</b></span>`)}</div>`;
}

function Plot({ label, x, series, axis, markers, zero, sync, onCursor, onZoom, zoomed }) {
  const box = useRef(null);
  const plot = useRef(null);
  const now = useRef({});
  now.current = { x, markers, zoomed, axis, series };
  const shape = `${dark.value}|${zero}|${series.map((s) => s.key).join()}`;
  useEffect(() => {
    const made = new uPlot(options(box.current, series, { zero, sync, now, onCursor, onZoom }), [x, ...series.map((s) => s.values)], box.current);
    plot.current = made;
    const observer = new ResizeObserver(() => made.setSize({ width: box.current.clientWidth, height: HEIGHT }));
    observer.observe(box.current);
    return () => {
      observer.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => {
    const made = plot.current;
    if (!made || made.data[0] === x) return;
    made.batch(() => {
      made.setData([x, ...series.map((s) => s.values)], !zoomed);
      if (zoomed) made.redraw();
    });
  }, [x, ...series.map((s) => s.values)]);
  const key = (event) => walk(event, plot.current, x, series, axis, onCursor);
  return html`<div class="plot" ref=${box} tabindex="0" role="img" aria-label=${label} onKeyDown=${key} />
    ${zoomed && html`<div class="follow"><${Button} onPress=${() => follow(plot.current, x, onZoom)}>Show all and follow<//></div>`}`;
}

function follow(plot, x, onZoom) {
  onZoom(false);
  plot.setScale("x", { min: x[0], max: x.at(-1) });
}

function walk(event, plot, x, series, axis, onCursor) {
  const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
  if (event.key === "Escape") onCursor(null);
  if (!step || !plot || !x.length) return;
  event.preventDefault();
  const from = plot.cursor.idx ?? x.length;
  const next = Math.min(x.length - 1, Math.max(0, from + step));
  plot.setCursor({ left: plot.valToPos(x[next], "x"), top: 20 });
  onCursor(next);
  say(`${axis.name} ${axis.format(x[next])}: ${series.filter((s) => !s.faint).map((s) => `${s.label} ${s.format(s.values[next])}`).join(", ")}`);
}

function options(box, series, { zero, sync, now, onCursor, onZoom }) {
  const grid = { stroke: colour("--line"), width: 1 };
  const text = { stroke: colour("--text-3"), font: `11px ${getComputedStyle(document.body).fontFamily}`, grid, ticks: { show: false } };
  return {
    width: box.clientWidth || 300,
    height: HEIGHT,
    padding: [10, 14, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: sync }, drag: { x: true, y: false }, points: { size: 7 } },
    scales: { x: { time: false }, y: { range: (u, low, high) => padded(low, high, zero) } },
    axes: [
      { ...text, size: 30, space: 70, values: (u, ticks) => ticks.map((v) => now.current.axis.format(v)) },
      { ...text, size: 52, values: (u, ticks) => ticks.map((v) => now.current.series[0].tick(v)) },
    ],
    series: [{}, ...series.map(seriesOptions)],
    hooks: {
      setCursor: [(u) => onCursor(u.cursor.left >= 0 ? u.cursor.idx : null)],
      setScale: [(u, name) => name === "x" && onZoom(isZoomed(u, now.current.x))],
      draw: [(u) => drawMarkers(u, now.current.markers)],
    },
  };
}

function isZoomed(u, x) {
  const { min, max } = u.scales.x;
  return x.length > 2 && min !== null && (min > x[0] || max < u.data[0].at(-1));
}

function seriesOptions(s) {
  const stroke = colour(s.colour);
  return {
    label: s.label, stroke, width: s.width ?? 2, dash: s.dash, alpha: s.faint ? 0.35 : 1, spanGaps: true,
    fill: s.fill ? stroke.replace("rgb(", "rgba(").replace(")", ", 0.10)") : undefined,
    paths: s.points ? () => null : undefined,
    points: s.points ? { show: true, size: 8, fill: colour("--surface"), width: 2 } : { show: (u) => u.data[0].length < 2 },
  };
}

function padded(low, high, zero) {
  if (low === null || high === null) return [0, 1];
  const margin = (high - low || Math.abs(high) || 1) * 0.08;
  return [zero ? 0 : low - margin < 0 && low >= 0 ? 0 : low - margin, high + margin];
}

function drawMarkers(u, markers) {
  const pen = u.ctx;
  const { left, top, width, height } = u.bbox;
  pen.save();
  pen.strokeStyle = pen.fillStyle = colour("--bad");
  pen.setLineDash([4 * uPlot.pxRatio, 3 * uPlot.pxRatio]);
  pen.lineWidth = 1.5 * uPlot.pxRatio;
  pen.font = `${11 * uPlot.pxRatio}px ${getComputedStyle(document.body).fontFamily}`;
  for (const marker of markers) {
    const x = u.valToPos(marker.at, "x", true);
    if (x < left || x > left + width) continue;
    pen.beginPath();
    pen.moveTo(x, top);
    pen.lineTo(x, top + height);
    pen.stroke();
    const right = x > left + width * 0.8;
    pen.textAlign = right ? "right" : "left";
    const length = pen.measureText(marker.label).width;
    pen.clearRect(x + (right ? -8 * uPlot.pxRatio - length : 2 * uPlot.pxRatio), top, length + 6 * uPlot.pxRatio, 14 * uPlot.pxRatio);
    pen.fillText(marker.label, x + (right ? -5 : 5) * uPlot.pxRatio, top + 10 * uPlot.pxRatio);
  }
  pen.restore();
}

function Data({ x, series, axis, title }) {
  const rows = spread(x.length, TABLE_ROWS).reverse();
  const columns = [
    { key: "x", label: axis.label, cell: (i) => axis.format(x[i]) },
    ...series.filter((s) => !s.faint).map((s) => ({ key: s.key, label: s.label, number: true, cell: (i) => s.format(s.values[i]) })),
  ];
  return html`<div class="tall-scroll" tabindex="0" role="region" aria-label=${`${title} as a table`}><${Table} caption=${`${title}, at most ${TABLE_ROWS} rows`} columns=${columns} rows=${rows} keyOf=${(i) => i} /></div>`;
}
