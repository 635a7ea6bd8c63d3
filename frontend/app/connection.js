/** Whether what is on the page is true right now: a chip that always says so, and a veil over what is not. */
import { span, timeOfDay } from "./format.js";
import { html, signal, useEffect } from "./html.js";
import { Icon } from "./icons.js";
import { say } from "./toasts.js";

/** Monotonic milliseconds, once a second: what countdowns and ages are read from. */
export const seconds = signal(performance.now());
setInterval(() => {
  if (!document.hidden) seconds.value = performance.now();
}, 1000);

const WORDS = {
  connecting: ["clock", "Connecting", "quiet"],
  live: ["play", "Live", "live"],
  stale: ["warn", "Stale", "warn"],
  reconnecting: ["warn", "Reconnecting", "warn"],
  history: ["clock", "History", "quiet"],
};
const SPOKEN = {
  stale: "No word from the controller: the figures are not current.",
  reconnecting: "Connection lost, reconnecting.",
  live: "Live.",
};

/** Live, Reconnecting, Stale since, or History. */
export function Chip({ live }) {
  const status = live.get("status").value;
  const heardAt = live.silence.value;
  const [icon, word, tone] = WORDS[status];
  useEffect(() => {
    if (status in SPOKEN) say(SPOKEN[status]);
  }, [status]);
  const since = status === "stale" ? ` since ${timeOfDay(wallClock(heardAt))}` : "";
  return html`
    <span class=${`chip tone-${tone}`} data-connection=${status}>
      <${Icon} name=${icon} size=${12} />${word}${since}
    </span>
  `;
}

const wallClock = (monotonic) => new Date(Date.now() - (performance.now() - monotonic)).toISOString();

/** Dims its content while the figures are not current, and says how old they are. */
export function Veil({ live, children }) {
  const heardAt = live.silence.value;
  const skipped = live.get("skipped").value;
  const away = heardAt !== null;
  return html`
    ${away && html`<${Away} status=${live.get("status").value} heardAt=${heardAt} />`}
    ${skipped > 0 && !away && html`<p class="catching-up">Catching up: ${skipped} updates were missed.</p>`}
    <div class=${away ? "veiled" : ""}>${children}</div>
  `;
}

function Away({ status, heardAt }) {
  const age = Math.max(0, Math.floor((seconds.value - heardAt) / 1000));
  const what = status === "stale" ? "No word from the controller." : "The connection to the controller is lost.";
  return html`
    <p class="away">
      <${Icon} name="warn" />
      <span>
        <strong>${what}</strong> These figures are <span class="age">${span(age)}</span> old. Training goes on without
        this page; it catches up by itself.
      </span>
    </p>
  `;
}
