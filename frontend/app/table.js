/** One semantic table for all of them: sortable headers, numbers aligned, and cards instead of columns on a phone. */
import { html, useState } from "./html.js";

const order = (a, b) => {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return a < b ? -1 : 1;
};

/**
 * `columns`: [{key, label, cell(row), sort(row)?, number?, wide?, hide?}]. `wide` takes a whole line of a card; the first column is
 * the row's header and the card's title. Roles are written out, since `display: block` on a phone would strip them.
 */
export function Table({ caption, columns, rows, keyOf, rowClass, sort: startSort = null }) {
  const [sort, setSort] = useState(startSort);
  const column = sort && columns.find((c) => c.key === sort.key);
  const shown = column ? [...rows].sort((a, b) => order(column.sort(a), column.sort(b)) * (sort.down ? -1 : 1)) : rows;
  return html`<div class="table-scroll">
    <table role="table">
      <caption class="offscreen">${caption}</caption>
      <thead role="rowgroup"><tr role="row">${columns.map((c) => html`<${Head} key=${c.key} column=${c} sort=${sort} onSort=${setSort} />`)}</tr></thead>
      <tbody role="rowgroup">${shown.map((row) => html`<tr role="row" key=${keyOf(row)} class=${rowClass?.(row) ?? ""}>
        ${columns.map((c, i) => html`<${i ? "td" : "th"} key=${c.key} role=${i ? "cell" : "rowheader"} scope=${i ? undefined : "row"}
          data-label=${c.quiet ? undefined : c.label} class=${classes(c)}>${c.cell(row)}<//>`)}
      </tr>`)}</tbody>
    </table>
  </div>`;
}

const classes = (c) => `${c.number ? "number" : ""} ${c.wide ? "wide" : ""} ${c.hide ? "optional" : ""}`;

function Head({ column, sort, onSort }) {
  const on = sort?.key === column.key;
  const direction = on ? (sort.down ? "descending" : "ascending") : undefined;
  const label = column.quiet ? html`<span class="offscreen">${column.label}</span>` : column.label;
  return html`<th role="columnheader" scope="col" class=${classes(column)} aria-sort=${direction}>
    ${column.sort
      ? html`<button type="button" class="sort" onClick=${() => onSort(next(column, sort))}>${label}<i aria-hidden="true">${on ? (sort.down ? "▾" : "▴") : "▵"}</i></button>`
      : label}
  </th>`;
}

function next(column, sort) {
  if (sort?.key !== column.key) return { key: column.key, down: Boolean(column.number) };
  return { key: column.key, down: !sort.down };
}
