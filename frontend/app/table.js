/** One semantic table for all of them: sortable headers, numbers aligned, and cards instead of columns on a phone. */
import { html, useState } from "./html.js";

/**
 * A column. `cell(row)` is what it shows; `more` may hold `sort(row)`, the value to sort by; `number` to align it;
 * `wide` to give it a whole line of a phone's card; `quiet` to keep its label for screen readers.
 */
export const column = (label, cell, more = {}) => ({ label, cell, ...more });

/**
 * `rows` under `columns`. The first column is the row's header and a card's title. Roles are written out, since
 * `display: block` on a phone would strip them.
 */
export function Table({ caption, columns, rows, keyOf, rowClass }) {
  const [sort, setSort] = useState(null);
  const by = sort && columns.find((candidate) => candidate.label === sort.label);
  const way = sort?.down ? -1 : 1;
  const shown = by ? [...rows].sort((a, b) => order(by.sort(a), by.sort(b)) * way) : rows;
  const head = (one) => html`<${Head} key=${one.label} column=${one} sort=${sort} onSort=${setSort} />`;
  const body = (row) => html`<${Row} key=${keyOf(row)} row=${row} columns=${columns} className=${rowClass?.(row)} />`;
  return html`
    <div class="table-scroll">
      <table role="table">
        <caption class="offscreen">${caption}</caption>
        <thead role="rowgroup">
          <tr role="row">${columns.map(head)}</tr>
        </thead>
        <tbody role="rowgroup">
          ${shown.map(body)}
        </tbody>
      </table>
    </div>
  `;
}

function Row({ row, columns, className = "" }) {
  const [first, ...rest] = columns;
  return html`
    <tr role="row" class=${className}>
      <th role="rowheader" scope="row" class=${classes(first)}>${first.cell(row)}</th>
      ${rest.map(
        (c) => html`
          <td key=${c.label} role="cell" class=${classes(c)} data-label=${c.quiet ? undefined : c.label}>
            ${c.cell(row)}
          </td>
        `,
      )}
    </tr>
  `;
}

function Head({ column: { label, sort: sortable, quiet, ...rest }, sort, onSort }) {
  const on = sort?.label === label;
  const direction = on ? (sort.down ? "descending" : "ascending") : undefined;
  const press = () => onSort({ label, down: on ? !sort.down : Boolean(rest.number) });
  const mark = on ? (sort.down ? "▾" : "▴") : "▵";
  const text = quiet ? html`<span class="offscreen">${label}</span>` : label;
  return html`
    <th role="columnheader" scope="col" class=${classes(rest)} aria-sort=${direction}>
      ${sortable
        ? html`<button type="button" class="sort" onClick=${press}>${text}<i aria-hidden="true">${mark}</i></button>`
        : text}
    </th>
  `;
}

const classes = ({ number, wide }) => `${number ? "number" : ""} ${wide ? "wide" : ""}`;

/** Smaller first; what is missing always last in rising order. */
function order(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return a < b ? -1 : 1;
}
