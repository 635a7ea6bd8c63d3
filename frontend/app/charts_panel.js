/** Loss and throughput over the same axis, with one cursor. */
import { Chart } from "./chart.js";
import { clock, count, figure, percent, short } from "./format.js";
import { html, signal, useMemo } from "./html.js";
import { columns, ends, smooth } from "./points.js";
import { recall, remember } from "./theme.js";
import { Choice, Emulated } from "./ui.js";

const AXES = {
  samples: { label: "Samples seen", name: "samples", format: short },
  round: { label: "Round", name: "round", format: (v) => count(Math.round(v)) },
  time: { label: "Training time", name: "at", format: clock },
};
const axisName = signal(AXES[recall("marchline.axis", "round")] ? recall("marchline.axis", "round") : "round");
const weight = signal(Math.min(0.95, Math.max(0, Number(recall("marchline.smooth", "0.4")) || 0)));

function setAxis(name) {
  axisName.value = name;
  remember("marchline.axis", name);
}

function setWeight(value) {
  weight.value = value;
  remember("marchline.smooth", String(value));
}

export function ChartsPanel({ live, epochs }) {
  const points = live.get("points").value;
  const axis = axisName.value;
  const data = useMemo(() => columns(points, axis), [points, axis]);
  const deaths = live.of("deaths").value;
  const markers = useMemo(() => markersOf(deaths, data), [deaths, data]);
  const aside = html`<${Choice} legend="Horizontal axis" value=${axis} options=${[["round", "Rounds"], ["samples", "Samples"], ["time", "Time"]]} onPick=${setAxis} />`;
  return html`<div class="two-columns">
    <${Loss} data=${data} axis=${AXES[axis]} markers=${markers} epochs=${epochs.value} aside=${aside} />
    <${Rate} data=${data} axis=${AXES[axis]} markers=${markers} emulated=${live.of("emulated").value} />
  </div>`;
}

function markersOf(deaths, data) {
  return (deaths ?? []).map((death) => {
    const at = data.round.findIndex((round) => round >= (death.last_round ?? 0));
    return { at: data.x[at < 0 ? data.x.length - 1 : at] ?? 0, label: `r${death.rank} died` };
  });
}

function Loss({ data, axis, markers, epochs, aside }) {
  const smoothed = useMemo(() => smooth(data.loss, weight.value), [data, weight.value]);
  const scores = useMemo(() => evalLoss(data, epochs), [data, epochs]);
  const [first, last] = ends(data.loss) ?? [];
  const summary = first === undefined ? "No loss yet." : `${last <= first ? "Fell" : "Rose"} from ${figure(first)} to ${figure(last)} over ${count(data.round.at(-1) + 1)} rounds.`;
  const series = [
    { key: "raw", label: "Loss, unsmoothed", colour: "--series-1", values: data.loss, faint: true, width: 1, format: figure, tick: (v) => String(Number(v.toPrecision(3))) },
    { key: "loss", label: "Training loss", colour: "--series-1", values: smoothed, format: figure },
    ...(scores ? [{ key: "eval", label: "Eval loss", colour: "--series-2", values: scores, points: true, format: figure }] : []),
  ];
  const slider = html`<label class="slider">Smooth <input type="range" min="0" max="0.95" step="0.05" value=${weight.value}
    onInput=${(event) => setWeight(Number(event.target.value))} aria-valuetext=${percent(weight.value, 0)} /></label>${aside}`;
  return html`<${Chart} title="Loss" summary=${summary} x=${data.x} series=${series} axis=${axis} markers=${markers} aside=${slider} />`;
}

/** The evaluation loss at the last point of its epoch, nulls between; null when the job has none. */
function evalLoss(data, epochs) {
  const scored = epochs.filter((row) => Number.isFinite(row.metrics?.loss));
  if (!scored.length) return null;
  const values = data.x.map(() => null);
  for (const row of scored) {
    const at = data.epoch.lastIndexOf(row.epoch);
    if (at >= 0) values[at] = row.metrics.loss;
  }
  return values;
}

function Rate({ data, axis, markers, emulated }) {
  const [, rate] = ends(data.rate) ?? [];
  const [, ideal] = ends(data.ideal) ?? [];
  const summary = rate === undefined ? "No throughput yet." : ideal ? `${short(rate)} batches/s, ${percent(rate / ideal, 0)} of what these devices could do if none ever waited.` : `${short(rate)} batches/s.`;
  const series = [
    { key: "rate", label: "Batches/s", colour: "--series-3", values: data.rate, fill: true, format: short, tick: short },
    { key: "ideal", label: "Ideal", colour: "--text-3", values: data.ideal, dash: [6, 4], width: 1.5, format: short },
  ];
  return html`<${Chart} title="Throughput" summary=${summary} x=${data.x} series=${series} axis=${axis} markers=${markers} zero=${true} aside=${emulated && html`<${Emulated} />`} />`;
}

