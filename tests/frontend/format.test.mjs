import assert from "node:assert/strict";
import { test } from "node:test";
import * as f from "../../frontend/app/format.js";

const NARROW = "\u202f";
const table = (name, fn, cases) => {
  for (const [given, wanted] of cases)
    test(`${name}(${JSON.stringify(given) ?? given}) is ${wanted}`, () => assert.equal(fn(...[given].flat()), wanted));
};

table("count", f.count, [
  [0, "0"],
  [12480, `12${NARROW}480`],
  [null, "–"],
  [undefined, "–"],
  [1234567, `1${NARROW}234${NARROW}567`],
]);
table("figure", f.figure, [
  [2.302585, "2.303"],
  [0.0412, "0.0412"],
  [0.1664, "0.166"],
  [12.345, "12.35"],
  [123.45, "123.5"],
  [0, "0.000"],
  [0.00001, "1.00e−5"],
  [-0.5, "−0.500"],
  [NaN, "NaN"],
  [Infinity, "∞"],
  [null, "–"],
  [2_500_000, "2.50e+6"],
]);
table("percent", f.percent, [
  [0.964, "96.4 %"],
  [[0.5, 0], "50 %"],
  [0, "0.0 %"],
  [null, "–"],
  [NaN, "–"],
]);
table("short", f.short, [
  [0, "0"],
  [7, "7"],
  [84.23, "84.2"],
  [999.6, `1.00${NARROW}k`],
  [18234, `18.2${NARROW}k`],
  [2_690_000, `2.69${NARROW}M`],
  [0.5, "0.50"],
  [null, "–"],
]);
table("bytes", f.bytes, [
  [0, "0 B"],
  [1023, "1023 B"],
  [1024, "1.0 KiB"],
  [21144, "20.6 KiB"],
  [24 * 2 ** 30, "24.0 GiB"],
  [141 * 2 ** 30, "141 GiB"],
  [null, "–"],
]);
table("millis", f.millis, [
  [0.412, "0.41 ms"],
  [41.23, "41.2 ms"],
  [123.4, "123 ms"],
  [1234, "1.23 s"],
  [null, "–"],
]);
table("clock", f.clock, [
  [0, "0:00"],
  [42.9, "0:42"],
  [761, "12:41"],
  [3761, "1:02:41"],
  [2 * 86400 + 3 * 3600, "2 d 03:00"],
  [-3, "0:00"],
  [null, "–"],
]);
table("span", f.span, [
  [6.24, "6.2 s"],
  [45, "45 s"],
  [300, "5 min"],
  [90, "1 min 30 s"],
  [5400, "1 h 30 min"],
  [7200, "2 h"],
  [null, "–"],
]);
table("ago", f.ago, [
  [2, "just now"],
  [48, "48 s ago"],
  [190, "3 min ago"],
  [7300, "2 h ago"],
  [200000, "2 d ago"],
  [null, "–"],
]);
table("words", f.words, [
  ["overhead_target", "Overhead target"],
  ["cpu_cadence", "CPU cadence"],
  ["turned_away", "Turned away"],
  ["epochs", "Epochs"],
]);

test("plural", () => {
  assert.equal(f.plural(1, "rank"), "1 rank");
  assert.equal(f.plural(3, "rank"), "3 ranks");
  assert.equal(f.plural(2, "lost", "lost"), "2 lost");
});

test("the job's name and place", () => {
  assert.deepEqual(f.jobParts("examples/digits.py:Digits"), { name: "Digits", where: "examples/digits.py" });
  assert.deepEqual(f.jobParts("odd"), { name: "odd", where: "" });
  assert.deepEqual(f.jobParts(null), { name: "–", where: "" });
});

test("a moment is as short as today allows", () => {
  const now = new Date(2026, 10, 29, 18, 0);
  const at = (...parts) => new Date(...parts).toISOString();
  assert.equal(f.moment(at(2026, 10, 29, 14, 2), now), "14:02");
  assert.equal(f.moment(at(2026, 10, 28, 14, 2), now), "28 Nov 14:02");
  assert.equal(f.moment(at(2025, 10, 28, 14, 2), now), "28 Nov 2025 14:02");
  assert.equal(f.moment(null, now), "–");
  assert.equal(f.moment("soon", now), "soon");
});

test("time between two moments, up to now while the second is missing", () => {
  assert.equal(f.between("2026-11-29T12:00:00Z", "2026-11-29T12:01:30Z"), 90);
  assert.equal(f.between("2026-11-29T12:00:00Z", null, Date.parse("2026-11-29T12:00:05Z")), 5);
  assert.equal(f.between(null, null), null);
  assert.equal(f.between("2026-11-29T12:00:10Z", "2026-11-29T12:00:00Z"), 0);
});

test("the metric that leads, and how it is shown", () => {
  assert.deepEqual(f.leadMetric({ loss: 0.1, accuracy: 0.9 }), { name: "accuracy", value: 0.9 });
  assert.deepEqual(f.leadMetric({ loss: 0.1, perplexity: 12 }), { name: "perplexity", value: 12 });
  assert.deepEqual(f.leadMetric({ loss: 0.1 }), { name: "loss", value: 0.1 });
  assert.equal(f.leadMetric({}), null);
  assert.equal(f.leadMetric(null), null);
  assert.equal(f.metric("accuracy", 0.964), "96.4 %");
  assert.equal(f.metric("learning_rate", 0.003), "0.0030");
  assert.equal(f.metric("perplexity", 12.3), "12.30");
});
