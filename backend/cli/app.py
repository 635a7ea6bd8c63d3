"""The commands. Each is a client of the REST interface; only ``serve`` and ``demo`` start anything.

stdout is data, stderr is messages. Exit codes: 0 done, 1 failed, 2 usage, 4 not signed in.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from backend.cli.client import Client

FOLLOW_SECONDS = 0.5
ENDED = frozenset({"done", "failed", "interrupted"})

Url = Annotated[
    str, typer.Option("--url", envvar="MARCHLINE_URL", metavar="URL", help="The controller.", show_default=False)
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file", metavar="FILE", help="The operator token; else MARCHLINE_TOKEN, else var/operator.token."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON for scripts instead of a table.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's number, or 'last'.")]

app = typer.Typer(
    name="python -m backend",
    help="Marchline's controller, and the commands that talk to it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
runs = typer.Typer(help="List, make and look at runs.", invoke_without_command=True)
app.add_typer(runs, name="runs")


def main() -> None:
    """Run the command line."""
    app()


@contextmanager
def _client(url: str, token_file: Path | None) -> Iterator[Client]:
    """A client whose errors end the command with their sentence and exit code."""
    from backend.cli.client import Client, CliError
    from backend.cli.show import say

    try:
        with Client(url, token_file) as client:
            yield client
    except CliError as error:
        say(f"error: {error.text}")
        for line in error.errors:
            say(f"  {line}")
        raise typer.Exit(error.exit_code) from error


# ------------------------------------------------------------------------------------------------ starting


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1]; 0.0.0.0 for other hosts.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="[8470]; 0 takes a free one.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Tokens, database and checkpoints [var].")] = None,
    job_dir: Annotated[Path | None, typer.Option(help="Jobs are named by a path below it [.].")] = None,
    database_url: Annotated[str | None, typer.Option(help="Any SQLAlchemy URL [SQLite in the data directory].")] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A name by which browsers and hosts may call; may be repeated.")
    ] = None,
) -> None:
    """Run a controller until Ctrl-C. What is not given is taken from MARCHLINE_HOST, MARCHLINE_PORT and so on."""
    from backend import main as controller
    from backend.cli.show import say
    from backend.runtime.errors import SettingsError

    try:
        settings = controller.settings_from(
            host=host,
            port=port,
            data_dir=data_dir,
            job_dir=job_dir,
            database_url=database_url,
            allowed_hosts=tuple(allow_host) if allow_host else None,
        )
    except SettingsError as error:
        say(f"error: {error}")
        raise typer.Exit(2) from error
    raise typer.Exit(controller.serve(settings))


@app.command()
def demo(
    auto: Annotated[bool, typer.Option("--auto", help="Press Start without a person, once all have joined.")] = False,
    exit_: Annotated[bool, typer.Option("--exit", help="End with the run; 0 only if it is done.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write a summary.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for other hosts.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8470,
    data_dir: Annotated[Path, typer.Option(help="Tokens, database, checkpoints and logs.")] = Path("var"),
    job_dir: Annotated[Path, typer.Option(help="Where the job is, for the controller and the agents.")] = Path("."),
    job: Annotated[str, typer.Option(help="path/file.py:Name.")] = "examples/digits.py:Digits",
    epochs: Annotated[int, typer.Option(min=1)] = 12,
    batch_size: Annotated[int, typer.Option(min=1)] = 12,
    speeds: Annotated[str, typer.Option(help="Milliseconds per batch, one agent each.")] = "40,80,160",
) -> None:
    """A controller, three agents of unequal speed and a run, on this machine."""
    from backend.cli.client import CliError
    from backend.cli.show import say
    from backend.demo import DemoError, DemoOptions, run_demo

    options = DemoOptions(
        auto=auto,
        exit=exit_,
        json_path=json_path,
        host=host,
        port=port,
        data_dir=data_dir,
        job_dir=job_dir,
        job=job,
        epochs=epochs,
        batch_size=batch_size,
        speeds=_speeds(speeds),
    )
    try:
        code = run_demo(options)
    except (DemoError, CliError) as error:
        say(f"error: {error}")
        raise typer.Exit(1) from error
    raise typer.Exit(code)


def _speeds(text: str) -> tuple[float, ...]:
    try:
        speeds = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter("write milliseconds like 40,80,160", param_hint="--speeds") from error
    if not 2 <= len(speeds) <= 8 or not all(0 < speed <= 60_000 for speed in speeds):
        raise typer.BadParameter("two to eight agents, each above 0 and at most 60000 ms", param_hint="--speeds")
    return speeds


# --------------------------------------------------------------------------------------------------- runs


@runs.callback()
def _runs(context: typer.Context, url: Url = "", token_file: TokenFile = None, as_json: Json = False) -> None:
    if context.invoked_subcommand is None:
        list_runs(url=url, token_file=token_file, as_json=as_json)


@runs.command("list")
def list_runs(
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    url: Url = "",
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """All runs, newest first."""
    from backend.cli import show

    with _client(url, token_file) as client:
        items = client.get("runs", limit=limit)["items"]
        show.as_json(items) if as_json else show.runs(items)


@runs.command("view")
def view_run(run: Run, url: Url = "", token_file: TokenFile = None, as_json: Json = False) -> None:
    """One run, with its ranks."""
    _show_run(run, url, token_file, as_json)


@runs.command("create")
def create_run(
    job: Annotated[str, typer.Argument(metavar="[JOB]", help="path/file.py:Name below the job directory.")] = "",
    resume_from: Annotated[
        str,
        typer.Option(metavar="WHICH", help="Go on from a checkpoint: last, best, RUN, RUN:last, RUN:best, RUN:NUMBER."),
    ] = "",
    name: Annotated[str, typer.Option(help="Empty: two words are chosen.")] = "",
    param: Annotated[
        list[str] | None, typer.Option("--param", "-p", metavar="NAME=VALUE", help="A parameter of the job.")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="NAME=VALUE", help="Any other setting of a run.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="cpu_cadence, cpu_async, cpu_sync, nccl_cadence or nccl_sync.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="f32, bf16 or fp16: what steps are computed in.")] = None,
    epochs: Annotated[int | None, typer.Option()] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples per step, on each rank.")] = None,
    start_mode: Annotated[str | None, typer.Option(help="auto, manual or hybrid.")] = None,
    quorum: Annotated[int | None, typer.Option(help="Ranks needed to start.")] = None,
    target: Annotated[int | None, typer.Option(help="Ranks at which the run starts by itself.")] = None,
    url: Url = "",
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Make a run and open its join window."""
    from backend.cli import show

    named: dict[str, Any] = {"name": name or None, "mode": mode, "precision": precision, "start_mode": start_mode}
    named |= {"epochs": epochs, "batch_size": batch_size, "quorum": quorum, "target": target}
    body = {
        **({"job": job} if job or not resume_from else {}),
        **({"params": _pairs(param, "--param")} if param or not resume_from else {}),
        **({"resume_from": resume_from} if resume_from else {}),
        **_pairs(setting, "--set"),
        **{key: value for key, value in named.items() if value is not None},
    }
    with _client(url, token_file) as client:
        view = client.post("runs", body)
        if as_json:
            show.as_json(view)
        else:
            print(view["id"])
            show.say(f"Run {view['id']} {view['name']} waits for hosts. {view['window']['verdict']}")


