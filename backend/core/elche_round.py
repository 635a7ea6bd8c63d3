"""One round of ElChe's: what it starts from, what has bent its outcome so far, and the counts that follow (behaviour
C12). Every recomputation within a round starts from the same counts, so that dead zone and step limit hold for the
window, not for each verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from backend.core import elche_words as words
from backend.core.elche_growth import Pressure
from backend.core.elche_rules import DEAD_ZONE, capped, slack_batches, target_count


@dataclass(slots=True)
class Round:
    """The round at hand. ``before`` are the counts of the window that it closed."""

    before: dict[int, int]
    free: bool = False
    """counts move without dead zone or step limit: nothing was measured before"""
    slack: dict[int, float] = field(default_factory=dict)
    """ms that a rank will be away on an errand in the next window"""
    pressure: Pressure | None = None
    proposal: int | None = None
    """the anchor that ``Stable`` commits"""
    limited: bool = False
    """whether the step limit held a count back"""
    cap: int | None = None
    """the epoch's batches, where they are fewer than the anchor asks for"""
    moves: list[str] = field(default_factory=list)
    waits: bool = False
    """whether the latch kept the anchor from growing"""
    learnt: bool = False
    """whether the report counted as a measurement"""
    note: str = ""
    """why it did not"""

    def counts(
        self, anchor: int, slow_ms: float, rates: Mapping[int, float], *, step: int | None, max_total: int
    ) -> dict[int, int]:
        """The allotments for an anchor of ``slow_ms`` a batch (0 when it is not known yet). ``step`` limits how far a
        count moves, ``max_total`` (0: none) their sum."""
        self.limited = False
        found: dict[int, int] = {}
        asked = 0
        for rank, current in self.before.items():
            share = target_count(anchor, slow_ms, rates[rank]) if slow_ms > 0.0 else anchor
            fewer = slack_batches(self.slack.get(rank, 0.0), rates[rank])
            target = max(1, share - fewer)
            found[rank] = self._held_back(current, target, step, urgent=fewer > 0)
            self.limited = self.limited or abs(target - found[rank]) > DEAD_ZONE * current
            asked += share
        total = sum(found.values())
        self.cap = max_total if 0 < max_total < max(total, asked) else None
        return capped(found, max_total) if 0 < max_total < total else found

    def reason(self, counts: Mapping[int, int], rates: Mapping[int, float], rank: int, step: int | None) -> str:
        """The decision in words; ``rank`` sets the pace."""
        return words.explain(
            before=self.before,
            counts=counts,
            rates=rates,
            anchor_rank=rank,
            moves=self.moves,
            slack={absent: ms for absent, ms in self.slack.items() if absent in counts},
            cap=self.cap,
            step=step if self.limited else None,
        )

    def _held_back(self, current: int, target: int, step: int | None, *, urgent: bool) -> int:
        if self.free:
            return target
        if abs(target - current) <= DEAD_ZONE * current and not urgent:
            return current
        return target if step is None else min(current + step, max(current - step, target))
