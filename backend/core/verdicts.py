"""What a guard, or the meta-controller, says about the round that just closed; ElChe does it (behaviour C10, K2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Stable:
    """Nothing speaks against longer windows: a pending growth of the anchor is committed."""

    name: ClassVar[str] = "stable"
    reason: str
    """a sentence for the operator"""
    relax_up: bool = False
    """besides, the anchor may grow by one batch: only on evidence, for silence is no stability (M35)"""


@dataclass(frozen=True, slots=True)
class SuppressGrowth:
    """The replicas drift apart: the anchor must not grow until it has been quiet for a while."""

    name: ClassVar[str] = "suppress_growth"
    reason: str


@dataclass(frozen=True, slots=True)
class NudgeDown:
    """The window is too long: the anchor shrinks to ``factor`` of itself, and growth stops."""

    name: ClassVar[str] = "nudge_down"
    factor: float
    cause: str
    """a clause that starts a sentence and has no full stop"""

    @property
    def reason(self) -> str:
        """The cause and what follows from it, as a sentence."""
        return f"{self.cause}, so the anchor is to shrink to {100 * self.factor:.0f} % of itself."


Verdict = Stable | SuppressGrowth | NudgeDown
