/** Live views as signals: REST for what is past, the stream for what is now, one reducer for both. */
import { Problem, get, pages, session, untilAnswered } from "./api.js";
import { computed, signal } from "./html.js";
import { EVENTS_KEPT, initial, isEnded, reduce } from "./store.js";
import { Stream } from "./stream.js";

const now = () => performance.now();

/** Like the state, but while the tab is hidden nothing is drawn: the last state is shown at once when it comes back. */
class Shown {
  constructor(state) {
    this.latest = state;
    this.signal = signal(state);
    this.onVisible = () => this.flush();
    document.addEventListener("visibilitychange", this.onVisible);
  }

  set(state) {
    this.latest = state;
    if (!document.hidden) this.flush();
  }

  flush() {
    if (!document.hidden) this.signal.value = this.latest;
  }

  close() {
    document.removeEventListener("visibilitychange", this.onVisible);
  }
}

class Live {
  constructor(query) {
    this.shown = new Shown(initial(now()));
    this.state = this.shown.signal;
    this.problem = signal(null);
    this.query = query;
    this.parts = new Map();
    this.stream = null;
    this.closed = false;
    this.wake = () => this.stream?.hurry();
    window.addEventListener("online", this.wake);
    document.addEventListener("visibilitychange", this.wake);
  }

  /** One top-level part of the view as a signal: who reads it renders only when that part changes. */
  of(key) {
    if (!this.parts.has(key))
      this.parts.set(
        key,
        computed(() => this.state.value.view?.[key]),
      );
    return this.parts.get(key);
  }

  /** Any other part of the state as a signal. */
  get(key) {
    const name = `state:${key}`;
    if (!this.parts.has(name))
      this.parts.set(
        name,
        computed(() => this.state.value[key]),
      );
    return this.parts.get(name);
  }

  /** When the last frame came, while that matters: null as long as frames come. */
  get silence() {
    this.silent ??= computed(() => {
      const { status, heardAt } = this.state.value;
      return status === "stale" || status === "reconnecting" ? heardAt : null;
    });
    return this.silent;
  }

  dispatch(frame) {
    const state = reduce(this.shown.latest, frame);
    this.shown.set(state);
    return state;
  }

  connect() {
    if (this.closed || this.stream) return;
    const scheme = location.protocol === "https:" ? "wss:" : "ws:";
    this.stream = new Stream({
      url: `${scheme}//${location.host}/api/v1/stream${this.query}`,
      dispatch: (frame) => this.dispatch(frame),
      lost: (attempt) => this.lost(attempt),
    });
  }

  /** `take()`, or null and the problem. */
  async once() {
    try {
      return await this.take();
    } catch (problem) {
      return this.failed(problem);
    }
  }

  /** The same, asked until there is an answer. */
  async first() {
    try {
      return await untilAnswered(
        () => this.take(),
        (problem) => {
          this.failed(problem);
          if (this.closed) throw problem;
        },
      );
    } catch (problem) {
      return this.failed(problem);
    }
  }

  failed(problem) {
    if (!(problem instanceof Problem)) throw problem;
    this.problem.value = problem;
    return null;
  }

  close() {
    this.closed = true;
    this.stream?.close();
    this.shown.close();
    window.removeEventListener("online", this.wake);
    document.removeEventListener("visibilitychange", this.wake);
  }
}

/** One run, live while it lives and from the store afterwards. */
export class LiveRun extends Live {
  constructor(id) {
    super(`?run=${id}`);
    this.id = id;
    this.filling = false;
    this.open();
  }

  async open() {
    const view = await this.first();
    if (view && !isEnded(view.phase)) this.connect();
  }

  dispatch(frame) {
    const before = this.shown.latest;
    const state = super.dispatch(frame);
    if (state.history && !this.filling) this.fill();
    const streamed = frame.type === "snapshot" || frame.type === "delta";
    if (streamed && state.status === "history" && before.status !== "history") this.settle();
    return state;
  }

  /** The run's REST view into the state; the whole history with it when the run is over. */
  async take() {
    const view = await get(`runs/${this.id}`);
    if (this.closed) return null;
    const over = isEnded(view.phase);
    this.dispatch({ type: "polled", now: now(), view, history: over });
    this.problem.value = null;
    if (over) await this.load();
    return view;
  }

  async load() {
    const base = `runs/${this.id}`;
    const { items: events } = await get(`${base}/events?newest=true&limit=${EVENTS_KEPT}`);
    this.dispatch({ type: "polled", now: now(), view: this.shown.latest.view, events, history: true });
    for await (const rows of pages(`${base}/rounds`, -1, { key: "round" })) {
      if (this.closed) return;
      this.dispatch({ type: "history", now: now(), rounds: rows });
    }
  }

  /** Rounds that are older than the snapshot, page by page. */
  async fill() {
    this.filling = true;
    try {
      const { after, until } = this.shown.latest.history;
      for await (const rows of pages(`runs/${this.id}/rounds`, after, { key: "round", until })) {
        if (this.closed) return;
        this.dispatch({ type: "history", now: now(), rounds: rows });
      }
      this.shown.set({ ...this.shown.latest, history: null });
    } catch {
      // The next snapshot asks again; the charts simply begin later until then.
    } finally {
      this.filling = false;
    }
  }

  /** The run ended while we watched: take the final record, and let the stream go. */
  async settle() {
    this.stream?.close();
    this.stream = null;
    await this.first();
  }

  async lost() {
    if (session.value === "out") return false;
    const view = await this.once();
    const gone = this.problem.value && [401, 404].includes(this.problem.value.status);
    return !gone && !(view && isEnded(view.phase));
  }
}

/** The list of runs, and the controller. */
export class LiveOverview extends Live {
  constructor() {
    super("");
    this.older = signal([]);
    this.cursor = signal(null);
    this.loaded = signal(false);
    this.open();
  }

  async open() {
    if (await this.first()) this.connect();
  }

  /** One more page of history from REST. */
  async take() {
    const cursor = this.cursor.value ? `&cursor=${encodeURIComponent(this.cursor.value)}` : "";
    const page = await get(`runs?limit=50${cursor}`);
    this.older.value = [...this.older.value, ...page.items];
    this.cursor.value = page.next_cursor ?? null;
    this.loaded.value = true;
    this.problem.value = null;
    return page;
  }

  async lost() {
    if (session.value === "out") return false;
    try {
      await get("session");
      return true;
    } catch (problem) {
      return problem.status !== 401;
    }
  }
}
