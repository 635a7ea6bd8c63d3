/** The small parts that every page shows. Text goes in as text; nothing here takes markup from outside. */
import { MISSING, moment, words } from "./format.js";
import { html, useId } from "./html.js";
import { Icon } from "./icons.js";

const PHASES = {
  waiting: ["door", "info"],
  staging: ["clock", "warn"],
  forming: ["clock", "info"],
  training: ["play", "live"],
  done: ["check", "good"],
  failed: ["cross", "bad"],
  interrupted: ["stop", "bad"],
};

/** A run's phase as shape, word and colour. */
export function Phase({ phase, large = false }) {
  const [icon, tone] = PHASES[phase] ?? ["info", "quiet"];
  return html`
    <span class=${`badge tone-${tone} ${large ? "badge-large" : ""}`} data-phase=${phase}>
      <${Icon} name=${icon} size=${large ? 16 : 13} />${words(phase)}
    </span>
  `;
}

const TROUBLED = /lost|dead|turned|failed/;
const BUSY = /train|work|reduc|eval/;

/** The state of a host or a rank as a dot of its own shape and a word. */
export function State({ state }) {
  const tone = TROUBLED.test(state) ? "bad" : BUSY.test(state) ? "good" : "quiet";
  return html`<span class=${`state tone-${tone}`}><i class="dot" />${words(state)}</span>`;
}

const EMULATED =
  "Training steps are padded on purpose here. Speeds and times that involve it are emulated, not measured hardware.";

/** The mark of throttled figures: they must never pass for real ones. */
export function Emulated({ ms, brief = false }) {
  const text = brief ? "emu" : ms ? `emulated ${ms} ms/batch` : "emulated";
  return html`<span class="badge tone-emulated" title=${EMULATED}>${text}</span>`;
}

export function Time({ iso }) {
  if (!iso) return MISSING;
  return html`<time dateTime=${iso} title=${new Date(iso).toLocaleString()}>${moment(iso)}</time>`;
}

/** A titled part of a page. */
export function Panel({ title, id, aside, children, className = "", note }) {
  const heading = useId();
  return html`
    <section class=${`panel ${className}`} id=${id} aria-labelledby=${heading}>
      <header class="panel-head">
        <h2 id=${heading}>${title}</h2>
        ${note && html`<p class="panel-note">${note}</p>`} ${aside && html`<div class="panel-aside">${aside}</div>`}
      </header>
      ${children}
    </section>
  `;
}

/** A sentence with an icon: info, good, warn or bad. `live` announces it when it appears. */
export function Notice({ tone = "info", title, children, live = false, action }) {
  const icon = { good: "check", warn: "warn", bad: "warn" }[tone] ?? "info";
  return html`
    <div class=${`notice tone-${tone}`} role=${live ? "alert" : undefined}>
      <${Icon} name=${icon} size=${18} />
      <div class="notice-text">
        ${title && html`<strong>${title}</strong>`}
        <div>${children}</div>
      </div>
      ${action}
    </div>
  `;
}

/** The database takes nothing. What is wrong, and the cure, are the controller's words. */
export function NotDurable({ text }) {
  if (!text) return null;
  return html`
    <${Notice} tone="bad" title="Nothing is recorded right now" live=${true}>
      ${text}. Training goes on; what happens meanwhile is kept in the controller's memory, and is lost if it ends.
    <//>
  `;
}

/** What a panel shows when it has nothing yet. */
export const Empty = ({ children, className = "" }) => html`<p class=${`empty ${className}`}>${children}</p>`;

/** A few choices of one thing, as radio buttons that look like a switch. */
export function Choice({ legend, value, options, onPick }) {
  const group = useId();
  return html`
    <fieldset class="choice">
      <legend class="offscreen">${legend}</legend>
      ${options.map(
        ([key, label]) => html`
          <label key=${key} class=${key === value ? "on" : ""}>
            <input type="radio" name=${group} checked=${key === value} onChange=${() => onPick(key)} />
            <span>${label}</span>
          </label>
        `,
      )}
    </fieldset>
  `;
}

/** A bar of `value` out of `most`, with its words in `label`. */
export function Meter({ value, most, label, tone = "" }) {
  const whole = most || 1;
  const filled = Math.min(whole, Math.max(0, value ?? 0));
  return html`
    <div
      class=${`meter ${tone}`}
      role="meter"
      aria-label=${label}
      aria-valuemin="0"
      aria-valuemax=${whole}
      aria-valuenow=${filled}
    >
      <i style=${{ width: `${(filled / whole) * 100}%` }} />
    </div>
  `;
}
