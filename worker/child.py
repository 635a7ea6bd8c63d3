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
from dataclasses import dataclass, field
from typing import BinaryIO, TextIO

TAIL_BYTES = 4096
_MAX_LINE = 16384


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended. ``code`` is negative for a signal, as in ``subprocess``."""

    code: int
    peak_rss_bytes: int

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


class Child:
    """A running child. ``label`` names it in the output: ``rank 2``, ``relay``."""

    def __init__(self, label: str, process: subprocess.Popen[bytes], tail: Tail) -> None:
        self.label = label
        self.pid = process.pid
        self.tail = tail
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._process = process
        self._outputs: list[Passthrough] = []
        self._done = asyncio.Event()
        self._waiter = asyncio.create_task(self._wait(), name=f"wait for {label}")

    @classmethod
    async def spawn(cls, label: str, module: str, orders: bytes, environment: dict[str, str]) -> Child:
        """Start ``python -m module`` in a new process group and hand it its orders.

        Must be called on the thread that lives as long as the agent: the kernel ends a child with the thread that
        made it. Raises ``OSError`` when no process can be made.
        """
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-m", *module.split()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            process_group=0,
        )
        child = cls(label, process, Tail())
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise AssertionError("all three are pipes")
        await child._pass(process.stdout, sys.stdout, Tail())
        await child._pass(process.stderr, sys.stderr, child.tail)
        with contextlib.suppress(BrokenPipeError):  # it died at once: its exit says why
            process.stdin.write(orders)
            process.stdin.flush()
        return child

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

    async def _pass(self, pipe: BinaryIO, out: TextIO, tail: Tail) -> None:
        loop = asyncio.get_running_loop()
        _, protocol = await loop.connect_read_pipe(lambda: Passthrough(self.label, out, tail), pipe)
        self._outputs.append(protocol)

    async def _wait(self) -> None:
        await _process_ended(self.pid)
        self.send_signal(signal.SIGKILL)  # helpers of the user's code must not outlive their rank
        _, status, usage = os.wait4(self.pid, 0)
        self._done.set()
        self._process.returncode = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        closed = [output.closed for output in self._outputs]
        if closed:
            await asyncio.wait(closed, timeout=1.0)  # its last words are part of the reason
        self.exited.set_result(Exit(self._process.returncode, _peak_bytes(usage.ru_maxrss)))


async def _process_ended(pid: int) -> None:
    """Wait until the process is a zombie, without reaping it: its number and group stay its own until we let go."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def wait() -> None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=wait, name=f"wait for {pid}", daemon=True).start()
    await ended.wait()


def _peak_bytes(maxrss: int) -> int:
    return maxrss if sys.platform == "darwin" else maxrss * 1024
