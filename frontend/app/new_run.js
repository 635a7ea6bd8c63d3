/** New run: the form made from the job's own parameters, the window in words, and every refusal at its field. */
import { get, post } from "./api.js";
import { Field } from "./field.js";
import { jobParts, span } from "./format.js";
import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { Icon } from "./icons.js";
import { ADVANCED, ALL_FIELDS, MODES, START_MODES, TRAINING, WINDOW, fieldName, promise } from "./run_fields.js";
import { fieldsOf, parse } from "./schema.js";
import { Button, Notice, Panel, useAct } from "./ui.js";

export function NewRun() {
  const [jobs, setJobs] = useState(null);
  const [form, setForm] = useState({ job: "", name: "", mode: "cpu_cadence", start_mode: "manual", values: {}, params: {} });
  const [problems, setProblems] = useState({});
  const jobList = useAct(async () => {
    const { items, broken } = await get("jobs");
    setJobs({ items, broken: broken ?? [] });
    if (items.length) setForm((old) => (old.job ? old : { ...old, job: items[0].job }));
  });
  const schema = useSchema(form.job);
  const ref = useRef(null);
  useEffect(() => {
    document.title = "New run · Marchline";
    jobList.run();
  }, []);
  const change = (patch) => setForm((old) => ({ ...old, ...patch }));
  const create = useAct(() => post("runs", bodyOf(form, schema.fields)));
  const submit = async (event) => {
    event.preventDefault();
    if (create.busy) return undefined;
    const found = check(form, schema.fields);
    setProblems(found);
    if (Object.keys(found).length) return focusProblem(ref.current);
    const run = await create.run();
    if (run) location.hash = `#/runs/${run.id}`;
    return undefined;
  };
  useEffect(() => {
    if (!create.problem) return;
    setProblems(Object.fromEntries(create.problem.errors.map((error) => [fieldName(error.field), error.text])));
    setTimeout(() => focusProblem(ref.current));
  }, [create.problem]);
  const set = (part) => (name) => (value) => change({ [part]: { ...form[part], [name]: value } });
  return html`<div class="page-head"><h1 tabindex="-1">New run</h1></div>
    <form class="new-run" onSubmit=${submit} ref=${ref} novalidate>
      <div class="new-run-main">
        <${JobPanel} jobs=${jobs} list=${jobList} form=${form} change=${change} problem=${problems.job} schema=${schema}
          problems=${problems} setParam=${set("params")} />
        <${TrainingPanel} form=${form} change=${change} set=${set("values")} problems=${problems} />
        <${WindowPanel} form=${form} change=${change} set=${set("values")} problems=${problems} />
        <${Advanced} form=${form} set=${set("values")} problems=${problems} />
      </div>
      <${Summary} form=${form} create=${create} problems=${problems} />
    </form>`;
}

/** The parameters of a job as fields; the last answer wins when the choice changes quickly. */
function useSchema(job) {
  const [state, setState] = useState({ fields: [], loading: false, problem: null });
  useEffect(() => {
    if (!job.includes(":")) return undefined;
    let current = true;
    setState((old) => ({ ...old, loading: true, problem: null }));
    get(`jobs/schema?job=${encodeURIComponent(job)}`).then(
      (answer) => current && setState({ fields: fieldsOf(answer.schema ?? answer), loading: false, problem: null }),
      (problem) => current && setState({ fields: [], loading: false, problem }),
    );
    return () => {
      current = false;
    };
  }, [job]);
  return state;
}

const applicable = (field, form) => !(field.automatic && form.start_mode === "manual");

/** Everything that the page itself can see is wrong, by field. */
function check(form, params) {
  const found = {};
  if (!form.job.trim()) found.job = "Name the job as path/file.py:Name";
  for (const field of ALL_FIELDS.filter((f) => applicable(f, form))) {
    const { problem } = parse(field, form.values[field.name] ?? (field.kind === "boolean" ? field.fallback : ""));
    if (problem) found[field.name] = problem;
  }
  for (const field of params) {
    const { problem } = parse(field, form.params[field.name] ?? (field.kind === "boolean" ? field.fallback : ""));
    if (problem) found[`params.${field.name}`] = problem;
  }
  return found;
}

/** The request: only what was typed, so that the server's defaults stay the server's. */
function bodyOf(form, params) {
  const typed = (fields, values) =>
    Object.fromEntries(fields.filter((f) => f.name in values).map((f) => [f.name, parse(f, values[f.name]).value]).filter(([, v]) => v !== undefined));
  const { job, name, mode, start_mode } = form;
  const settings = typed(ALL_FIELDS.filter((f) => applicable(f, form)), form.values);
  return { job: job.trim(), ...(name.trim() ? { name: name.trim() } : {}), mode, start_mode, ...settings, params: typed(params, form.params) };
}

function focusProblem(form) {
  const input = form?.querySelector("[aria-invalid=true]");
  const details = input?.closest("details");
  if (details) details.open = true;
  input?.focus();
}

