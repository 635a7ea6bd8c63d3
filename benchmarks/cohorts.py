"""Marchline as its users start it, made to do rounds when told: for ``benchmarks.reduce``.

A controller, an agent a host, relays and ranks as those start them, over the REST interface. The job's steps cost
nothing and wait at a gate (``jobs/hollow.py``), so that rounds come back to back while it is open, else not at all.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from backend.cli.client import Client, CliError
from backend.demo import READY_SECONDS, Children, DemoError
from benchmarks.entries import ENDED, JOB_DIR, POLL_SECONDS, ROOT, free_port
from benchmarks.figures import EntryFailed
from benchmarks.netns import Host, Network

JOB = "hollow.py:Hollow"
FORMING_SECONDS = 180.0
ROUND_SECONDS = 120.0
LOOK_SECONDS = 2.0
"""between two looks whether everybody still lives"""
PULSE = {
    "tick_p50": ("marchline_run_tick_latency_seconds", 'quantile="0.5"'),
    "tick_p99": ("marchline_run_tick_latency_seconds", 'quantile="0.99"'),
    "tick_max": ("marchline_run_tick_latency_seconds", 'quantile="1"'),
    "loop_lag_max": ("marchline_event_loop_lag_worst_seconds", ""),
    "heartbeat_late_max": ("marchline_host_heartbeat_worst_late_seconds", ""),
    "heartbeats_late": ("marchline_host_heartbeats_late_total", ""),
    "heard_late_max": ("marchline_host_hears_worst_late_seconds", ""),
}
"""figure -> family and label in the controller's metrics"""
BYTES = 4
"""of an element"""


@dataclass(frozen=True, slots=True)
class Wish:
    """What to start. ``hosts`` has the number of ranks of each, ``places`` where each is (none: this namespace)."""

    megabytes: float
    hosts: tuple[int, ...]
    network: Network | None = None
    places: tuple[Host, ...] = ()
    controller: Host | None = None
    """where the controller is; none: this namespace"""
    stream: bool = False
    """no shared memory between hosts and controller"""
    settings: dict[str, Any] = field(default_factory=dict)
    """of the run, beyond job and world"""
    gated: bool = True

    @property
    def world(self) -> int:
        """Ranks."""
        return sum(self.hosts)

    @property
    def elements(self) -> int:
        """Of the model; a megabyte is 10^6 bytes."""
        return round(self.megabytes * 1e6 / BYTES)


