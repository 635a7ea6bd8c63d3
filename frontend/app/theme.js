/** Light, dark, or as the system says; remembered. Canvases ask here for colours: they cannot read CSS variables. */
import { signal } from "./html.js";

const KEY = "marchline.theme";
const system = matchMedia("(prefers-color-scheme: dark)");

/** auto, light or dark. */
export const theme = signal(document.documentElement.dataset.theme ?? "auto");
/** Whether the page is dark right now. Read it where colours are taken, and the drawing follows. */
export const dark = signal(isDark());

function isDark() {
  return theme.value === "auto" ? system.matches : theme.value === "dark";
}

system.addEventListener("change", () => {
  dark.value = isDark();
});

export function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  remember(KEY, name);
  theme.value = name;
  dark.value = isDark();
}

/** A CSS colour variable as the browser computes it in this theme. */
export function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

/** A small setting of this browser. Storage may be forbidden: then it lasts as long as the page. */
export function remember(key, value) {
  try {
    localStorage.setItem(key, value);
  } catch {
    // Nothing else depends on it.
  }
}

export function recall(key, fallback) {
  try {
    return localStorage.getItem(key) ?? fallback;
  } catch {
    return fallback;
  }
}
