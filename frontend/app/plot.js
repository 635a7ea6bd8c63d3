/** uPlot in a page: it follows data, width and theme, zooms by dragging, and has a cursor for the keyboard. */
import uPlot from "uplot";
import { Button } from "./acts.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { colour, dark } from "./theme.js";
import { say } from "./toasts.js";

const HEIGHT = 220;
const SYNC = "run";
const MARGIN = 0.08;

export function Plot({ label, x, series, axis, tick, markers, zero, onCursor }) {
  const box = useRef(null);
  const plot = useRef(null);
  const latest = useRef(null);
  const [zoomed, setZoomed] = useState(false);
  latest.current = { axis, tick, markers };
  useEffect(() => {
    const element = box.current;
    const hooks = { onCursor, onZoom: setZoomed };
    const made = new uPlot(options(element, series, zero, latest, hooks), dataOf(x, series), element);
    const observer = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height: HEIGHT }));
    observer.observe(element);
    plot.current = made;
    return () => {
      observer.disconnect();
      made.destroy();
    };
  }, [`${dark.value} ${series.map((one) => one.key).join()}`]);
  useEffect(() => update(plot.current, dataOf(x, series), zoomed), [x, series]);
  const press = (event) => walk(event, plot.current, { x, series, axis, onCursor });
  const follow = () => plot.current.setScale("x", { min: x[0], max: x.at(-1) });
  return html`
    <div class="plot" ref=${box} tabindex="0" role="img" aria-label=${label} onKeyDown=${press} />
    ${zoomed && html`<div class="follow"><${Button} onPress=${follow}>Show all and follow<//></div>`}
  `;
}

const dataOf = (x, series) => [x, ...series.map((one) => one.values)];

/** New data; while somebody looks at a part of it, that part stays where it is. */
function update(plot, data, zoomed) {
  if (data.every((values, i) => values === plot.data[i])) return;
  plot.batch(() => {
    plot.setData(data, !zoomed);
    if (zoomed) plot.redraw();
  });
}

const STEPS = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };

/** Move the cursor by keyboard, and say what is under it. */
function walk(event, plot, { x, series, axis, onCursor }) {
  if (event.key === "Escape") onCursor(null);
  if (!(event.key in STEPS) || !x.length) return;
  event.preventDefault();
  const next = Math.min(x.length - 1, Math.max(0, (plot.cursor.idx ?? x.length) + STEPS[event.key]));
  plot.setCursor({ left: plot.valToPos(x[next], "x"), top: HEIGHT / 4 });
  const values = series.filter((one) => !one.faint).map((one) => `${one.label} ${one.format(one.values[next])}`);
  say(`${axis.name} ${axis.format(x[next])}: ${values.join(", ")}`);
}

function options(box, series, zero, latest, { onCursor, onZoom }) {
  const look = {
    stroke: colour("--text-3"),
    font: `11px ${getComputedStyle(document.body).fontFamily}`,
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { show: false },
  };
  return {
    width: box.clientWidth || 300,
    height: HEIGHT,
    padding: [10, 14, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: SYNC }, drag: { x: true, y: false }, points: { size: 7 } },
    scales: { x: { time: false }, y: { range: (u, low, high) => padded(low, high, zero) } },
    axes: [
      { ...look, size: 30, space: 70, values: (u, ticks) => ticks.map((v) => latest.current.axis.format(v)) },
      { ...look, size: 52, values: (u, ticks) => ticks.map((v) => latest.current.tick(v)) },
    ],
    series: [{}, ...series.map(drawn)],
    hooks: {
      setCursor: [(u) => onCursor(u.cursor.left >= 0 ? u.cursor.idx : null)],
      setScale: [(u, name) => name === "x" && onZoom(isZoomed(u))],
      draw: [(u) => drawMarkers(u, latest.current.markers)],
    },
  };
}

function isZoomed(u) {
  const [x] = u.data;
  const { min, max } = u.scales.x;
  return x.length > 2 && min !== null && (min > x[0] || max < x.at(-1));
}

function drawn({ label, colour: name, width = 2, dash, fill, points, faint }) {
  const stroke = colour(name);
  return {
    label,
    stroke,
    width,
    dash,
    alpha: faint ? 0.35 : 1,
    spanGaps: true,
    fill: fill && stroke.replace("rgb(", "rgba(").replace(")", ", 0.10)"),
    paths: points && (() => null),
    points: points
      ? { show: true, size: 8, fill: colour("--surface"), width: 2 }
      : { show: (u) => u.data[0].length < 2 },
  };
}

/** A little air above and below; from 0 on where the size of the whole matters, and never below 0 for what is not. */
function padded(low, high, zero) {
  if (low === null || high === null) return [0, 1];
  const margin = (high - low || Math.abs(high) || 1) * MARGIN;
  const touchesZero = low >= 0 && low - margin < 0;
  return [zero || touchesZero ? 0 : low - margin, high + margin];
}

function drawMarkers(u, markers) {
  const { ctx: pen, bbox } = u;
  const unit = uPlot.pxRatio;
  pen.save();
  pen.lineWidth = 1.5 * unit;
  pen.setLineDash([4 * unit, 3 * unit]);
  pen.font = `${11 * unit}px ${getComputedStyle(document.body).fontFamily}`;
  for (const { at, label, tone = "--bad" } of markers) {
    pen.strokeStyle = pen.fillStyle = colour(tone);
    const x = u.valToPos(at, "x", true);
    if (x >= bbox.left && x <= bbox.left + bbox.width) drawMarker(pen, bbox, unit, x, label);
  }
  pen.restore();
}

/** A line from top to bottom and its word beside it, on the side where there is room. */
function drawMarker(pen, { left, top, width, height }, unit, x, label) {
  pen.beginPath();
  pen.moveTo(x, top);
  pen.lineTo(x, top + height);
  pen.stroke();
  const size = pen.measureText(label).width;
  const start = x > left + width * 0.8 ? x - size - 5 * unit : x + 5 * unit;
  pen.clearRect(start - 3 * unit, top, size + 6 * unit, 14 * unit);
  pen.fillText(label, start, top + 10 * unit);
}
