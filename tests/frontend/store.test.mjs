import assert from "node:assert/strict";
import { test } from "node:test";
import { EVENTS_KEPT, ROUNDS_KEPT, STALE_AFTER_MS, initial, isEnded, reduce } from "../../frontend/app/store.js";

const round = (n, extra = {}) => ({
  round: n,
  epoch: Math.floor(n / 10),
  samples: 96,
  seconds: 1,
  loss: 1 / (n + 1),
  planned: { 0: 2, 1: 1 },
  realized: { 0: 2, 1: 1 },
  ms_per_batch: { 0: 20, 1: 40 },
  ...extra,
});
const rounds = (from, to) => Array.from({ length: to - from }, (_, i) => round(from + i));
const event = (id, text = `event ${id}`) => ({
  id,
  at: `2026-11-29T12:00:${String(id).padStart(2, "0")}.000Z`,
  kind: "x",
  level: "info",
  text,
});
const play = (frames, state = initial(0)) => frames.reduce(reduce, state);
const snapshot = (extra = {}) => ({
  type: "snapshot",
  seq: 1,
  now: 10,
  view: { phase: "training", loss: 2 },
  rounds: rounds(0, 3),
  events: [event(1)],
  ...extra,
});
const delta = (seq, extra = {}) => ({ type: "delta", seq, now: 10 + seq, patch: {}, rounds: [], events: [], ...extra });

test("a snapshot is the whole truth and makes the view live", () => {
  const state = play([snapshot()]);
  assert.equal(state.status, "live");
  assert.equal(state.view.loss, 2);
  assert.equal(state.rounds.length, 3);
  assert.deepEqual(
    state.points.map((p) => p.round),
    [0, 1, 2],
  );
  assert.equal(state.events[0].text, "event 1");
});

test("a delta patches only what changed and keeps the identity of the rest", () => {
  const ranks = [{ rank: 0 }];
  const before = play([snapshot({ view: { phase: "training", loss: 2, ranks } })]);
  const after = reduce(before, delta(2, { patch: { loss: 1 }, rounds: [round(3)], events: [event(2)] }));
  assert.equal(after.view.loss, 1);
  assert.equal(after.view.ranks, ranks);
  assert.equal(after.rounds.at(-1).round, 3);
  assert.equal(after.events.length, 2);
  assert.equal(before.view.loss, 2, "the old state is untouched");
  assert.equal(reduce(after, delta(3, { patch: { loss: 0.5 } })).rounds, after.rounds, "no new round, same rows");
});

test("a missing frame asks for a fresh snapshot and lies about nothing meanwhile", () => {
  const state = play([snapshot(), delta(2, { patch: { loss: 1 } }), delta(5, { patch: { loss: 0.1 } })]);
  assert.equal(state.resync, true);
  assert.equal(state.skipped, 2);
  assert.equal(state.view.loss, 1, "a delta after a gap is not applied");
  assert.equal(reduce(state, delta(6, { patch: { loss: 0.1 } })), state, "nor any later one");
});

test("the fresh snapshot heals the gap", () => {
  const state = play([
    snapshot(),
    delta(5),
    { type: "opened", now: 20 },
    snapshot({ seq: 1, now: 21, view: { phase: "training", loss: 0.2 } }),
  ]);
  assert.equal(state.resync, false);
  assert.equal(state.skipped, 0);
  assert.equal(state.view.loss, 0.2);
  assert.equal(reduce(state, delta(2, { patch: { loss: 0.1 } })).view.loss, 0.1);
});

test("the server's own gap frame asks for a snapshot too", () => {
  assert.equal(play([snapshot(), { type: "gap", now: 12 }]).resync, true);
});

for (const [name, seq, resync] of [
  ["repeats the last number", 1, false],
  ["takes the next number", 2, false],
  ["skips one", 3, true],
  ["goes back", 0, true],
]) {
  test(`a ping that ${name} ${resync ? "shows a gap" : "is a sign of life"}`, () => {
    const state = play([snapshot(), { type: "ping", seq, now: 500 }]);
    assert.equal(state.resync, resync);
    assert.equal(state.heardAt, 500);
  });
}

test("after a ping that took a number the next delta follows it", () => {
  const state = play([snapshot(), { type: "ping", seq: 2, now: 12 }, delta(3, { patch: { loss: 1 } })]);
  assert.equal(state.resync, false);
  assert.equal(state.view.loss, 1);
});

test("a frame before any snapshot is ignored", () => {
  const state = initial(0);
  assert.equal(reduce(state, delta(7)), state);
  assert.equal(reduce(state, { type: "ping", seq: 7, now: 1 }), state);
});

test("an unknown frame throws", () => {
  assert.throws(() => reduce(initial(0), { type: "surprise", now: 1 }), /unknown frame type: surprise/);
});

test("silence makes the view stale, since the last frame; a frame makes it live again", () => {
  const live = play([snapshot({ now: 1000 })]);
  assert.equal(reduce(live, { type: "tick", now: 1000 + STALE_AFTER_MS }).status, "live");
  const stale = reduce(live, { type: "tick", now: 1001 + STALE_AFTER_MS });
  assert.equal(stale.status, "stale");
  assert.equal(stale.since, 1000);
  assert.equal(reduce(stale, { type: "ping", seq: 2, now: 9000 }).status, "live");
});

