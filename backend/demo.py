"""The demo: a controller, three agents of unequal speed and one run, on this machine, until Ctrl-C.

Everything goes the way it goes between machines: the agents are ordinary workers that dial in over loopback, the run is
made and started by the REST interface. Only their speeds are emulated, and shown as such wherever they appear.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, Self

from backend.cli import show
from backend.cli.client import Client

ENDED = frozenset({"done", "failed", "interrupted"})
POLL_SECONDS = 0.25
READY_SECONDS = 30.0
JOIN_SECONDS = 120.0
STOP_SECONDS = 15.0
"""What children get from SIGTERM to SIGKILL."""
WARM_UP_ROUNDS = 3
"""The scheduler learns the speeds in these; efficiency is that of the rounds after them."""
NAMES = ("swift", "steady", "slow", "fourth", "fifth", "sixth", "seventh", "eighth")

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo was asked for. ``speeds`` are milliseconds per batch, one agent each."""

    auto: bool = False
    exit: bool = False
    json_path: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8470
    data_dir: Path = Path("var")
    job_dir: Path = Path(".")
    job: str = "examples/digits.py:Digits"
    epochs: int = 12
    batch_size: int = 12
    """two windows of some seconds an epoch: long against a round, short enough to watch"""
    speeds: tuple[float, ...] = (40.0, 80.0, 160.0)


class DemoError(Exception):
    """Why the demo cannot go on, with the cure."""


class _Stop(BaseException):
    """SIGINT, SIGTERM or SIGHUP: not an error, so that nothing but the end handles it."""


@dataclass(slots=True)
class _Child:
    name: str
    log: Path
    process: subprocess.Popen[bytes]


@dataclass(slots=True)
class Children:
    """The demo's processes. Leaving the block ends them all, agents first, whatever happened inside."""

    log_dir: Path
    _children: list[_Child] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Agents first: they say goodbye to a controller that is still there. The controller is the first child.
        for group in (self._children[1:], self._children[:1]):
            _end([child.process for child in group])

    def start(self, name: str, arguments: Sequence[str], environment: dict[str, str] | None = None) -> None:
        """Start ``python ARGUMENTS`` with its output in a log file. The child does not outlive this process."""
        log = self.log_dir / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # Ctrl-C reaches us alone; we end them in order
                preexec_fn=_die_with_parent if _libc else None,
            )
        self._children.append(_Child(name, log, process))

    def check(self, allowed: Callable[[str], bool] = lambda name: False) -> None:
        """Raise ``DemoError`` with its last words when a child has ended that should not have."""
        for child in self._children:
            code = child.process.poll()
            if code is not None and not allowed(child.name):
                raise DemoError(f"{child.name} ended with code {code}: {_last_words(child.log)}")


def run_demo(options: DemoOptions) -> int:
    """Run it; the exit code: 0 when it was stopped by hand, or with ``exit`` only if the run is done."""
    url = _url(options)
    log_dir = options.data_dir / "demo"
    log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    handlers = {number: signal.signal(number, _on_signal) for number in _signals()}
    try:
        with Children(log_dir) as children, Client(url, options.data_dir / "operator.token") as client:
            return _play(options, url, children, client)
    except _Stop:
        show.say("\nStopped; every process of the demo has ended.")
        return 1 if options.exit else 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _play(options: DemoOptions, url: str, children: Children, client: Client) -> int:
    _start_controller(options, url, children, client)
    run = client.post("runs", _run_of(options))
    _print_addresses(options, run, client)
    view = _start_agents(options, run["id"], children, client)
    if options.auto and view["window"]["open"] and not view["window"]["armed"]:
        client.post(f"runs/{run['id']}/start")
        show.say("All agents have joined; started.")
    view = _until_ended(run["id"], children, client)
    summary = summarize(view, _rounds(client, run["id"]))
    if options.json_path is not None:
        _write_json(options.json_path, summary)
    _print_summary(summary)
    if options.exit:
        return 0 if view["phase"] == "done" else 1
    show.say("The page stays until Ctrl-C; a new run of yours will find the three agents waiting.")
    while True:
        time.sleep(POLL_SECONDS)
        children.check()


