/**
 * The arithmetic of the allotment heat map: which round and rank a pixel is, and which colour a count has. Pure.
 *
 * Rows are ranks in order, columns the last rounds that fit, the newest in a wider column that has room for its number.
 */

// Viridis at nine even steps: even in lightness, and safe for every kind of colour blindness.
const STOPS = [
  [68, 1, 84],
  [71, 44, 122],
  [59, 81, 139],
  [44, 113, 142],
  [33, 144, 141],
  [39, 173, 129],
  [92, 200, 99],
  [170, 220, 50],
  [253, 231, 37],
];

/** The colour of `share` (0 to 1). More work is brighter on a dark page and darker on a light one, so it stands out. */
export function ramp(share, dark) {
  const clamped = Math.min(1, Math.max(0, share));
  const place = (dark ? 0.12 + clamped * 0.88 : 0.97 - clamped * 0.92) * (STOPS.length - 1);
  const low = Math.min(STOPS.length - 2, Math.floor(place));
  const rest = place - low;
  return STOPS[low].map((channel, i) => Math.round(channel + (STOPS[low + 1][i] - channel) * rest));
}

/** Black or white, whichever reads better on this colour (WCAG relative luminance). */
export function ink(rgb) {
  const [r, g, b] = rgb.map((channel) => {
    const c = channel / 255;
    return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}

/** Row height in pixels for so many ranks: tall enough to label while they are few. */
export function rowHeight(ranks) {
  return ranks <= 12 ? 30 : ranks <= 32 ? 20 : ranks <= 96 ? 12 : 6;
}

/**
 * Where everything lies. `width` is the canvas in CSS pixels; `lead` the width of the newest column. `first` is the
 * index of the oldest round shown, `left` its edge: columns are flush right, and new rounds push old ones out.
 */
export function layout({ width, ranks, rounds, lead = 52, gap = 1 }) {
  const room = Math.max(0, width - lead);
  const cell = rounds <= 1 ? 14 : Math.max(5, Math.min(32, Math.floor(room / (rounds - 1))));
  const columns = Math.max(0, Math.min(rounds, 1 + Math.floor(room / cell)));
  const height = rowHeight(ranks);
  return {
    cell,
    columns,
    gap,
    lead,
    width,
    row: height,
    height: height * ranks,
    first: rounds - columns,
    left: width - (columns ? lead + (columns - 1) * cell : 0),
  };
}

/** The rectangle of a cell, `column` counted from the oldest shown. */
export function cellRect(place, row, column) {
  const newest = column === place.columns - 1;
  return {
    x: place.left + column * place.cell,
    y: row * place.row,
    width: (newest ? place.lead : place.cell) - place.gap,
    height: place.row - place.gap,
  };
}

/** The cell under a point, as {row, column}, or null beside the map. */
export function cellAt(place, x, y) {
  const row = Math.floor(y / place.row);
  if (x < place.left || x >= place.width || y < 0 || y >= place.height || !place.columns) return null;
  const column = Math.min(place.columns - 1, Math.floor((x - place.left) / place.cell));
  return { row, column };
}

/** The largest allotment of the rounds from `first` on: full colour. */
export function peak(rounds, first = 0) {
  let most = 1;
  for (let i = first; i < rounds.length; i += 1) {
    for (const n of Object.values(rounds[i].planned ?? {})) if (n > most) most = n;
  }
  return most;
}

/** What a cell shows: batches given and really done, whether its rank was the anchor, whether it was dead by then. */
export function cellOf(round, rank, diedAfter) {
  const planned = round.planned?.[rank] ?? null;
  const realized = round.realized?.[rank] ?? null;
  const dead = diedAfter !== undefined && round.round > diedAfter;
  const done = planned > 0 && realized !== null ? Math.min(1, realized / planned) : 1;
  return { planned, realized, done, dead, anchor: round.anchor_rank === rank };
}

/** Ranks that died, with the last round that each took part in. */
export function lastRounds(deaths) {
  return new Map((deaths ?? []).map((death) => [death.rank, death.last_round ?? -1]));
}

/** Indices of rounds where an epoch begins, for the marks under the map. */
export function epochStarts(rounds, first) {
  const starts = [];
  for (let i = first; i < rounds.length; i += 1) {
    if (i > 0 && rounds[i].epoch !== rounds[i - 1].epoch) starts.push(i);
  }
  return starts;
}

/** A cell in words, for the pointer, the keyboard and the screen reader. */
export function describe(round, rank, label, cell) {
  const where = `Round ${round.round}, ${label}`;
  if (cell.dead) return `${where}: dead`;
  if (!cell.planned) return `${where}: no work`;
  const done = cell.realized === null || cell.realized === cell.planned ? "" : `, ${cell.realized} done`;
  const speed = round.ms_per_batch?.[rank] ? `, ${Number(round.ms_per_batch[rank]).toFixed(1)} ms a batch` : "";
  return `${where}: ${cell.planned} batches${done}${speed}${cell.anchor ? ", anchor" : ""}`;
}

/** Every how many rows there is room for a label. */
export const spreadLabel = (ranks) => Math.ceil(14 / rowHeight(ranks));

const STEPS = {
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
  Home: [0, -Infinity],
  End: [0, Infinity],
};

/** The cell that a key leads to from `cursor` (none: from the newest of the first row), or null for another key. */
export function moved(place, cursor, key) {
  const rows = Math.round(place.height / place.row);
  if (!(key in STEPS) || !place.columns || !rows) return null;
  const from = cursor ?? { row: 0, column: place.columns };
  const clamp = (value, most) => Math.min(most, Math.max(0, value));
  const [down, right] = STEPS[key];
  return { row: clamp(from.row + down, rows - 1), column: clamp(from.column + right, place.columns - 1) };
}
