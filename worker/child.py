"""One child process of the agent: its orders, its output, and the true reason of its end.

A child leads a process group of its own. Its exit is seen without reaping it, so the group can still be named when
what the child started is cleaned away; only then is it reaped, with its peak memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TextIO

TAIL_BYTES = 4096
_MAX_LINE = 16384


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended. ``code`` is negative for a signal, as in ``subprocess``."""

    code: int
    peak_rss_bytes: int
    seen_at: float = 0.0
    """monotonic seconds"""

    @property
    def signal_name(self) -> str:
        """SIGKILL, SIGSEGV, ... or empty."""
        if self.code >= 0:
            return ""
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"


@dataclass(slots=True)
class Tail:
    """The last 4 KiB of what went through."""

    data: bytearray = field(default_factory=bytearray)

    def add(self, data: bytes) -> None:
        self.data += data
        del self.data[:-TAIL_BYTES]

    def text(self) -> str:
        """It as text, from its first whole line on."""
        text = bytes(self.data).decode(errors="replace")
        if len(self.data) == TAIL_BYTES and "\n" in text:
            text = text.partition("\n")[2]
        return text


class Passthrough(asyncio.Protocol):
    """Copies a child's output line by line, each with the child's name before it, and keeps the end of it."""

    def __init__(self, label: str, out: TextIO, tail: Tail) -> None:
        self._label = label
        self._out = out
        self._tail = tail
        self._line = b""
        self.closed = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """Take output as it comes."""
        self._tail.add(data)
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self._write(line)
        if len(self._line) > _MAX_LINE:
            self._write(self._line)
            self._line = b""

    def connection_lost(self, exc: Exception | None) -> None:
        """The child and all that inherited its output closed it."""
        if self._line:
            self._write(self._line)
        if not self.closed.done():
            self.closed.set_result(None)

    def _write(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        with contextlib.suppress(OSError, ValueError):  # our own terminal went away: the run goes on without it
            self._out.write(f"[{self._label}] {text}\n")
            self._out.flush()


class Collector(asyncio.Protocol):
    """Keeps a child's output, up to a cap; the rest is dropped."""

    def __init__(self, cap: int) -> None:
        self.data = bytearray()
        self.closed = asyncio.get_running_loop().create_future()
        self._cap = cap

    def data_received(self, data: bytes) -> None:
        """Take output as it comes."""
        self.data += data[: self._cap - len(self.data)]

    def connection_lost(self, exc: Exception | None) -> None:
        """The child closed it."""
        if not self.closed.done():
            self.closed.set_result(None)


class Child:
    """A running child. ``label`` names it in the output: ``rank 2``, ``relay``."""

    def __init__(self, label: str, process: subprocess.Popen[bytes]) -> None:
        self.label = label
        self.pid = process.pid
        self.tail = Tail()
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._process = process
        self._collector: Collector | None = None
        self._closed: list[asyncio.Future[None]] = []
        self._done = asyncio.Event()
        self._waiter = asyncio.create_task(self._wait(), name=f"wait for {label}")

    @classmethod
    async def spawn(
        cls, label: str, module: str, orders: bytes, environment: dict[str, str], *, collect: int = 0
    ) -> Child:
        """Start ``python -m module`` in a new process group and hand it its orders.

        Its output is passed through; with ``collect``, up to so many bytes of its stdout are kept instead. Must be
        called on the thread that lives as long as the agent: the kernel ends a child with the thread that made it.
        Raises ``OSError`` when no process can be made.
        """
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-m", *module.split()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            process_group=0,
        )
        child = cls(label, process)
        await child._connect(collect)
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it died at once: its exit says why
                process.stdin.write(orders)
                process.stdin.flush()
        return child

    @property
    def collected(self) -> bytes:
        """What it wrote to stdout, when that was to be kept."""
        return bytes(self._collector.data) if self._collector is not None else b""

    @property
    def alive(self) -> bool:
        return not self._done.is_set()

    def send_signal(self, number: int) -> None:
        """Signal the child and everything in its group; nothing once it is reaped."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    async def stop(self, grace_seconds: float, patience_seconds: float = 0.0) -> Exit:
        """End it: wait ``patience_seconds`` for it to go by itself, then SIGTERM, and SIGKILL after the grace."""
        for number, seconds in ((signal.SIGTERM, patience_seconds), (signal.SIGKILL, grace_seconds)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    return await asyncio.shield(self.exited)
            self.send_signal(number)
        return await asyncio.shield(self.exited)

    async def _connect(self, collect: int) -> None:
        loop = asyncio.get_running_loop()
        errors = Passthrough(self.label, sys.stderr, self.tail)
        await loop.connect_read_pipe(lambda: errors, self._process.stderr)
        output: Passthrough | Collector = Passthrough(self.label, sys.stdout, Tail())
        if collect:
            output = self._collector = Collector(collect)
        await loop.connect_read_pipe(lambda: output, self._process.stdout)
        self._closed += [errors.closed, output.closed]

    async def _wait(self) -> None:
        seen_at = await _process_ended(self.pid)
        self.send_signal(signal.SIGKILL)  # helpers of the user's code must not outlive their rank
        _, status, usage = os.wait4(self.pid, 0)  # noqa: ASYNC222 (a zombie: it does not block)
        self._done.set()
        self._process.returncode = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        if self._closed:
            await asyncio.wait(self._closed, timeout=1.0)  # its last words are part of the reason
        self.exited.set_result(Exit(self._process.returncode, _peak_bytes(usage.ru_maxrss), seen_at))


async def _process_ended(pid: int) -> float:
    """Wait until the process is a zombie, without reaping it: its number and group stay its own until we let go.
    Answers when that was, in monotonic seconds."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    seen_at = 0.0

    def wait() -> None:
        nonlocal seen_at
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        seen_at = time.monotonic()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=wait, name=f"wait for {pid}", daemon=True).start()
    await ended.wait()
    return seen_at


def _peak_bytes(maxrss: int) -> int:
    return maxrss if sys.platform == "darwin" else maxrss * 1024
