/** Numbers, times and names as people read them. Pure; a missing value is an en dash, never "null" or "0". */

export const MISSING = "–";
const absent = (x) => x === null || x === undefined || x === "";

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** A whole number with thin groups: 12 480. */
export function count(n) {
  if (absent(n)) return MISSING;
  return Number.isFinite(n) ? grouped.format(n).replaceAll(",", "\u202f") : String(n);
}

/** Four significant digits with a steady width, as losses and metrics are read: 2.303, 0.04120, 12.35. */
export function figure(x) {
  if (absent(x)) return MISSING;
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "NaN" : x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) return x.toExponential(2).replace("-", "−");
  const decimals = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : size >= 0.1 || size === 0 ? 3 : 4;
  return x.toFixed(decimals).replace("-", "−");
}

/** A ratio as a percentage: 0.964 -> 96.4 %. */
export function percent(ratio, decimals = 1) {
  if (absent(ratio) || !Number.isFinite(ratio)) return MISSING;
  return `${(ratio * 100).toFixed(decimals)} %`.replace("-", "−");
}

/** A rate or a size with three significant digits and k, M, G: 18.2 k. */
export function short(x) {
  if (absent(x) || !Number.isFinite(x)) return MISSING;
  const units = ["", "\u202fk", "\u202fM", "\u202fG", "\u202fT"];
  let unit = 0;
  while (Math.abs(x) >= 999.5 && unit < units.length - 1) {
    x /= 1000;
    unit += 1;
  }
  const size = Math.abs(x);
  const decimals = size >= 99.95 || (unit === 0 && Number.isInteger(x)) ? 0 : size >= 9.995 ? 1 : 2;
  return x.toFixed(decimals) + units[unit];
}

/** Bytes in binary units: 141 GiB. */
export function bytes(n) {
  if (absent(n)) return MISSING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1023.5 && unit < units.length - 1) {
    n /= 1024;
    unit += 1;
  }
  return `${unit === 0 || n >= 99.95 ? n.toFixed(0) : n.toFixed(1)} ${units[unit]}`;
}

/** Milliseconds: 41.2 ms, 0.38 ms, 1.20 s. */
export function millis(ms) {
  if (absent(ms) || !Number.isFinite(ms)) return MISSING;
  if (ms >= 1000) return `${(ms / 1000).toFixed(2)} s`;
  return `${ms >= 100 ? ms.toFixed(0) : ms >= 10 ? ms.toFixed(1) : ms.toFixed(2)} ms`;
}

/** Seconds as a clock that does not change its width every second: 0:42, 12:41, 1:02:41, 2 d 03:00. */
export function clock(seconds) {
  if (absent(seconds) || !Number.isFinite(seconds)) return MISSING;
  const whole = Math.max(0, Math.floor(seconds));
  const two = (n) => String(n).padStart(2, "0");
  const days = Math.floor(whole / 86400);
  const hours = Math.floor((whole % 86400) / 3600);
  const minutes = Math.floor((whole % 3600) / 60);
  if (days) return `${days} d ${two(hours)}:${two(minutes)}`;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

/** Seconds in words, for sentences: 45 s, 5 min, 1 h 30 min. */
export function span(seconds) {
  if (absent(seconds) || !Number.isFinite(seconds)) return MISSING;
  const whole = Math.round(seconds);
  if (whole < 60) return `${seconds < 10 && !Number.isInteger(seconds) ? seconds.toFixed(1) : whole} s`;
  if (whole < 3600) return whole % 60 ? `${Math.floor(whole / 60)} min ${whole % 60} s` : `${whole / 60} min`;
  const minutes = Math.round(whole / 60);
  return minutes % 60 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${minutes / 60} h`;
}

/** How long ago, coarse enough not to tick: just now, 12 s ago, 4 min ago, 3 h ago, 2 d ago. */
export function ago(seconds) {
  if (absent(seconds) || !Number.isFinite(seconds)) return MISSING;
  if (seconds < 5) return "just now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  return seconds < 86400 ? `${Math.floor(seconds / 3600)} h ago` : `${Math.floor(seconds / 86400)} d ago`;
}

/** A day and time as short as `now` allows: 14:02, 28 Nov 14:02, 28 Nov 2025 14:02. */
export function moment(iso, now = new Date()) {
  if (absent(iso)) return MISSING;
  const at = new Date(iso);
  if (Number.isNaN(at.getTime())) return String(iso);
  const time = at.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  if (at.toDateString() === now.toDateString()) return time;
  const year = at.getFullYear() === now.getFullYear() ? undefined : "numeric";
  return `${at.toLocaleDateString("en-GB", { day: "numeric", month: "short", year })} ${time}`;
}

/** The time of day with seconds: 14:02:09. */
export function timeOfDay(iso) {
  const at = new Date(iso);
  return Number.isNaN(at.getTime()) ? String(iso ?? MISSING) : at.toLocaleTimeString("en-GB");
}

/** Seconds between two times, up to `now` while the second is missing; null without a first. */
export function between(from, to, now = Date.now()) {
  if (absent(from)) return null;
  return Math.max(0, ((to ? Date.parse(to) : now) - Date.parse(from)) / 1000);
}

/** 1 rank, 3 ranks. */
export const plural = (n, word, many = `${word}s`) => `${count(n)} ${n === 1 ? word : many}`;

/** The job's file and class apart: examples/digits.py:Digits -> {name: "Digits", where: "examples/digits.py"}. */
export function jobParts(job) {
  const cut = (job ?? "").lastIndexOf(":");
  return cut < 0 ? { name: job || MISSING, where: "" } : { name: job.slice(cut + 1), where: job.slice(0, cut) };
}

/** A machine name as words: overhead_target -> Overhead target. */
export function words(name) {
  const text = String(name)
    .replaceAll("_", " ")
    .trim()
    .replace(/\b(cpu|nccl|gpu|id)\b/g, (short) => short.toUpperCase());
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** The metric that says most: accuracy when there is one, else the first that is not a loss. */
export function leadMetric(metrics) {
  const names = Object.keys(metrics ?? {});
  const name = ["accuracy", "acc"].find((n) => names.includes(n)) ?? names.find((n) => n !== "loss") ?? names[0];
  return name === undefined ? null : { name, value: metrics[name] };
}

/** Metrics between 0 and 1 whose name says that they are shares are shown as percentages, others as they are. */
export function metric(name, value) {
  const share = /(^|_)(acc|accuracy|precision|recall|f1|auc|error_rate)$/.test(name) && value >= 0 && value <= 1;
  return share ? percent(value) : figure(value);
}
