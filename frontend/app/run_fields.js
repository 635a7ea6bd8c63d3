/** The settings of a run that the form offers, in the words of the configuration. Pure: names, kinds, defaults, help. */

export const MODES = [
  ["cpu_cadence", "Cadence", "Each device does as many batches as it can in the same time, then all average. For unequal devices."],
  ["cpu_sync", "Sync", "Every device does one batch, then all average. The slow one holds the others up; useful to compare."],
];

export const START_MODES = [
  ["manual", "Manual", "You press Start when you are content with who has joined. The window's cap ends the wait."],
  ["auto", "Auto", "Starts by itself: at once when the target is reached, or with the quorum when the window ends."],
  ["hybrid", "Hybrid", "Starts by itself like auto, and you may press Start earlier, as soon as the quorum is there."],
];

const field = (name, label, kind, fallback, help, more = {}) => ({ name, label, kind, fallback, help, required: false, ...more });

export const TRAINING = [
  field("epochs", "Epochs", "integer", 1, "Passes over the data, by the cohort together", { min: 1 }),
  field("batch_size", "Batch size", "integer", 32, "Samples per training step, on each rank", { min: 1 }),
  field("seed", "Seed", "integer", 42, "Decides the order of the samples"),
];

export const WINDOW = [
  field("quorum", "Quorum", "integer", 2, "Ranks that must have joined before a world may form", { min: 2 }),
  field("target", "Target", "integer", undefined, "Starts at once with so many ranks; empty: wait for the window", { min: 2, optional: true, automatic: true }),
  field("window_seconds", "Window", "number", 300, "Seconds in which hosts may join", { unit: "s" }),
  field("cap_seconds", "Hard cap", "number", 600, "Seconds after which a window without a start fails", { unit: "s" }),
];

export const ADVANCED = [
  { title: "ElChe, the scheduler", fields: [
    field("initial_anchor", "First anchor", "integer", 10, "Batches the slow device does per window, before tuning", { min: 1 }),
    field("min_anchor", "Least anchor", "integer", undefined, "Never fewer; empty: no floor", { min: 1, optional: true }),
    field("max_anchor", "Most anchor", "integer", 1000, "Never more", { min: 1 }),
    field("overhead_target", "Overhead target", "number", 0.05, "Share of time the reduce may take: the anchor grows until it holds", { min: 0.01, max: 0.5 }),
    field("max_batch_diff", "Most batches apart", "integer", undefined, "Limits how far a fast rank runs ahead; empty: no limit", { min: 1, optional: true }),
    field("gamma", "Work weighting", "number", 1, "Exponent of a rank's weight in the average: 1 by work done, 0 all alike"),
    field("fixed_counts", "Forced allotments", "json", undefined, "Batches by rank, such as [4, 2, 1]: for experiments; empty: ElChe decides", { optional: true }),
  ] },
  { title: "Patience", fields: [
    field("heartbeat_seconds", "Heartbeat", "number", 1, "Seconds between signs of life", { unit: "s" }),
    field("heartbeat_timeout_seconds", "Lost after", "number", 30, "Seconds of silence until a host counts as lost", { unit: "s" }),
    field("forming_seconds", "Forming", "number", 120, "Seconds for every rank to become ready", { unit: "s" }),
    field("stall_seconds", "Stall ceiling", "number", 300, "Seconds without progress until the run ends", { unit: "s" }),
    field("max_failure", "Tolerated deaths", "number", undefined, "A count from 1 up, a share below 1; empty: all but the last", { min: 0, optional: true }),
  ] },
  { title: "Checks", fields: [
    field("verify_consensus", "Compare parameters after every round", "boolean", true, "Each rank reports a hash; they must agree"),
    field("open_admission", "Let hosts in without the join token", "boolean", false, "Anyone who reaches this port may join. Only for a network you trust"),
  ] },
];

export const ALL_FIELDS = [...TRAINING, ...WINDOW, ...ADVANCED.flatMap((group) => group.fields)];

/** The words of what will happen, so that nobody has to guess from four numbers. */
export function promise({ start_mode: mode, quorum, target, window_seconds: window, cap_seconds: cap }, span) {
  const ranks = (n) => `${n} rank${n === 1 ? "" : "s"}`;
  if (mode === "manual") {
    return `The window opens at once. From ${ranks(quorum)} on you may press Start; hosts may join until you do. Without a start within ${span(cap)} the run fails.`;
  }
  const early = target ? `The world forms as soon as ${ranks(target)} are here` : `The window stays open for ${span(window)}`;
  const late = target ? `, or after ${span(window)} with at least ${quorum}` : `; then the world forms if at least ${ranks(quorum)} are here`;
  const press = mode === "hybrid" ? ` You may press Start earlier, from ${ranks(quorum)} on.` : "";
  return `${early}${late}.${press} Without a quorum within ${span(cap)} the run fails.`;
}

/** A server's field name as the form knows it: body.params.hidden -> params.hidden, config.quorum -> quorum. */
export const fieldName = (name) => String(name).replace(/^(body|config)\./, "").replace(/^config\./, "");
