import assert from "node:assert/strict";
import { afterEach, beforeEach, mock, test } from "node:test";
import { initial, reduce } from "../../frontend/app/store.js";
import { Stream, retryDelay } from "../../frontend/app/stream.js";

/** The port: a socket as the browser gives it, driven by hand. */
class HandSocket {
  static made = [];
  constructor() {
    this.readyState = 1;
    this.closed = false;
    HandSocket.made.push(this);
  }
  close() {
    this.closed = true;
  }
  say(frame) {
    this.onmessage({ data: JSON.stringify(frame) });
  }
}

let state;
let time;
let stream;
const settled = () => new Promise((resolve) => setImmediate(resolve));
const last = () => HandSocket.made.at(-1);

function open({ lost = async () => true } = {}) {
  stream = new Stream({
    url: "ws://x",
    dispatch: (frame) => (state = reduce(state, frame)),
    lost,
    now: () => time,
    socket: () => new HandSocket(),
  });
  last().onopen();
  last().say({ type: "snapshot", seq: 1, view: { phase: "training" }, rounds: [], events: [] });
}

beforeEach(() => {
  mock.timers.enable({ apis: ["setTimeout", "setInterval"] });
  HandSocket.made = [];
  state = initial(0);
  time = 0;
});
afterEach(() => {
  stream.close();
  mock.timers.reset();
});

test("a gap is healed by a new subscription, not by a guess", () => {
  open();
  last().say({ type: "delta", seq: 4, patch: { loss: 1 } });
  assert.equal(HandSocket.made[0].closed, true);
  assert.equal(state.status, "live", "healing is not an outage");
  mock.timers.tick(300);
  assert.equal(HandSocket.made.length, 2);
  last().onopen();
  last().say({ type: "snapshot", seq: 1, view: { phase: "training", loss: 1 }, rounds: [], events: [] });
  assert.equal(state.view.loss, 1);
  assert.equal(state.resync, false);
});

test("a lost socket is dialled again, later each time", async () => {
  open();
  for (const expected of [2, 3]) {
    last().onclose();
    await settled();
    assert.equal(state.status, "reconnecting");
    mock.timers.tick(1000);
    assert.equal(HandSocket.made.length, expected);
  }
  last().onopen();
  last().say({ type: "snapshot", seq: 1, view: { phase: "training" }, rounds: [], events: [] });
  assert.equal(state.status, "live");
});

test("nobody is dialled when there is nothing to go on for", async () => {
  open({ lost: async () => false });
  last().onclose();
  await settled();
  mock.timers.tick(60_000);
  assert.equal(HandSocket.made.length, 1);
});

test("an open link that says nothing is given up", async () => {
  open();
  time = 7000;
  mock.timers.tick(1000);
  assert.equal(state.status, "stale");
  time = 13_000;
  mock.timers.tick(1000);
  await settled();
  assert.equal(HandSocket.made[0].closed, true);
  assert.equal(state.status, "reconnecting");
});

test("hurry dials at once, but only when no socket is there", async () => {
  open();
  stream.hurry();
  assert.equal(HandSocket.made.length, 1);
  last().onclose();
  await settled();
  stream.hurry();
  assert.equal(HandSocket.made.length, 2);
  mock.timers.tick(60_000);
  assert.equal(HandSocket.made.length, 2, "the planned attempt is dropped");
});

test("a socket that still connects is closed when it stands", () => {
  open();
  const socket = last();
  socket.readyState = 0;
  stream.close();
  assert.equal(socket.closed, false);
  socket.onopen();
  assert.equal(socket.closed, true);
});

test("delays double up to a ceiling, with half of them random", () => {
  assert.deepEqual(
    [0, 1, 2, 10].map((n) => retryDelay(n, 0)),
    [400, 800, 1600, 8000],
  );
  assert.equal(retryDelay(0, 1), 200);
});
