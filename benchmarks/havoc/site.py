"""A controller and its hosts, as their users start them, each process with its log; for ``world`` and ``recovery``.

Every process carries the world's mark in its environment, which its children inherit, so that what it leaves behind can
be told from everybody else's.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from backend.cli.client import Client
from benchmarks.entries import JOB_DIR, ROOT

MARK = "MARCHLINE_HAVOC_WORLD"
ENDED = frozenset({"done", "failed", "interrupted"})
POLL_SECONDS = 0.1
START_SECONDS = 90.0
END_SECONDS = 25.0
"""what an agent or a controller may take to leave; more than any wait on its way"""
PORTS = (20_000, 32_000)
"""below those that the system gives to outgoing connections, so that a restarted controller finds its own again"""

T = TypeVar("T")


class Hung(Exception):
    """Something that should have happened within its bound did not; the text says what."""


class Halted(Exception):
    """The campaign is told to end."""


@dataclass(slots=True)
class Running:
    """A process that was started here."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.popen.poll() is None

    def children(self) -> list[psutil.Process]:
        """All below it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return list(psutil.Process(self.popen.pid).children(recursive=True))
        return []

    def relay(self) -> psutil.Process | None:
        """Its relay, while it runs."""
        return next((child for child in self.children() if "worker.relay" in command_of(child)), None)

    def ranks(self) -> list[psutil.Process]:
        """Its ranks, in the order in which they were started."""
        found = [child for child in self.children() if "worker.rank" in command_of(child)]
        return sorted(found, key=lambda child: child.pid)

    def words(self) -> str:
        """What it printed."""
        return self.log.read_text(errors="replace")


@dataclass
class Site:
    """One controller, which can be killed and started again at the same address, and hosts. ``halt`` ends each wait."""

    place: Path
    halt: threading.Event = field(default_factory=threading.Event)
    address: str = "127.0.0.1"
    """where hosts reach it"""
    job_dir: Path = JOB_DIR
    agents: list[Running] = field(default_factory=list)
    controllers: list[Running] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.data_dir = self.place / "var"
        self.data_dir.mkdir(exist_ok=True)
        self.port = _port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.mark = self.place.name
        self._client: Client | None = None

    @property
    def controller(self) -> Running:
        """The one that was started last."""
        return self.controllers[-1]

    @property
    def client(self) -> Client:
        """The interface, with the operator's token."""
        if self._client is None:
            self._client = Client(self.url, self.data_dir / "operator.token")
        return self._client

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """Of every process: one thread, no GPU, nothing of the tester's own settings."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("MARCHLINE_")}
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}
        return kept | own | {MARK: self.mark, "TMPDIR": str(self.place)} | dict(more)

    def serve(self, environment: Mapping[str, str] | None = None) -> None:
        """Start the controller, or start it again, and wait until it is ready. Raises ``Hung``."""
        self._client = None
        where = ["--port", str(self.port), "--data-dir", str(self.data_dir), "--job-dir", str(self.job_dir)]
        if self.address != "127.0.0.1":
            where += ["--host", "0.0.0.0", "--allow-host", self.address]
        name = f"controller{len(self.controllers)}"
        self.controllers.append(self._start(name, ["-m", "backend", "serve", *where], environment or {}))
        self.wait(self.ready, "the controller to be ready", START_SECONDS)

    def ready(self) -> bool:
        """Whether the controller serves. Raises ``Hung`` when it has ended."""
        if not self.controller.alive:
            raise Hung(f"the controller ended with code {self.controller.popen.returncode} instead of serving")
        return self.client.is_ready()

    def host(
        self,
        name: str,
        ranks: int,
        *options: str,
        join: str = "",
        inside: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Running:
        """Start an agent that offers so many ranks; ``inside`` becomes the program."""
        token = str(self.data_dir / "join.token")
        where = ["--join", join or self.url, "--token-file", token, "--job-dir", str(self.job_dir)]
        arguments = ["-m", "worker", *where, "--name", name, "--devices", f"cpu:{ranks}", *options]
        running = self._start(f"{name}-{len(self.agents)}", arguments, environment or {}, inside)
        self.agents.append(running)
        return running

    def _start(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str], inside: Sequence[str] = ()
    ) -> Running:
        log = self.place / f"{name}.log"
        # Nothing outlives this process, however it ends, where the system has a way.
        leash = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
        with log.open("wb") as output:
            popen = subprocess.Popen(
                [*leash, *inside, sys.executable, *arguments],
                cwd=ROOT,
                env=self.environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches us alone
            )
        return Running(name, popen, log)

    def view(self, run: int) -> dict[str, Any]:
        """The run as the interface shows it."""
        view: dict[str, Any] = self.client.get(f"runs/{run}")
        return view

    def until(
        self, run: int, true: Callable[[dict[str, Any]], Any], what: str, seconds: float = START_SECONDS
    ) -> dict[str, Any]:
        """The first view of the run for which ``true`` holds. Raises ``Hung``."""

        def look() -> dict[str, Any] | None:
            view = self.view(run)
            return view if true(view) else None

        return self.wait(look, what, seconds)

    def wait(self, look: Callable[[], T | None], what: str, seconds: float) -> T:
        """Look until there is something. Raises ``Hung``, ``Halted``."""
        deadline = time.monotonic() + seconds
        while True:
            found = look()
            if found:
                return found
            if self.halt.is_set():
                raise Halted
            if time.monotonic() > deadline:
                raise Hung(f"waited {seconds:g} s for {what}")
            time.sleep(POLL_SECONDS)

    def stop_agents(self, seconds: float = END_SECONDS) -> list[str]:
        """Wait for the agents to leave by themselves; who did not, by name. They are killed."""
        return _ended(self.agents, seconds)

    def stop_controller(self, seconds: float = END_SECONDS) -> list[str]:
        """SIGTERM to the controller; its name if it did not leave in time."""
        if self.controllers and self.controller.alive:
            self.controller.popen.terminate()
        return _ended(self.controllers, seconds)

    def close(self) -> None:
        """End everything that still runs, bluntly."""
        self._client = None
        for running in (*self.agents, *self.controllers):
            if running.alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(running.popen.pid, signal.SIGCONT)
                running.popen.terminate()
        _ended([*self.agents, *self.controllers], 5.0)
        for process in marked(self.mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _ended(group: Sequence[Running], seconds: float) -> list[str]:
    deadline = time.monotonic() + seconds
    late = []
    for running in group:
        try:
            running.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(running.name)
            running.popen.kill()
            running.popen.wait()
    return late


def command_of(process: psutil.Process) -> str:
    """Its command line; empty once it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return " ".join(process.cmdline())
    return ""


def marked(mark: str) -> list[psutil.Process]:
    """Living processes of a world, whoever their parent is."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                process = psutil.Process(int(entry.name))
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


def _port() -> int:
    """One that nobody listens at, and that no other world of this process has had."""
    while True:
        port = random.randrange(*PORTS)
        with _lock, socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port


_lock = threading.Lock()
_given: set[int] = set()
