/** The frame around every page: who you are, where you are, and the page itself. */
import { get, session, signIn, signOut, tradeTicket } from "./api.js";
import { h, html, render, signal, useEffect, useRef, useState } from "./html.js";
import { Icon, Mark } from "./icons.js";
import { NewRun } from "./new_run.js";
import { RunPage } from "./run_page.js";
import { RunsPage } from "./runs_page.js";
import { setTheme, theme } from "./theme.js";
import { Button, Choice, Notice, Toasts } from "./ui.js";

const route = signal(routeOf(location.hash));
const ticketProblem = signal(null);
const failed = signal(null);

/** `#/runs/12` -> {page: "run", id: 12}. Anything unknown is the list of runs. */
function routeOf(hash) {
  const path = hash.replace(/^#/, "");
  const run = /^\/runs\/(\d+)$/.exec(path);
  if (run) return { page: "run", id: Number(run[1]) };
  return { page: path === "/runs/new" ? "new" : "runs" };
}

window.addEventListener("hashchange", async () => {
  if (location.hash.startsWith("#ticket=")) return enter();
  route.value = routeOf(location.hash);
  failed.value = null;
  window.scrollTo(0, 0);
  return undefined;
});

/** Trade a ticket if the address holds one, then find out whether we are in. */
async function enter() {
  ticketProblem.value = await tradeTicket();
  route.value = routeOf(location.hash);
  try {
    await get("session");
  } catch (problem) {
    if (problem.status !== 401) failed.value = problem;
    session.value = "out";
  }
}

function SignIn() {
  const [token, setToken] = useState("");
  const [problem, setProblem] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    failed.value = null;
    setProblem(await signIn({ token: token.trim() }));
  };
  return html`<section class="sign-in">
    <h1 tabindex="-1">Sign in</h1>
    ${failed.value && html`<${Notice} tone="bad" title="No answer">${failed.value.message}<//>`}
    ${ticketProblem.value && html`<${Notice} tone="warn" title="That address was not accepted">
      A one-time address works once and not for long. Restart the controller for a new one, or use the token below.<//>`}
    <p class="lead">Marchline trains on your machines, so its pages need a key. There are two ways in:</p>
    <ol class="ways">
      <li><strong>The one-time address.</strong> The controller printed it in its terminal when it started:
        <code class="block">${location.origin}/#ticket=…</code>Open it once; this browser then stays signed in.</li>
      <li><strong>The operator token.</strong> It is in the file <code>operator.token</code> in the controller's data
        directory (<code>var/operator.token</code> unless you chose another).
        <form onSubmit=${submit} class="inline-form">
          <label class="offscreen" for="token">Operator token</label>
          <input id="token" type="password" autocomplete="off" spellcheck=${false} placeholder="Paste the token" value=${token}
            onInput=${(event) => setToken(event.target.value)} aria-describedby=${problem ? "token-problem" : undefined}
            aria-invalid=${problem ? "true" : undefined} />
          <button class="button button-primary" type="submit">Sign in</button>
        </form>
        ${problem && html`<p class="field-problem" id="token-problem" role="alert">${problem.message}</p>`}</li>
    </ol>
  </section>`;
}

function ThemeSwitch() {
  const options = [
    ["light", html`<${Icon} name="sun" /><span class="offscreen">Light</span>`],
    ["auto", html`<${Icon} name="auto" /><span class="offscreen">As the system</span>`],
    ["dark", html`<${Icon} name="moon" /><span class="offscreen">Dark</span>`],
  ];
  return html`<${Choice} legend="Theme" value=${theme.value} options=${options} onPick=${setTheme} />`;
}

function TopBar() {
  const page = route.value.page;
  const current = (name) => (page === name ? "page" : undefined);
  const inside = session.value === "in";
  return html`<header class="topbar">
    <a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
    <a class="brand" href="#/" aria-label="Marchline, all runs"><${Mark} /><span>Marchline</span></a>
    ${inside && html`<nav aria-label="Pages">
      <a href="#/" aria-current=${current("runs")}>Runs</a>
      <a href="#/runs/new" aria-current=${current("new")}>New run</a>
      <a href="/docs" class="optional">API</a>
    </nav>`}
    <div class="topbar-end"><${ThemeSwitch} />
      ${inside && html`<${Button} kind="quiet" icon="leave" onPress=${signOut} aria-label="Sign out"><span class="optional">Sign out</span><//>`}</div>
  </header>`;
}

function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

/** A script error in a page must not leave a blank one. */
function Guarded({ children }) {
  const [error, setError] = useState(null);
  const ref = useRef(setError);
  useEffect(() => {
    const show = (event) => ref.current(event.error ?? event.reason);
    window.addEventListener("error", show);
    window.addEventListener("unhandledrejection", show);
    return () => {
      window.removeEventListener("error", show);
      window.removeEventListener("unhandledrejection", show);
    };
  }, []);
  return html`${error && html`<${Notice} tone="bad" live=${true} title="This page had an error"
    action=${html`<${Button} onPress=${() => location.reload()}>Reload<//>`}>
    ${String(error.message ?? error)}. Training is not affected.<//>`}${children}`;
}

function Page() {
  const { page, id } = route.value;
  if (session.value === "unknown") return html`<p class="booting" role="status">Loading …</p>`;
  if (session.value === "out") return html`<${SignIn} />`;
  if (page === "new") return html`<${NewRun} />`;
  return page === "run" ? html`<${RunPage} id=${id} key=${id} />` : html`<${RunsPage} />`;
}

function App() {
  return html`<${TopBar} />
    <main id="main" tabindex="-1"><${Guarded}><${Page} /><//></main>
    <${Toasts} />`;
}

const root = document.getElementById("app");
root.replaceChildren();
render(h(App), root);
enter();
