"""Virtual time: what is to happen, in the order in which it happens. Nothing sleeps and no clock is read."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class Stage:
    """A queue of acts. At one moment, acts of lower ``order`` come first, then those that were planned first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._acts: list[tuple[float, int, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._ticket = itertools.count()

    def at(self, when: float, act: Callable[..., Any], *arguments: Any, order: int = 0) -> None:
        """Do something at a moment (seconds) to come; what was due before is done now: no act turns time back."""
        heapq.heappush(self._acts, (max(when, self.now), order, next(self._ticket), act, arguments))

    def after(self, seconds: float, act: Callable[..., Any], *arguments: Any, order: int = 0) -> None:
        """Do something so many seconds from now."""
        self.at(self.now + seconds, act, *arguments, order=order)

    @property
    def next_at(self) -> float | None:
        """When the next act is due."""
        return self._acts[0][0] if self._acts else None

    def step(self) -> None:
        """Let time pass to the next act, and play it. There must be one."""
        self.now, _, _, act, arguments = heapq.heappop(self._acts)
        act(*arguments)
