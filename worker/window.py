"""What a rank is about, and since when: its shared progress block, and the moments of the open window.

A window is the work between two rounds. All moments are seconds of the loop's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from worker.progress import ProgressBlock


class Window:
    """``overlap``: rounds and work go on at once, so waiting for work is counted wherever it happens."""

    def __init__(self, progress: ProgressBlock, clock: Callable[[], float], *, overlap: bool) -> None:
        self.clock = clock
        self._progress = progress
        self._overlap = overlap
        self.reset()

    def reset(self) -> None:
        """Begin anew, with nothing done."""
        self.worked_until = self.clock()
        """end of the last batch, evaluation or round: from here on the rank waits"""
        self.requested_at = 0.0
        self.wait_ms = 0.0
        self.pack_ms = 0.0
        self._idle_ms = 0.0
        """where rounds and work overlap: waited for work since the arena was packed last"""

    def enter(self, state: str) -> None:
        """Show what the rank is doing now."""
        self._progress.enter(state, time.monotonic_ns())

    def count(self, steps: int) -> None:
        """Show the rank's optimizer steps."""
        self._progress.count(steps)

    def note_device_peak(self, size: int) -> None:
        """The most bytes that tensors took on the GPU at once, so far."""
        self._progress.note_device_peak(size)

    def requested(self) -> None:
        """A round begins: the window's waiting ends."""
        self.enter("reducing")
        now = self.clock()
        self.count_idle(now)
        self.requested_at = now
        self.wait_ms = self._idle_ms + (now - self.worked_until) * 1000
        self._idle_ms = self.pack_ms = 0.0

    def packed(self) -> None:
        """What the round asked for is ready."""
        now = self.worked_until = self.clock()
        self.pack_ms = (now - self.requested_at) * 1000

    def count_idle(self, now: float) -> None:
        """Where rounds and work overlap, waiting for work is spread over the window; elsewhere it ends in the round."""
        if self._overlap:
            self._idle_ms += (now - self.worked_until) * 1000
            self.worked_until = now

    def rest(self) -> None:
        """Whatever was in the way of training is over; from here on the rank works or waits."""
        self.worked_until = self.clock()
        self.enter("idle")
