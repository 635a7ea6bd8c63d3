/** Every rank in figures. */
import { MISSING, bytes, count, figure, millis, span } from "./format.js";
import { html } from "./html.js";
import { Icon } from "./icons.js";
import { isEnded } from "./store.js";
import { Table, column } from "./table.js";
import { Emulated, Panel, State } from "./ui.js";

const MANY = 16;

export function RanksPanel({ live, phase }) {
  const ranks = live.of("ranks").value ?? [];
  const many = ranks.length > MANY;
  const over = isEnded(phase);
  const gpus = ranks.some((rank) => rank.device_total_bytes);
  const { transports } = live.of("session").value ?? {};
  const note = over ? "Totals over the whole run" : "Plan and progress of the window in hand; totals since the start";
  return html`
    <${Panel} title="Ranks" note=${note}>
      <div class=${many ? "tall-scroll" : ""} tabindex=${many ? 0 : undefined}>
        <${Table}
          caption="Ranks"
          columns=${columnsOf({ over, gpus, transports })}
          rows=${ranks}
          keyOf=${(rank) => rank.rank}
          rowClass=${(rank) => (rank.state === "dead" ? "gone" : "")}
        />
      </div>
    <//>
  `;
}

const ANCHOR = html`
  <span class="badge tone-quiet" title="The slow device: its batches set the length of a window">
    <${Icon} name="anchor" size=${12} />anchor
  </span>
`;

const leftOut = (r) => html`
  <span class="badge tone-bad" title="Rounds without this rank: what it contributed was not finite">
    left out ${count(r.exclusions)}×
  </span>
`;

const DOING = { working: "in one batch", evaluating: "scoring", saving: "handing over its state" };
const busy = (r) => html`
  <span class="badge tone-warn" title=${`${DOING[r.doing] ?? r.doing} for ${r.doing_seconds} s: it lives, but says nothing new`}>
    busy ${span(r.doing_seconds)}
  </span>
`;
const state = (r) => html`
  <${State} state=${r.state} /> ${r.busy && r.doing_seconds && busy(r)} ${r.exclusions > 0 && leftOut(r)}
`;

const figures = (label, cell, sort) => column(label, cell, { number: true, sort });
const pace = (r) => html`${r.emulated_ms && html`<${Emulated} brief=${true} />`} ${millis(r.ms_per_batch)}`;
const done = (r) => html`
  <span title="batches done / planned">${count(r.realized ?? 0)} / ${count(r.planned ?? 0)}</span>
`;

/** How busy the rank's GPU is, as a figure and a bar. */
const use = ({ device_utilisation: share }) =>
  Number.isFinite(share)
    ? html`<span class="use"><i class="use-bar" aria-hidden="true"><i style=${{ width: `${share}%` }} /></i>${share} %</span>`
    : MISSING;

/** 41.2 of 141 GiB, with the rank's own peak behind it. */
const held = (r) => {
  if (!r.device_total_bytes || !r.device_bytes) return MISSING;
  const peak = r.device_peak_bytes ? `; at its peak this rank's tensors took ${bytes(r.device_peak_bytes)}` : "";
  return html`
    <span title=${`In use on this GPU, by whomever${peak}`}>${bytes(r.device_bytes)} / ${bytes(r.device_total_bytes)}</span>
  `;
};

const GPU = [
  figures("GPU", use, (r) => r.device_utilisation),
  figures("GPU memory", held, (r) => r.device_bytes),
];
const WINDOW = figures("Window", done, (r) => r.planned);
const COLUMNS = [
  column("Rank", (r) => html`<strong>r${r.rank}</strong> ${r.anchor && ANCHOR}`, { sort: (r) => r.rank }),
  column("Where", (r) => html`${r.host_name} <span class="muted mono">${r.device}</span>`, {
    sort: (r) => `${r.host_name} ${r.device}`,
  }),
  column("State", state, { sort: (r) => r.state }),
  WINDOW,
  figures("Per batch", pace, (r) => r.ms_per_batch),
  figures("Steps", (r) => count(r.steps), (r) => r.steps),
  figures("Samples", (r) => count(r.samples), (r) => r.samples),
  figures("Loss", (r) => figure(r.loss), (r) => r.loss),
  figures("Memory", (r) => (r.rss_bytes ? bytes(r.rss_bytes) : MISSING), (r) => r.rss_bytes),
  ...GPU,
];

/** A run that is over has no window in hand; only ranks that average among themselves have a way to each other. */
function columnsOf({ over, gpus, transports }) {
  const columns = COLUMNS.filter((c) => (c === WINDOW ? !over : gpus || !GPU.includes(c)));
  if (over || !Object.keys(transports ?? {}).length) return columns;
  return [...columns, column("Averages by", (r) => transports[r.rank] ?? MISSING, { sort: (r) => transports[r.rank] })];
}
