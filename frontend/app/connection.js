/** Whether what is on the page is true right now: a chip that always says so, and a veil over what is not. */
import { span, timeOfDay } from "./format.js";
import { html, signal, useEffect } from "./html.js";
import { Icon } from "./icons.js";
import { say } from "./ui.js";

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

const wallClock = (monotonic) => timeOfDay(new Date(Date.now() - (performance.now() - monotonic)).toISOString());

/** Live, Reconnecting, Stale since, or History. */
export function Chip({ live }) {
  const status = live.get("status").value;
  const heardAt = live.silence.value;
  const [icon, word, tone] = WORDS[status];
  const since = status === "stale" && heardAt !== null ? ` since ${wallClock(heardAt)}` : "";
  useEffect(() => {
    if (status === "stale") say("No word from the controller: the figures are not current.");
    if (status === "reconnecting") say("Connection lost, reconnecting.");
    if (status === "live") say("Live.");
  }, [status]);
  return html`<span class=${`chip tone-${tone}`} data-connection=${status}><${Icon} name=${icon} size=${12} />${word}${since}</span>`;
}

/** Dims its content while the figures are not current, and says how old they are. */
export function Veil({ live, children }) {
  const status = live.get("status").value;
  const heardAt = live.silence.value;
  const skipped = live.get("skipped").value;
  const away = heardAt !== null;
  return html`${away && html`<${Away} status=${status} heardAt=${heardAt} />`}
    ${skipped > 0 && !away && html`<p class="catching-up">Catching up: ${skipped} updates were missed.</p>`}
    <div class=${away ? "veiled" : ""}>${children}</div>`;
}

function Away({ status, heardAt }) {
  const age = Math.max(0, (seconds.value - heardAt) / 1000);
  const what = status === "stale" ? "No word from the controller" : "The connection to the controller is lost";
  return html`<p class="away"><${Icon} name="warn" /><span><strong>${what}.</strong> These figures are <span class="age">${span(Math.floor(age))}</span> old.
    Training goes on without this page; it catches up by itself.</span></p>`;
}
