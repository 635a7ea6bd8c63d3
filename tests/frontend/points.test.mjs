import assert from "node:assert/strict";
import { test } from "node:test";
import { POINTS_KEPT, addPoints, columns, ends, overall, pointOf, smooth, spread } from "../../frontend/app/points.js";

const row = (round, extra = {}) => ({
  round,
  epoch: 0,
  samples: 64,
  seconds: 2,
  loss: 1,
  planned: { 0: 4, 1: 2 },
  realized: { 0: 4, 1: 2 },
  ms_per_batch: { 0: 20, 1: 40 },
  ...extra,
});
const many = (n, make = row) => Array.from({ length: n }, (_, i) => make(i));
const total = (points, key) => points.reduce((sum, point) => sum + point[key], 0);

test("a point has the round's batches and the rate of devices that never wait", () => {
  const point = pointOf(row(3));
  assert.equal(point.batches, 6);
  assert.equal(point.ideal, 75);
  assert.equal(pointOf(row(3, { ms_per_batch: {} })).ideal, null);
  assert.equal(pointOf(row(3, { planned: { 0: 4, 1: 0 } })).ideal, 75, "a rank without work could have done some");
  assert.equal(pointOf(row(3, { ms_per_batch: { 0: 20, 1: 0 } })).ideal, null, "one is not timed yet");
  assert.equal(pointOf(row(3, { loss: Number.NaN })).loss, null);
});

test("any length of run fits, and the sums stay true", () => {
  const points = addPoints([], many(10 * POINTS_KEPT));
  assert.ok(points.length <= POINTS_KEPT);
  assert.equal(total(points, "samples"), 64 * 10 * POINTS_KEPT);
  assert.equal(total(points, "batches"), 6 * 10 * POINTS_KEPT);
  assert.equal(points[0].round, 0);
  assert.equal(points.at(-1).last, 10 * POINTS_KEPT - 1);
});

test("folding weighs the loss by samples and skips what is unknown", () => {
  const rows = many(POINTS_KEPT + 1, (n) =>
    row(n, n === 0 ? { loss: 4, samples: 192 } : n === 1 ? { loss: 0 } : n === 2 ? { loss: null } : {}),
  );
  const points = addPoints([], rows);
  assert.equal(points[0].loss, 3);
  assert.equal(points[1].loss, 1);
});

test("rows may come late, twice, or out of order", () => {
  const inOrder = addPoints([], many(6));
  const late = addPoints(addPoints([], [row(3), row(5), row(4)]), [row(1), row(0), row(2)]);
  assert.deepEqual(late, inOrder);
  assert.equal(addPoints(inOrder, [row(2, { loss: 7 })])[2].loss, 7);
  assert.equal(addPoints(inOrder, []), inOrder);
  const folded = addPoints([], many(2 * POINTS_KEPT));
  assert.equal(
    total(addPoints(folded, [row(1)]), "samples"),
    total(folded, "samples"),
    "a round inside a folded point is not counted again",
  );
});

test("the three axes", () => {
  const points = addPoints([], many(3));
  assert.deepEqual(columns(points, "round").x, [0, 1, 2]);
  assert.deepEqual(columns(points, "samples").x, [64, 128, 192]);
  assert.deepEqual(columns(points, "time").x, [2, 4, 6]);
  assert.deepEqual(columns(points, "round").rate, [3, 3, 3]);
  assert.deepEqual(columns([pointOf(row(0, { seconds: 0 }))], "round").rate, [null]);
});

test("smoothing starts at the first value, keeps nulls, and 0 changes nothing", () => {
  assert.deepEqual(smooth([4, 2, null, 8], 0), [4, 2, null, 8]);
  const [first, second, third] = smooth([4, 2, null], 0.5);
  assert.equal(first, 4);
  assert.ok(Math.abs(second - 8 / 3) < 1e-12);
  assert.equal(third, null);
});

test("the whole run's rates leave the measuring rounds out", () => {
  const rates = overall(
    addPoints(
      [],
      many(13, (n) => row(n, n < 3 ? { seconds: 100 } : {})),
    ),
  );
  assert.equal(rates.batches_per_second, 3);
  assert.equal(rates.samples_per_second, 32);
  assert.equal(rates.efficiency, 3 / 75);
  assert.equal(overall(addPoints([], many(3))), null);
  assert.equal(overall([]), null);
});

test("ends and spread", () => {
  assert.deepEqual(ends([null, 3, null, 5, null]), [3, 5]);
  assert.equal(ends([null]), null);
  assert.deepEqual(spread(3, 10), [0, 1, 2]);
  const picked = spread(1000, 100);
  assert.equal(picked.length, 100);
  assert.deepEqual([picked[0], picked.at(-1)], [0, 999]);
});
