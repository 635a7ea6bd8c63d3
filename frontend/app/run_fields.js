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
const AT_LEAST_1 = { min: 1 };
const AT_LEAST_2 = { min: 2 };
const SECONDS = { unit: "s" };
const OPTIONAL = { optional: true };

export const TRAINING = [
  integer("epochs", "Epochs", 1, "Passes over the data, by the cohort together", AT_LEAST_1),
  integer("batch_size", "Batch size", 32, "Samples per training step, on each rank", AT_LEAST_1),
  integer("seed", "Seed", 42, "Decides the order of the samples", { min: 0 }),
];

export const WINDOW = [
  integer("quorum", "Quorum", 2, "Ranks that must have joined before a world may form", AT_LEAST_2),
  integer("target", "Target", undefined, "Starts at once with so many ranks; empty: wait for the window", {
    ...AT_LEAST_2,
    ...OPTIONAL,
    automatic: true, // no part of a manual window
  }),
  number("window_seconds", "Window", 300, "Seconds in which hosts may join", SECONDS),
  number("cap_seconds", "Hard cap", 600, "Seconds after which a window without a start fails", SECONDS),
];

const SCHEDULER = [
  integer("initial_anchor", "First anchor", 10, "Batches the slow device does per window, before tuning", AT_LEAST_1),
  integer("min_anchor", "Least anchor", undefined, "Never fewer batches for the slow device; empty: no floor", {
    ...AT_LEAST_1,
    ...OPTIONAL,
  }),
  integer("max_anchor", "Most anchor", 1000, "Never more batches for the slow device", AT_LEAST_1),
  number("overhead_target", "Overhead target", 0.05, "Share of time the reduce may take; the anchor grows to hold it", {
    min: 0.01,
    max: 0.5,
  }),
  integer("max_batch_diff", "Most batches apart", undefined, "How far a fast rank may run ahead; empty: no limit", {
    ...AT_LEAST_1,
    ...OPTIONAL,
  }),
  integer("max_overshoot", "Batches ahead", undefined, "Async: how far past its allotment; empty: as fits a round", {
    min: 0,
    ...OPTIONAL,
  }),
  number("gamma", "Work weighting", 1, "Exponent of a rank's weight in the average: 1 by work done, 0 all alike"),
  json("fixed_counts", "Forced allotments", undefined, "By rank, such as [4, 2, 1]; empty: ElChe decides", OPTIONAL),
];

const PATIENCE = [
  number("heartbeat_seconds", "Heartbeat", 1, "Seconds between signs of life", SECONDS),
  number("heartbeat_timeout_seconds", "Lost after", 30, "Seconds of silence until a host counts as lost", SECONDS),
  number("forming_seconds", "Forming", 120, "Seconds for every rank to become ready", SECONDS),
  number("stall_seconds", "Stall ceiling", 300, "Seconds without progress until the run ends", SECONDS),
  number("max_failure", "Tolerated deaths", undefined, "A count from 1 up, a share below 1; empty: all but the last", {
    min: 0,
    ...OPTIONAL,
  }),
];

const CHECKS = [
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
  { title: "Patience", fields: PATIENCE },
  { title: "Checks", fields: CHECKS },
];

export const ALL_FIELDS = [...TRAINING, ...WINDOW, ...SCHEDULER, ...PATIENCE, ...CHECKS];

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
