/** Every rank in figures. */
import { bytes, count, figure, millis } from "./format.js";
import { html } from "./html.js";
import { Icon } from "./icons.js";
import { isEnded } from "./store.js";
import { Table } from "./table.js";
import { Emulated, Panel, State } from "./ui.js";

const MANY = 16;

export function RanksPanel({ live, phase }) {
  const ranks = live.of("ranks").value ?? [];
  return html`<${Panel} title="Ranks" note="Plan and progress of the window in hand; totals since the start">
    <div class=${ranks.length > MANY ? "tall-scroll" : ""} tabindex=${ranks.length > MANY ? 0 : undefined}>
      <${Table} caption="Ranks" columns=${isEnded(phase) ? COLUMNS.filter((c) => c.key !== "planned") : COLUMNS} rows=${ranks} keyOf=${(rank) => rank.rank}
        rowClass=${(rank) => (rank.state === "dead" ? "gone" : "")} /></div>
  <//>`;
}

const COLUMNS = [
  { key: "rank", label: "Rank", sort: (r) => r.rank, cell: (r) => html`<strong>r${r.rank}</strong>${r.anchor && html` <span class="badge tone-anchor" title="The slow device: its batches set the length of a window"><${Icon} name="anchor" size=${12} />anchor</span>`}` },
  { key: "where", label: "Where", sort: (r) => `${r.host_name}${r.device}`, cell: (r) => html`${r.host_name} <span class="muted mono">${r.device}</span>` },
  { key: "state", label: "State", sort: (r) => r.state, cell: (r) => html`<${State} state=${r.state} />` },
  { key: "planned", label: "Window", number: true, sort: (r) => r.planned, cell: (r) => html`<span title="batches done / planned">${count(r.realized ?? 0)} / ${count(r.planned ?? 0)}</span>` },
  { key: "ms", label: "Per batch", number: true, sort: (r) => r.ms_per_batch, cell: (r) => html`${r.emulated_ms ? html`<${Emulated} brief=${true} /> ` : ""}${millis(r.ms_per_batch)}` },
  { key: "steps", label: "Steps", number: true, sort: (r) => r.steps, cell: (r) => count(r.steps) },
  { key: "samples", label: "Samples", number: true, sort: (r) => r.samples, cell: (r) => count(r.samples) },
  { key: "loss", label: "Loss", number: true, sort: (r) => r.loss, cell: (r) => figure(r.loss) },
  { key: "memory", label: "Memory", number: true, sort: (r) => r.rss_bytes, cell: (r) => (r.rss_bytes ? bytes(r.rss_bytes) : "–") },
];

