"""The product as its users start it: a controller, workers, and the REST API between them and the test."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import psutil
import pytest
from children import module_path

ROOT = Path(__file__).parent.parent.parent
JOBS = ROOT / "tests" / "jobs"
T = TypeVar("T")
PATHS: dict[str, tuple[str, ...]] = {"shared memory": (), "stream": ("--stream-data",)}
"""how a host's data goes to a controller on the same machine, and the options that make it"""
THOROUGH = pytest.mark.skipif(
    not os.environ.get("MARCHLINE_TEST_THOROUGH"),
    reason="more of what is tested without it, up to models of 560 MB: minutes, and 6 GB; MARCHLINE_TEST_THOROUGH=1",
)
ADDRESS = re.compile(r"http://(?:\[[\da-f:]+\]|[\d.]+):\d+")
OVER = ("done", "failed", "interrupted")
PATIENCE = 180.0
"""seconds after which a test gives up on something that should have happened"""


def environment() -> dict[str, str]:
    """What child processes get: one thread a rank, and no token or address of the tester's own."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MARCHLINE_")}
    return kept | {"PYTHONPATH": module_path(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@dataclass
class Worker:
    """One ``python -m worker`` and what it printed."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def children(self) -> list[psutil.Process]:
        """Its relay and ranks."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def child(self, module: str, index: int = 0) -> psutil.Process:
        """The process of ``worker.rank`` or ``worker.relay``, once it runs."""

        def found() -> psutil.Process | None:
            matching = [child for child in self.children() if module in _command(child)]
            return sorted(matching, key=lambda child: child.pid)[index] if len(matching) > index else None

        return wait_for(found, f"{self.name} to start {module}")

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = PATIENCE) -> int:
        return self.process.wait(seconds)


@dataclass
class Stage:
    """A running controller. Everything it started ends with it."""

    url: str
    data_dir: Path
    process: subprocess.Popen[bytes]
    log: Path
    tmp: Path
    job_dir: Path = JOBS
    workers: list[Worker] = field(default_factory=list)

    def __post_init__(self) -> None:
        token = (self.data_dir / "operator.token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        self.client = httpx2.Client(base_url=self.url, headers=headers, trust_env=False, timeout=20)

    def get(self, path: str, **params: Any) -> Any:
        response = self.client.get(f"/api/v1/{path}", params=params)
        assert response.status_code == 200, response.text
        return response.json()

    def post(self, path: str, body: Any = None, expect: int = 200) -> Any:
        response = self.client.post(f"/api/v1/{path}", json=body)
        assert response.status_code == expect, f"{response.status_code}: {response.text}"
        return response.json()

    def create(self, job: str, expect: int = 201, **config: Any) -> Any:
        """A run; answers its number, or the problem when another status is expected."""
        body = {"job": job, "start_mode": "manual", "quorum": 2, "batch_size": 1} | config
        answer = self.post("runs", body, expect=expect)
        return answer["id"] if expect == 201 else answer

    def worker(
        self,
        name: str,
        devices: str = "cpu:1",
        *options: str,
        job_dir: Path | None = None,
        env: dict[str, str] | None = None,
        join: str = "",
        inside: list[str] | None = None,
    ) -> Worker:
        """Start a host that joins the controller, or a relay-only host at ``join``; ``inside`` becomes the program."""
        where = ("--devices", devices, "--job-dir", str(job_dir or self.job_dir))
        return self._start(name, join or self.url, *where, *options, env=env, inside=inside)

    def relay(self, name: str, *options: str, join: str = "") -> tuple[Worker, str]:
        """Start a relay-only host; the address at which others join through it."""
        worker = self._start(name, join or self.url, "--relay-only", "--listen", "127.0.0.1:0", *options)
        found = wait_for(lambda: re.search(r"join here, port (\d+)", worker.output()), f"{name} to listen")
        return worker, f"http://127.0.0.1:{found.group(1)}"

    def _start(
        self,
        name: str,
        join: str,
        *options: str,
        env: dict[str, str] | None = None,
        inside: list[str] | None = None,
    ) -> Worker:
        log = self.tmp / f"{name}-{len(self.workers)}.log"
        token = self.data_dir / "join.token"
        program = [sys.executable, "-m", "worker", "--join", join, "--token-file", str(token), "--name", name, *options]
        command = [*(inside or []), *program]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, cwd=self.tmp, env=environment() | (env or {}), stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )
        worker = Worker(name, process, log)
        self.workers.append(worker)
        return worker

    def view(self, run: int) -> dict[str, Any]:
        return self.get(f"runs/{run}")

    def until(
        self, run: int, true: Callable[[dict[str, Any]], Any], what: str, seconds: float = PATIENCE
    ) -> dict[str, Any]:
        """The first view of the run for which ``true`` holds."""

        def look() -> dict[str, Any] | None:
            view = self.view(run)
            return view if true(view) else None

        try:
            return wait_for(look, what, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story(run)}") from None

    def joined(self, run: int, ranks: int) -> dict[str, Any]:
        return self.until(run, lambda view: view["window"]["joined_ranks"] >= ranks, f"{ranks} ranks to join")

    def ended(self, run: int, seconds: float = PATIENCE) -> dict[str, Any]:
        return self.until(run, lambda view: view["phase"] in OVER, f"run {run} to end", seconds)

    def started(self, run: int, ranks: int) -> None:
        """Wait for the ranks and press Start."""
        self.joined(run, ranks)
        self.post(f"runs/{run}/start")

    def items(self, run: int, what: str) -> list[dict[str, Any]]:
        return self.get(f"runs/{run}/{what}", limit=1000)["items"]

    def metrics(self) -> dict[str, float]:
        """The unlabelled figures of ``/metrics``, by name."""
        response = self.client.get("/metrics")
        assert response.status_code == 200, response.text
        pairs = (line.split() for line in response.text.splitlines() if not line.startswith("#") and "{" not in line)
        return {name: float(value) for name, value in pairs}

    def story(self, run: int) -> str:
        """All there is to read when a test fails."""
        view = self.view(run)
        parts = [f"phase {view['phase']}: {view['reason']}; {view['window']['verdict']}"]
        parts += [f"  {row['level']}: {row['text']}" for row in self.items(run, "events")]
        parts += [f"--- {worker.name}\n{worker.output()[-3000:]}" for worker in self.workers]
        return "\n".join([*parts, "--- controller", self.log.read_text(errors="replace")[-4000:]])

    def leave(self) -> None:
        """End what was started here, but for the controller: no run of it is live any more."""
        _end([worker.process for worker in self.workers])
        for row in self.get("runs", limit=1000)["items"]:
            if row["phase"] not in OVER:
                self.client.post(f"/api/v1/runs/{row['id']}/abort")
                self.ended(row["id"], 30)
        self.client.close()

    def close(self) -> None:
        self.client.close()
        _end([*(worker.process for worker in self.workers), self.process])


@contextmanager
def stage(
    tmp: Path,
    *options: str,
    job_dir: Path = JOBS,
    env: dict[str, str] | None = None,
    inside: Sequence[str] = (),
) -> Iterator[Stage]:
    """A controller on a free port with its data under ``tmp``; ``inside`` becomes the program."""
    log, data_dir = tmp / "controller.log", tmp / "var"
    command = [
        *inside,
        sys.executable,
        "-m",
        "backend",
        "serve",
        "--port",
        "0",
        "--data-dir",
        str(data_dir),
        "--job-dir",
        str(job_dir),
        *options,
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment() | (env or {}), stdout=out, stderr=out, stdin=subprocess.DEVNULL
        )

    def address() -> str | None:
        assert process.poll() is None, log.read_text()
        found = re.search(r"#ticket", text := log.read_text()) and ADDRESS.search(text)
        return found.group(0) if found else None

    try:
        running = Stage(wait_for(address, "the controller to say where it is"), data_dir, process, log, tmp, job_dir)
    except BaseException:
        process.kill()
        raise
    try:
        yield running
    finally:
        running.close()


def wait_for(look: Callable[[], T | None], what: str, seconds: float = PATIENCE) -> T:
    """Poll until there is an answer; the pause only spares the machine, no result depends on it."""
    deadline = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.1)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
