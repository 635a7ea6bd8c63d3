"""How ``benchmarks.heterogeneous`` runs an entry: Marchline as its users start it, a peer as a process a rank.

An entry's outcome is a ``Traces``; ``EntryFailed`` says why there is none. Whatever was started has ended by then.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from backend.cli.client import Client, CliError
from backend.demo import NAMES, READY_SECONDS, WARM_UP_ROUNDS, Children, DemoError
from benchmarks.figures import EntryFailed, Window, window_of_rounds, window_of_steps
from benchmarks.jobs import images
from benchmarks.jobs.images import DATA_VARIABLE, WEIGHTS_VARIABLE

ROOT = Path(__file__).parent.parent
JOB_DIR = ROOT / "benchmarks" / "jobs"
JOB = "fashion.py:Fashion"
ENDED = frozenset({"done", "failed", "interrupted"})
POLL_SECONDS = 0.25
INTERFACES = {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo"}
"""for libraries that connect ranks directly: all of them are on this machine"""
GRACE_SECONDS = 5.0
"""what a peer's ranks get from the moment at which one failed, and from SIGTERM to SIGKILL"""


@dataclass(frozen=True, slots=True)
class Task:
    """What every entry has to do. ``place`` is the entry's own directory, ``limit`` seconds it may take."""

    ms: tuple[float, ...]
    batch_size: int
    epochs: int
    samples: int
    """of all epochs"""
    data: Path
    place: Path
    limit: float
    gpus: int = 0
    """each rank has one of these to itself, in turn; 0: ranks are on CPUs"""

    @property
    def devices(self) -> tuple[str, ...]:
        """What the agents offer, in turn."""
        return tuple(str(gpu) for gpu in range(self.gpus)) or ("cpu:1",)

    @property
    def weights(self) -> Path:
        """Where the first rank notes weights."""
        return self.place / "weights"

    def environment(self, *, notes: bool) -> dict[str, str]:
        """Of a process that trains, or that starts such: one thread, our packages, the data."""
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", DATA_VARIABLE: str(self.data)} | INTERFACES
        return own | ({WEIGHTS_VARIABLE: str(self.weights)} if notes else {})


@dataclass(frozen=True, slots=True)
class Traces:
    """What an entry did. Moments are Unix seconds, from the first batch's start to the end of the last."""

    started: float
    ended: float
    window: Window
    notes: dict[str, Any]


# ------------------------------------------------------------------------------------------------ Marchline


@dataclass(frozen=True, slots=True)
class Host:
    """An agent of a run; ``emulate_ms`` a batch, none for the device's own speed."""

    name: str
    devices: str
    emulate_ms: float | None
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class Show:
    """A run as a user would have it: ``settings`` beyond job and world are as ``POST runs`` takes them. It must be over
    at ``deadline`` (monotonic); ``place`` is its own directory."""

    place: Path
    job: str
    job_dir: Path
    settings: dict[str, Any]
    hosts: tuple[Host, ...]
    deadline: float


@dataclass(frozen=True, slots=True)
class Played:
    """What a run that is done left: its view and its rounds."""

    view: dict[str, Any]
    rounds: list[dict[str, Any]]
    data_dir: Path

    def by_speed(self, window: Window) -> Window:
        """The window with its ranks as the hosts were named, fastest first; hosts join in an order of their own."""
        by_speed = sorted(self.view["ranks"], key=lambda rank: rank["emulated_ms"])
        return replace(window, batches=tuple(window.batches[rank["rank"]] for rank in by_speed))


def play(show: Show) -> Played:
    """A controller and agents, over the REST interface, until the run is done. Raises ``EntryFailed``."""
    data_dir = show.place / "var"
    data_dir.mkdir()
    url = f"http://127.0.0.1:{free_port()}"
    try:
        with Children(show.place) as children, Client(url, data_dir / "operator.token") as client:
            _start_controller(url, data_dir, show.job_dir, children, client)
            run = client.post("runs", _run_of(show))["id"]
            _start_agents(url, show, children, client)
            view = _until_ended(run, children, client, show.deadline)
            rounds = [row for page in client.pages(f"runs/{run}/rounds", after=-1, key="round") for row in page]
    except (DemoError, CliError) as error:
        raise EntryFailed(str(error)) from error
    if view["phase"] != "done":
        raise EntryFailed(f"the run ended as {view['phase']}: {view['reason']}")
    return Played(view, rounds, data_dir)


def run_marchline(mode: str, task: Task) -> Traces:
    """An agent for each rank; nothing but the work and who takes part is set: the rest are the defaults."""
    hosts = tuple(
        Host(name, task.devices[index % len(task.devices)], ms, task.environment(notes=index == 0))
        for index, (name, ms) in enumerate(zip(NAMES, task.ms, strict=False))
    )
    settings = {"mode": mode, "batch_size": task.batch_size, "epochs": task.epochs}
    played = play(Show(task.place, JOB, JOB_DIR, settings, hosts, time.monotonic() + task.limit))
    rounds = played.rounds
    moments = [datetime.fromisoformat(row["at"]).timestamp() for row in rounds]
    window = played.by_speed(window_of_rounds(rounds, moments, len(task.ms), WARM_UP_ROUNDS))
    _note_checkpoint(played, task, moments[-1])
    allotments = rounds[-1]["planned"] or rounds[-2]["planned"]
    return Traces(moments[0], moments[-1], window, {"rounds": len(rounds), "last_allotments": allotments})


