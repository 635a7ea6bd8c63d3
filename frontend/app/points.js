/**
 * Rounds as chart points, kept small for any length of run. Pure.
 *
 * A point stands for the rounds `round..last`. When there are too many, neighbours are folded into one: samples,
 * seconds and batches add up, the loss is weighted by samples. So sums stay true and only the resolution falls.
 */
export const POINTS_KEPT = 1600;

const sum = (map) => Object.values(map ?? {}).reduce((total, n) => total + (n ?? 0), 0);

/** A stored round as a point. `ideal`: batches/s if no living device ever waited; null until every one is timed. */
export function pointOf(row) {
  const paces = Object.values(row.ms_per_batch ?? {});
  const timed = paces.length > 0 && paces.every((ms) => ms > 0);
  return {
    round: row.round,
    last: row.round,
    epoch: row.epoch,
    samples: row.samples ?? 0,
    seconds: row.seconds ?? 0,
    batches: sum(row.realized),
    ideal: timed ? paces.reduce((total, ms) => total + 1000 / ms, 0) : null,
    loss: Number.isFinite(row.loss) ? row.loss : null,
  };
}

/** Points with these rows added, in order, each round once. */
export function addPoints(points, rows) {
  if (!rows.length) return points;
  const fresh = rows.map(pointOf).sort((a, b) => a.round - b.round);
  const appends = !points.length || fresh[0].round > points.at(-1).last;
  return thin(appends ? points.concat(fresh) : splice(points, fresh));
}

function splice(points, fresh) {
  const known = new Set(fresh.map((point) => point.round));
  const kept = points.filter((point) => point.round !== point.last || !known.has(point.round));
  const spans = kept.filter((point) => point.round !== point.last);
  const covered = (round) => spans.some((span) => span.round <= round && round <= span.last);
  return kept.concat(fresh.filter((point) => !covered(point.round))).sort((a, b) => a.round - b.round);
}

function thin(points) {
  while (points.length > POINTS_KEPT) {
    const folded = [];
    for (let i = 0; i < points.length; i += 2) {
      folded.push(i + 1 < points.length ? fold(points[i], points[i + 1]) : points[i]);
    }
    points = folded;
  }
  return points;
}

function fold(a, b) {
  const seconds = a.seconds + b.seconds;
  return {
    round: a.round,
    last: b.last,
    epoch: b.epoch,
    samples: a.samples + b.samples,
    seconds,
    batches: a.batches + b.batches,
    ideal: mean(a.ideal, a.seconds, b.ideal, b.seconds),
    loss: mean(a.loss, a.samples, b.loss, b.samples),
  };
}

function mean(x, wx, y, wy) {
  if (x === null) return y;
  if (y === null) return x;
  return wx + wy > 0 ? (x * wx + y * wy) / (wx + wy) : (x + y) / 2;
}

/** Columns for the charts. `axis` is round, samples or time; samples and seconds are counted up. */
export function columns(points, axis) {
  const out = { x: [], loss: [], rate: [], ideal: [], round: [], epoch: [] };
  let samples = 0;
  let seconds = 0;
  for (const point of points) {
    samples += point.samples;
    seconds += point.seconds;
    out.x.push(axis === "samples" ? samples : axis === "time" ? seconds : point.last);
    out.loss.push(point.loss);
    out.rate.push(point.seconds > 0 ? point.batches / point.seconds : null);
    out.ideal.push(point.ideal);
    out.round.push(point.last);
    out.epoch.push(point.epoch);
  }
  return out;
}

/** Batches and samples a second over a whole run, less the first rounds, which only measure; null without any. */
export function overall(points, skip = 3) {
  const counted = points.filter((point) => point.last >= skip);
  const seconds = counted.reduce((total, point) => total + point.seconds, 0);
  if (!(seconds > 0)) return null;
  const batches = counted.reduce((total, point) => total + point.batches, 0) / seconds;
  const samples = counted.reduce((total, point) => total + point.samples, 0) / seconds;
  const ideal = counted.reduce((total, point) => total + (point.ideal ?? 0) * point.seconds, 0) / seconds || null;
  return {
    batches_per_second: batches,
    samples_per_second: samples,
    ideal_batches_per_second: ideal,
    efficiency: ideal && batches / ideal,
  };
}

/** Exponential moving average with the start corrected for; `weight` 0 leaves the values alone. Nulls stay null. */
export function smooth(values, weight) {
  let average = 0;
  let scale = 1;
  return values.map((value) => {
    if (value === null) return null;
    average = average * weight + value * (1 - weight);
    scale *= weight;
    return average / (1 - scale);
  });
}

/** The first and the last value that are numbers, or null when there is none. */
export function ends(values) {
  const numbers = values.filter((value) => value !== null);
  return numbers.length ? [numbers[0], numbers.at(-1)] : null;
}

/** At most `limit` row numbers spread evenly over `length`, the last always among them. */
export function spread(length, limit) {
  if (length <= limit) return Array.from({ length }, (_, i) => i);
  return Array.from({ length: limit }, (_, i) => Math.round((i * (length - 1)) / (limit - 1)));
}
