/** Everything that is pressed: buttons that show their work, questions before what cannot be undone, copying. */
import { Problem } from "./api.js";
import { html, useEffect, useId, useRef, useState } from "./html.js";
import { Icon } from "./icons.js";
import { Notice } from "./ui.js";

const COPIED_MS = 2000;

/** An async act as {run, busy, problem, clear}. A `Problem` is kept to be shown until the next try; bugs are thrown. */
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

/** A button that shows it is at work. Never disabled without a word: while busy it says so and ignores presses. */
export function Button({ onPress, busy, kind = "plain", wide = false, icon, children, ...rest }) {
  const press = (event) => {
    if (!busy) onPress(event);
  };
  return html`
    <button
      type="button"
      class=${`button button-${kind} ${wide ? "button-wide" : ""}`}
      aria-busy=${busy ? "true" : undefined}
      onClick=${press}
      ...${rest}
    >
      ${busy ? html`<span class="spinner" aria-hidden="true" />` : icon && html`<${Icon} name=${icon} />`}
      <span>${children}</span>
    </button>
  `;
}

/** Shows the same data the other way: every drawing has a table behind it. */
export const AsTable = ({ on, onPick, otherwise }) => html`
  <${Button} kind="quiet" onPress=${() => onPick(!on)} aria-pressed=${on}>${on ? otherwise : "As a table"}<//>
`;

/** A shell command that can be copied. */
export const Command = ({ text }) => html`
  <div class="command">
    <code tabindex="0" role="group" aria-label="Shell command">${text}</code>
    <${Copy} text=${text} label="Copy the command" />
  </div>
`;

function Copy({ text, label }) {
  const [copied, setCopied] = useState(false);
  useEffect(() => {
    if (!copied) return undefined;
    const timer = setTimeout(() => setCopied(false), COPIED_MS);
    return () => clearTimeout(timer);
  }, [copied]);
  const copy = async () => setCopied(await toClipboard(text));
  return html`
    <${Button} kind="quiet" icon=${copied ? "check" : "copy"} onPress=${copy} aria-label=${copied ? "Copied" : label}>
      <span aria-live="polite">${copied ? "Copied" : "Copy"}</span>
    <//>
  `;
}

/** Plain http on a network has no clipboard interface; there the old way by a selection still works. */
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

/** A button that asks once, naming the effect, before it acts. */
export function Confirm({ label, name, title, effect, confirm, act, kind = "plain", confirmKind = "danger", icon }) {
  const [open, setOpen] = useState(false);
  const { run, busy, problem, clear } = useAct(async () => {
    await act();
    setOpen(false);
  });
  const close = () => {
    clear();
    setOpen(false);
  };
  const actions = html`
    <${Button} onPress=${close} autofocus>Keep it as it is<//>
    <${Button} kind=${confirmKind} busy=${busy} onPress=${run}>${confirm}<//>
  `;
  return html`
    <${Button} kind=${kind} icon=${icon} onPress=${() => setOpen(true)} aria-haspopup="dialog" aria-label=${name}>
      ${label}
    <//>
    ${open &&
    html`<${Dialog} title=${title} onClose=${close} actions=${actions}>
      <div class="dialog-text">${effect}</div>
      ${problem && html`<${Notice} tone="bad" live=${true}>${problem.message}<//>`}
    <//>`}
  `;
}

/** A modal question. It closes on Escape and beside it; the browser puts the focus back where it was. */
function Dialog({ title, children, onClose, actions }) {
  const ref = useRef(null);
  const heading = useId();
  useEffect(() => {
    const dialog = ref.current;
    dialog.showModal();
    return () => dialog.close();
  }, []);
  const press = (event) => {
    if (event.target === ref.current) onClose();
  };
  return html`
    <dialog ref=${ref} class="dialog" aria-labelledby=${heading} onCancel=${onClose} onClick=${press}>
      <div class="dialog-body">
        <h2 id=${heading}>${title}</h2>
        ${children}
        <div class="dialog-actions">${actions}</div>
      </div>
    </dialog>
  `;
}
