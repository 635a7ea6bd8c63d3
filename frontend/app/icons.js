/** Our own line icons on a 24-pixel grid. They are decoration: the word beside each carries the meaning. */
import { html } from "./html.js";

const PATHS = {
  anchor:
    "M12 8.5V21M5 13c0 4.6 3.2 8 7 8s7-3.4 7-8M3 15l2-2.5L7.5 15M16.5 15l2.5-2.5L21 15M8.5 11h7" +
    "M12 8.5a2.6 2.6 0 1 0 0-5.2 2.6 2.6 0 0 0 0 5.2",
  auto: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18M12 7h5M12 12h8M12 17h5",
  check: "M5 12.5l4.5 4.5L19 7.5",
  chevron: "M9 6l6 6-6 6",
  clock: "M12 3.5a8.5 8.5 0 1 0 0 17 8.5 8.5 0 0 0 0-17M12 7.5V12l3 2",
  copy: "M9 9h10v11H9zM15 9V5H5v11h4",
  cross: "M6 6l12 12M18 6L6 18",
  door: "M6 20.5V4.5L15 3v18zM15 5h3.5v15.5H15M11.8 12v.4M3 20.5h18",
  down: "M12 4v11M7 10.5l5 5 5-5M5 20h14",
  host: "M4 5h16v6H4zM4 13h16v6H4zM8 8h.01M8 16h.01",
  info: "M12 3.5a8.5 8.5 0 1 0 0 17 8.5 8.5 0 0 0 0-17M12 11v5.5M12 7.6v.1",
  leave: "M14 4.5H6v15h8M10.5 12H20M16.5 8.5L20 12l-3.5 3.5",
  moon: "M20 14.5A8.2 8.2 0 0 1 9.5 4a8.2 8.2 0 1 0 10.5 10.5z",
  play: "M7 4.8v14.4L19 12z",
  plus: "M12 5v14M5 12h14",
  skull: "M12 3a8 8 0 0 0-5 14.2V20h10v-2.8A8 8 0 0 0 12 3M9 11.2v.4M15 11.2v.4M10.5 20v-2M13.5 20v-2",
  stop: "M6.5 6.5h11v11h-11z",
  sun:
    "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 2.5v2M12 19.5v2M2.5 12h2M19.5 12h2" +
    "M5.3 5.3l1.4 1.4M17.3 17.3l1.4 1.4M18.7 5.3l-1.4 1.4M6.7 17.3l-1.4 1.4",
  warn: "M12 4L2.8 19.8h18.4zM12 10v4.5M12 17.2v.1",
};

export function Icon({ name, size = 16 }) {
  return html`<svg class=${`icon icon-${name}`} width=${size} height=${size} viewBox="0 0 24 24" aria-hidden="true">
    <path d=${PATHS[name]} />
  </svg>`;
}

/** The product's mark: a short, a middling and a long march that end on one line. */
export function Mark({ size = 28 }) {
  return html`<svg class="mark" width=${size} height=${size} viewBox="0 0 32 32" aria-hidden="true">
    <rect class="mark-a" x="2" y="6" width="20" height="5" rx="2.5" />
    <rect class="mark-b" x="11" y="13.5" width="11" height="5" rx="2.5" />
    <rect class="mark-c" x="16.5" y="21" width="5.5" height="5" rx="2.5" />
    <rect class="mark-line" x="25.5" y="3" width="3" height="26" rx="1.5" />
  </svg>`;
}
