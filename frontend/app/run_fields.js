/** The settings of a run that the form offers, in the configuration's names: kinds, defaults, help. Pure. */

export const MODES = [
  {
    key: "cpu_cadence",
    title: "Cadence",
    text: "Each device does as many batches as it can in the same time, then all average. For unequal devices.",
  },
  {
    key: "cpu_async",
    title: "Async",
    text: "Like cadence, but nobody waits: devices work ahead while the average is made. For slow links and big models.",
  },
  {
    key: "cpu_sync",
    title: "Sync",
    text: "Every device does one batch, then all average. The slow one holds the others up; useful to compare.",
  },
  {
    key: "nccl_cadence",
    title: "NCCL cadence",
    text:
      "Like cadence, but the devices average among themselves. Needs GPUs of one vendor with one NCCL release (or " +
      "CPUs alone), hosts that reach each other, and room on each device for two more copies of the model.",
  },
  {
    key: "nccl_sync",
    title: "NCCL sync",
    text:
      "Each device does one batch, then all average among themselves. Needs what NCCL cadence needs, and devices of " +
      "equal speed.",
  },
];

export const START_MODES = [
  {
    key: "manual",
    title: "Manual",
    text: "You press Start when you are content with who has joined. The window's cap ends the wait.",
  },
  {
    key: "auto",
    title: "Auto",
    text: "Starts by itself: at once when the target is reached, or with the quorum when the window ends.",
  },
  {
    key: "hybrid",
    title: "Hybrid",
    text: "Starts by itself like auto, and you may press Start earlier, as soon as the quorum is there.",
  },
];

const field = (kind) => (name, label, fallback, help, more) => ({ name, label, kind, fallback, help, ...more });
const integer = field("integer");
const number = field("number");
const flag = field("boolean");
const json = field("json");
const choice = field("choice");
const AT_LEAST_1 = { min: 1 };
const AT_LEAST_2 = { min: 2 };
const SECONDS = { unit: "s" };
const OPTIONAL = { optional: true };

/** Whether a field is shown in this form. */
export const applies = (field, form) => field.when?.(form) ?? true;

/** Why a field that is shown has no effect in this form; empty where it has one. */
export const barred = (field, form) => field.bar?.(form) ?? "";

/** Whether a field has a say in this form: the server refuses settings without an effect by name. */
export const counts = (field, form) => applies(field, form) && !barred(field, form);

const chosen = (form, field) => form.values[field.name] ?? field.fallback;

const PRECISION = choice("precision", "Precision", "f32", "What steps and evaluation are computed in; parameters stay f32", {
  choices: ["f32", "bf16", "fp16"],
  names: { f32: "f32: as the job has it", bf16: "bf16 where autocast allows", fp16: "fp16, with a scaled loss" },
});

/** Whether the devices average among themselves, so that the controller sees no parameters. */
const collective = (form) => form.mode.startsWith("nccl_");
const barredThere = (reason) => (form) => (collective(form) ? reason : "");
const NOBODY_AHEAD = barredThere("All devices are in the average at the same moment: nobody works ahead");

export const TRAINING = [
  integer("epochs", "Epochs", 1, "Passes over the data, by the cohort together", AT_LEAST_1),
  integer("batch_size", "Batch size", 32, "Samples per training step, on each rank", AT_LEAST_1),
  integer("seed", "Seed", 42, "Decides the order of the samples", { min: 0 }),
  PRECISION,
];

export const WINDOW = [
  integer("quorum", "Quorum", 2, "Ranks that must have joined before a world may form", AT_LEAST_2),
  integer("target", "Target", undefined, "Starts at once with so many ranks; empty: wait for the window", {
    ...AT_LEAST_2,
    ...OPTIONAL,
    when: (form) => form.start_mode !== "manual",
  }),
  number("window_seconds", "Window", 300, "Seconds in which hosts may join", SECONDS),
  number("cap_seconds", "Hard cap", 600, "Seconds after which a window without a start fails", SECONDS),
];

/** Whether ranks go on while a round is open. */
const ahead = (form) => form.mode.endsWith("_async");
const aheadOrCollective = (form) => ahead(form) || collective(form);

const SCHEDULER = [
  integer("initial_anchor", "First anchor", 10, "Batches the slow device does per window, before tuning", AT_LEAST_1),
  integer("min_anchor", "Least anchor", undefined, "Never fewer batches for the slow device; empty: no floor", {
    ...AT_LEAST_1,
    ...OPTIONAL,
  }),
  integer("max_anchor", "Most anchor", 1000, "Never more batches for the slow device", AT_LEAST_1),
  number("overhead_target", "Overhead target", 0.04, "Share of time the reduce may take; the anchor grows to hold it", {
    min: 0.01,
    max: 0.5,
  }),
  integer("max_batch_diff", "Most batches apart", undefined, "How far a fast rank may run ahead; empty: no limit", {
    ...AT_LEAST_1,
    ...OPTIONAL,
  }),
  json("speed_hint", "Speed hint", undefined, "Slow rank, and how many times as fast the rest are: [2, 2.5]", {
    ...OPTIONAL,
    example: [2, 2.5],
    check: (pair) => Array.isArray(pair) && pair.length === 2 && pair.every(Number.isFinite),
    when: (form) => !form.mode.endsWith("_sync"),
  }),
  json("fixed_counts", "Forced allotments", undefined, "By rank, such as [4, 2, 1]; empty: ElChe decides", {
    ...OPTIONAL,
    example: [4, 2, 1],
    check: (counts) => Array.isArray(counts) && counts.every(Number.isInteger),
  }),
  integer("max_overshoot", "Batches ahead", undefined, "How far past its share a rank may work; empty: as fits a round", {
    min: 0,
    ...OPTIONAL,
    when: aheadOrCollective,
    bar: NOBODY_AHEAD,
  }),
];

