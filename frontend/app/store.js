/**
 * The pure state of one live view: `reduce(state, frame) -> state`. No DOM, no socket, no clock.
 *
 * Frames of the server: snapshot, delta, ping, gap. Frames of this page: opened, closed, tick, polled, history. Each
 * carries `now`, monotonic milliseconds. An unknown type throws: a frame that is silently ignored is a number that
 * silently lies.
 */
import { addPoints } from "./points.js";

/** More than 5 s of silence: the server speaks every 2 s, and a frame may be late. */
export const STALE_AFTER_MS = 5000;
export const ROUNDS_KEPT = 400;
export const EVENTS_KEPT = 500;

const ENDED = new Set(["done", "failed", "interrupted"]);

/** Whether a run in this phase will never change again. */
export const isEnded = (phase) => ENDED.has(phase);

/** The state before the first word from the server. */
export function initial(now = 0) {
  return {
    status: "connecting", // connecting | live | stale | reconnecting | history
    since: now, // when the status last changed
    heardAt: null, // when the last frame came
    attempts: 0, // failed connections since the last good one
    seq: null, // of the last frame; null until a snapshot
    resync: false, // a frame is missing: subscribe afresh
    skipped: 0, // frames known to be missing, for the notice
    view: null,
    viewAt: now, // when `view` was last patched
    windowAt: now, // when `view.window` was, the origin of its countdowns
    rounds: [], // the last full rows, for the heat map and the tables
    points: [], // every round, thinned, for the charts
    events: [], // oldest first
    history: null, // {after, until}: rows that the snapshot did not hold
  };
}

/** Apply one frame. Throws on a type that nobody taught it. */
export function reduce(state, frame) {
  const handler = HANDLERS[frame.type];
  if (!handler) throw new Error(`unknown frame type: ${frame.type}`);
  return handler(state, frame);
}

const HANDLERS = {
  snapshot(state, frame) {
    const rounds = frame.rounds ?? [];
    const last = state.points.at(-1);
    const first = rounds[0]?.round;
    const hole = last && first > last.last + 1 ? { after: last.last, until: first } : null;
    const before = !last && rounds.length >= ROUNDS_KEPT ? { after: -1, until: first } : null;
    return heard(state, frame, {
      seq: frame.seq,
      resync: false,
      view: frame.view,
      viewAt: frame.now,
      windowAt: frame.now,
      rounds: rounds.slice(-ROUNDS_KEPT),
      points: addPoints(state.points, rounds),
      events: mergeEvents(state.events, frame.events ?? []),
      history: hole ?? before ?? state.history,
    });
  },

  delta(state, frame) {
    if (state.seq === null || state.resync) return state;
    if (frame.seq !== state.seq + 1) return missed(state, frame, frame.seq - state.seq - 1);
    const patch = frame.patch ?? {};
    const rounds = frame.rounds ?? [];
    const events = frame.events ?? [];
    return heard(state, frame, {
      seq: frame.seq,
      view: { ...state.view, ...patch },
      viewAt: frame.now,
      windowAt: "window" in patch ? frame.now : state.windowAt,
      rounds: rounds.length ? mergeRounds(state.rounds, rounds) : state.rounds,
      points: rounds.length ? addPoints(state.points, rounds) : state.points,
      events: events.length ? mergeEvents(state.events, events) : state.events,
    });
  },

  ping(state, frame) {
    if (state.seq === null || state.resync) return state;
    const step = (frame.seq ?? state.seq) - state.seq;
    // A ping may repeat the last number or take the next one; anything beyond says that a delta was lost.
    if (step > 1 || step < 0) return missed(state, frame, Math.max(step - 1, 1));
    return heard(state, frame, { seq: state.seq + step });
  },

  gap: (state, frame) => missed(state, frame, 1),

  opened: (state) => ({ ...state, seq: null, resync: false }),

  closed(state, frame) {
    if (state.status === "history") return state;
    const attempts = state.attempts + 1;
    return turn({ ...state, seq: null, resync: false, attempts }, "reconnecting", frame.now);
  },

  tick(state, frame) {
    const silent = state.heardAt !== null && frame.now - state.heardAt > STALE_AFTER_MS;
    return state.status === "live" && silent ? turn(state, "stale", state.heardAt) : state;
  },

  polled(state, frame) {
    // The REST answer while the socket is away, or for a run that is over: the facts, without a promise of being live.
    const next = { ...state, view: frame.view, viewAt: frame.now, windowAt: frame.now };
    const events = frame.events ? mergeEvents(state.events, frame.events) : state.events;
    return frame.history ? turn({ ...next, events }, "history", frame.now) : { ...next, events };
  },

  history(state, frame) {
    const rounds = frame.rounds;
    const end = rounds.at(-1)?.round ?? Infinity;
    const more = state.history && end + 1 < state.history.until ? { after: end, until: state.history.until } : null;
    return {
      ...state,
      rounds: mergeRounds(state.rounds, rounds),
      points: addPoints(state.points, rounds),
      history: more,
    };
  },
};

function heard(state, frame, changes) {
  const next = { ...state, ...changes, heardAt: frame.now, attempts: 0, skipped: 0 };
  const status = next.view && isEnded(next.view.phase) ? "history" : "live";
  return turn(next, status, frame.now);
}

function missed(state, frame, count) {
  return { ...state, heardAt: frame.now, resync: true, skipped: state.skipped + count };
}

function turn(state, status, since) {
  return state.status === status ? state : { ...state, status, since };
}

/** Rows by round number, the newer row winning, the last `ROUNDS_KEPT` of them. */
function mergeRounds(rows, more) {
  const byRound = new Map(rows.map((row) => [row.round, row]));
  for (const row of more) byRound.set(row.round, row);
  return [...byRound.values()].sort((a, b) => a.round - b.round).slice(-ROUNDS_KEPT);
}

const eventKey = (event) => event.id ?? `${event.at}|${event.kind}|${event.text}`;

function mergeEvents(events, more) {
  const byKey = new Map(events.map((event) => [eventKey(event), event]));
  for (const event of more) byKey.set(eventKey(event), event);
  const merged = [...byKey.values()];
  merged.sort((a, b) => (a.at < b.at ? -1 : a.at > b.at ? 1 : (a.id ?? 0) - (b.id ?? 0)));
  return merged.slice(-EVENTS_KEPT);
}
