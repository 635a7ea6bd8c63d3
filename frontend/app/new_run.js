/** New run: the form made from the job's own parameters, the window in words, and every refusal at its field. */
import { useAct } from "./acts.js";
import { post, useAnswer } from "./api.js";
import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { Advanced, JobPanel, Summary, TrainingPanel, WindowPanel } from "./new_run_panels.js";
import { ALL_FIELDS, counts } from "./run_fields.js";
import { fieldsOf, parse } from "./schema.js";

const BLANK = { job: "", name: "", mode: "cpu_cadence", start_mode: "manual", values: {}, params: {} };

export function NewRun() {
  const [form, setForm] = useState(BLANK);
  const [problems, setProblems] = useState({});
  const change = (patch) => setForm((old) => ({ ...old, ...patch }));
  const jobs = useJobs((job) => setForm((old) => (old.job ? old : { ...old, job })));
  const schema = useSchema(form.job);
  const element = useRef(null);
  const create = useAct(() => post("runs", bodyOf(form, schema.fields)));
  useEffect(() => {
    document.title = "New run · Marchline";
  }, []);
  useEffect(() => {
    const errors = create.problem?.errors ?? [];
    if (errors.length) setProblems(Object.fromEntries(errors.map((error) => [placeOf(error.field), error.text])));
  }, [create.problem]);
  useEffect(() => reveal(element.current), [problems]);
  const submit = async (event) => {
    event.preventDefault();
    if (create.busy) return;
    const found = check(form, schema.fields);
    setProblems(found);
    const run = Object.keys(found).length ? null : await create.run();
    if (run) location.hash = `#/runs/${run.id}`;
  };
  const shared = { form, change, problems };
  return html`
    <div class="page-head"><h1 tabindex="-1">New run</h1></div>
    <form class="new-run" onSubmit=${submit} ref=${element} novalidate>
      <div>
        <${JobPanel} ...${shared} jobs=${jobs} schema=${schema} />
        <${TrainingPanel} ...${shared} />
        <${WindowPanel} ...${shared} />
        <${Advanced} ...${shared} />
      </div>
      <${Summary} form=${form} create=${create} count=${Object.keys(problems).length} />
    </form>
  `;
}

/** The controller's jobs: {items, broken} or null until known, and the problem of asking. */
function useJobs(onFirst) {
  const { answer, problem } = useAnswer("jobs");
  useEffect(() => {
    if (answer?.items.length) onFirst(answer.items[0].job);
  }, [answer]);
  return { list: answer, problem };
}

/** The parameters of a job as fields. */
function useSchema(job) {
  const named = job.includes(":");
  const { answer, problem } = useAnswer(named && `jobs/schema?job=${encodeURIComponent(job)}`);
  const fields = useMemo(() => (answer ? fieldsOf(answer.schema) : []), [answer]);
  const waiting = named ? "Reading the job …" : "They are shown once a job is chosen.";
  return { fields, problem, note: answer ? "This job has no parameters." : waiting };
}

/** The field of the form that a refusal is about: "speed_hint.0" is a part of "speed_hint". */
const placeOf = (name) => (name.startsWith("params.") ? name : name.split(".")[0]);

const typedIn = (field, values) => values[field.name] ?? (field.kind === "boolean" ? field.fallback : "");

/** Everything that the page itself can see is wrong, by field. */
function check(form, params) {
  const found = form.job.trim() ? {} : { job: "Name the job as path/file.py:Name" };
  const look = (fields, values, prefix) => {
    for (const field of fields) {
      const { problem } = parse(field, typedIn(field, values));
      if (problem) found[`${prefix}${field.name}`] = problem;
    }
  };
  look(ALL_FIELDS.filter((field) => counts(field, form)), form.values, "");
  look(params, form.params, "params.");
  return found;
}

/** The request: only what was typed, so that the server's defaults stay the server's. */
function bodyOf(form, params) {
  const typed = (fields, values) => {
    const touched = fields.filter((field) => field.name in values);
    const parsed = touched.map((field) => [field.name, parse(field, values[field.name]).value]);
    return Object.fromEntries(parsed.filter(([, value]) => value !== undefined));
  };
  return {
    job: form.job.trim(),
    name: form.name.trim(),
    mode: form.mode,
    start_mode: form.start_mode,
    ...typed(ALL_FIELDS.filter((field) => counts(field, form)), form.values),
    params: typed(params, form.params),
  };
}

/** Brings the first problem into view, out of a folded part if need be. */
function reveal(form) {
  const input = form.querySelector("[aria-invalid=true]");
  if (!input) return;
  const folded = input.closest("details");
  if (folded) folded.open = true;
  input.focus();
}