# ---------------------------------------------------------------------------------------------------- parts


def _url(options: DemoOptions) -> str:
    """Where the controller will be for this machine. Raises ``DemoError`` when its port is taken."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
    return f"http://[{host}]:{_port(options)}" if ":" in host else f"http://{host}:{_port(options)}"


def _port(options: DemoOptions) -> int:
    with socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((options.host, options.port))
        except OSError as error:
            raise DemoError(
                f"Port {options.port} on {options.host} cannot be used ({error.strerror}); stop what listens there, or "
                "choose another with --port (0 takes a free one)."
            ) from error
        return int(probe.getsockname()[1])


def _start_controller(options: DemoOptions, url: str, children: Children, client: Client) -> None:
    place = ["--host", options.host, "--port", url.rpartition(":")[2]]
    folders = ["--data-dir", str(options.data_dir), "--job-dir", str(options.job_dir)]
    children.start("controller", ["-m", "backend", "serve", *place, *folders])
    deadline = time.monotonic() + READY_SECONDS
    while not client.is_ready():
        children.check()
        if time.monotonic() > deadline:
            raise DemoError(f"The controller was not ready within {READY_SECONDS:g} s; see {children.log_dir}.")
        time.sleep(POLL_SECONDS)


def _run_of(options: DemoOptions) -> dict[str, Any]:
    return {
        "job": options.job,
        "name": "demo",
        "start_mode": "manual",
        "quorum": len(options.speeds),
        "window_seconds": 3600.0,
        "cap_seconds": 3600.0,
        "epochs": options.epochs,
        "batch_size": options.batch_size,
    }


def _start_agents(options: DemoOptions, run_id: int, children: Children, client: Client) -> dict[str, Any]:
    """One agent after the other, the fastest first: ranks are numbered as hosts join, so rank 0 is always the fastest.
    Answers the run's view with all of them in, or sooner when somebody else closed the window."""
    # Single-threaded ranks: three of them share this machine, and a step of theirs is small.
    environment = {"MARCHLINE_JOIN_TOKEN": client.get("controller")["join_token"], "OMP_NUM_THREADS": "1"}
    view: dict[str, Any] = {}
    for count, (name, speed) in enumerate(zip(NAMES, options.speeds, strict=False), start=1):
        arguments = ["--join", client.url, "--name", name, "--devices", "cpu:1", "--job-dir", str(options.job_dir)]
        persist = [] if options.exit else ["--persist"]
        emulate = ["--emulate-ms-per-batch", f"{speed:g}"]
        children.start(name, ["-m", "worker", *arguments, *emulate, *persist], environment)
        view = _joined(run_id, count, children, client)
        if not view["window"]["open"]:
            break
    return view


def _joined(run_id: int, count: int, children: Children, client: Client) -> dict[str, Any]:
    """The run's view once so many ranks are in, or its window is closed."""
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        view: dict[str, Any] = client.get(f"runs/{run_id}")
        window = view["window"]
        if window["joined_ranks"] >= count or not window["open"]:
            return view
        children.check()
        if time.monotonic() > deadline:
            refusals = "; ".join(item["reason"] for item in window["refusals"]) or "nobody was refused"
            raise DemoError(f"Not all agents joined within {JOIN_SECONDS:g} s ({refusals}); see {children.log_dir}.")
        time.sleep(POLL_SECONDS)


def _until_ended(run_id: int, children: Children, client: Client) -> dict[str, Any]:
    """The run's view once it has ended. Agents may die on the way; the controller may not."""
    while True:
        view: dict[str, Any] = client.get(f"runs/{run_id}")
        if view["phase"] in ENDED:
            return view
        children.check(allowed=lambda name: name != "controller")
        time.sleep(POLL_SECONDS)


