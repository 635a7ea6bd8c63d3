/** A run that trains or has trained: is it learning, is anyone holding the others up, is anything dying? */
import { get } from "./api.js";
import { ChartsPanel } from "./charts_panel.js";
import { HeatPanel } from "./heat_panel.js";
import { html, signal, useEffect, useMemo } from "./html.js";
import { Decisions, Events } from "./logs.js";
import { Checkpoints, Config, Deaths, Epochs } from "./outcome.js";
import { RanksPanel } from "./ranks_panel.js";
import { Roster } from "./roster.js";
import { SessionPanel } from "./session_panel.js";
import { SplitPanel } from "./split_panel.js";
import { isEnded } from "./store.js";
import { Strip } from "./strip.js";

export function Training({ live, phase }) {
  const epochs = useEpochs(live, phase);
  return html`
    <${Strip} live=${live} phase=${phase} />
    ${!isEnded(phase) && html`<${Deaths} live=${live} />`}
    <${HeatPanel} live=${live} phase=${phase} />
    <${ChartsPanel} live=${live} epochs=${epochs} />
    <div class="two-columns"><${SplitPanel} live=${live} /><${Epochs} live=${live} epochs=${epochs} /></div>
    <${Checkpoints} live=${live} />
    <${RanksPanel} live=${live} phase=${phase} />
    ${!isEnded(phase) && html`<${SessionPanel} live=${live} />`}
    <div class="two-columns"><${Decisions} live=${live} /><${Events} live=${live} /></div>
    <${Roster} live=${live} phase=${phase} title="Hosts" />
    <${Config} live=${live} />
  `;
}

/** Finished epochs, fetched anew whenever one more was finished or scored: they are not in the stream. */
function useEpochs(live, phase) {
  const rows = useMemo(() => signal([]), [live]);
  const scored = live.of("eval").value?.epoch;
  const finished = live.of("samples_accepted").value?.length;
  useEffect(() => {
    get(`runs/${live.id}/epochs`).then(
      ({ items }) => {
        rows.value = items;
      },
      () => undefined, // the next epoch asks again
    );
  }, [scored, finished, isEnded(phase)]);
  return rows;
}