test("a lost connection keeps the last figures and counts the attempts", () => {
  let state = play([snapshot(), { type: "closed", now: 30 }, { type: "closed", now: 40 }]);
  assert.equal(state.status, "reconnecting");
  assert.equal(state.since, 30, "the clock of the outage does not restart");
  assert.equal(state.attempts, 2);
  assert.equal(state.view.loss, 2);
  state = play([{ type: "opened", now: 50 }, snapshot({ now: 51 })], state);
  assert.equal(state.status, "live");
  assert.equal(state.attempts, 0);
});

test("a reconnect with a hole between asks for the rounds in it", () => {
  const state = play([
    snapshot(),
    { type: "closed", now: 30 },
    { type: "opened", now: 31 },
    snapshot({ now: 32, rounds: rounds(50, 60) }),
  ]);
  assert.deepEqual(state.history, { after: 2, until: 50 });
  const filled = reduce(state, { type: "history", now: 33, rounds: rounds(3, 50) });
  assert.equal(filled.history, null);
  assert.deepEqual(
    filled.points.map((p) => p.round),
    Array.from({ length: 60 }, (_, i) => i),
  );
});

test("a late viewer is given what the snapshot left out, page by page", () => {
  let state = play([snapshot({ rounds: rounds(600, 600 + ROUNDS_KEPT) })]);
  assert.deepEqual(state.history, { after: -1, until: 600 });
  state = reduce(state, { type: "history", now: 11, rounds: rounds(0, 400) });
  assert.deepEqual(state.history, { after: 399, until: 600 });
  state = reduce(state, { type: "history", now: 12, rounds: rounds(400, 600) });
  assert.equal(state.history, null);
  assert.equal(
    state.points.reduce((sum, p) => sum + p.samples, 0),
    96 * 1000,
  );
  assert.equal(state.rounds.length, ROUNDS_KEPT);
  assert.equal(state.rounds.at(-1).round, 999, "old pages do not push the new rows out");
});

test("an empty page of history ends the search", () => {
  const state = play([snapshot({ rounds: rounds(600, 600 + ROUNDS_KEPT) }), { type: "history", now: 11, rounds: [] }]);
  assert.equal(state.history, null);
});

test("rounds and events that come twice are kept once, the newer row winning", () => {
  const state = play([
    snapshot(),
    delta(2, { rounds: [round(2, { loss: 9 }), round(3)], events: [event(1, "again"), event(2)] }),
  ]);
  assert.deepEqual(
    state.rounds.map((row) => row.round),
    [0, 1, 2, 3],
  );
  assert.equal(state.rounds[2].loss, 9);
  assert.deepEqual(
    state.events.map((e) => e.text),
    ["again", "event 2"],
  );
});

test("events without an id are told apart by what they say", () => {
  const bare = { at: "2026-11-29T12:00:05.000Z", kind: "x", level: "info", text: "bare" };
  const state = play([
    snapshot(),
    delta(2, { events: [bare] }),
    delta(3, { events: [bare, { ...bare, text: "other" }] }),
  ]);
  assert.deepEqual(
    state.events.map((e) => e.text),
    ["event 1", "bare", "other"],
  );
});

test("memory is bounded", () => {
  const many = Array.from({ length: EVENTS_KEPT + 50 }, (_, i) => ({
    ...event(i + 1),
    at: "2026-11-29T12:00:00.000Z",
  }));
  const state = play([snapshot({ rounds: rounds(0, 5000), events: many })]);
  assert.equal(state.rounds.length, ROUNDS_KEPT);
  assert.equal(state.events.length, EVENTS_KEPT);
  assert.equal(state.events.at(-1).id, EVENTS_KEPT + 50);
  assert.ok(state.points.length <= 1600);
});

test("the countdown's origin moves only with the window", () => {
  const first = play([snapshot({ now: 10, view: { phase: "waiting", window: {} } })]);
  assert.equal(reduce(first, delta(2, { now: 99, patch: { members: [] } })).windowAt, 10);
  assert.equal(reduce(first, delta(2, { now: 99, patch: { window: {} } })).windowAt, 99);
});

for (const phase of ["done", "failed", "interrupted"]) {
  test(`a run that is ${phase} is history: silence and a closed socket mean nothing any more`, () => {
    assert.ok(isEnded(phase));
    const state = play([snapshot(), delta(2, { patch: { phase } })]);
    assert.equal(state.status, "history");
    assert.equal(
      play(
        [
          { type: "tick", now: 1e9 },
          { type: "closed", now: 1e9 },
        ],
        state,
      ).status,
      "history",
    );
  });
}

test("the REST answer shows figures without claiming to be live", () => {
  const away = play([
    snapshot(),
    { type: "closed", now: 30 },
    { type: "polled", now: 40, view: { phase: "training", loss: 1 } },
  ]);
  assert.equal(away.view.loss, 1);
  assert.equal(away.status, "reconnecting");
  assert.equal(
    play([{ type: "polled", now: 5, view: { phase: "done" }, history: true, events: [event(4)] }]).status,
    "history",
  );
});
