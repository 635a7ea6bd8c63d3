import assert from "node:assert/strict";
import { test } from "node:test";
import { splitOf, verdict } from "../../frontend/app/split.js";
import { percent } from "../../frontend/app/format.js";
import { decisionLog } from "../../frontend/app/decisions.js";

const row = (extra = {}) => ({
  planned: { 0: 4, 1: 2, 2: 0 },
  compute_seconds: { 0: 0.8, 1: 0.6 },
  data_seconds: { 0: 0.1, 1: 0.1 },
  wait_seconds: { 0: 0, 1: 0.2 },
  reduce_seconds: 0.1,
  ...extra,
});

test("the time split adds up, and a rank without work is no part of it", () => {
  const sums = splitOf([row(), row(), row()], 2);
  assert.deepEqual([...sums.keys()], [0, 1]);
  assert.ok(Math.abs(sums.get(0).total - 2) < 1e-9);
  assert.ok(Math.abs(sums.get(1).wait - 0.4) < 1e-9);
  assert.equal(splitOf([], 10).size, 0);
});

test("the split in a sentence", () => {
  assert.equal(
    verdict(splitOf([row()], 1), percent),
    "70.0 % of all rank time is compute; rank 1 waits most, 20.0 % of its time.",
  );
  const even = splitOf([row({ wait_seconds: {} })], 1);
  assert.match(verdict(even, percent), /nobody waits for anybody/);
  assert.equal(verdict(new Map(), percent), "");
});

test("the decision log counts what is said again and shows the newest first", () => {
  const rounds = [
    ["a", 0],
    ["a", 1],
    ["b", 2],
    ["", 3],
    ["a", 4],
  ].map(([decision, n]) => ({ round: n, decision }));
  assert.deepEqual(decisionLog(rounds), [
    { from: 4, to: 4, text: "a", times: 1, against: null },
    { from: 2, to: 2, text: "b", times: 1, against: null },
    { from: 0, to: 1, text: "a", times: 2, against: null },
  ]);
});

test("an objection stands beside its decision and is never folded away", () => {
  const row = (round, verdict, verdict_reason) => ({ round, decision: "a", verdict, verdict_reason });
  const log = decisionLog([
    row(0, "stable", "calm"),
    row(1, null, null), // a round of before there were verdicts
    row(2, "suppress_growth", "drifting"),
    row(3, "suppress_growth", "drifting"),
    row(4, "nudge_down", "far apart"),
    row(5, "stable", "calm"),
  ]);
  assert.deepEqual(
    log.map(({ from, to, against }) => [from, to, against?.heading, against?.text]),
    [
      [5, 5, undefined, undefined],
      [4, 4, "Shorter window", "far apart"],
      [3, 3, "No growth", "drifting"],
      [2, 2, "No growth", "drifting"],
      [0, 1, undefined, undefined],
    ],
  );
});
