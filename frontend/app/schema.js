/** A job's Params schema (JSON Schema of a flat object) as form fields, and what was typed as values. Pure. */
import { words } from "./format.js";

/** Fields in the schema's order: {name, label, kind, help, fallback, required, min, max, choices}. */
export function fieldsOf(schema) {
  const definitions = schema?.$defs ?? schema?.definitions ?? {};
  const required = new Set(schema?.required ?? []);
  return Object.entries(schema?.properties ?? {}).map(([name, raw]) => {
    const spec = resolve(raw, definitions);
    return {
      name,
      label: raw.title && raw.title.toLowerCase() !== words(name).toLowerCase() ? raw.title : words(name),
      kind: kindOf(spec),
      help: raw.description ?? spec.description ?? "",
      fallback: raw.default ?? spec.default,
      optional: spec.nullable,
      required: required.has(name),
      min: spec.minimum ?? spec.exclusiveMinimum,
      max: spec.maximum ?? spec.exclusiveMaximum,
      choices: spec.enum ?? null,
    };
  });
}

function resolve(spec, definitions) {
  if (spec.$ref) return resolve({ ...definitions[spec.$ref.split("/").at(-1)], ...spec, $ref: undefined }, definitions);
  const options = spec.anyOf ?? spec.oneOf;
  if (options) {
    const real = options.filter((option) => option.type !== "null");
    return { ...(real.length === 1 ? resolve(real[0], definitions) : {}), nullable: real.length < options.length };
  }
  if (Array.isArray(spec.type)) {
    const real = spec.type.filter((type) => type !== "null");
    return { ...spec, type: real.length === 1 ? real[0] : undefined, nullable: real.length < spec.type.length };
  }
  return { ...spec, nullable: false };
}

function kindOf(spec) {
  if (spec.enum) return "choice";
  return ["integer", "number", "boolean", "string"].includes(spec.type) ? spec.type : "json";
}

/** What an input shows for a value. */
export function shown(field, value) {
  if (value === undefined || value === null) return field.kind === "boolean" ? false : "";
  if (field.kind === "boolean") return Boolean(value);
  return field.kind === "json" ? JSON.stringify(value) : String(value);
}

/** What was typed as {value} (undefined: leave it to the default) or {problem}: a sentence with what would be right. */
export function parse(field, typed) {
  if (field.kind === "boolean") return { value: Boolean(typed) };
  const text = String(typed ?? "").trim();
  if (text === "") {
    if (field.kind === "string" && !field.required) return { value: field.fallback ? "" : undefined };
    return field.required ? { problem: `${field.label} is needed` } : { value: undefined };
  }
  if (field.kind === "integer" || field.kind === "number") return parseNumber(field, text);
  if (field.kind === "choice") return { value: field.choices.find((choice) => String(choice) === text) };
  if (field.kind === "json") return parseJson(field, text);
  return { value: text };
}

function parseNumber(field, text) {
  const value = Number(text);
  if (!Number.isFinite(value)) return { problem: `${field.label} must be a number, such as ${field.fallback ?? 1}` };
  if (field.kind === "integer" && !Number.isInteger(value)) return { problem: `${field.label} must be a whole number` };
  if (field.min !== undefined && value < field.min) return { problem: `${field.label} must be at least ${field.min}` };
  if (field.max !== undefined && value > field.max) return { problem: `${field.label} must be at most ${field.max}` };
  return { value };
}

function parseJson(field, text) {
  const example = JSON.stringify(field.fallback ?? field.example ?? [1, 2]);
  try {
    const value = JSON.parse(text);
    return field.check?.(value) ?? true ? { value } : { problem: `${field.label} must look like ${example}` };
  } catch {
    return { problem: `${field.label} must be JSON, such as ${example}` };
  }
}
