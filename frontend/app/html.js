/** The template tag and the hooks, in one place, so that every module imports them the same way. */
import { Fragment, h, render } from "preact";
import htm from "htm";

export const html = htm.bind(h);
export { Fragment, h, render };
export { useCallback, useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
export { batch, computed, effect, signal, useComputed, useSignal } from "@preact/signals";
