"""A real agent process, and a look at what it leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
JOBS = REPOSITORY / "tests" / "jobs"
PATIENCE = 60.0


class AgentProcess:
    """``python -m worker`` as an operator starts it."""

    def __init__(self, process: asyncio.subprocess.Process, heard: bool) -> None:
        self.process = process
        self.pid = process.pid
        self.output = ""
        self._grown = asyncio.Event()
        self._readers: list[asyncio.Task[None]] = []
        if heard:
            self.hear()

    def hear(self) -> None:
        """Begin to read what it writes."""
        streams = (self.process.stdout, self.process.stderr)
        self._readers = self._readers or [asyncio.create_task(self._read(stream)) for stream in streams]

    async def ended(self) -> tuple[int, str]:
        """Its exit code, and what it wrote: stdout and stderr."""
        self.hear()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*self._readers)
            return await self.process.wait(), self.output

    async def said(self, text: str) -> None:
        """Wait until its output holds this text."""
        async with asyncio.timeout(PATIENCE):
            while text not in self.output:
                self._grown.clear()
                await self._grown.wait()

    async def _read(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        while data := await stream.read(1 << 16):
            self.output += data.decode(errors="replace")
            self._grown.set()

    def children(self) -> dict[int, str]:
        """Its living children by process number, each with its module."""
        return {pid: what for pid, (parent, what) in processes().items() if parent == self.pid}

    def child(self, module: str) -> int:
        """The process number of a child that runs this module."""
        return next(pid for pid, what in self.children().items() if module in what)


@asynccontextmanager
async def agent(
    url: str, *arguments: str, token: str = "secret", heard: bool = True, **environment: str
) -> AsyncIterator[AgentProcess]:
    """Start one; whatever the test does, it is gone at the end. Unless it is ``heard``, nobody reads its output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "worker",
        *("--join", url, "--devices", "cpu", "--name", "test-host", "--job-dir", str(JOBS), *arguments),
        cwd=REPOSITORY,
        env={**os.environ, "MARCHLINE_JOIN_TOKEN": token, **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    running = AgentProcess(process, heard)
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await running.ended()


def processes() -> dict[int, tuple[int, str]]:
    """Every living process: its parent and its command line."""
    found: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    found[int(entry.name)] = (int(parent), (entry / "cmdline").read_text().replace("\0", " "))
    return found


async def gone(pids: Iterable[int], seconds: float = 10.0) -> None:
    """Wait until none of these processes lives, whoever their parent is."""
    async with asyncio.timeout(seconds):
        for pid in pids:
            await _ended(pid)


async def _ended(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(handle, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def shared_directory(rank_pid: int) -> Path:
    """Where this rank meets the others of its host: the directory of the files that it maps."""
    for line in Path(f"/proc/{rank_pid}/maps").read_text().splitlines():
        if line.endswith(".progress"):
            return Path(line.split(maxsplit=5)[5]).parent
    raise AssertionError("the rank maps no progress block")


def job_variant(directory: Path, name: str, prologue: str) -> str:
    """The odometer with a few lines before it, as a file of its own; the job's name."""
    source = (JOBS / "odometer.py").read_text(encoding="utf-8")
    (directory / f"{name}.py").write_text(prologue + source, encoding="utf-8")
    return f"{name}.py:Odometer"
