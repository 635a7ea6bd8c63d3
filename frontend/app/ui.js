/** The small parts that every page is made of. Text goes in as text; nothing here takes markup from outside. */
import { Problem } from "./api.js";
import { html, signal, useEffect, useId, useRef, useState } from "./html.js";
import { Icon } from "./icons.js";
import { moment, words } from "./format.js";

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
  return html`<span class=${`badge tone-${tone} ${large ? "badge-large" : ""}`} data-phase=${phase}>
    <${Icon} name=${icon} size=${large ? 16 : 13} />${words(phase)}
  </span>`;
}

/** The state of a host or a rank as a dot of its own shape and a word. */
export function State({ state, note }) {
  const tone = /lost|dead|turned|failed/.test(state) ? "bad" : /train|work|reduc|eval/.test(state) ? "good" : "quiet";
  return html`<span class=${`state tone-${tone}`}><i class="dot" />${words(state)}${note && html` <small>${note}</small>`}</span>`;
}

/** The mark of throttled figures: they must never pass for real ones. */
export function Emulated({ ms, brief = false }) {
  const text = ms ? `emulated ${ms} ms/batch` : "emulated";
  return html`<span class="badge tone-emulated" title="This device pads its training steps on purpose. Speeds and times
 that involve it are emulated, not measured hardware.">${brief ? "emu" : text}</span>`;
}

export const Time = ({ iso }) =>
  iso ? html`<time dateTime=${iso} title=${new Date(iso).toLocaleString()}>${moment(iso)}</time>` : "–";

/** A titled panel; a problem inside one leaves the others alone. */
export function Panel({ title, id, aside, children, className = "", note }) {
  const auto = useId();
  const heading = `${id ?? auto}-title`;
  return html`<section class=${`panel ${className}`} id=${id} aria-labelledby=${heading}>
    <header class="panel-head"><h2 id=${heading}>${title}</h2>${note && html`<p class="panel-note">${note}</p>`}
      ${aside && html`<div class="panel-aside">${aside}</div>`}</header>
    ${children}
  </section>`;
}

/** A sentence with an icon: info, good, warn or bad. `live` announces it when it appears. */
export function Notice({ tone = "info", title, children, live = false, action }) {
  const icon = { good: "check", warn: "warn", bad: "warn" }[tone] ?? "info";
  return html`<div class=${`notice tone-${tone}`} role=${live ? "alert" : undefined}>
    <${Icon} name=${icon} size=${18} />
    <div class="notice-text">${title && html`<strong>${title}</strong>`}<div>${children}</div></div>${action}
  </div>`;
}

/** What a panel shows when it has nothing yet. */
export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

/** Run an async act from a button: {run, busy, problem, clear}. A problem stays until the next try. */
export function useAct(act) {
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState(null);
  const run = async (...given) => {
    setBusy(true);
    setProblem(null);
    try {
      return await act(...given);
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      setProblem(error);
      return undefined;
    } finally {
      setBusy(false);
    }
  };
  return { run, busy, problem, clear: () => setProblem(null) };
}

/** A button that shows it is at work. It is never disabled without a word: while busy it ignores presses and says so. */
export function Button({ onPress, busy, kind = "plain", wide = false, icon, children, ...rest }) {
  return html`<button type="button" class=${`button button-${kind} ${wide ? "button-wide" : ""}`} aria-busy=${busy ? "true" : undefined}
    onClick=${(event) => (busy ? undefined : onPress?.(event))} ...${rest}>
    ${busy ? html`<span class="spinner" aria-hidden="true" />` : icon && html`<${Icon} name=${icon} />`}<span>${children}</span>
  </button>`;
}

/** Copies `text`; works without the clipboard permission, which plain http on a network does not have. */
export function Copy({ text, label = "Copy" }) {
  const [copied, setCopied] = useState(false);
  useEffect(() => {
    if (!copied) return undefined;
    const timer = setTimeout(() => setCopied(false), 2000);
    return () => clearTimeout(timer);
  }, [copied]);
  const copy = async () => setCopied(await toClipboard(text));
  return html`<${Button} onPress=${copy} icon=${copied ? "check" : "copy"} kind="quiet"
    aria-label=${copied ? "Copied" : label}><span aria-live="polite">${copied ? "Copied" : "Copy"}</span><//>`;
}