const GUARD = choice("guard", "Guard", "level", "Objects to longer windows when the replicas drift apart", {
  choices: ["level", "growth", "none"],
  names: { level: "by the level of the distance", growth: "by the growth of the distance", none: "none" },
});
const DRIFT = [
  GUARD,
  number("guard_threshold", "Guard's threshold", 0.05, "Relative distance of a replica that is still near", {
    min: 0,
    when: (form) => chosen(form, GUARD) === "level",
  }),
  flag("meta_controller", "Meta-controller", true, "Shortens the window after a fall of the learning rate"),
];

const WRITE_BACK = choice("write_back", "Write-back", "delta", "What becomes of batches done while the round was open", {
  choices: ["delta", "blend", "overwrite"],
  names: { delta: "delta: keep them on top", blend: "blend: a share of each", overwrite: "overwrite: drop them" },
  when: aheadOrCollective,
  bar: NOBODY_AHEAD,
});

const OUTER = choice("outer_optimizer", "Outer optimizer", "none", "Makes each round's average a step of its own", {
  choices: ["none", "nesterov"],
  names: { none: "none: adopt the average", nesterov: "Nesterov (DiLoCo)" },
  bar: barredThere("The controller would take that step, and it sees no parameters in this mode"),
});
const outer = (form) => counts(OUTER, form) && chosen(form, OUTER) !== "none";
const AVERAGE = [
  number("gamma", "Work weighting", 1, "Exponent of a rank's weight in the average: 1 by work done, 0 all alike"),
  WRITE_BACK,
  number("blend_alpha", "Blend", 0.5, "The consensus' share when blending, above 0 up to 1", {
    min: 0,
    max: 1,
    when: (form) => ahead(form) && chosen(form, WRITE_BACK) === "blend",
  }),
  OUTER,
  number("outer_lr", "Outer learning rate", 0.7, "Length of the outer step; 1 without momentum is the average", {
    min: 0,
    max: 10,
    when: outer,
  }),
  number("outer_momentum", "Outer momentum", 0.9, "How much of the steps before goes on, from 0 to below 1", {
    min: 0,
    when: outer,
  }),
  flag("bf16_wire", "Parameters travel as bf16", false, "Halves what a round moves; what changed is rounded to 8 bits", {
    bar: barredThere("The devices sum in f32; nothing travels by way of the controller"),
  }),
];

const PATIENCE = [
  number("heartbeat_seconds", "Heartbeat", 1, "Seconds between signs of life", SECONDS),
  number("heartbeat_timeout_seconds", "Lost after", 30, "Seconds of silence until a host counts as lost", SECONDS),
  number("forming_seconds", "Forming", 120, "Seconds for every rank to become ready", SECONDS),
  number("stall_seconds", "Stall ceiling", 300, "Seconds without progress until the run ends", SECONDS),
  number("reattach_seconds", "Wait for a lost controller", undefined, "Seconds; 0: never; empty: as Lost after", {
    min: 0,
    ...OPTIONAL,
    bar: barredThere("Hosts do not wait in this mode; the run goes on from its newest checkpoint"),
  }),
  number("max_failure", "Tolerated deaths", undefined, "A count from 1 up, a share below 1; empty: all but the last", {
    min: 0,
    ...OPTIONAL,
  }),
];

const CHECKPOINTS = [
  integer("checkpoint_epochs", "Saving interval", 1, "Epochs between checkpoints; training goes on meanwhile", AT_LEAST_1),
  integer("checkpoint_rounds", "Saving interval in rounds", undefined, "For long passes over the data; empty: only as above", {
    ...AT_LEAST_1,
    ...OPTIONAL,
  }),
  integer("keep_checkpoints", "Keep", 3, "The newest so many stay; -1 keeps all", { min: -1 }),
];

const CHECKS = [
  choice("non_finite", "NaN or infinity", "exclude", "What becomes of a rank that contributes a value that is no number", {
    choices: ["exclude", "stop"],
    names: { exclude: "leave the rank out of the round", stop: "end the run" },
  }),
  flag("verify_consensus", "Compare parameters after every round", true, "Each rank reports a hash; they must agree"),
  flag(
    "open_admission",
    "Let hosts in without the join token",
    false,
    "Anyone who reaches this port may join. Only for a network you trust",
  ),
];

export const ADVANCED = [
  { title: "ElChe, the scheduler", fields: SCHEDULER },
  { title: "Drift of the replicas", fields: DRIFT },
  { title: "Average", fields: AVERAGE },
  { title: "Checkpoints", fields: CHECKPOINTS },
  { title: "Patience", fields: PATIENCE },
  { title: "Checks", fields: CHECKS },
];

export const ALL_FIELDS = [...TRAINING, ...WINDOW, ...ADVANCED.flatMap((group) => group.fields)];

/** The words of what will happen, so that nobody has to guess from four numbers. `span` writes seconds. */
export function promise({ start_mode: mode, quorum, target, window_seconds: wait, cap_seconds: cap }, span) {
  const ranks = (n) => `${n} rank${n === 1 ? "" : "s"}`;
  if (mode === "manual") {
    return (
      `The window opens at once. From ${ranks(quorum)} on you may press Start; hosts may join until you do. ` +
      `Without a start within ${span(cap)} the run fails.`
    );
  }
  const start = target
    ? `The world forms as soon as ${ranks(target)} are here, or after ${span(wait)} with at least ${quorum}.`
    : `The window stays open for ${span(wait)}; then the world forms if at least ${ranks(quorum)} are here.`;
  const press = mode === "hybrid" ? ` You may press Start earlier, from ${ranks(quorum)} on.` : "";
  return `${start}${press} Without a quorum within ${span(cap)} the run fails.`;
}
