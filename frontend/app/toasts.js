/** Short messages at the edge of the page, and the voice for what only a screen reader needs to be told. */
import { html, signal } from "./html.js";
import { Icon } from "./icons.js";

const MOST = 4;
const SHOWN_MS = 6000;
const TROUBLE_SHOWN_MS = 15000;

const shown = signal([]);
const spoken = signal("");
let next = 1;

/** Show `text` for a while; trouble (tone bad) stays longer. It is also spoken. */
export function toast(text, tone = "info") {
  const id = next++;
  shown.value = [...shown.value.slice(1 - MOST), { id, text, tone }];
  setTimeout(() => dismiss(id), tone === "bad" ? TROUBLE_SHOWN_MS : SHOWN_MS);
}

/** Speak, politely: a phase that turned, a cell under the keyboard's cursor. Never a ticking number. */
export function say(text) {
  spoken.value = text;
}

function dismiss(id) {
  shown.value = shown.value.filter((item) => item.id !== id);
}

export function Toasts() {
  return html`
    <div class="toasts" aria-live="polite">
      ${shown.value.map(
        ({ id, text, tone }) => html`
          <div key=${id} class=${`toast tone-${tone}`}>
            <span>${text}</span>
            <button type="button" class="icon-button" aria-label="Dismiss" onClick=${() => dismiss(id)}>
              <${Icon} name="cross" />
            </button>
          </div>
        `,
      )}
    </div>
    <p class="offscreen" role="status" aria-live="polite">${spoken.value}</p>
  `;
}
