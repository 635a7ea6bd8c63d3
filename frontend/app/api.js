/** The REST interface: JSON in and out, every refusal a `Problem` that can be shown as it is. */
import { signal, useEffect, useState } from "./html.js";
import { retryDelay } from "./stream.js";

/** unknown until the first answer, then in or out. */
export const session = signal("unknown");

/** An RFC 9457 problem, or the network's failure in the same shape (status 0). */
export class Problem extends Error {
  constructor({ status, code, title, detail, errors }) {
    super(detail || title || "The request failed");
    this.status = status;
    this.code = code ?? "";
    this.title = title ?? "";
    this.errors = errors ?? [];
  }

  /** The problem of one form field as a sentence, if there is one. */
  at(field) {
    return this.errors.find((error) => error.field === field)?.text;
  }
}

const unreachable = () =>
  new Problem({
    status: 0,
    code: "unreachable",
    title: "No answer",
    detail: "The controller does not answer. Is it still running?",
  });

export async function request(method, path, body) {
  let response;
  try {
    response = await fetch(`/api/v1/${path}`, {
      method,
      headers: {
        Accept: "application/json",
        ...(method === "GET" ? {} : { "X-Marchline": "1" }),
        ...(body === undefined ? {} : { "Content-Type": "application/json" }),
      },
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "same-origin",
      cache: "no-store",
    });
  } catch {
    throw unreachable();
  }
  const answer = await readJson(response);
  // A wrong ticket or token is answered with 401 too: that says nothing about the session that may be there.
  if (response.status === 401 && !(path === "session" && method === "POST")) session.value = "out";
  if (!response.ok) throw new Problem({ title: response.statusText, ...answer, status: response.status });
  if (path !== "session" || method !== "DELETE") session.value = "in";
  return answer;
}

async function readJson(response) {
  const type = response.headers.get("Content-Type") ?? "";
  if (response.status === 204 || !type.includes("json")) return null;
  try {
    return await response.json();
  } catch {
    throw unreachable();
  }
}

export const get = (path) => request("GET", path);
export const post = (path, body) => request("POST", path, body);
export const patch = (path, body) => request("PATCH", path, body);
export const remove = (path) => request("DELETE", path);

/** Pages of a list endpoint whose rows count up, from after `after`; stops when `keep` says so or there are no more. */
export async function* pages(path, after, { limit = 400, key, until = Infinity }) {
  for (;;) {
    const { items } = await get(`${path}?after=${after}&limit=${limit}`);
    if (items.length) yield items;
    if (items.length < limit) return;
    after = items.at(-1)[key];
    if (after + 1 >= until) return;
  }
}

/** No answer, or one that says to try later: a proxy without its controller, a controller without its database. */
const LATER = [0, 502, 503, 504];

/** What `ask` resolves to, asked again while there is none; `away` is told why each time, and stops it by throwing. */
export async function untilAnswered(ask, away) {
  for (let tries = 0; ; tries += 1) {
    try {
      return await ask();
    } catch (problem) {
      if (!(problem instanceof Problem) || !LATER.includes(problem.status)) throw problem;
      away(problem);
    }
    await new Promise((resolve) => setTimeout(resolve, retryDelay(tries)));
  }
}

const UNKNOWN = { answer: null, problem: null };

/** A GET of `path` as {answer, problem}, asked until it is answered; nothing is asked while there is no path. */
export function useAnswer(path) {
  const [known, setKnown] = useState({ path: null, ...UNKNOWN });
  useEffect(() => {
    if (!path) return undefined;
    let current = true;
    const away = (problem) => {
      if (!current || !(problem instanceof Problem)) throw problem;
      setKnown({ path, answer: null, problem });
    };
    untilAnswered(() => get(path), away).then(
      (answer) => current && setKnown({ path, answer, problem: null }),
      (problem) => current && away(problem),
    );
    return () => {
      current = false;
    };
  }, [path]);
  return known.path === path ? known : UNKNOWN;
}

/** What asking ends with: null, or the problem. */
const problemOf = (asked) => asked.then(
  () => null,
  (problem) => problem,
);

/**
 * The printed address `/#ticket=...` is traded for a cookie once. It leaves the address bar before anything else
 * happens, so that it is in no history, bookmark or screenshot. Resolves to a Problem, or null.
 */
export async function tradeTicket(away) {
  const ticket = new URLSearchParams(location.hash.slice(1)).get("ticket");
  if (!ticket) return null;
  history.replaceState(null, "", `${location.pathname}#/`);
  return problemOf(untilAnswered(() => post("session", { ticket }), away));
}

/** Trade the operator's token for a cookie. Resolves to a Problem, or null. */
export const signIn = (token) => problemOf(post("session", { token }));

export async function signOut() {
  await remove("session");
  session.value = "out";
}
