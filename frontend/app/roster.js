/** The hosts of a run: what they bring, how they are, and the switch to turn one away. */
import { Confirm } from "./acts.js";
import { remove } from "./api.js";
import { seconds } from "./connection.js";
import { MISSING, ago, bytes, plural } from "./format.js";
import { html } from "./html.js";
import { Icon } from "./icons.js";
import { Table, column } from "./table.js";
import { toast } from "./toasts.js";
import { Emulated, Panel, State } from "./ui.js";

const RELAY_ONLY = "It trains nothing: it folds the data of the hosts that join through it into one stream.";
const FOLDED = "Its data is folded there with that of the other hosts behind it.";
const LEFT = ["left", "lost", "turned_away", "away"];
const total = (items, pick) => items.reduce((sum, item) => sum + pick(item), 0);

export function Roster({ live, phase, title = "Roster" }) {
  const members = live.of("members").value ?? [];
  const model = live.of("model").value;
  const ranks = live.of("ranks").value ?? [];
  const open = phase === "waiting" || phase === "staging";
  return html`
    <${Panel} title=${title} note=${[strength(members), weight(model)].filter(Boolean).join("; ")}>
      ${members.length
        ? html`<${Table}
            caption="Hosts of this run"
            columns=${columnsOf(live, open, members, ranks)}
            rows=${members}
            keyOf=${(member) => member.host}
            rowClass=${(member) => (member.state === "lost" || member.state === "turned_away" ? "gone" : "")}
          />`
        : html`<${Nobody} />`}
    <//>
  `;
}

/** What a round carries, and what of it stays at home. */
function weight(model) {
  if (!model) return "";
  const frozen = model.frozen_bytes ? `, ${bytes(model.frozen_bytes)} of it frozen: not sent while unchanged` : "";
  return `model of ${bytes(model.bytes)}${frozen}`;
}

/** 3 hosts, 7 ranks, 168 GiB: of those who are here. */
function strength(members) {
  const here = members.filter((member) => !LEFT.includes(member.state));
  if (!here.length) return "";
  const memory = total(here, (member) => total(member.devices, (device) => device.memory_bytes ?? 0));
  const ranks = total(here, (member) => member.ranks.length);
  return [plural(here.filter((member) => !member.relay_only).length, "host"), plural(ranks, "rank"), memory && bytes(memory)].filter(Boolean).join(", ");
}

const Nobody = () => html`
  <div class="nobody">
    <span class="pulse" aria-hidden="true"><${Icon} name="host" size=${28} /></span>
    <div>
      <strong>No host yet</strong>
      <p>
        Listening. A host appears here a moment after its command runs: first while its job is probed, then with its
        devices.
      </p>
    </div>
  </div>
`;

function columnsOf(live, open, members, ranks) {
  const columns = [
    column("Host", (m) => name(m, members), { sort: (m) => m.name }),
    column("State", state, { sort: (m) => m.state }),
    column("Ranks", (m) => m.ranks.map((rank) => `r${rank}`).join(" ") || MISSING, { sort: (m) => m.ranks[0] }),
    column("Devices", (m) => devices(m, ranks), { wide: true }),
    column("Versions", versions, { wide: true }),
    column("Joined", (m) => html`<${Age} live=${live} value=${m.joined_seconds_ago} />`, {
      number: true,
      sort: (m) => m.joined_seconds_ago,
    }),
  ];
  if (!open) return columns;
  const act = (member) => html`<${TurnAway} live=${live} member=${member} />`;
  return [...columns, column("Actions", act, { quiet: true, wide: true })];
}

/** A host, where it is, and by way of which relay-only host its data goes. */
function name(m, members) {
  const relay = members.find((other) => other.host === m.via);
  return html`
    <span class="host-name">${m.name}</span> <span class="muted mono">${m.address}</span>
    ${relay && html` <small class="muted" title=${FOLDED}>via ${relay.name}</small>`}
  `;
}

const state = (m) => html`
  <${State} state=${m.state} /> ${m.relay_only && html`<span class="badge tone-quiet" title=${RELAY_ONLY}>relay only</span>`}
  ${m.emulated && html`<${Emulated} ms=${m.emulate_ms_per_batch} />`}${" "}
  ${m.data_path && html`<small class="muted" title="How its part of a round travels">${m.data_path}</small>`}
`;

/** Like devices together: 8 × NVIDIA RTX 4090 24 GiB, and how busy those that train are. */
function devices(member, ranks) {
  const kinds = new Map();
  for (const device of member.devices) {
    const memory = device.memory_bytes ? ` ${bytes(device.memory_bytes)}` : "";
    const label = `${device.name || device.type.toUpperCase()}${memory}`;
    kinds.set(label, [...(kinds.get(label) ?? []), device.id]);
  }
  const kind = ([label, ids]) => html`
    <span key=${label} title=${ids.join(", ")}>
      ${ids.length > 1 && html`<strong>${ids.length} ×</strong>`} ${label}${" "}
      ${ids.length === 1 && html`<small class="muted mono">${ids[0]}</small>`}
    </span>
  `;
  return html`<span class="devices">${[...kinds].map(kind)}${load(ranks.filter((rank) => member.ranks.includes(rank.rank)))}</span>`;
}

/** Of the GPUs of one host together: 92 % busy, 311 of 1128 GiB in use. */
function load(ranks) {
  const told = ranks.filter((rank) => rank.device_total_bytes && rank.device_bytes);
  if (!told.length) return null;
  const busy = told.filter((rank) => Number.isFinite(rank.device_utilisation));
  const share = busy.length ? `${Math.round(total(busy, (rank) => rank.device_utilisation) / busy.length)} % busy, ` : "";
  const used = total(told, (rank) => rank.device_bytes);
  return html`
    <small class="muted tabular" title="Its GPUs together, as the host last saw them">
      ${share}${bytes(used)} of ${bytes(total(told, (rank) => rank.device_total_bytes))} in use
    </small>
  `;
}

function versions({ versions: told = {} }) {
  const all = Object.entries(told).map(([what, value]) => `${what} ${value || MISSING}`);
  const shown = ["torch", "cuda", "nccl", "python"].filter((what) => told[what]);
  return html`
    <span class="versions" title=${all.join("\n")}>
      ${shown.map((what) => html`<span key=${what}><span class="muted">${what}</span> ${told[what]}</span>`)}
    </span>
  `;
}

/** An age that grows between frames. */
export function Age({ live, value }) {
  if (value === null || value === undefined) return MISSING;
  const { viewAt } = live.state.peek();
  return ago(value + Math.max(0, seconds.value - viewAt) / 1000);
}

function TurnAway({ live, member }) {
  if (member.state !== "admitted") return null;
  const act = async () => {
    await remove(`runs/${live.id}/members/${member.host}`);
    toast(`${member.name} was turned away.`);
  };
  const leaving = member.relay_only
    ? "Hosts that joined through it lose their link"
    : `${plural(member.ranks.length, "rank")} ${member.ranks.length === 1 ? "leaves" : "leave"} with it`;
  return html`
    <${Confirm}
      label="Turn away"
      name=${`Turn away ${member.name}`}
      kind="quiet"
      title=${`Turn ${member.name} away?`}
      confirm="Turn away"
      act=${act}
      effect=${html`<p>${leaving} and later ranks move up. The window stays open for others.</p>`}
    />
  `;
}
