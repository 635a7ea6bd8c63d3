/** What somebody without a run needs to know: three steps, each with its button or its command. */
import { Command } from "./acts.js";
import { useAnswer } from "./api.js";
import { html } from "./html.js";
import { Mark } from "./icons.js";

export function FirstSteps() {
  const { answer: controller } = useAnswer("controller");
  return html`
    <section class="first-steps">
      <${Mark} size=${56} />
      <h2>No runs yet</h2>
      <p class="lead">
        Unequal devices, one model: the slow one sets the pace, the fast ones range ahead, and all meet at one line.
        Three steps lead to the first run.
      </p>
      <ol class="steps">
        <li>
          <h3>Create a run</h3>
          <p>Choose a job and its parameters. A join window opens.</p>
          <a class="button button-primary" href="#/runs/new">New run</a>
        </li>
        <li>
          <h3>Let hosts dial in</h3>
          <p>On every machine that shall train, run:</p>
          ${controller
            ? html`<${Command} text=${controller.join_command} />`
            : html`<p class="muted">The command appears on the run's page.</p>`}
        </li>
        <li>
          <h3>Start, and watch</h3>
          <p>Press Start when all are here. Allotments settle within a few rounds, and you see why.</p>
        </li>
      </ol>
    </section>
  `;
}
