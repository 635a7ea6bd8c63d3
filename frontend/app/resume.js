/** Checkpoints as acts: save now, go on from one, and where a run came from. */
import { Button, Confirm, useAct } from "./acts.js";
import { post } from "./api.js";
import { count } from "./format.js";
import { html, useState } from "./html.js";
import { toast } from "./toasts.js";
import { Notice } from "./ui.js";

/** The newest checkpoint that is still there. */
export const newest = (rows) => (rows ?? []).filter((row) => !row.pruned).at(-1);

/** Save when the round at hand is closed; training goes on. */
export function SaveNow({ live }) {
  const { run, busy, problem } = useAct(async () => {
    await post(`runs/${live.id}/checkpoints`);
    toast("Saving when the round at hand is closed. Training goes on.");
  });
  return html`
    <${Button} icon="down" busy=${busy || live.of("saving").value} onPress=${run}>Save now<//>
    ${problem && html`<span class="tone-bad ink" role="alert">${problem.message}</span>`}
  `;
}

/** A run that goes on from this one's newest checkpoint, after a question; with more epochs where all are trained. */
export function Resume({ live }) {
  const row = newest(live.of("checkpoints").value);
  const wanted = live.of("epochs").value ?? 1;
  const trained = (row?.epoch ?? 0) >= wanted;
  const [epochs, setEpochs] = useState(null);
  if (!row) return null;
  const total = epochs ?? wanted * 2;
  const act = async () => {
    const more = trained ? { epochs: total } : {};
    const run = await post("runs", { resume_from: `${live.id}:last`, ...more });
    location.hash = `#/runs/${run.id}`;
  };
  const effect = html`
    <p>
      A new run goes on from checkpoint ${row.checkpoint} (round ${count(row.round)}, step ${count(row.global_step)})
      with the same settings. Its window opens now, and hosts have to join it.
    </p>
    ${trained &&
    html`<div class="field">
      <label>
        Epochs in all; ${count(wanted)} are trained
        <input
          type="number"
          min=${wanted + 1}
          step="1"
          value=${total}
          onInput=${(event) => setEpochs(Math.max(wanted + 1, Math.round(Number(event.target.value)) || 0))}
        />
      </label>
    </div>`}
  `;
  return html`<${Confirm}
    label=${trained ? "Train on …" : "Resume …"}
    icon="play"
    kind="primary"
    title="Go on from the last checkpoint?"
    effect=${effect}
    confirm="Open the run"
    confirmKind="primary"
    act=${act}
  />`;
}

/** Where a resumed run came from. */
export function Origin({ live }) {
  const origin = live.of("resumed_from").value;
  if (!origin) return null;
  return html`<span>
    goes on from <a href=${`#/runs/${origin.run}`}>run ${origin.run}</a>, checkpoint ${origin.checkpoint}
  </span>`;
}

/** Checkpoints that cannot be written are lost work in waiting: it is said as long as it is so. */
export function Trouble({ live }) {
  const trouble = live.of("checkpoint_trouble").value;
  if (!trouble) return null;
  const last = newest(live.of("checkpoints").value);
  const kept = last ? ` Checkpoint ${last.checkpoint} is still there.` : " There is none yet.";
  return html`<${Notice} tone="bad" title="The run is not being saved" live=${true}>${trouble}.${kept}<//>`;
}