def _rounds(client: Client, run_id: int) -> list[dict[str, Any]]:
    return [row for page in client.pages(f"runs/{run_id}/rounds", after=-1, key="round") for row in page]


def summarize(view: dict[str, Any], rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """What a run came to, from its view and its rounds, in their order.

    ``batches_per_second`` and ``efficiency`` are of the rounds after the third, by the wall clock between the third's
    closing and the last one's: pauses between rounds count. None when there are no such rounds.
    """
    measured = rounds[WARM_UP_ROUNDS:]
    rate = None
    if measured:
        wall = (_moment(measured[-1]) - _moment(rounds[WARM_UP_ROUNDS - 1])).total_seconds()
        batches = sum(sum((row["realized"] or {}).values()) for row in measured)
        rate = batches / wall if wall > 0 else None
    emulated = [rank["emulated_ms"] for rank in view["ranks"]]
    ideal = sum(1000.0 / ms for ms in emulated) if emulated and all(emulated) else None
    metrics = (view["eval"] or {}).get("metrics", {})
    return {
        "run_id": view["id"],
        "phase": view["phase"],
        "reason": view["reason"],
        "world_size": view["world_size"],
        "epochs": len(view["samples_accepted"]),
        "rounds": len(rounds),
        "accuracy": metrics.get("accuracy"),
        "loss": view["loss"],
        "allotments": (rounds[-1]["planned"] if rounds else None) or {},
        "batches_per_second": rate,
        "ideal_batches_per_second": ideal,
        "efficiency": rate / ideal if rate and ideal else None,
        "samples_accepted": view["samples_accepted"],
        "deaths": len(view["deaths"]),
        "checkpoint": view["checkpoints"][-1]["path"] if view["checkpoints"] else None,
        "seconds": view["seconds"],
    }


def _moment(row: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(row["at"])


# ---------------------------------------------------------------------------------------------------- words


def _print_addresses(options: DemoOptions, run: dict[str, Any], client: Client) -> None:
    about = client.get("controller")
    ticket = client.post("session/ticket")
    speeds = ", ".join(f"{name} {speed:g} ms" for name, speed in zip(NAMES, options.speeds, strict=False))
    port = client.url.rpartition(":")[2]
    show.say(f"Run {run['id']} ({options.job}) waits for {len(options.speeds)} emulated devices: {speeds} per batch.\n")
    show.say("Open it once, within ten minutes; the browser stays signed in:")
    print(f"  {ticket['url']}", flush=True)
    show.say("\nAnother host joins with (same job file below the directory where it is called):")
    if about["loopback_only"]:
        show.say(
            f"  ssh -N -L {port}:127.0.0.1:{port} {socket.gethostname()} &    # this demo listens on loopback only"
        )
    show.say(f"  {about['join_command']}")
    show.say(f"\nLogs are in {options.data_dir / 'demo'}. Ctrl-C ends everything.\n")


def _print_summary(summary: dict[str, Any]) -> None:
    facts = {name: json.dumps(value) if isinstance(value, dict | list) else value for name, value in summary.items()}
    for name in ("accuracy", "loss", "batches_per_second", "ideal_batches_per_second", "efficiency", "seconds"):
        facts[name] = show.number(summary[name])
    show.facts(list(facts.items()))


def _write_json(path: Path, summary: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise DemoError(f"The summary cannot be written to {path}: {error.strerror}.") from error


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else 'it said nothing'} (all of it is in {log})"


# ------------------------------------------------------------------------------------------------ processes


def _signals() -> tuple[signal.Signals, ...]:
    """SIGHUP is one of them unless it is ignored already, as under nohup."""
    asked = (signal.SIGINT, signal.SIGTERM)
    return asked if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*asked, signal.SIGHUP)


def _on_signal(_number: int, _frame: FrameType | None) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the end is under way; it takes its bounded time
    raise _Stop


def _die_with_parent() -> None:
    """In the child before it becomes itself: it gets SIGTERM when this process is gone, however it went."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """SIGTERM to all, SIGKILL to those that remain; returns when none is left."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
