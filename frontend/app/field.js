/** One labelled input, with its help, its default and its problem, or with why it has no effect. */
import { html, useId } from "./html.js";
import { shown } from "./schema.js";

export function Field({ field, value, onInput, problem, barred = "" }) {
  const id = useId();
  const notes = [field.help && `${id}-help`, barred && `${id}-barred`, problem && `${id}-problem`].filter(Boolean);
  const attributes = {
    id,
    "data-field": field.name,
    "aria-describedby": notes.join(" ") || undefined,
    "aria-invalid": problem ? "true" : undefined,
    disabled: Boolean(barred),
  };
  const check = field.kind === "boolean";
  const Control = check ? Check : field.kind === "choice" ? Select : Text;
  const needed = field.required && html` <span class="muted">(needed)</span>`;
  return html`
    <div class=${`field ${check ? "field-check" : ""} ${problem ? "has-problem" : ""} ${barred ? "barred" : ""}`}>
      ${!check && html`<label for=${id}>${field.label}${needed}</label>`}
      <${Control} ...${{ field, value: barred ? undefined : value, onInput, attributes }} />
      ${field.help && html`<p class="field-help" id=${`${id}-help`}>${field.help}</p>`}
      ${barred && html`<p class="field-help field-barred" id=${`${id}-barred`}>${barred}.</p>`}
      ${problem && html`<p class="field-problem" id=${`${id}-problem`}>${problem}</p>`}
    </div>
  `;
}

const MODES = { integer: "numeric", number: "decimal" };

/** Empty means the default, which is shown where the value will be. */
function Text({ field, value, onInput, attributes }) {
  const none = field.fallback === undefined || field.fallback === null;
  return html`
    <div class="input-row">
      <input
        ...${attributes}
        type="text"
        inputmode=${MODES[field.kind]}
        autocomplete="off"
        spellcheck=${false}
        placeholder=${none ? (field.hint ?? (field.optional ? "none" : "")) : shown(field, field.fallback)}
        value=${value ?? ""}
        onInput=${(event) => onInput(event.target.value)}
      />
      ${field.unit && html`<span class="unit">${field.unit}</span>`}
    </div>
  `;
}

const Select = ({ field, value, onInput, attributes }) => html`
  <select
    ...${attributes}
    value=${value ?? shown(field, field.fallback)}
    onChange=${(event) => onInput(event.target.value)}
  >
    ${field.choices.map(
      (choice) =>
        html`<option key=${choice} value=${String(choice)}>${field.names?.[choice] ?? String(choice)}</option>`,
    )}
  </select>
`;

const Check = ({ field, value, onInput, attributes }) => html`
  <label>
    <input
      ...${attributes}
      type="checkbox"
      checked=${value ?? Boolean(field.fallback)}
      onChange=${(event) => onInput(event.target.checked)}
    />
    <span>${field.label}</span>
  </label>
`;
