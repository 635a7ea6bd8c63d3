import assert from "node:assert/strict";
import { test } from "node:test";
import {
  cellAt,
  cellOf,
  cellRect,
  describe,
  epochStarts,
  ink,
  lastRounds,
  layout,
  moved,
  peak,
  ramp,
  rowHeight,
  spreadLabel,
} from "../../frontend/app/heat.js";

const round = (n, extra = {}) => ({
  round: n,
  epoch: Math.floor(n / 4),
  planned: { 0: 8, 1: 4, 2: 2 },
  realized: { 0: 8, 1: 3, 2: 2 },
  anchor_rank: 2,
  ms_per_batch: { 0: 20.04 },
  ...extra,
});
const grid = { width: 652, ranks: 3, lead: 52 };

test("the newest round is flush right and wider; old ones leave on the left", () => {
  const place = layout({ ...grid, rounds: 1000 });
  assert.equal(place.cell, 5);
  assert.equal(place.columns, 121);
  assert.equal(place.first, 879);
  assert.equal(place.left, 0);
  const newest = cellRect(place, 0, place.columns - 1);
  assert.equal(newest.x + newest.width + place.gap, 652);
  assert.equal(newest.width, 51);
});

test("few rounds get wide cells and start where they are", () => {
  const place = layout({ ...grid, rounds: 3 });
  assert.equal(place.columns, 3);
  assert.equal(place.first, 0);
  assert.equal(place.left, 652 - 52 - 2 * place.cell);
});

test("no rounds, or no room, is no cell", () => {
  assert.equal(layout({ ...grid, rounds: 0 }).columns, 0);
  const none = layout({ width: 0, ranks: 3, rounds: 9 });
  assert.equal(none.columns, 1);
  assert.equal(cellAt(layout({ ...grid, rounds: 0 }), 10, 10), null);
});

test("every cell is found again under its own middle", () => {
  for (const rounds of [1, 2, 7, 40, 500]) {
    const place = layout({ ...grid, rounds });
    for (let row = 0; row < 3; row += 1) {
      for (let column = 0; column < place.columns; column += 1) {
        const { x, y, width, height } = cellRect(place, row, column);
        assert.deepEqual(cellAt(place, x + width / 2, y + height / 2), { row, column });
      }
    }
  }
});

test("beside the map there is nothing", () => {
  const place = layout({ ...grid, rounds: 3 });
  for (const [x, y] of [
    [place.left - 1, 5],
    [652, 5],
    [600, -1],
    [600, place.height],
  ])
    assert.equal(cellAt(place, x, y), null);
});

test("rows shrink as ranks grow, and labels thin out with them", () => {
  assert.deepEqual([3, 12, 13, 32, 64, 256].map(rowHeight), [30, 30, 20, 20, 12, 6]);
  assert.deepEqual([3, 32, 64, 256].map(spreadLabel), [1, 1, 2, 3]);
});

test("more work is brighter on a dark page and darker on a light one", () => {
  const light = ([r, g, b]) => 0.2126 * r + 0.7152 * g + 0.0722 * b;
  for (let i = 1; i <= 10; i += 1) {
    assert.ok(light(ramp(i / 10, true)) > light(ramp((i - 1) / 10, true)));
    assert.ok(light(ramp(i / 10, false)) < light(ramp((i - 1) / 10, false)));
  }
  assert.deepEqual(ramp(7, true), ramp(1, true));
  assert.deepEqual(ramp(-7, true), ramp(0, true));
});

test("the number in a cell always reads: at least 4.5 to 1", () => {
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  for (const dark of [true, false]) {
    for (let i = 0; i <= 40; i += 1) {
      const cell = ramp(i / 40, dark);
      const [high, low] = [luminance(cell), ink(cell) === "#000" ? 0 : 1].sort((a, b) => b - a);
      assert.ok((high + 0.05) / (low + 0.05) >= 4.5, `${cell}`);
    }
  }
});

test("a cell knows what was given, what was done, the anchor, and the dead", () => {
  assert.deepEqual(cellOf(round(5), 0), { planned: 8, realized: 8, done: 1, dead: false, anchor: false });
  assert.deepEqual(cellOf(round(5), 1), { planned: 4, realized: 3, done: 0.75, dead: false, anchor: false });
  assert.equal(cellOf(round(5), 2).anchor, true);
  assert.equal(cellOf(round(5), 9).planned, null);
  assert.equal(cellOf(round(5), 1, 5).dead, false, "alive in its last round");
  assert.equal(cellOf(round(6), 1, 5).dead, true);
  assert.equal(cellOf(round(0), 1, -1).dead, true, "died before any round closed");
  assert.equal(cellOf(round(5, { planned: { 0: 0 } }), 0).done, 1, "nothing given is nothing owed");
});

test("deaths by rank", () => {
  assert.deepEqual(
    [
      ...lastRounds([
        { rank: 1, last_round: 31 },
        { rank: 2, last_round: null },
      ]),
    ],
    [
      [1, 31],
      [2, -1],
    ],
  );
  assert.equal(lastRounds(undefined).size, 0);
});

test("the peak is of the rounds in sight", () => {
  const rounds = [round(0, { planned: { 0: 90 } }), round(1)];
  assert.equal(peak(rounds), 90);
  assert.equal(peak(rounds, 1), 8);
  assert.equal(peak([]), 1);
});

test("epochs begin where the number changes", () => {
  const rounds = Array.from({ length: 10 }, (_, i) => round(i));
  assert.deepEqual(epochStarts(rounds, 0), [4, 8]);
  assert.deepEqual(epochStarts(rounds, 5), [8]);
});

test("a cell in words", () => {
  const words = (n, rank, after) => describe(round(n), rank, `rank ${rank}`, cellOf(round(n), rank, after));
  assert.equal(words(5, 0), "Round 5, rank 0: 8 batches, 20.0 ms a batch");
  assert.equal(words(5, 1), "Round 5, rank 1: 4 batches, 3 done");
  assert.equal(words(5, 2), "Round 5, rank 2: 2 batches, anchor");
  assert.equal(words(6, 1, 5), "Round 6, rank 1: dead");
  assert.equal(words(5, 7), "Round 5, rank 7: no work");
  const none = round(5, { planned: { 0: 0 } });
  assert.equal(describe(none, 0, "rank 0", cellOf(none, 0)), "Round 5, rank 0: no work");
});

test("keys walk the map and stop at its edges", () => {
  const place = layout({ ...grid, rounds: 7 });
  assert.deepEqual(moved(place, null, "ArrowLeft"), { row: 0, column: 6 });
  assert.deepEqual(moved(place, { row: 0, column: 6 }, "ArrowRight"), { row: 0, column: 6 });
  assert.deepEqual(moved(place, { row: 0, column: 6 }, "ArrowUp"), { row: 0, column: 6 });
  assert.deepEqual(moved(place, { row: 0, column: 6 }, "ArrowDown"), { row: 1, column: 6 });
  assert.deepEqual(moved(place, { row: 2, column: 6 }, "Home"), { row: 2, column: 0 });
  assert.deepEqual(moved(place, { row: 2, column: 0 }, "End"), { row: 2, column: 6 });
  assert.equal(moved(place, null, "Enter"), null);
  assert.equal(moved(layout({ ...grid, rounds: 0 }), null, "ArrowLeft"), null);
});
