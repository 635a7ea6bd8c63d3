/** Before training: who is here, who is at the door, and what is missing to start. */
import { Command } from "./acts.js";
import { useAnswer } from "./api.js";
import { count, plural } from "./format.js";
import { html } from "./html.js";
import { Icon } from "./icons.js";
import { Outlook } from "./outlook.js";
import { Age, Roster } from "./roster.js";
import { SessionPanel } from "./session_panel.js";
import { isEnded } from "./store.js";
import { Panel, State } from "./ui.js";
import { WindowPanel } from "./window_panel.js";

export function Staging({ live, phase }) {
  const open = phase === "waiting" || phase === "staging";
  return html`
    <div class=${`staging ${isEnded(phase) ? "staging-over" : ""}`}>
      <div class="staging-side">
        ${phase === "forming" && html`<${Forming} live=${live} /><${SessionPanel} live=${live} />`}
        ${open && html`<${WindowPanel} live=${live} />`}
      </div>
      <div class="staging-main">
        ${open && html`<${Join} />`}
        <${Roster} live=${live} phase=${phase} />
        ${open && html`<${Outlook} live=${live} />`} ${phase !== "forming" && html`<${Door} live=${live} />`}
      </div>
    </div>
  `;
}

/** How another host dials in. The controller says the command: it knows under which address it can be reached. */
function Join() {
  const { answer: controller } = useAnswer("controller");
  return html`
    <${Panel} title="Add a host" className="join">
      <p>On each machine that shall train, in the directory that holds the job, run:</p>
      ${controller ? html`<${Command} text=${controller.join_command} />` : html`<div class="skeleton" />`}
      ${controller?.loopback_only &&
      html`<p class="field-help">
        This controller listens on this machine only. For other hosts, start it with <code>--host 0.0.0.0</code>.
      </p>`}
      <details class="hints">
        <summary>It does not show up?</summary>
        <ul>
          <li>The host must reach <code>${controller?.join_url ?? location.origin}</code>: one port for everything.</li>
          <li>The command carries the join token: keep it to those who may join.</li>
          <li>Add <code>--dry-run</code> to see what a host would offer, without joining.</li>
          <li>A host that was turned away or does not fit is listed under “At the door”, with the reason.</li>
        </ul>
      </details>
    <//>
  `;
}

/** Between the closing of the window and the first batch: what each rank is busy with. */
function Forming({ live }) {
  const ranks = live.of("ranks").value ?? [];
  const ready = ranks.filter((rank) => rank.state !== "starting").length;
  return html`
    <${Panel} title="The world forms" className="start-panel">
      <p class="verdict">
        The window is closed. Every host starts one process per rank; they build the model, open the data and take rank
        0's parameters.
      </p>
      <p class="forming">
        <span class="spinner" aria-hidden="true" />
        ${ranks.length ? `${ready} of ${plural(ranks.length, "rank")} ready` : "Processes are starting"}
      </p>
      <p class="muted">${live.of("decision").value}</p>
      <ul class="rank-chips">
        ${ranks.map(
          (rank) => html`
            <li key=${rank.rank}>
              <strong>r${rank.rank}</strong> <span class="muted">${rank.host_name}</span>
              <${State} state=${rank.state} />
            </li>
          `,
        )}
      </ul>
    <//>
  `;
}

/** Those who are not in: being probed, refused, or strangers who never showed a token. */
function Door({ live }) {
  const { probing = [], refusals = [], strangers } = live.of("window").value ?? {};
  if (!probing.length && !refusals.length && !strangers?.count) return null;
  return html`
    <${Panel} title="At the door">
      ${probing.length > 0 && html`<ul class="door">${probing.map((host) => html`<${Probed} host=${host} />`)}</ul>`}
      ${refusals.length > 0 &&
      html`<h3 class="sub-title">Refused</h3>
        <ul class="door">${refusals.map((entry) => html`<${Refusal} live=${live} entry=${entry} />`)}</ul>`}
      ${strangers?.count > 0 && html`<${Strangers} strangers=${strangers} />`}
    <//>
  `;
}

const Probed = ({ host }) => html`
  <li>
    <span class="spinner" aria-hidden="true" />
    <div>
      <strong>${host.host}</strong> <span class="muted mono">${host.address}</span>
      <p>Loads the job, builds the model and opens the data, to be compared with the others.</p>
    </div>
  </li>
`;

const Refusal = ({ live, entry }) => html`
  <li class="refusal">
    <${Icon} name="cross" />
    <div>
      <strong>${entry.host || "A host"}</strong> <span class="muted mono">${entry.address}</span>${" "}
      <span class="muted"><${Age} live=${live} value=${entry.seconds_ago} /></span>
      <p>${entry.reason} <code class="code">${entry.code}</code></p>
    </div>
  </li>
`;

function Strangers({ strangers }) {
  return html`
    <details class="strangers">
      <summary>
        <${Icon} name="chevron" />${plural(strangers.count, "stranger")} failed before showing who they are
      </summary>
      <p>Wrong token, wrong protocol, or silence. They are slowed down and cannot disturb the window.</p>
      <ul>
        ${Object.entries(strangers.sources).map(
          ([address, times]) => html`<li key=${address}><span class="mono">${address}</span> ${count(times)} ×</li>`,
        )}
      </ul>
    </details>
  `;
}
