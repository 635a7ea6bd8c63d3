/** The frame around every page: who you are, where you are, and the page itself. */
import { Button } from "./acts.js";
import { get, session, signOut, tradeTicket, untilAnswered } from "./api.js";
import { h, html, render, signal, useEffect, useState } from "./html.js";
import { Icon, Mark } from "./icons.js";
import { NewRun } from "./new_run.js";
import { routeOf } from "./route.js";
import { RunPage } from "./run_page.js";
import { RunsPage } from "./runs_page.js";
import { SignIn } from "./sign_in.js";
import { setTheme, theme } from "./theme.js";
import { Toasts, toast } from "./toasts.js";
import { Choice, Notice } from "./ui.js";

const route = signal(routeOf(location.hash));
const refused = signal(null);
const unreachable = signal(null);

window.addEventListener("hashchange", () => {
  if (location.hash.startsWith("#ticket=")) {
    enter();
    return;
  }
  route.value = routeOf(location.hash);
  window.scrollTo(0, 0);
  document.querySelector("h1")?.focus({ preventScroll: true });
});

/** Trade a ticket if the address holds one, then find out whether we are in. Both are asked until there is an answer. */
async function enter() {
  const away = (problem) => {
    unreachable.value = problem;
  };
  refused.value = await tradeTicket(away);
  route.value = routeOf(location.hash);
  try {
    await untilAnswered(() => get("session"), away);
  } catch (problem) {
    if (problem.status !== 401) refused.value = problem;
    session.value = "out";
  }
  unreachable.value = null;
}

const THEMES = [
  ["light", "sun", "Light"],
  ["auto", "auto", "As the system"],
  ["dark", "moon", "Dark"],
].map(([key, icon, name]) => [key, html`<${Icon} name=${icon} /><span class="offscreen">${name}</span>`]);

function TopBar() {
  const current = (page) => (route.value.page === page ? "page" : undefined);
  const inside = session.value === "in";
  return html`
    <header class="topbar">
      <a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
      <a class="brand" href="#/" aria-label="Marchline, all runs"><${Mark} /><span>Marchline</span></a>
      ${inside &&
      html`<nav aria-label="Pages">
        <a href="#/" aria-current=${current("runs")}>Runs</a>
        <a href="#/runs/new" aria-current=${current("new")}>New run</a>
        <a href="/docs" class="optional">API</a>
      </nav>`}
      <div class="topbar-end">
        <${Choice} legend="Theme" value=${theme.value} options=${THEMES} onPick=${setTheme} />
        ${inside &&
        html`<${Button} kind="quiet" icon="leave" onPress=${leave} aria-label="Sign out">
          <span class="optional">Sign out</span>
        <//>`}
      </div>
    </header>
  `;
}

const leave = () => signOut().catch((problem) => toast(problem.message, "bad"));

function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

/** An error in this page's own script is said, and must not pass for trouble with the training. */
function ScriptError() {
  const [error, setError] = useState(null);
  useEffect(() => {
    const show = (event) => setError(event.error ?? event.reason);
    window.addEventListener("error", show);
    window.addEventListener("unhandledrejection", show);
    return () => {
      window.removeEventListener("error", show);
      window.removeEventListener("unhandledrejection", show);
    };
  }, []);
  if (!error) return null;
  const reload = html`<${Button} onPress=${() => location.reload()}>Reload<//>`;
  return html`
    <${Notice} tone="bad" live=${true} title="This page had an error" action=${reload}>
      ${String(error.message ?? error)}. Training is not affected.
    <//>
  `;
}

function Page() {
  const { page, id } = route.value;
  if (session.value === "unknown") return html`<${Entering} />`;
  if (session.value === "out") return html`<${SignIn} refused=${refused.value} />`;
  if (page === "new") return html`<${NewRun} />`;
  return page === "run" ? html`<${RunPage} id=${id} key=${id} />` : html`<${RunsPage} />`;
}

function Entering() {
  const problem = unreachable.value;
  if (!problem) return html`<p class="booting" role="status">Loading …</p>`;
  return html`
    <div class="page-head"><h1 tabindex="-1">Marchline</h1></div>
    <${Notice} tone="bad" title=${problem.title} live=${true}>${problem.message} This page goes on asking.<//>
  `;
}

const App = () => html`
  <${TopBar} />
  <main id="main" tabindex="-1"><${ScriptError} /><${Page} /></main>
  <${Toasts} />
`;

function start() {
  document.documentElement.dataset.boot = "started";
  if (history.state) history.replaceState(null, "");
  const root = document.getElementById("app");
  root.replaceChildren();
  render(h(App), root);
  enter();
}

// What index.html found missing comes with the next load; a ticket is not spent on this one.
if (document.documentElement.dataset.boot !== "stuck") start();
