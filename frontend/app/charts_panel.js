/** Loss and throughput over the same axis, with one cursor. */
import { Chart } from "./chart.js";
import { clock, count, figure, percent, short } from "./format.js";
import { html, signal, useMemo } from "./html.js";
import { columns, ends, overall, smooth } from "./points.js";
import { recall, remember } from "./theme.js";
import { Choice, Emulated } from "./ui.js";

const AXES = {
  round: { label: "Round", name: "round", format: (v) => count(Math.round(v)) },
  samples: { label: "Samples seen", name: "samples", format: short },
  time: { label: "Training time", name: "at", format: clock },
};
const AXIS_OPTIONS = [
  ["round", "Rounds"],
  ["samples", "Samples"],
  ["time", "Time"],
];
const AXIS_KEY = "marchline.axis";
const SMOOTH_KEY = "marchline.smooth";
const MOST_SMOOTH = 0.95;
const RECENT = 10;

const axisName = signal(recall(AXIS_KEY, "round") in AXES ? recall(AXIS_KEY, "round") : "round");
const weight = signal(Math.min(MOST_SMOOTH, Math.max(0, Number(recall(SMOOTH_KEY, "0.4")) || 0)));

function pickAxis(name) {
  axisName.value = name;
  remember(AXIS_KEY, name);
}

function pickWeight(value) {
  weight.value = value;
  remember(SMOOTH_KEY, String(value));
}

export function ChartsPanel({ live, epochs }) {
  const points = live.get("points").value;
  const deaths = live.of("deaths").value;
  const axis = axisName.value;
  const data = useMemo(() => columns(points, axis), [points, axis]);
  const origin = live.of("resumed_from").value;
  const markers = useMemo(() => markersOf(deaths ?? [], origin, data), [deaths, origin, data]);
  const shared = { x: data.x, axis: AXES[axis], markers };
  return html`
    <div class="two-columns">
      <${Loss} data=${data} shared=${shared} epochs=${epochs.value} />
      <${Rate} data=${data} points=${points} shared=${shared} emulated=${live.of("emulated").value} />
    </div>
  `;
}

/** A line for each death, at the last round that the rank took part in, and one where the run was resumed. */
function markersOf(deaths, origin, data) {
  const resumed = origin ? data.round.findIndex((round) => round > origin.round) : -1;
  const here = resumed > 0 ? [{ at: data.x[resumed], label: "resumed", tone: "--text-3" }] : [];
  return here.concat(deadMarkers(deaths, data));
}

function deadMarkers(deaths, data) {
  return deaths.map(({ rank, last_round: last }) => {
    const at = data.round.findIndex((round) => round >= last);
    return { at: data.x.at(at) ?? 0, label: `r${rank} died` };
  });
}

function Loss({ data, shared, epochs }) {
  const series = useMemo(() => lossSeries(data, epochs), [data, epochs, weight.value]);
  const [first, last] = ends(data.loss) ?? [];
  const way = `${last <= first ? "Fell" : "Rose"} from ${figure(first)} to ${figure(last)}`;
  const summary = first === undefined ? "No loss yet." : `${way} in ${count(data.round.at(-1) + 1)} rounds.`;
  const aside = html`
    <label class="slider">
      Smooth
      <input
        type="range"
        min="0"
        max=${MOST_SMOOTH}
        step="0.05"
        value=${weight.value}
        aria-valuetext=${percent(weight.value, 0)}
        onInput=${(event) => pickWeight(Number(event.target.value))}
      />
    </label>
    <${Choice} legend="Horizontal axis" value=${axisName.value} options=${AXIS_OPTIONS} onPick=${pickAxis} />
  `;
  const tick = (v) => String(Number(v.toPrecision(3)));
  return html`<${Chart} title="Loss" ...${shared} series=${series} summary=${summary} tick=${tick} aside=${aside} />`;
}

function lossSeries(data, epochs) {
  const smoothed = smooth(data.loss, weight.value);
  const scores = evalLoss(data, epochs);
  const train = { colour: "--series-1", format: figure };
  return [
    { ...train, key: "raw", label: "Loss, unsmoothed", values: data.loss, faint: true, width: 1 },
    { ...train, key: "loss", label: "Training loss", values: smoothed },
    ...(scores
      ? [{ key: "eval", label: "Eval loss", colour: "--series-2", format: figure, values: scores, points: true }]
      : []),
  ];
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

function Rate({ data, points, shared, emulated }) {
  const series = useMemo(() => rateSeries(data), [data]);
  return html`
    <${Chart}
      title="Throughput"
      ...${shared}
      series=${series}
      summary=${rateWords(points)}
      tick=${short}
      zero=${true}
      aside=${emulated && html`<${Emulated} />`}
    />
  `;
}

const rateSeries = (data) => [
  { key: "rate", label: "Batches/s", colour: "--series-3", values: data.rate, format: short, fill: true },
  { key: "ideal", label: "Ideal", colour: "--text-3", values: data.ideal, format: short, dash: [6, 4], width: 1.5 },
];

/** Over the last rounds together: the last of an epoch is short, and says little alone. */
function rateWords(points) {
  const rates = overall(points.slice(-RECENT), 0);
  if (!rates) return "No throughput yet.";
  const { batches_per_second: rate, efficiency } = rates;
  const share = efficiency ? `, ${percent(efficiency, 0)} of what these devices could do if none ever waited` : "";
  return `${short(rate)} batches/s${share}.`;
}
