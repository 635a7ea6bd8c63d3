/** A chart with what a drawing alone lacks: a sentence, its values in figures, and the same data as a table. */
import { AsTable } from "./acts.js";
import { html, useId, useState } from "./html.js";
import { Plot } from "./plot.js";
import { spread } from "./points.js";
import { Table, column } from "./table.js";

const TABLE_ROWS = 100;

/**
 * `series`: [{key, label, colour, values, format, dash?, width?, fill?, points?, faint?}]; faint ones are drawn only.
 * `axis`: {label, name, format, tick} of the horizontal axis and `tick` of the vertical one. `markers`: [{at, label}],
 * dashed lines. `summary` is the chart in a sentence.
 */
export function Chart({ title, summary, x, series, axis, tick, markers, zero = false, aside }) {
  const [asTable, setAsTable] = useState(false);
  const [index, setIndex] = useState(null);
  const id = useId();
  const told = series.filter((one) => !one.faint);
  const label = `${title}. ${summary} Arrow keys read the values.`;
  return html`
    <figure class="chart panel" aria-labelledby=${id}>
      <figcaption class="panel-head">
        <h2 id=${id}>${title}</h2>
        <div class="panel-aside">${aside} <${AsTable} on=${asTable} onPick=${setAsTable} otherwise="As a chart" /></div>
      </figcaption>
      <p class="chart-summary">${summary}</p>
      ${!x.length && html`<p class="empty chart-empty">The first round has not closed yet.</p>`}
      ${x.length > 0 && asTable && html`<${Data} x=${x} series=${told} axis=${axis} title=${title} />`}
      ${x.length > 0 &&
      !asTable &&
      html`<${Readout} series=${told} index=${index} x=${x} axis=${axis} />
        <${Plot} ...${{ label, x, series, axis, tick, markers, zero, onCursor: setIndex }} />`}
    </figure>
  `;
}

/** The values under the cursor, or the last ones while there is none. */
function Readout({ series, index, x, axis }) {
  const at = index === null || index >= x.length ? x.length - 1 : index;
  const item = ({ key, label, colour, dash, values, format }) => html`
    <span key=${key}>
      <i class=${`swatch ${dash ? "dashed" : ""}`} style=${{ borderTopColor: `var(${colour})` }} />
      ${label} <b class="tabular">${format(inForce(values, at))}</b>
    </span>
  `;
  return html`
    <div class="readout" aria-hidden="true">
      <span class=${`readout-x tabular ${index === null ? "muted" : ""}`}>${axis.name} ${axis.format(x[at])}</span>
      ${series.map(item)}
    </div>
  `;
}

/** The value at a place, or the last one known before it: a score stays in force until the next. */
function inForce(values, at) {
  while (at > 0 && values[at] === null) at -= 1;
  return values[at];
}

function Data({ x, series, axis, title }) {
  const columns = [
    column(axis.label, (i) => axis.format(x[i])),
    ...series.map(({ label, values, format }) => column(label, (i) => format(values[i]), { number: true })),
  ];
  const rows = spread(x.length, TABLE_ROWS).reverse();
  return html`
    <div class="tall-scroll" tabindex="0" role="region" aria-label=${`${title} as a table`}>
      <${Table} caption=${`${title}, at most ${TABLE_ROWS} rows`} columns=${columns} rows=${rows} keyOf=${(i) => i} />
    </div>
  `;
}