def _note_checkpoint(played: Played, task: Task, moment: float) -> None:
    """The run's last checkpoint as the last noted weights: what a user would take home."""
    tensors = load_file(played.data_dir / played.view["checkpoints"][-1]["path"])
    names = [name for name, _ in images.network().named_parameters()]
    np.save(task.weights / f"{int(moment * 1e9)}.npy", np.concatenate([tensors[name].ravel() for name in names]))


def _start_controller(url: str, data_dir: Path, job_dir: Path, children: Children, client: Client) -> None:
    place = ["--port", url.rpartition(":")[2], "--data-dir", str(data_dir), "--job-dir", str(job_dir)]
    children.start("controller", ["-m", "backend", "serve", *place], {"PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + READY_SECONDS
    while not client.is_ready():
        children.check()
        if time.monotonic() > deadline:
            raise EntryFailed(f"the controller was not ready within {READY_SECONDS:g} s")
        time.sleep(POLL_SECONDS)


def _run_of(show: Show) -> dict[str, Any]:
    world = len(show.hosts)
    who = {"start_mode": "auto", "quorum": world, "target": world}
    return {"job": show.job, "name": "bench"} | who | show.settings


def _start_agents(url: str, show: Show, children: Children, client: Client) -> None:
    token = {"MARCHLINE_JOIN_TOKEN": client.get("controller")["join_token"]}
    for host in show.hosts:
        options = ["--join", url, "--name", host.name, "--devices", host.devices, "--job-dir", str(show.job_dir)]
        if host.emulate_ms is not None:
            options += ["--emulate-ms-per-batch", f"{host.emulate_ms:g}"]
        children.start(host.name, ["-m", "worker", *options], host.environment | token)


def _until_ended(run: int, children: Children, client: Client, deadline: float) -> dict[str, Any]:
    while True:
        view: dict[str, Any] = client.get(f"runs/{run}")
        if view["phase"] in ENDED:
            return view
        children.check(allowed=lambda name: name != "controller")
        if time.monotonic() > deadline:
            raise EntryFailed(f"it was not through in time; its phase was {view['phase']}")
        time.sleep(POLL_SECONDS)


# ---------------------------------------------------------------------------------------------------- peers


def run_peer(module: str, python: str, settings: dict[str, str], task: Task) -> Traces:
    """``python -m benchmarks.peers.MODULE`` with ``settings`` in its environment, a process a rank."""
    np.full(len(task.ms), -1, dtype=np.int64).tofile(task.place / "done")
    port = free_port()
    ranks = [
        _start_rank([python, "-m", f"benchmarks.peers.{module}"], settings, task, rank, port)
        for rank in range(len(task.ms))
    ]
    try:
        late = _wait(ranks, time.monotonic() + task.limit)
    finally:
        _end(ranks)
    reports = [_report(task.place / f"rank{rank}.log") for rank in range(len(ranks))]
    if late or any(process.returncode for process in ranks) or None in reports:
        words = next((_last_words(task.place / f"rank{rank}.log") for rank in _suspects(ranks, reports)), "")
        raise EntryFailed(f"it was not through within {task.limit:g} s; {words}" if late else words)
    told = [report for report in reports if report is not None]
    started = max(report["started"] for report in told)
    window = window_of_steps([report["ends"] for report in told], started, task.batch_size)
    steps = [len(report["ends"]) for report in told]
    return Traces(started, max(report["ends"][-1] for report in told), window, {"steps": steps})


def _start_rank(
    program: list[str], settings: dict[str, str], task: Task, rank: int, port: int
) -> subprocess.Popen[bytes]:
    own = {"rank": rank, "world": len(task.ms), "ms": task.ms[rank], "batch-size": task.batch_size}
    device = f"cuda:{rank % task.gpus}" if task.gpus else "cpu"
    shared = {"samples": task.samples, "port": port, "place": task.place, "device": device}
    options = [text for name, value in (own | shared).items() for text in (f"--{name}", str(value))]
    with (task.place / f"rank{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [*program, *options, "--json"],
            cwd=task.place,
            env={**os.environ, **settings, **task.environment(notes=rank == 0)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, so that its own children end with it
        )


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Until all have ended; a rank that fails leaves the others ``GRACE_SECONDS``. True when the time was up first."""
    failed = False
    while any(process.poll() is None for process in ranks):
        if not failed and any(process.returncode for process in ranks):
            failed, deadline = True, min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            return not failed
        time.sleep(POLL_SECONDS / 5)
    return False


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what is left of each rank's process group, its own children included."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        deadline = time.monotonic() + (GRACE_SECONDS if number == signal.SIGTERM else 60)
        for process in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


def _report(log: Path) -> dict[str, Any] | None:
    """The last JSON line; a peer's own threads may have written after it."""
    for line in reversed(log.read_text(errors="replace").splitlines()):
        if line.startswith('{"rank"'):
            report: dict[str, Any] = json.loads(line)
            return report
    return None


def _suspects(ranks: Sequence[subprocess.Popen[bytes]], reports: Sequence[Any]) -> list[int]:
    """Ranks in the order in which their last words may explain a failure: those that ended by themselves first."""
    numbers = range(len(ranks))
    return sorted(
        (rank for rank in numbers if ranks[rank].returncode or reports[rank] is None),
        key=lambda rank: ((ranks[rank].returncode or 0) <= 0, rank),
    )


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "it said nothing"


def free_port() -> int:
    """A port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