@app.command()
def status(
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="A run's number, or 'last'.")] = "",
    url: Url = "",
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """One run, or without RUN the controller and what it serves now."""
    if run:
        _show_run(run, url, token_file, as_json)
        return
    from backend.cli import show

    with _client(url, token_file) as client:
        about = client.get("controller")
        items = [item for item in client.get("runs", limit=100)["items"] if item["phase"] not in ENDED]
        if as_json:
            show.as_json({"controller": about, "runs": items})
            return
        show.facts(
            [
                ("controller", f"{about['name']} {about['version']} at {client.url}"),
                ("live runs", str(len(items))),
                ("join with", about["join_command"]),
            ]
        )
        if items:
            show.runs(items)


def _show_run(run: str, url: str, token_file: Path | None, as_json: bool) -> None:
    from backend.cli import show

    with _client(url, token_file) as client:
        view = client.get(f"runs/{_number(client, run)}")
        show.as_json(view) if as_json else show.run(view)


# ---------------------------------------------------------------------------------------------- commanding


@app.command()
def start(run: Run, url: Url = "", token_file: TokenFile = None, as_json: Json = False) -> None:
    """Close the join window and form the world."""
    _command(run, "start", lambda view: f"Run {view['id']} starts.", url, token_file, as_json)


@app.command()
def stop(run: Run, url: Url = "", token_file: TokenFile = None, as_json: Json = False) -> None:
    """Finish the window of work, save, and end."""
    _command(run, "stop", lambda view: f"Run {view['id']} finishes its window and saves.", url, token_file, as_json)


