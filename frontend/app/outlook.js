/** What to expect once the run starts, from the speeds of the ranks that are here. The controller asks ElChe itself. */
import { get } from "./api.js";
import { count, millis, percent, span } from "./format.js";
import { html, useEffect, useState } from "./html.js";
import { Table, column } from "./table.js";
import { Emulated, Panel } from "./ui.js";

const SOURCES = { measured: "measured", declared: "declared by its host", guessed: "a guess" };

/** Shown while the door is open and two ranks or more are in; asked for anew when the roster changes. */
export function Outlook({ live }) {
  const joined = live.of("window").value?.joined_ranks ?? 0;
  const members = (live.of("members").value ?? []).map((member) => member.host).join(",");
  const [preview, setPreview] = useState(null);
  useEffect(() => {
    let wanted = true;
    if (joined >= 2) get(`runs/${live.id}/preview`).then((found) => wanted && setPreview(found), () => undefined);
    return () => {
      wanted = false;
    };
  }, [live.id, joined, members]);
  if (joined < 2 || !preview?.expectation) return null;
  const { expectation: expected, guess, reason, ranks } = preview;
  const mark = live.of("emulated").value && html`<${Emulated} />`;
  return html`
    <${Panel}
      title="What to expect"
      className="outlook"
      note=${guess ? "a guess, until the ranks are timed" : ""}
      aside=${mark}
    >
      <p>${reason}</p>
      <dl class="facts-list">
        <${Fact} term="Gain over the fastest rank alone" value=${`${expected.gain.toFixed(2)} ×`} />
        <${Fact} term="Efficiency" value=${percent(expected.efficiency)} />
        <${Fact} term="Idle, rounds aside" value=${percent(expected.idle_share)} />
        <${Fact} term="A window" value=${`${count(expected.window_batches)} batches, ${span(expected.window_seconds)}`} />
        <${Fact} term="A round" value=${millis(expected.round_seconds * 1000)} />
        <${Fact} term="An epoch" value=${span(expected.epoch_seconds)} />
      </dl>
      <${Table} caption="Expected allotments" columns=${COLUMNS} rows=${ranks} keyOf=${(rank) => rank.rank} />
    <//>
  `;
}

const Fact = ({ term, value }) => html`<div><dt>${term}</dt><dd class="tabular">${value}</dd></div>`;

const COLUMNS = [
  column("Rank", (rank) => `r${rank.rank}`),
  column("A batch", (rank) => millis(rank.ms_per_batch), { number: true }),
  column("Speed is", (rank) => SOURCES[rank.source] ?? rank.source),
  column("Batches a window", (rank) => count(rank.batches), { number: true }),
  column("Idle", (rank) => percent(rank.idle_share), { number: true }),
];
