/** Before training: who is here, who is at the door, and what is missing to start. */
import { get, remove } from "./api.js";
import { seconds } from "./connection.js";
import { ago, bytes, count, plural } from "./format.js";
import { html, useEffect, useState } from "./html.js";
import { Icon } from "./icons.js";
import { Command } from "./runs_page.js";
import { isEnded } from "./store.js";
import { Table } from "./table.js";
import { Confirm, Emulated, Panel, State, toast } from "./ui.js";
import { WindowPanel } from "./window_panel.js";

export function Staging({ live, phase }) {
  const over = isEnded(phase);
  return html`<div class="staging">
    <div class="staging-side">
      ${phase === "forming" ? html`<${Forming} live=${live} />` : !over && html`<${WindowPanel} live=${live} phase=${phase} />`}
    </div>
    <div class="staging-main">
      ${!over && phase !== "forming" && html`<${Join} />`}
      <${Roster} live=${live} phase=${phase} />
      ${phase !== "forming" && html`<${Door} live=${live} />`}
    </div>
  </div>`;
}

function Join() {
  const [controller, setController] = useState(null);
  useEffect(() => {
    get("controller").then(setController, () => undefined);
  }, []);
  return html`<${Panel} title="Add a host" className="join">
    <p>On each machine that shall train, in the directory that holds the job, run:</p>
    ${controller ? html`<${Command} text=${controller.join_command} />` : html`<div class="skeleton" />`}
    <details class="hints"><summary>It does not show up?</summary>
      <ul><li>The host must reach <code>${controller?.join_url ?? location.origin}</code>: one port, for everything.</li>
        <li>The command carries the join token: keep it to those who may join.</li>
        <li>Add <code>--dry-run</code> to see what a host would offer, without joining.</li>
        <li>A host that was turned away or does not fit is listed under “At the door”, with the reason.</li></ul></details>
  <//>`;
}

/** Between the closing of the window and the first batch: what each rank is busy with. */
function Forming({ live }) {
  const ranks = live.of("ranks").value ?? [];
  const ready = ranks.filter((rank) => rank.state !== "starting").length;
  return html`<${Panel} title="The world forms" className="start-panel">
    <p class="verdict">The window is closed. Every host starts one process per rank; they build the model, open the data and take rank 0's parameters.</p>
    <p class="forming"><span class="spinner" aria-hidden="true" /> ${ranks.length ? `${ready} of ${plural(ranks.length, "rank")} ready` : "Processes are starting"}</p>
    <ul class="rank-chips">${ranks.map((rank) => html`<li key=${rank.rank}><strong>r${rank.rank}</strong> <span class="muted">${rank.host_name}</span> <${State} state=${rank.state} /></li>`)}</ul>
  <//>`;
}

const total = (members, pick) => members.reduce((sum, member) => sum + pick(member), 0);

export function Roster({ live, phase, title = "Roster" }) {
  const members = live.of("members").value ?? [];
  const here = members.filter((member) => !["left", "lost", "turned_away"].includes(member.state));
  const memory = total(here, (member) => total(member.devices, (device) => device.memory_bytes ?? 0));
  const note = here.length ? `${plural(here.length, "host")}, ${plural(total(here, (m) => m.ranks.length), "rank")}${memory ? `, ${bytes(memory)}` : ""}` : "";
  const open = phase === "waiting" || phase === "staging";
  return html`<${Panel} title=${title} note=${note}>
    ${members.length
      ? html`<${Table} caption="Hosts of this run" columns=${rosterColumns(live, open)} rows=${members} keyOf=${(m) => m.host}
          rowClass=${(m) => (m.state === "lost" || m.state === "turned_away" ? "gone" : "")} />`
      : html`<div class="nobody"><span class="pulse" aria-hidden="true"><${Icon} name="host" size=${28} /></span>
          <div><strong>No host yet</strong><p>Listening. A host appears here a moment after its command runs: first while its job is probed, then with its devices.</p></div></div>`}
  <//>`;
}