@app.command()
def abort(
    run: Run,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: Url = "",
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """End at once; what was learned since the last checkpoint is lost."""
    if not yes and sys.stdin.isatty() and sys.stdout.isatty():
        typer.confirm(f"Abort run {run}, losing what was learned since its last checkpoint?", abort=True, err=True)
    _command(run, "abort", lambda view: f"Run {view['id']} is aborted.", url, token_file, as_json)


def _command(
    run: str, act: str, words: Callable[[dict[str, Any]], str], url: str, token_file: Path | None, as_json: bool
) -> None:
    from backend.cli import show

    with _client(url, token_file) as client:
        view = client.post(f"runs/{_number(client, run)}/{act}")
        if as_json:
            show.as_json(view)
        else:
            show.say(words(view))


@app.command()
def save(run: Run, url: Url = "", token_file: TokenFile = None, as_json: Json = False) -> None:
    """Save a checkpoint when the round at hand is closed, and go on."""
    _command(run, "checkpoints", lambda view: f"Run {view['id']} saves after its round.", url, token_file, as_json)


@app.command()
def resume(
    run: Run,
    which: Annotated[str, typer.Option("--from", metavar="WHICH", help="last, best, or a number.")] = "last",
    setting: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="NAME=VALUE", help="A setting to change.")
    ] = None,
    url: Url = "",
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Make a run that goes on from a checkpoint of RUN; its hosts have to join again."""
    from backend.cli import show

    with _client(url, token_file) as client:
        view = client.post("runs", {"resume_from": f"{_number(client, run)}:{which}"} | _pairs(setting, "--set"))
        origin = view["resumed_from"]
        show.as_json(view) if as_json else print(view["id"])
        show.say(f"It goes on from checkpoint {origin['checkpoint']} of run {origin['run']} and waits for hosts.")


@app.command()
def events(
    run: Run,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    url: Url = "",
    token_file: TokenFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """What happened, oldest first."""
    from backend.cli import show

    with _client(url, token_file) as client:
        number = _number(client, run)
        if follow:
            show.say(f"Following run {number} to its end; Ctrl-C stops following.")
        after = 0
        while True:
            # Asked for before the events: what the end wrote is then among them.
            ended = not follow or client.get(f"runs/{number}")["phase"] in ENDED
            for items in client.pages(f"runs/{number}/events", after=after, key="id"):
                after = items[-1]["id"]
                for row in items:
                    show.as_json_line(row) if as_json else show.event(row)
            if ended:
                return
            time.sleep(FOLLOW_SECONDS)


@app.command()
def link(url: Url = "", token_file: TokenFile = None) -> None:
    """Print a one-time address that signs a browser in."""
    with _client(url, token_file) as client:
        print(client.post("session/ticket")["url"])


def _number(client: Client, run: str) -> int:
    from backend.cli.client import CliError, UsageError

    if run == "last":
        items = client.get("runs", limit=1)["items"]
        if not items:
            raise CliError("There is no run yet.")
        return int(items[0]["id"])
    if not (run.isascii() and run.isdigit() and 0 < int(run) < 1 << 62):
        raise UsageError(f"{run!r} is no run; write its number, or 'last'.")
    return int(run)


def _pairs(given: list[str] | None, option: str) -> dict[str, Any]:
    """``NAME=VALUE``: the value is JSON if it reads as such, else text."""
    pairs: dict[str, Any] = {}
    for item in given or []:
        name, equals, text = item.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{item!r} is not NAME=VALUE", param_hint=option)
        try:
            pairs[name] = json.loads(text)
        except ValueError:
            pairs[name] = text
    return pairs