async function toClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "offscreen";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

/** A modal question. Closes on Escape; the focus goes back to where it was. */
export function Dialog({ title, children, onClose, actions }) {
  const ref = useRef(null);
  const heading = useId();
  useEffect(() => {
    const dialog = ref.current;
    dialog.showModal();
    return () => dialog.close();
  }, []);
  return html`<dialog ref=${ref} class="dialog" aria-labelledby=${heading} onCancel=${onClose}
    onClick=${(event) => event.target === ref.current && onClose()}>
    <div class="dialog-body"><h2 id=${heading}>${title}</h2>${children}<div class="dialog-actions">${actions}</div></div>
  </dialog>`;
}

/** A button that asks once, naming the effect, before it acts. */
export function Confirm({ label, title, effect, confirm, act, kind = "plain", confirmKind = "danger", icon, name }) {
  const [open, setOpen] = useState(false);
  const { run, busy, problem, clear } = useAct(async () => {
    await act();
    setOpen(false);
  });
  const close = () => {
    clear();
    setOpen(false);
  };
  return html`<${Button} kind=${kind} icon=${icon} onPress=${() => setOpen(true)} aria-haspopup="dialog" aria-label=${name}>${label}<//>
    ${open && html`<${Dialog} title=${title} onClose=${close} actions=${html`
        <${Button} onPress=${close} autofocus>Keep it as it is<//>
        <${Button} kind=${confirmKind} busy=${busy} onPress=${run}>${confirm}<//>`}>
      <div class="dialog-text">${effect}</div>
      ${problem && html`<${Notice} tone="bad" live=${true}>${problem.message}<//>`}
    <//>`}`;
}

/** A few choices of one thing, as radio buttons that look like a switch. */
export function Choice({ legend, value, options, onPick, hidden = true }) {
  const group = useId();
  return html`<fieldset class="choice"><legend class=${hidden ? "offscreen" : ""}>${legend}</legend>
    ${options.map(([key, label]) => html`<label key=${key} class=${key === value ? "on" : ""}>
      <input type="radio" name=${group} checked=${key === value} onChange=${() => onPick(key)} /><span>${label}</span>
    </label>`)}
  </fieldset>`;
}

/** A bar of `value` out of `most`, with its words in `label`. */
export function Meter({ value, most, label, tone = "" }) {
  const share = most > 0 ? Math.min(1, Math.max(0, (value ?? 0) / most)) : 0;
  return html`<div class=${`meter ${tone}`} role="meter" aria-label=${label} aria-valuemin="0" aria-valuemax=${most || 1}
    aria-valuenow=${Math.min(value ?? 0, most || 1)}><i style=${{ width: `${share * 100}%` }} /></div>`;
}

/** Short messages at the edge: what an act did, or a death. `say` is also how phase changes are announced. */
export const toasts = signal([]);
export const announced = signal("");
let nextToast = 1;

export function toast(text, tone = "info") {
  const id = nextToast++;
  toasts.value = [...toasts.value.slice(-3), { id, text, tone }];
  setTimeout(() => dismiss(id), tone === "bad" ? 15000 : 6000);
}

export function say(text) {
  announced.value = text;
}

function dismiss(id) {
  toasts.value = toasts.value.filter((item) => item.id !== id);
}

export function Toasts() {
  return html`<div class="toasts" aria-live="polite">${toasts.value.map((item) => html`
    <div key=${item.id} class=${`toast tone-${item.tone}`}><span>${item.text}</span>
      <button type="button" class="icon-button" aria-label="Dismiss" onClick=${() => dismiss(item.id)}><${Icon} name="cross" /></button>
    </div>`)}</div>
    <p class="offscreen" role="status" aria-live="polite">${announced.value}</p>`;
}
