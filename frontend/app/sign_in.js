/** Who has no session sees where the key is: the printed one-time address, or the operator token. */
import { signIn } from "./api.js";
import { html, useState } from "./html.js";
import { Notice } from "./ui.js";

/** `refused` is the problem of a one-time address that was not accepted, or of asking who we are. */
export function SignIn({ refused }) {
  const title = refused?.status === 401 ? "That address was not accepted" : refused?.title;
  return html`
    <section class="sign-in">
      <h1 tabindex="-1">Sign in</h1>
      ${refused && html`<${Notice} tone="warn" title=${title}>${refused.message}<//>`}
      <p class="lead">Marchline trains on your machines, so its pages need a key. There are two ways in:</p>
      <ol class="ways">
        <li>
          <strong>The one-time address.</strong> The controller printed it in its terminal when it started:
          <code class="block">${location.origin}/#ticket=…</code>
          Open it once; this browser then stays signed in.
        </li>
        <li>
          <strong>The operator token.</strong> It is in the file <code>operator.token</code> in the controller's data
          directory (<code>var/operator.token</code> unless you chose another).
          <${TokenForm} />
        </li>
      </ol>
    </section>
  `;
}

function TokenForm() {
  const [token, setToken] = useState("");
  const [problem, setProblem] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    setProblem(await signIn(token.trim()));
  };
  return html`
    <form onSubmit=${submit} class="inline-form">
      <label class="offscreen" for="token">Operator token</label>
      <input
        id="token"
        type="password"
        autocomplete="off"
        spellcheck=${false}
        placeholder="Paste the token"
        value=${token}
        aria-describedby=${problem ? "token-problem" : undefined}
        aria-invalid=${problem ? "true" : undefined}
        onInput=${(event) => setToken(event.target.value)}
      />
      <button class="button button-primary" type="submit">Sign in</button>
    </form>
    ${problem && html`<p class="field-problem" id="token-problem" role="alert">${problem.message}</p>`}
  `;
}