function JobPanel({ jobs, list, form, change, problem, schema, problems, setParam }) {
  const [other, setOther] = useState(false);
  const typed = other || (jobs && !jobs.items.length);
  const pick = (job) => change({ job, params: {} });
  const jobField = { name: "job", label: "Job", kind: "string", help: "path/file.py:Name, below the controller's job directory" };
  return html`<${Panel} title="Job">
    ${list.problem && html`<${Notice} tone="bad" title="The jobs could not be listed">${list.problem.message}<//>`}
    ${jobs && !typed && html`<fieldset class="cards"><legend class="offscreen">Job</legend>${jobs.items.map((item) => html`
      <${Card} key=${item.job} name="job" on=${form.job === item.job} onPick=${() => pick(item.job)} title=${jobParts(item.job).name}
        text=${item.doc ?? item.description} note=${jobParts(item.job).where} />`)}</fieldset>
      ${problem && html`<p class="field-problem" role="alert">${problem}</p>`}`}
    ${typed && html`<${Field} field=${jobField} value=${form.job} onInput=${pick} problem=${problem} />`}
    <div class="under">${jobs && jobs.items.length > 0 && html`<p><button type="button" class="link" onClick=${() => setOther(!other)}>
      ${other ? "Choose from the list" : "Name another job"}</button></p>`}
    ${jobs?.broken.length > 0 && html`<details class="broken"><summary>${jobs.broken.length} ${jobs.broken.length === 1 ? "file looks" : "files look"} like a job and cannot be used</summary>
      <ul>${jobs.broken.map((item) => html`<li key=${item.job}><code>${item.job}</code> ${item.text}</li>`)}</ul></details>`}</div>
    <h3 class="sub-title">Parameters</h3>
    ${schema.problem ? html`<${Notice} tone="bad" title="This job cannot be used as it is">${schema.problem.message}<//>`
      : schema.fields.length ? html`<div class="fields">${schema.fields.map((field) => html`<${Field} key=${`${form.job}.${field.name}`} field=${field}
          value=${form.params[field.name]} onInput=${setParam(field.name)} problem=${problems[`params.${field.name}`]} />`)}</div>`
      : html`<p class="muted">${schema.loading ? "Reading the job …" : "This job has no parameters."}</p>`}
  <//>`;
}

function Card({ name, on, onPick, title, text, note }) {
  return html`<label class=${`card-choice ${on ? "on" : ""}`}><input type="radio" name=${name} checked=${on} onChange=${onPick} />
    <span><strong>${title}</strong>${note && html`<small class="mono">${note}</small>`}${text && html`<span class="muted">${text}</span>`}</span></label>`;
}

function TrainingPanel({ form, change, set, problems }) {
  const nameField = { name: "name", label: "Name", kind: "string", help: "Empty: two words are chosen for you", optional: false };
  return html`<${Panel} title="Training">
    <fieldset class="cards"><legend class="offscreen">Mode</legend>${MODES.map(([key, title, text]) => html`
      <${Card} key=${key} name="mode" on=${form.mode === key} onPick=${() => change({ mode: key })} title=${title} text=${text} />`)}</fieldset>
    ${problems.mode && html`<p class="field-problem" role="alert">${problems.mode}</p>`}
    <div class="fields">
      <${Fields} fields=${TRAINING} form=${form} set=${set} problems=${problems} />
      <${Field} field=${nameField} value=${form.name} onInput=${(name) => change({ name })} problem=${problems.name} />
    </div>
  <//>`;
}

function WindowPanel({ form, change, set, problems }) {
  return html`<${Panel} title="Join window">
    <fieldset class="cards cards-3"><legend class="offscreen">How the run starts</legend>${START_MODES.map(([key, title, text]) => html`
      <${Card} key=${key} name="start_mode" on=${form.start_mode === key} onPick=${() => change({ start_mode: key })} title=${title} text=${text} />`)}</fieldset>
    ${problems.start_mode && html`<p class="field-problem" role="alert">${problems.start_mode}</p>`}
    <div class="fields"><${Fields} fields=${WINDOW.filter((f) => applicable(f, form))} form=${form} set=${set} problems=${problems} /></div>
  <//>`;
}

function Advanced({ form, set, problems }) {
  const changed = ADVANCED.flatMap((group) => group.fields).filter((field) => field.name in form.values).length;
  return html`<details class="panel advanced"><summary><${Icon} name="chevron" /><h2>Advanced</h2>
      <span class="muted">${changed ? `${changed} changed` : "Sensible as they are"}</span></summary>
    ${ADVANCED.map((group) => html`<h3 class="sub-title" key=${group.title}>${group.title}</h3>
      <div class="fields"><${Fields} fields=${group.fields} form=${form} set=${set} problems=${problems} /></div>`)}
  </details>`;
}

const Fields = ({ fields, form, set, problems }) => fields.map((field) => html`<${Field} key=${field.name} field=${field}
  value=${form.values[field.name]} onInput=${set(field.name)} problem=${problems[field.name]} />`);

function Summary({ form, create, problems }) {
  const words = useMemo(() => promise(settings(form), span), [form]);
  const count = Object.keys(problems).length;
  return html`<aside class="panel summary" aria-label="What will happen">
    <h2>What will happen</h2>
    <p>${words}</p>
    ${count > 0 && html`<${Notice} tone="bad" live=${true} title=${count === 1 ? "One thing to correct" : `${count} things to correct`}>Each is marked at its field.<//>`}
    ${create.problem && !count && html`<${Notice} tone="bad" live=${true} title=${create.problem.title || "Not created"}>${create.problem.message}<//>`}
    <button type="submit" class="button button-primary button-wide" aria-busy=${create.busy ? "true" : undefined}>
      ${create.busy ? html`<span class="spinner" aria-hidden="true" />` : html`<${Icon} name="door" />`}<span>Create run</span></button>
    <p class="muted">Opens the join window. Nothing trains until hosts are here.</p>
  </aside>`;
}

function settings(form) {
  const value = (name) => {
    const field = WINDOW.find((f) => f.name === name);
    return parse(field, form.values[name] ?? "").value ?? field.fallback;
  };
  const target = form.start_mode === "manual" ? undefined : value("target");
  return { start_mode: form.start_mode, quorum: value("quorum"), target, window_seconds: value("window_seconds"), cap_seconds: value("cap_seconds") };
}
