"""Which rank the cohort sends on errands (scoring, handing over tensors), and what they cost it (behaviour C21,
F16)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from backend.core.world import World

SMOOTHING = 0.3
"""weight of the newest cost in the running average"""


class Errands:
    """One rank has the role as long as it lives: the fastest when the role was given, for it loses least."""

    def __init__(self, world: World, pace: Callable[[int], float]) -> None:
        self._world = world
        self._pace = pace
        self._rank: int | None = None
        self._cost_ms: dict[str, float] = {}

    def rank(self) -> int | None:
        """Who goes; the lowest number among equals, and none when nobody lives."""
        alive = self._world.alive()
        if self._rank not in alive:
            self._rank = min(alive, key=lambda rank: (self._pace(rank) or math.inf, rank), default=None)
        return self._rank

    def paid(self, kind: str, ms: float) -> None:
        """An errand of this kind (evaluation, checkpoint) took so many ms."""
        if not math.isfinite(ms) or ms < 0.0:
            return
        known = self._cost_ms.get(kind)
        self._cost_ms[kind] = ms if known is None else SMOOTHING * ms + (1.0 - SMOOTHING) * known

    def patience(self, kind: str, least: float) -> float:
        """Seconds that an errand of this kind may take: ten times what it cost so far, and at least so many."""
        return max(least, 10.0 * self._cost((kind,)) / 1000.0)

    def slack_ms(self, kinds: Iterable[str], everybody: Iterable[str] = ()) -> dict[int, float]:
        """What errands will take from ranks' next windows: of these kinds from the role's, of those for ``everybody``
        from each. Nothing while no cost is known."""
        common = self._cost(everybody)
        slack = dict.fromkeys(self._world.alive(), common) if common > 0.0 else {}
        rank, cost = self.rank(), self._cost(kinds)
        if rank is not None and cost > 0.0:
            slack[rank] = common + cost
        return slack

    def _cost(self, kinds: Iterable[str]) -> float:
        return sum(self._cost_ms.get(kind, 0.0) for kind in kinds)
