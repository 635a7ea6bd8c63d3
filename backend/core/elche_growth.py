"""When the anchor grows: the window's fixed cost against its target, and the latch that holds growth back (behaviour
C9, C10). Nothing here shrinks an anchor; only a verdict does."""

from __future__ import annotations

import math
from dataclasses import dataclass

from backend.core.elche_rules import Phase

GROWTH_STEP_CAP = 2.0
"""no window may grow by more than this at once"""
WARMUP_MARGIN = 2.0
"""before the phase is stable only an overhead of this many targets fires"""
REARM_AFTER = 5
"""verdicts without an objection until a closed latch opens again"""
LOWEST_TARGET, HIGHEST_TARGET = 0.01, 0.5


@dataclass(frozen=True, slots=True)
class Pressure:
    """What a window's fixed cost is, as a share of the anchor's window."""

    overhead: float
    target: float
    fire_at: float
    fill_share: float
    """part of the fixed cost that is the first batch's start-up, not the round; 0 to 1"""

    @property
    def fires(self) -> bool:
        """Whether the overhead calls for a longer window."""
        return self.overhead > self.fire_at

    def wanted(self, anchor: int) -> int:
        """The anchor that would bring the overhead to its target, at most twice the present one."""
        return math.ceil(anchor * min(self.overhead / self.target, GROWTH_STEP_CAP))


def pressure(anchor: int, ms: float, *, fill_ms: float, sync_ms: float, target: float, phase: Phase) -> Pressure | None:
    """The pressure on a window of ``anchor`` batches of ``ms`` each (C9); none without a rate or a fixed cost.

    ``fill_ms`` is the anchor rank's start-up, ``sync_ms`` the round's duration, ``target`` a share of the window.
    """
    fill, sync = max(0.0, fill_ms), max(0.0, sync_ms)
    fixed = fill + sync
    if ms <= 0.0 or fixed <= 0.0 or not math.isfinite(fixed):
        return None
    settled = phase in ("stable", "mature")
    return Pressure(
        overhead=fixed / (anchor * ms + fixed),
        target=target,
        fire_at=target if settled else WARMUP_MARGIN * target,
        fill_share=fill / fixed,
    )


class GrowthLatch:
    """Open lets the anchor grow. An objection closes it; five verdicts in a row without one open it again."""

    def __init__(self) -> None:
        self.open = True
        self._quiet = 0

    @property
    def missing(self) -> int:
        """Verdicts without objection that a closed latch still waits for."""
        return 0 if self.open else REARM_AFTER - self._quiet

    def quiet(self) -> None:
        """A verdict without an objection."""
        self._quiet += 1
        if self._quiet >= REARM_AFTER:
            self.open = True

    def object(self) -> None:
        """A verdict that speaks against growth."""
        self.open = False
        self._quiet = 0
