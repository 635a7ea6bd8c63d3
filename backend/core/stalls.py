"""Who lives but does not move: a ceiling on the time between two batches of a rank that has some to do.

Heartbeats say that a host lives; only batches say that its ranks get on (reliability study, H1). A rank whose data
loader hangs, or whose plan got lost, would hold up the cohort for ever. Long before the ceiling its plan is issued
again, which costs nothing when it has it (``nudges``: at a twentieth, then at twice the time, and so on).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Set
from dataclasses import dataclass

EXPECTED_TIMES = 10.0
"""the ceiling is at least so many times what the rank's chunk is expected to take"""
FIRST_NUDGE = 1 / 20
"""of the ceiling"""


@dataclass(slots=True)
class _Clock:
    """One rank that has work."""

    since: float
    """its last batch, or when it was given work"""
    ceiling: float
    patience: float
    """seconds until the next nudge"""

    @property
    def due(self) -> float:
        return self.since + min(self.patience, self.ceiling)


class ProgressWatch:
    """The ranks that have batches to do, and when each did one last. ``ceiling`` in seconds."""

    def __init__(self, ceiling: float) -> None:
        self.ceiling = ceiling
        self._clocks: dict[int, _Clock] = {}
        self._excused: dict[int, float] = {}
        """by rank: seconds on top while it is on an errand"""
        self._filed: dict[int, float] = {}
        """the moment under which each rank lies in ``_queue``; the true one may be later, never earlier"""
        self._queue: list[tuple[float, int]] = []

    def begins(self, rank: int, now: float, expected_seconds: float) -> None:
        """The rank was given work that should take so long (0: nobody knows). With work in hand its clock runs on."""
        ceiling = max(self.ceiling, EXPECTED_TIMES * expected_seconds)
        clock = self._clocks.get(rank)
        if clock is None:
            self._clocks[rank] = _Clock(now, ceiling, ceiling * FIRST_NUDGE)
            self._file(rank)
        else:
            clock.ceiling = max(clock.ceiling, ceiling)

    def moved(self, rank: int, now: float) -> None:
        """The rank did a batch."""
        clock = self._clocks.get(rank)
        if clock is None:
            return
        clock.since = now
        if clock.patience > clock.ceiling * FIRST_NUDGE:
            clock.patience = clock.ceiling * FIRST_NUDGE
            self._file(rank)  # the next nudge may come before the moment that it is filed under

    def rests(self, rank: int) -> None:
        """The rank has nothing to do, or is gone."""
        self._clocks.pop(rank, None)  # it stays filed: with its next work it need not be filed again

    def excuse(self, rank: int, seconds: float) -> None:
        """It is sent on an errand that may keep it from its batches for so long."""
        self._excused[rank] = seconds

    def back(self, rank: int, now: float) -> None:
        """The errand is done."""
        if self._excused.pop(rank, None) is not None:
            self.moved(rank, now)

    def excused(self, rank: int) -> float:
        """Seconds that the rank has on top; 0 when it is on no errand."""
        return self._excused.get(rank, 0.0)

    def longest_errand(self, among: Set[int]) -> float:
        """Seconds that one of these ranks has on top at most. Few are on errands, many may be asked about."""
        return max((seconds for rank, seconds in self._excused.items() if rank in among), default=0.0)

    def forget(self, rank: int) -> None:
        """The rank is dead."""
        self.rests(rank)
        self._excused.pop(rank, None)

    def lagged(self, seconds: float) -> None:
        """The controller was away: what ranks did meanwhile is still unread."""
        for clock in self._clocks.values():
            clock.since += seconds

    def next_deadline(self) -> float | None:
        """When the first rank is to be nudged, or stalls; none while nobody has work."""
        queue = self._queue
        while queue:
            filed, rank = queue[0]
            if self._filed.get(rank) != filed:
                heapq.heappop(queue)
                continue
            if rank not in self._clocks:
                heapq.heappop(queue)
                del self._filed[rank]
                continue
            due = self._due(rank)
            if due <= filed:
                return due
            self._filed[rank] = due
            heapq.heapreplace(queue, (due, rank))
        return None

    def overdue(self, now: float) -> tuple[list[int], list[int]]:
        """Ranks to be nudged, each once until it is due again, and ranks that stall."""
        first = self.next_deadline()
        nudges: list[int] = []
        stalled: list[int] = []
        if first is None or first > now:
            return nudges, stalled
        for rank, clock in sorted(self._clocks.items()):
            if self._due(rank) > now:
                continue
            if now >= clock.since + clock.ceiling + self.excused(rank):
                stalled.append(rank)
                continue
            nudges.append(rank)
            while clock.since + clock.patience + self.excused(rank) <= now:
                clock.patience *= 2.0
        return nudges, stalled

    def waited(self, rank: int, now: float) -> float:
        """Seconds since the rank moved; 0 when it has nothing to do."""
        clock = self._clocks.get(rank)
        return now - clock.since if clock else 0.0

    def working(self, rank: int) -> bool:
        """Whether the rank has batches to do."""
        return rank in self._clocks

    def _due(self, rank: int) -> float:
        return self._clocks[rank].due + self.excused(rank)

    def _file(self, rank: int) -> None:
        due = self._due(rank)
        if self._filed.get(rank, math.inf) > due:
            self._filed[rank] = due
            heapq.heappush(self._queue, (due, rank))
