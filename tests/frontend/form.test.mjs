import assert from "node:assert/strict";
import { test } from "node:test";
import { span } from "../../frontend/app/format.js";
import { ALL_FIELDS, MODES, applies, barred, counts, promise } from "../../frontend/app/run_fields.js";
import { fieldsOf, parse, shown } from "../../frontend/app/schema.js";

const SCHEMA = {
  type: "object",
  required: ["path"],
  $defs: { Act: { enum: ["relu", "gelu"], type: "string" } },
  properties: {
    hidden: { type: "integer", default: 64, title: "Hidden", description: "Width", minimum: 1, maximum: 512 },
    learning_rate: { type: "number", default: 0.003 },
    act: { $ref: "#/$defs/Act", default: "relu" },
    clip: { anyOf: [{ type: "number" }, { type: "null" }], default: null },
    decay: { type: ["number", "null"] },
    augment: { type: "boolean", default: true },
    path: { type: "string" },
    layers: { type: "array", items: { type: "integer" }, default: [64, 32] },
  },
};
const field = (name) => fieldsOf(SCHEMA).find((f) => f.name === name);

test("fields keep the schema's order, kinds and words", () => {
  assert.deepEqual(
    fieldsOf(SCHEMA).map((f) => [f.name, f.kind, f.label]),
    [
      ["hidden", "integer", "Hidden"],
      ["learning_rate", "number", "Learning rate"],
      ["act", "choice", "Act"],
      ["clip", "number", "Clip"],
      ["decay", "number", "Decay"],
      ["augment", "boolean", "Augment"],
      ["path", "string", "Path"],
      ["layers", "json", "Layers"],
    ],
  );
  assert.equal(field("hidden").help, "Width");
  assert.equal(field("path").required, true);
  assert.equal(field("clip").optional, true);
  assert.deepEqual(fieldsOf(undefined), []);
});

for (const [name, typed, wanted] of [
  ["hidden", "128", { value: 128 }],
  ["hidden", "", { value: undefined }],
  ["hidden", "1.5", { problem: "Hidden must be a whole number" }],
  ["hidden", "many", { problem: "Hidden must be a number, such as 64" }],
  ["hidden", "0", { problem: "Hidden must be at least 1" }],
  ["hidden", "513", { problem: "Hidden must be at most 512" }],
  ["learning_rate", " 1e-3 ", { value: 0.001 }],
  ["act", "gelu", { value: "gelu" }],
  ["clip", "", { value: undefined }],
  ["augment", false, { value: false }],
  ["path", "", { problem: "Path is needed" }],
  ["path", " a b ", { value: "a b" }],
  ["layers", "[1, 2]", { value: [1, 2] }],
  ["layers", "1,", { problem: "Layers must be JSON, such as [64,32]" }],
]) {
  test(`${name} typed as ${JSON.stringify(typed)}`, () => assert.deepEqual(parse(field(name), typed), wanted));
}

test("values are shown as they are typed", () => {
  assert.equal(shown(field("layers"), [1, 2]), "[1,2]");
  assert.equal(shown(field("hidden"), 64), "64");
  assert.equal(shown(field("augment"), undefined), false);
  assert.equal(shown(field("clip"), null), "");
});

test("the settings of a run have a name each, and help", () => {
  const names = ALL_FIELDS.map((f) => f.name);
  assert.equal(new Set(names).size, names.length);
  for (const f of ALL_FIELDS) assert.ok(f.help.length > 10, f.name);
});

test("settings without an effect are not offered", () => {
  const form = (values = {}, more = {}) => ({ mode: "cpu_cadence", start_mode: "manual", values, ...more });
  const offered = (...of) => ALL_FIELDS.filter((f) => applies(f, form(...of))).map((f) => f.name);
  const differ = (a, b) => a.filter((name) => !b.includes(name));
  const plain = offered();
  const without = ["target", "max_overshoot", "write_back", "blend_alpha", "outer_lr", "outer_momentum"];
  assert.deepEqual(differ(ALL_FIELDS.map((f) => f.name), plain), without);
  const async = { mode: "cpu_async" };
  assert.deepEqual(differ(offered({}, async), plain), ["max_overshoot", "write_back"]);
  assert.deepEqual(differ(offered({ write_back: "blend" }, async), offered({}, async)), ["blend_alpha"]);
  assert.deepEqual(differ(offered({ outer_optimizer: "nesterov" }), plain), ["outer_lr", "outer_momentum"]);
  assert.deepEqual(differ(plain, offered({ guard: "growth" })), ["guard_threshold"]);
  assert.deepEqual(differ(plain, offered({}, { mode: "cpu_sync" })), ["speed_hint"]);
  assert.deepEqual(differ(offered({}, { start_mode: "auto" }), plain), ["target"]);
});

test("what has no effect where the devices average among themselves is shown with the reason", () => {
  const modes = MODES.map(({ key }) => key);
  assert.deepEqual(modes.filter((mode) => mode.startsWith("nccl_")), ["nccl_cadence", "nccl_sync"]);
  const typed = { outer_optimizer: "nesterov", write_back: "blend", bf16_wire: true };
  for (const mode of modes) {
    const form = { mode, start_mode: "manual", values: typed };
    const shown = ALL_FIELDS.filter((f) => applies(f, form));
    const names = shown.filter((f) => barred(f, form)).map((f) => f.name);
    if (!mode.startsWith("nccl_")) assert.deepEqual(names, [], mode);
    else assert.deepEqual(names, ["max_overshoot", "write_back", "outer_optimizer", "bf16_wire", "reattach_seconds"]);
    const said = shown.filter((f) => counts(f, form)).map((f) => f.name);
    assert.equal(said.includes("outer_lr"), !mode.startsWith("nccl_"), mode);
    assert.equal(said.includes("blend_alpha"), mode === "cpu_async", mode);
    for (const f of shown) assert.ok(!barred(f, form) || barred(f, form).length > 20, f.name);
  }
});

test("pairs and lists are looked at before they are sent", () => {
  const setting = (name, typed) => parse(ALL_FIELDS.find((f) => f.name === name), typed);
  assert.deepEqual(setting("speed_hint", "[1, 2.5]"), { value: [1, 2.5] });
  for (const typed of ["[1]", "2", '["a", 2]', "{}"]) {
    assert.deepEqual(setting("speed_hint", typed), { problem: "Speed hint must look like [2,2.5]" });
  }
  assert.deepEqual(setting("fixed_counts", "[1, 2.5]"), { problem: "Forced allotments must look like [4,2,1]" });
  assert.deepEqual(setting("outer_lr", "11"), { problem: "Outer learning rate must be at most 10" });
});

test("the promise says what will happen", () => {
  const base = { quorum: 2, window_seconds: 300, cap_seconds: 600 };
  assert.match(
    promise({ ...base, start_mode: "manual" }, span),
    /From 2 ranks on you may press Start.*within 10 min the run fails/,
  );
  assert.match(
    promise({ ...base, start_mode: "auto" }, span),
    /stays open for 5 min; then the world forms if at least 2 ranks are here\. Without/,
  );
  assert.match(
    promise({ ...base, start_mode: "hybrid", target: 4 }, span),
    /as soon as 4 ranks are here, or after 5 min with at least 2\. You may press Start earlier, from 2 ranks on/,
  );
});
