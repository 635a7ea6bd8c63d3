/**
 * One live subscription that heals itself. It knows sockets and time; what frames mean is the reducer's business.
 *
 * `dispatch(frame)` gets every frame with `now`; it returns the new state. A state that asks for `resync` is answered
 * with a new subscription, whose first frame is a snapshot. `lost()` is asked after each failed connection whether to
 * go on.
 */
const RETRY_FIRST_MS = 400;
const RETRY_MOST_MS = 8000;
const TICK_MS = 1000;
const RESYNC_MS = 250;
const SILENT_MS = 12000;

/** How long to wait before attempt `n` (from 0): doubling, with up to half of it shaved off at random. */
export function retryDelay(n, random = Math.random()) {
  return Math.min(RETRY_MOST_MS, RETRY_FIRST_MS * 2 ** n) * (1 - random / 2);
}

export class Stream {
  constructor({ url, dispatch, lost, now = () => performance.now(), socket = (address) => new WebSocket(address) }) {
    Object.assign(this, { url, dispatch, lost, now, makeSocket: socket });
    this.socket = null;
    this.timer = null;
    this.attempt = 0;
    this.heardAt = this.now();
    this.closed = false;
    this.ticker = setInterval(() => this.tick(), TICK_MS);
    this.connect();
  }

  close() {
    this.closed = true;
    clearInterval(this.ticker);
    clearTimeout(this.timer);
    this.drop();
  }

  /** Try now instead of waiting: the tab came back, or the network did. */
  hurry() {
    if (!this.closed && !this.socket) this.connect();
  }

  connect() {
    clearTimeout(this.timer);
    this.timer = null;
    this.heardAt = this.now();
    const socket = this.makeSocket(this.url);
    this.socket = socket;
    socket.onopen = () => this.dispatch({ type: "opened", now: this.now() });
    socket.onmessage = (message) => this.receive(message.data);
    socket.onclose = () => this.failed();
  }

  receive(text) {
    this.attempt = 0;
    this.heardAt = this.now();
    const state = this.dispatch({ ...JSON.parse(text), now: this.now() });
    if (!state.resync || this.closed) return;
    this.drop();
    this.timer = setTimeout(() => this.connect(), RESYNC_MS);
  }

  async failed() {
    this.socket = null;
    if (this.closed) return;
    this.dispatch({ type: "closed", now: this.now() });
    const goOn = await this.lost(this.attempt);
    if (this.closed) return;
    if (!goOn) return this.close();
    this.timer = setTimeout(() => this.connect(), retryDelay(this.attempt));
    this.attempt += 1;
  }

  tick() {
    this.dispatch({ type: "tick", now: this.now() });
    // A link that is open and silent for this long is dead in the middle; nobody else will say so.
    if (this.socket && this.now() - this.heardAt > SILENT_MS) {
      this.drop();
      this.failed();
    }
  }

  drop() {
    const socket = this.socket;
    this.socket = null;
    if (!socket) return;
    socket.onopen = socket.onmessage = socket.onclose = null;
    // Closing a socket that still connects makes browsers complain; it is closed as soon as it stands.
    if (socket.readyState === 0) socket.onopen = () => socket.close();
    else socket.close();
  }
}