class Cohort:
    """A cohort at the gate: ``go`` lets it do rounds. Raises ``EntryFailed`` when something is wrong with it."""

    def __init__(self, wish: Wish, *, samples: int = 1_000_000) -> None:
        self.wish = wish
        self._samples = samples
        self._stack = ExitStack()
        self._seen = -1
        """the last round that was read"""
        self._told = 0
        """steps that the ranks were let through, each"""
        self.run = 0

    def __enter__(self) -> Self:
        try:
            self._place = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            with _as_failure():
                self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(CliError, AttributeError):
            self.client.post(f"runs/{self.run}/abort")
        self._stack.close()

    # ------------------------------------------------------------------------------------------------- rounds

    def go(self, rounds: int) -> list[dict[str, Any]]:
        """Do so many rounds back to back; their rows. Returns when the last one is over and every rank waits again."""
        for go in self._gates:
            os.write(go, b"." * rounds)
        self._told += rounds
        self._wait_at_gate(rounds, ROUND_SECONDS * rounds)
        rows = self._rows(rounds)
        if len(rows) != rounds:
            raise EntryFailed(f"{rounds} rounds were asked for and {len(rows)} came")
        return rows

    def rows(self) -> list[dict[str, Any]]:
        """Rounds that were closed since the last call."""
        with _as_failure():
            pages = self.client.pages(f"runs/{self.run}/rounds", after=self._seen, key="round")
            found = [row for page in pages for row in page]
        if found:
            self._seen = found[-1]["round"]
        return found

    def wait_for_rounds(self, rounds: int) -> None:
        """Until a cohort without a gate has closed so many."""
        deadline = time.monotonic() + FORMING_SECONDS + ROUND_SECONDS * rounds
        while (self.view()["round"] or 0) < rounds:
            if time.monotonic() > deadline:
                raise EntryFailed(f"{rounds} rounds did not come in time")
            self.check()
            time.sleep(POLL_SECONDS)
        self.rows()

    def pulse(self) -> dict[str, float]:
        """How promptly the controller served the run and its hosts, from its metrics, by name; seconds and counts."""
        headers = {"Authorization": f"Bearer {self._token_file.read_text().strip()}"}
        with urllib.request.urlopen(urllib.request.Request(f"{self.client.url}/metrics", headers=headers)) as answer:
            text: str = answer.read().decode()
        return pulse_of(text)

    def view(self) -> dict[str, Any]:
        """The run as the interface shows it."""
        with _as_failure():
            view: dict[str, Any] = self.client.get(f"runs/{self.run}")
            return view

    def check(self) -> None:
        """Raise ``EntryFailed`` when a process or the run has ended."""
        with _as_failure():
            self.children.check()
        view = self.view()
        if view["phase"] in ENDED:
            raise EntryFailed(f"the run ended as {view['phase']}: {view['reason']}")

    def _rows(self, wanted: int) -> list[dict[str, Any]]:
        """The store writes behind the rounds."""
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + READY_SECONDS
        while len(found) < wanted and time.monotonic() < deadline:
            found += self.rows()
            if len(found) < wanted:
                time.sleep(POLL_SECONDS / 5)
        return found

    def _wait_at_gate(self, steps: int, seconds: float) -> None:
        """Until every rank has come to the gate so many times more."""
        missing = steps * self.wish.world
        deadline = time.monotonic() + seconds
        while missing:
            if select.select([self._at], [], [], LOOK_SECONDS)[0]:
                missing -= len(os.read(self._at, missing))
                continue
            if time.monotonic() > deadline:
                raise EntryFailed(f"{missing} steps were not done within {seconds:g} s")
            self.check()

    # ------------------------------------------------------------------------------------------------ starting

    def _start(self) -> None:
        network, controller = self.wish.network, self.wish.controller
        address = controller.address if controller else network.address if network else "127.0.0.1"
        url = f"http://{address}:{free_port()}"
        self.children = self._stack.enter_context(Children(self._place))
        gate = self._make_gate() if self.wish.gated else ""  # closed before the children end: waiting ranks notice
        data_dir = self._place / "var"
        data_dir.mkdir()
        self._token_file = data_dir / "operator.token"
        self.client = self._stack.enter_context(Client(url, self._token_file))
        port = url.rpartition(":")[2]
        serve = ["--host", address, "--port", port, "--data-dir", str(data_dir), "--job-dir", str(JOB_DIR)]
        self._launch("controller", ["-m", "backend", "serve", *serve], {}, controller)
        self._wait_ready()
        self.run = self.client.post("runs", self._config(gate))["id"]
        token = {"MARCHLINE_JOIN_TOKEN": self.client.get("controller")["join_token"]}
        for index, ranks in enumerate(self.wish.hosts):
            options = ["--join", url, "--name", f"host{index}", "--devices", f"cpu:{ranks}", "--job-dir", str(JOB_DIR)]
            stream = ["--stream-data"] if self.wish.stream else []
            place = self.wish.places[index] if self.wish.places else None
            self._launch(f"host{index}", ["-m", "worker", *options, *stream], token, place)
        if self.wish.gated:
            self._wait_at_gate(1, FORMING_SECONDS)

    def _config(self, gate: str) -> dict[str, Any]:
        params = {"elements": self.wish.elements, "samples": self._samples, "gate": gate}
        world = {"start_mode": "auto", "quorum": self.wish.world, "target": self.wish.world}
        own = {"job": JOB, "name": "bench", "params": params, "mode": "cpu_sync", "batch_size": 1, "epochs": 1}
        return own | world | self.wish.settings

    def _make_gate(self) -> str:
        gate = self._place / "gate"
        gate.mkdir()
        names = ["at", *(f"go{rank}" for rank in range(self.wish.world))]
        for name in names:
            os.mkfifo(gate / name)
        # Open for both, so that opening does not wait for the other side.
        self._at, *self._gates = [os.open(gate / name, os.O_RDWR | os.O_NONBLOCK) for name in names]
        for pipe in (self._at, *self._gates):
            self._stack.callback(os.close, pipe)
        return str(gate)

    def _launch(self, name: str, arguments: list[str], extra: dict[str, str], place: Host | None) -> None:
        inside = ["-m", "benchmarks.netns", place.namespace, sys.executable] if place is not None else []
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | extra
        self.children.start(name, [*inside, *arguments], environment)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not self.client.is_ready():
            self.children.check()
            if time.monotonic() > deadline:
                raise EntryFailed(f"the controller was not ready within {READY_SECONDS:g} s")
            time.sleep(POLL_SECONDS)


def pulse_of(exposition: str) -> dict[str, float]:
    """The figures of ``PULSE`` in the controller's metrics, the worst where several hosts have one."""
    found: dict[str, float] = {}
    for line in exposition.splitlines():
        series, _, value = line.rpartition(" ")
        for name, (family, label) in PULSE.items():
            if series.partition("{")[0] == family and label in series:
                found[name] = max(found.get(name, 0.0), float(value))
    return found


@contextlib.contextmanager
def _as_failure() -> Iterator[None]:
    try:
        yield
    except (DemoError, CliError) as error:
        raise EntryFailed(str(error)) from error