function rosterColumns(live, open) {
  const columns = [
    { key: "host", label: "Host", sort: (m) => m.name, cell: (m) => html`<span class="host-name">${m.name}</span> <span class="muted mono">${m.address}</span>` },
    { key: "state", label: "State", sort: (m) => m.state, cell: (m) => html`<${State} state=${m.state} /> ${m.emulated && html`<${Emulated} ms=${m.emulate_ms_per_batch} />`}` },
    { key: "ranks", label: "Ranks", sort: (m) => m.ranks[0] ?? 0, cell: (m) => m.ranks.map((rank) => `r${rank}`).join(" ") || "–" },
    { key: "devices", label: "Devices", wide: true, cell: (m) => html`<${Devices} devices=${m.devices} />` },
    { key: "versions", label: "Versions", wide: true, cell: (m) => html`<${Versions} versions=${m.versions} />` },
    { key: "joined", label: "Joined", number: true, sort: (m) => m.joined_seconds_ago, cell: (m) => html`<${Age} live=${live} value=${m.joined_seconds_ago} />` },
  ];
  if (!open) return columns;
  return [...columns, { key: "act", label: "Actions", quiet: true, wide: true, cell: (m) => html`<${TurnAway} live=${live} member=${m} />` }];
}

/** An age that grows between frames. */
function Age({ live, value }) {
  const since = live.state.peek().viewAt;
  return value === null || value === undefined ? "–" : ago(value + Math.max(0, seconds.value - since) / 1000);
}

function Devices({ devices }) {
  const kinds = new Map();
  for (const device of devices) {
    const label = `${device.name || device.type.toUpperCase()}${device.memory_bytes ? ` ${bytes(device.memory_bytes)}` : ""}`;
    kinds.set(label, [...(kinds.get(label) ?? []), device.id]);
  }
  return html`<span class="devices">${[...kinds].map(([label, ids]) => html`<span key=${label} title=${ids.join(", ")}>
    ${ids.length > 1 && html`<strong>${ids.length} ×</strong>`} ${label} <small class="muted mono">${ids.length === 1 ? ids[0] : ""}</small></span>`)}</span>`;
}

function Versions({ versions }) {
  const told = ["torch", "cuda", "nccl", "python"].filter((name) => versions?.[name]);
  const all = Object.entries(versions ?? {}).map(([name, value]) => `${name} ${value || "–"}`).join("\n");
  return html`<span class="versions" title=${all}>${told.map((name) => html`<span key=${name}><span class="muted">${name}</span> ${versions[name]}</span>`)}</span>`;
}

function TurnAway({ live, member }) {
  if (member.state !== "admitted") return null;
  const act = async () => {
    await remove(`runs/${live.id}/members/${member.host}`);
    toast(`${member.name} was turned away.`);
  };
  return html`<${Confirm} label="Turn away" name=${`Turn away ${member.name}`} kind="quiet" title=${`Turn ${member.name} away?`} confirm="Turn away" act=${act}
    effect=${html`<p>${plural(member.ranks.length, "rank")} leave with it and later ranks move up. It may not join this run again.</p>`} />`;
}

/** Those who are not in: being probed, refused, or strangers who never showed a token. */
function Door({ live }) {
  const { probing = [], refusals = [], strangers } = live.of("window").value ?? {};
  const sources = Object.entries(strangers?.sources ?? {});
  if (!probing.length && !refusals.length && !strangers?.count) return null;
  return html`<${Panel} title="At the door">
    ${probing.length > 0 && html`<ul class="door">${probing.map((p) => html`<li key=${`${p.host}@${p.address}`}><span class="spinner" aria-hidden="true" />
      <div><strong>${p.host}</strong> <span class="muted mono">${p.address}</span><p>Loads the job, builds the model and opens the data, to be compared with the others.</p></div></li>`)}</ul>`}
    ${refusals.length > 0 && html`<h3 class="sub-title">Refused</h3><ul class="door">${refusals.map((r, i) => html`<li key=${`${r.host}${r.at}${i}`} class="refusal"><${Icon} name="cross" />
      <div><strong>${r.host || "A host"}</strong> <span class="muted mono">${r.address}</span> <span class="muted"><${Age} live=${live} value=${r.seconds_ago} /></span>
        <p>${r.reason} <code class="code">${r.code}</code></p></div></li>`)}</ul>`}
    ${strangers?.count > 0 && html`<details class="strangers"><summary><${Icon} name="chevron" />${plural(strangers.count, "stranger")} failed before showing who they are</summary>
      <p>Wrong token, wrong protocol, or silence. They are slowed down and cannot disturb the window.</p>
      <ul>${sources.map(([address, n]) => html`<li key=${address}><span class="mono">${address}</span> ${count(n)} ×</li>`)}</ul></details>`}
  <//>`;
}
