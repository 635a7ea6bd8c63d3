"""The command line as a person calls it, against a real controller in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from children import module_path

REPOSITORY = Path(__file__).resolve().parents[2]
JOB = """
from dataclasses import dataclass
from worker import Job

class Digits(Job):
    @dataclass
    class Params:
        hidden: int = 64

    def build_model(self): ...
    def build_optimizer(self, model): ...
    def train_dataset(self): ...
    def training_step(self, model, batch): ...
"""


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without any setting of ours, and with a proxy that nothing may use."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MARCHLINE_")}
    dead = "http://127.0.0.1:9"
    proxies = {"http_proxy": dead, "HTTP_PROXY": dead, "ALL_PROXY": dead}
    return kept | proxies | {"PYTHONPATH": module_path(REPOSITORY)} | more


@dataclass
class Served:
    """A controller that runs."""

    url: str
    data_dir: Path
    process: subprocess.Popen[str]
    printed: list[str]

    @property
    def ticket(self) -> str:
        return self.printed[-1].strip().partition("/#ticket=")[2]

    @property
    def token_file(self) -> Path:
        return self.data_dir / "operator.token"

    def cli(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """``python -m backend ARGUMENTS`` as its operator."""
        environment = {"MARCHLINE_URL": self.url, "MARCHLINE_TOKEN": self.token_file.read_text().strip()} | environment
        return cli(*arguments, cwd=self.data_dir, **environment)


def cli(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python -m backend ARGUMENTS`` with nothing set."""
    return subprocess.run(
        [sys.executable, "-m", "backend", *arguments],
        cwd=cwd,
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def start_server(folder: Path, *options: str) -> Served:
    """Start a controller on a free port and wait until it says where it is."""
    (folder / "jobs").mkdir()
    (folder / "jobs/digits.py").write_text(JOB)
    data_dir = folder / "var"
    data_dir.mkdir(mode=0o700)
    arguments = ["serve", "--port", "0", "--data-dir", str(data_dir), "--job-dir", str(folder / "jobs"), *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "backend", *arguments],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    printed = []
    while not printed or "/#ticket=" not in printed[-1]:
        printed.append(process.stdout.readline())
        assert printed[-1], f"the controller ended early: {process.communicate()[1]}"
    return Served(printed[0].split()[-1], data_dir, process, printed)


def stop_server(served: Served) -> None:
    served.process.send_signal(signal.SIGTERM)
    served.process.communicate(timeout=30)


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Until it holds; ``AssertionError`` naming it when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether this process still runs; one that only waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def descendants(pid: int) -> set[int]:
    """Every process below this one."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child} | descendants(child)
    return found
