/** One labelled input, with its help, its default and its problem. */
import { html, useId } from "./html.js";
import { shown } from "./schema.js";

export function Field({ field, value, onInput, problem }) {
  const id = useId();
  const notes = [field.help && `${id}-help`, problem && `${id}-problem`].filter(Boolean).join(" ") || undefined;
  const common = { id, "aria-describedby": notes, "aria-invalid": problem ? "true" : undefined, "data-field": field.name };
  if (field.kind === "boolean") return html`<${Check} field=${field} value=${value} onInput=${onInput} problem=${problem} common=${common} />`;
  return html`<div class=${`field ${problem ? "has-problem" : ""}`}>
    <label for=${id}>${field.label}${field.required && html`<span class="muted"> (needed)</span>`}</label>
    <div class="input-row">${control(field, value, onInput, common)}${field.unit && html`<span class="unit">${field.unit}</span>`}</div>
    <${Notes} field=${field} id=${id} problem=${problem} />
  </div>`;
}

function control(field, value, onInput, common) {
  const input = (event) => onInput(event.target.value);
  if (field.kind === "choice") {
    return html`<select ...${common} value=${value ?? shown(field, field.fallback)} onChange=${input}>
      ${field.choices.map((choice) => html`<option key=${choice} value=${String(choice)}>${String(choice)}</option>`)}</select>`;
  }
  const numeric = field.kind === "integer" || field.kind === "number";
  const hint = field.fallback === undefined || field.fallback === null ? (field.optional ? "none" : "") : shown(field, field.fallback);
  return html`<input ...${common} type="text" inputmode=${numeric ? (field.kind === "integer" ? "numeric" : "decimal") : undefined}
    autocomplete="off" spellcheck=${false} placeholder=${hint} value=${value ?? ""} onInput=${input} />`;
}

function Check({ field, value, onInput, problem, common }) {
  return html`<div class=${`field field-check ${problem ? "has-problem" : ""}`}>
    <label><input ...${common} type="checkbox" checked=${value ?? Boolean(field.fallback)} onChange=${(event) => onInput(event.target.checked)} />
      <span>${field.label}</span></label>
    <${Notes} field=${field} id=${common.id} problem=${problem} />
  </div>`;
}

function Notes({ field, id, problem }) {
  return html`${field.help && html`<p class="field-help" id=${`${id}-help`}>${field.help}</p>`}
    ${problem && html`<p class="field-problem" id=${`${id}-problem`}>${problem}</p>`}`;
}
