"""The agent's own output, written by a thread: a terminal that stands still (Ctrl-S, a pager) must not stop
heartbeats."""

from __future__ import annotations

import contextlib
import io
import os
import queue
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

_LINES = 10_000
"""pieces that wait for the terminal; beyond them output is dropped, and counted"""
_DRAIN_SECONDS = 2.0


class Printer:
    """Writes pieces of text to file descriptors, in order, in a thread of its own."""

    def __init__(self, capacity: int = _LINES) -> None:
        self._queue: queue.Queue[tuple[int, str] | None] = queue.Queue(capacity)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="output", daemon=True)
        self._thread.start()

    def put(self, descriptor: int, text: str) -> None:
        """Have it written; returns at once, and drops it when too much waits."""
        try:
            if self._dropped:
                self._queue.put_nowait((descriptor, f"... {self._dropped} pieces of output were dropped\n"))
                self._dropped = 0
            self._queue.put_nowait((descriptor, text))
        except queue.Full:
            self._dropped += 1

    def close(self, seconds: float = _DRAIN_SECONDS) -> None:
        """Let what waits be written, for so long at most."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=seconds)
        self._thread.join(seconds)

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            descriptor, text = item
            data = memoryview(text.encode(errors="replace"))
            with contextlib.suppress(OSError):  # nobody reads any more: the run goes on without an audience
                while data:
                    data = data[os.write(descriptor, data) :]


class QueuedStream(io.TextIOBase):
    """A text stream whose ``write`` never waits."""

    def __init__(self, printer: Printer, descriptor: int) -> None:
        self._printer = printer
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        """Queue the text."""
        self._printer.put(self._descriptor, text)
        return len(text)

    def writable(self) -> bool:
        """Always."""
        return True


@contextlib.contextmanager
def output_that_never_waits() -> Iterator[None]:
    """Within it, ``sys.stdout`` and ``sys.stderr`` are queued; what waits is written at the end, two seconds long."""
    printer = Printer()
    before: tuple[TextIO, TextIO] = sys.stdout, sys.stderr
    for stream in before:
        stream.flush()
    sys.stdout, sys.stderr = QueuedStream(printer, 1), QueuedStream(printer, 2)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        printer.close()
