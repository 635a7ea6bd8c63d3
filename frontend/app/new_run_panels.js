/** The parts of the new run form. They show and report; `new_run.js` holds the values. */
import { jobParts, plural, span } from "./format.js";
import { Field } from "./field.js";
import { html, useState } from "./html.js";
import { Icon } from "./icons.js";
import { ADVANCED, MODES, START_MODES, TRAINING, WINDOW, applies, barred, counts, promise } from "./run_fields.js";
import { parse } from "./schema.js";
import { Notice, Panel } from "./ui.js";

const JOB = { name: "job", label: "Job", kind: "string", help: "path/file.py:Name, below the job directory" };
const NAME = { name: "name", label: "Name", kind: "string", hint: "two words", help: "Empty: chosen for you" };

export function JobPanel({ form, change, problems, jobs: { list, problem }, schema }) {
  const [byName, setByName] = useState(false);
  const pick = (job) => change({ job, params: {} });
  const items = list?.items ?? [];
  const typed = byName || (list && !items.length);
  const card = ({ job, doc }) => ({ key: job, title: jobParts(job).name, place: jobParts(job).where, text: doc });
  return html`
    <${Panel} title="Job">
      ${problem && html`<${Notice} tone="bad" title="The jobs could not be listed">${problem.message}<//>`}
      ${typed
        ? html`<${Field} field=${JOB} value=${form.job} onInput=${pick} problem=${problems.job} />`
        : html`<${Cards}
            legend="Job"
            options=${items.map(card)}
            value=${form.job}
            onPick=${pick}
            problem=${problems.job}
          />`}
      <div class="under">
        ${items.length > 0 &&
        html`<button type="button" class="link" onClick=${() => setByName(!byName)}>
          ${byName ? "Choose from the list" : "Name another job"}
        </button>`}
        <${Broken} broken=${list?.broken ?? []} />
      </div>
      <h3 class="sub-title">Parameters</h3>
      <${Params} form=${form} change=${change} problems=${problems} schema=${schema} />
    <//>
  `;
}

function Broken({ broken }) {
  if (!broken.length) return null;
  const what = broken.length === 1 ? "1 file looks like a job" : `${broken.length} files look like jobs`;
  return html`
    <details class="broken">
      <summary>${what} and cannot be used</summary>
      <ul>${broken.map(({ job, text }) => html`<li key=${job}><code>${job}</code> ${text}</li>`)}</ul>
    </details>
  `;
}

function Params({ form, change, problems, schema }) {
  if (schema.problem) {
    return html`<${Notice} tone="bad" title="This job cannot be used as it is">${schema.problem.message}<//>`;
  }
  if (!schema.fields.length) return html`<p class="muted">${schema.note}</p>`;
  const set = (name) => (value) => change({ params: { ...form.params, [name]: value } });
  const shared = { fields: schema.fields, values: form.params, set, problems };
  return html`<${Fields} ...${shared} prefix="params." />`;
}

export function TrainingPanel({ form, change, problems }) {
  return html`
    <${Panel} title="Training">
      <${Cards}
        legend="Mode"
        options=${MODES}
        value=${form.mode}
        onPick=${(mode) => change({ mode })}
        problem=${problems.mode}
      />
      <${Settings} fields=${TRAINING} form=${form} change=${change} problems=${problems}>
        <${Field} field=${NAME} value=${form.name} onInput=${(name) => change({ name })} problem=${problems.name} />
      <//>
    <//>
  `;
}

export function WindowPanel({ form, change, problems }) {
  return html`
    <${Panel} title="Join window">
      <${Cards}
        legend="How the run starts"
        options=${START_MODES}
        value=${form.start_mode}
        onPick=${(mode) => change({ start_mode: mode })}
        problem=${problems.start_mode}
      />
      <${Settings} fields=${WINDOW} form=${form} change=${change} problems=${problems} />
    <//>
  `;
}

export function Advanced({ form, change, problems }) {
  const offered = ADVANCED.flatMap((group) => group.fields).filter((field) => counts(field, form));
  const changed = offered.filter((field) => field.name in form.values).length;
  return html`
    <details class="panel advanced">
      <summary>
        <${Icon} name="chevron" /><h2>Advanced</h2>
        <span class="muted">${changed ? `${changed} changed` : "Sensible as they are"}</span>
      </summary>
      ${ADVANCED.map(
        ({ title, fields }) => html`
          <h3 class="sub-title">${title}</h3>
          <${Settings} fields=${fields} form=${form} change=${change} problems=${problems} />
        `,
      )}
    </details>
  `;
}

function Settings({ fields, form, change, problems, children }) {
  const set = (name) => (value) => change({ values: { ...form.values, [name]: value } });
  const offered = fields.filter((field) => applies(field, form));
  return html`
    <${Fields}
      fields=${offered}
      values=${form.values}
      set=${set}
      problems=${problems}
      bar=${(field) => barred(field, form)}
    >
      ${children}
    <//>
  `;
}

const Fields = ({ fields, values, set, problems, prefix = "", bar = () => "", children }) => html`
  <div class="fields">
    ${fields.map(
      (field) => html`
        <${Field}
          key=${field.name}
          field=${field}
          value=${values[field.name]}
          onInput=${set(field.name)}
          problem=${problems[`${prefix}${field.name}`]}
          barred=${bar(field)}
        />
      `,
    )}
    ${children}
  </div>
`;

/** Few alternatives, each with its meaning, as radio buttons. */
function Cards({ legend, options, value, onPick, problem }) {
  const card = ({ key, title, place, text }) => html`
    <label key=${key} class=${`card-choice ${key === value ? "on" : ""}`}>
      <input type="radio" name=${legend} checked=${key === value} onChange=${() => onPick(key)} />
      <span>
        <strong>${title}</strong>
        ${place && html`<small class="mono">${place}</small>`} ${text && html`<span class="muted">${text}</span>`}
      </span>
    </label>
  `;
  return html`
    <fieldset class=${`cards ${options.length === 3 ? "cards-3" : options.length > 3 ? "cards-more" : ""}`}>
      <legend class="offscreen">${legend}</legend>
      ${options.map(card)}
    </fieldset>
    ${problem && html`<p class="field-problem" role="alert">${problem}</p>`}
  `;
}

/** What will happen, in words that follow the form, and the button. */
export function Summary({ form, create, count }) {
  const title = count === 1 ? "One thing to correct" : `${plural(count, "thing")} to correct`;
  return html`
    <aside class="panel summary" aria-label="What will happen">
      <h2>What will happen</h2>
      <p>${promise(terms(form), span)}</p>
      ${count > 0 && html`<${Notice} tone="bad" live=${true} title=${title}>Each is marked at its field.<//>`}
      ${create.problem &&
      html`<${Notice} tone="bad" live=${true} title="The run was not created">${create.problem.message}<//>`}
      <button type="submit" class="button button-primary button-wide" aria-busy=${create.busy ? "true" : undefined}>
        ${create.busy ? html`<span class="spinner" aria-hidden="true" />` : html`<${Icon} name="door" />`}
        <span>Create run</span>
      </button>
      <p class="muted">Opens the join window. Nothing trains until hosts are here.</p>
    </aside>
  `;
}

/** The window's terms as typed, or their defaults. */
function terms(form) {
  const value = (field) => parse(field, form.values[field.name] ?? "").value ?? field.fallback;
  const fields = WINDOW.filter((field) => applies(field, form));
  return { start_mode: form.start_mode, ...Object.fromEntries(fields.map((field) => [field.name, value(field)])) };
}
