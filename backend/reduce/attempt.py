"""What one open attempt holds: its count, its plan, the chunks that wait, and the arena that is being built."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from backend.reduce.accumulator import Accumulator, Slice
from backend.reduce.sums import FloatArray, Pieces


@dataclass(slots=True)
class Buffer:
    """An arena, the outer momentum behind it, and whether somebody outside holds either: then none is written again.

    The two are one state, committed and taken back together.
    """

    values: FloatArray
    momentum: FloatArray | None
    """(params_elements,); None without an outer optimizer"""
    lent: bool = False


@dataclass(slots=True)
class Attempt:
    """One open attempt and its buffer: dropped together, so that late sums and unsent views hurt nobody."""

    counts: Accumulator
    plan: list[Slice]
    built: Buffer
    started: float
    inbox: dict[int, deque[tuple[int, FloatArray]]]
    next_sum: int = 0
    next_send: int = 0
    summed: set[int] = field(default_factory=set)
    running: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def number(self) -> tuple[int, int]:
        return self.counts.opening.round, self.counts.opening.attempt

    @property
    def summed_to(self) -> int:
        """First element that no sum has asked for yet."""
        return self.plan[self.next_sum].offset if self.next_sum < len(self.plan) else self.counts.elements

    def take(self, host: int, piece: Slice) -> Pieces:
        """The host's elements of this slice, removed from its inbox; a chunk that reaches further keeps its rest."""
        inbox, pieces = self.inbox[host], []
        while inbox and inbox[0][0] < piece.stop:
            offset, values = inbox.popleft()
            wanted = piece.stop - offset
            pieces.append(values[:wanted])
            if values.size > wanted:
                inbox.appendleft((piece.stop, values[wanted:]))
        return pieces
