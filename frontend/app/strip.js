/** The strip of figures on top: the operator's questions answered without scrolling. */
import { MISSING, clock, count, figure, leadMetric, metric, percent, plural, short, span } from "./format.js";
import { html } from "./html.js";
import { overall } from "./points.js";
import { isEnded } from "./store.js";
import { Meter } from "./ui.js";

const LOOK_BACK = 20;
const POOR = 0.8;
const SOONEST = 0.05;

export const Strip = ({ live, phase }) => html`
  <dl class="strip">
    <${Loss} live=${live} /><${Evaluation} live=${live} /><${Rate} live=${live} phase=${phase} />
    <${Efficiency} live=${live} phase=${phase} /><${Epoch} live=${live} phase=${phase} /><${Round} live=${live} />
  </dl>
`;

const Tile = ({ label, value, sub, tone = "", children, mark }) => html`
  <div class=${`tile ${tone}`}>
    <dt>${label}${mark && html` <span class="mark-note">emulated</span>`}</dt>
    <dd><span class="tile-value">${value}</span>${children}<span class="tile-sub">${sub}</span></dd>
  </div>
`;

function Loss({ live }) {
  const rounds = live.get("rounds").value.filter((row) => Number.isFinite(row.loss));
  const loss = live.of("loss").value;
  const span = Math.min(LOOK_BACK, rounds.length - 1);
  const change = Number.isFinite(loss) && span > 0 ? loss - rounds.at(-1 - span).loss : null;
  const trend = `${change <= 0 ? "▼" : "▲"} ${figure(Math.abs(change))} in ${plural(span, "round")}`;
  const sub = change === null ? "mean over the last round" : trend;
  return html`<${Tile} label="Training loss" value=${figure(loss)} sub=${sub} />`;
}

function Evaluation({ live }) {
  const score = live.of("eval").value;
  const first = leadMetric(score?.metrics);
  if (!first) return html`<${Tile} label="Evaluation" value=${MISSING} sub="after each epoch, if the job has one" />`;
  const second = Object.entries(score.metrics).find(([name]) => name !== first.name);
  const also = second ? ` · ${second[0]} ${metric(...second)}` : "";
  const sub = `after epoch ${score.epoch + 1}${also}`;
  return html`<${Tile} label=${`Eval ${first.name}`} value=${metric(first.name, first.value)} sub=${sub} />`;
}

/** The cohort's rates: the last rounds' while it trains, the whole run's afterwards. */
function ratesOf(live, phase) {
  return (isEnded(phase) && overall(live.get("points").value)) || live.of("throughput").value || {};
}

function Rate({ live, phase }) {
  const rates = ratesOf(live, phase);
  const known = Number.isFinite(rates.batches_per_second);
  const batches = `${short(rates.batches_per_second)} of ${short(rates.ideal_batches_per_second)} batches/s`;
  const sub = known ? batches : "measured from the first rounds";
  const label = isEnded(phase) ? "Samples/s, mean" : "Samples/s";
  const value = short(rates.samples_per_second);
  return html`<${Tile} label=${label} value=${value} sub=${sub} mark=${live.of("emulated").value} />`;
}

function Efficiency({ live, phase }) {
  const { efficiency } = ratesOf(live, phase);
  const known = Number.isFinite(efficiency);
  const sub = known ? `${percent(Math.max(0, 1 - efficiency))} idle or reducing` : "how close to no waiting at all";
  const tone = known && efficiency < POOR ? "meter-warn" : "";
  return html`
    <${Tile} label="Efficiency" value=${percent(efficiency)} sub=${sub} mark=${live.of("emulated").value}>
      <${Meter} value=${known ? efficiency : 0} most=${1} label="Efficiency" tone=${tone} />
    <//>
  `;
}

function Epoch({ live, phase }) {
  const epochs = live.of("epochs").value;
  const each = live.of("samples_total").value ?? 0;
  const finished = live.of("samples_accepted").value?.length ?? 0;
  const share = each ? Math.min(1, (live.of("samples_done").value ?? 0) / each) : 0;
  const over = isEnded(phase);
  const done = over ? finished : Math.min(epochs, (live.of("epoch").value ?? 0) + share);
  const shown = over ? finished : Math.min(epochs, (live.of("epoch").value ?? 0) + 1);
  const left = over ? "" : remaining(live.of("seconds").value, done, epochs);
  const sub = over ? `${count(each)} samples each` : `${percent(share, 0)} of it${left}`;
  const value = html`${count(shown)}<small> of ${count(epochs)}</small>`;
  return html`
    <${Tile} label=${over ? "Epochs" : "Epoch"} value=${value} sub=${sub}>
      <${Meter} value=${done} most=${epochs} label="Epochs done" />
    <//>
  `;
}

/** " · about 20 s left", once enough is done to tell; in steps of 5 s, so that it does not flicker. */
function remaining(seconds, done, all) {
  if (!seconds || done < SOONEST || done >= all) return "";
  const left = (seconds / done) * (all - done);
  return ` · about ${span(left < 10 ? Math.ceil(left) : Math.round(left / 5) * 5)} left`;
}

function Round({ live }) {
  const last = live.get("rounds").value.at(-1);
  const took = last ? ` · last took ${last.seconds < 60 ? `${last.seconds.toFixed(2)} s` : clock(last.seconds)}` : "";
  const sub = `step ${count(live.of("global_step").value)}${took}`;
  return html`<${Tile} label="Round" value=${count(live.of("round").value)} sub=${sub} />`;
}
