/** A run that trains or has trained: is it learning, is anyone holding the others up, is anything dying? */
import { get } from "./api.js";
import { ChartsPanel } from "./charts_panel.js";
import { clock, count, figure, leadMetric, metric, percent, short, span } from "./format.js";
import { HeatPanel } from "./heat_panel.js";
import { html, signal, useEffect, useMemo } from "./html.js";
import { Decisions, Events } from "./logs.js";
import { Config, Epochs } from "./outcome.js";
import { RanksPanel } from "./ranks_panel.js";
import { SplitPanel } from "./split_panel.js";
import { Roster } from "./staging.js";
import { isEnded } from "./store.js";
import { Meter } from "./ui.js";

export function Training({ live, phase }) {
  const epochs = useEpochs(live);
  return html`<${Strip} live=${live} phase=${phase} />
    <${HeatPanel} live=${live} phase=${phase} />
    <${ChartsPanel} live=${live} epochs=${epochs} />
    <div class="two-columns"><${SplitPanel} live=${live} /><${Epochs} live=${live} epochs=${epochs} /></div>
    <${RanksPanel} live=${live} phase=${phase} />
    <div class="two-columns"><${Decisions} live=${live} /><${Events} live=${live} /></div>
    <${Roster} live=${live} phase=${phase} title="Hosts" />
    <${Config} live=${live} />`;
}

/** Finished epochs, fetched anew whenever one more was finished or scored. */
function useEpochs(live) {
  const rows = useMemo(() => signal([]), [live]);
  const scored = live.of("eval").value?.epoch;
  const finished = live.of("samples_accepted").value?.length;
  const phase = live.of("phase").value;
  useEffect(() => {
    get(`runs/${live.id}/epochs`).then(({ items }) => (rows.value = items), () => undefined);
  }, [scored, finished, isEnded(phase)]);
  return rows;
}

function Strip({ live, phase }) {
  return html`<dl class="strip">
    <${LossTile} live=${live} /><${EvalTile} live=${live} /><${RateTile} live=${live} phase=${phase} />
    <${EfficiencyTile} live=${live} /><${EpochTile} live=${live} phase=${phase} /><${RoundTile} live=${live} />
  </dl>`;
}

function Tile({ label, value, sub, tone = "", children, mark }) {
  return html`<div class=${`tile ${tone}`}><dt>${label}${mark && html` <span class="mark-note">${mark}</span>`}</dt><dd><span class="tile-value">${value}</span>${children}<span class="tile-sub">${sub}</span></dd></div>`;
}

const LOOK_BACK = 20;

function LossTile({ live }) {
  const rounds = live.get("rounds").value;
  const loss = live.of("loss").value;
  const before = rounds.at(-1 - LOOK_BACK)?.loss ?? rounds.find((row) => row.loss !== null && row.loss !== undefined)?.loss;
  const change = Number.isFinite(loss) && Number.isFinite(before) ? loss - before : null;
  const over = Math.min(LOOK_BACK, Math.max(0, rounds.length - 1));
  const sub = change === null || !over ? "mean over the last round" : `${change <= 0 ? "▼" : "▲"} ${figure(Math.abs(change))} in ${over} round${over === 1 ? "" : "s"}`;
  const broken = loss !== null && loss !== undefined && !Number.isFinite(loss);
  return html`<${Tile} label="Training loss" value=${figure(loss)} sub=${broken ? "Not finite: look at the ranks" : sub} tone=${broken ? "tile-bad" : ""} />`;
}

function EvalTile({ live }) {
  const score = live.of("eval").value;
  const first = leadMetric(score?.metrics);
  if (!first) return html`<${Tile} label="Evaluation" value="–" sub="after each epoch, if the job has one" />`;
  const rest = Object.entries(score.metrics).filter(([name]) => name !== first.name);
  const others = rest.slice(0, 1).map(([name, value]) => ` · ${name} ${metric(name, value)}`).join("");
  return html`<${Tile} label=${`Eval ${first.name}`} value=${metric(first.name, first.value)} sub=${`after epoch ${score.epoch + 1}${others}`} />`;
}

const emulatedMark = (live) => (live.of("emulated").value ? "emulated" : null);

function RateTile({ live, phase }) {
  const rate = live.of("throughput").value ?? {};
  const sub = rate.batches_per_second === null || rate.batches_per_second === undefined
    ? "measured from the first rounds"
    : `${short(rate.batches_per_second)} of ${short(rate.ideal_batches_per_second)} batches/s`;
  return html`<${Tile} label=${isEnded(phase) ? "Samples/s at the end" : "Samples/s"} value=${short(rate.samples_per_second)} sub=${sub} mark=${emulatedMark(live)} />`;
}

function EfficiencyTile({ live }) {
  const { efficiency } = live.of("throughput").value ?? {};
  const known = Number.isFinite(efficiency);
  const idle = known ? `${percent(Math.max(0, 1 - efficiency))} idle or reducing` : "how close to no waiting at all";
  return html`<${Tile} label="Efficiency" value=${percent(efficiency)} sub=${idle} mark=${emulatedMark(live)}>
    <${Meter} value=${known ? efficiency : 0} most=${1} label="Efficiency" tone=${known && efficiency < 0.8 ? "meter-warn" : ""} /><//>`;
}

function EpochTile({ live, phase }) {
  const epochs = live.of("epochs").value;
  const done = live.of("samples_done").value ?? 0;
  const total = live.of("samples_total").value ?? 0;
  const epoch = live.of("epoch").value ?? 0;
  const over = phase === "done";
  const finished = over ? (live.of("samples_accepted").value?.length ?? epoch) : Math.min(epoch + 1, epochs);
  const share = total > 0 ? Math.min(1, done / total) : 0;
  const left = over ? null : remaining(live.of("seconds").value, epoch + share, epochs);
  const sub = isEnded(phase) ? `${over ? "" : "ended in "}epoch ${finished}` : `${percent(share, 0)} of it${left ? ` · about ${span(left)} left` : ""}`;
  return html`<${Tile} label=${over ? "Epochs" : "Epoch"} value=${html`${count(finished)}<small> of ${count(epochs)}</small>`} sub=${over ? `${count(total)} samples each` : sub}>
    <${Meter} value=${over ? epochs : epoch + share} most=${epochs} label="Epochs done" /><//>`;
}

function remaining(seconds, done, all) {
  if (!seconds || done < 0.05 || done >= all) return null;
  const left = (seconds / done) * (all - done);
  return left < 10 ? Math.round(left) : Math.round(left / 5) * 5;
}

function RoundTile({ live }) {
  const rounds = live.get("rounds").value;
  const last = rounds.at(-1);
  const sub = `step ${count(live.of("global_step").value)}${last ? ` · last took ${last.seconds < 60 ? `${last.seconds.toFixed(2)} s` : clock(last.seconds)}` : ""}`;
  return html`<${Tile} label="Round" value=${count(live.of("round").value)} sub=${sub} />`;
}

