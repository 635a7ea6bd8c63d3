"""The meta-controller: shortens the window when the learning rate falls off a cliff, or when the guard keeps objecting
(behaviour K6). It speaks before the guard's own verdict is applied."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from backend.core.elche_rules import Phase
from backend.core.verdicts import NudgeDown, Stable, Verdict
from wire.messages import SyncAck

RATES, ANCHORS, VERDICTS = 3, 5, 5
"""rounds that are remembered"""
CLIFF = 0.3
"""a fall of the learning rate by more than this share in one round"""
SLIDE = 0.5
"""a fall of which the round before already had this share is the slope of a schedule that runs out, and no cliff
(decision 0010)"""
CLIFF_BASE = 0.5
SUSTAINED: dict[Phase, tuple[int, float]] = {"warmup": (5, 0.3), "stable": (3, 0.5), "mature": (2, 0.7)}
"""by phase: objections in a row that count as sustained, and the factor that they are worth"""
LEAST_FACTOR, MOST_FACTOR = 0.1, 0.95


class MetaController:
    """Watches the learning rate, the anchor and the verdicts of the last rounds."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=RATES)
        self._anchors: deque[int] = deque(maxlen=ANCHORS)
        self._objections: deque[bool] = deque(maxlen=VERDICTS)

    def state(self) -> dict[str, Any]:
        """What it remembers, for a checkpoint."""
        return {
            "rates": list(self._rates),
            "anchors": list(self._anchors),
            "objections": list(self._objections),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what it remembered. Raises ``ValueError``, and changes nothing, when it cannot be read."""
        try:
            rates = [float(value) for value in state["rates"]]
            anchors = [int(value) for value in state["anchors"]]
            objections = [bool(value) for value in state["objections"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the meta-controller's memory cannot be read: {error!r}") from error
        if not all(map(math.isfinite, rates)) or any(anchor < 1 for anchor in anchors):
            raise ValueError("the meta-controller's memory holds what cannot be")
        self._rates, self._anchors = deque(rates, RATES), deque(anchors, ANCHORS)
        self._objections = deque(objections, VERDICTS)

    def observe(self, lr: float | None, anchor: int, verdict: Verdict, phase: Phase) -> NudgeDown | None:
        """Take one round in: the learning rate that a rank reported (none keeps the last known one), the anchor and the
        guard's verdict. Answers with a nudge, or none."""
        if phase == "probe":
            return None
        cliff = lr is not None and self._falls_off(lr)
        self._anchors.append(anchor)
        self._objections.append(not isinstance(verdict, Stable))
        needed, base = SUSTAINED[phase]
        causes: list[str] = []
        factor = 1.0
        if cliff:
            causes.append(f"The learning rate fell from {self._rates[-2]:.3g} to {self._rates[-1]:.3g} in one round")
            factor *= self._factor(CLIFF_BASE)
        recent = list(self._objections)[-needed:]
        if len(recent) == needed and all(recent):
            causes.append(f"{'t' if causes else 'T'}he guard objected {needed} rounds in a row")
            factor *= self._factor(base)
        if not causes:
            return None
        return NudgeDown(_clamped(factor), " and ".join(causes))

    def _falls_off(self, lr: float) -> bool:
        """Remember this round's rate; whether it is a cliff."""
        self._rates.append(lr)
        falls = [(high - low) / high if high > 0.0 else 0.0 for high, low in pairwise(self._rates)]
        before, now = [0.0, 0.0, *falls][-2:]
        return now > CLIFF and before < SLIDE * now

    def _factor(self, base: float) -> float:
        """The base, corrected by the anchor's trend: a window that has grown lately shrinks more."""
        mean = sum(self._anchors) / len(self._anchors)
        trend = (self._anchors[-1] - mean) / mean
        return _clamped(base - (1.0 - base) * trend)


def first_known_lr(acks: Mapping[int, SyncAck]) -> float | None:
    """The learning rate that the lowest rank with one reports; none when nobody does."""
    rates = (ack.lr for _, ack in sorted(acks.items()))
    return next((lr for lr in rates if lr is not None and math.isfinite(lr)), None)


def _clamped(factor: float) -> float:
    return min(max(factor, LEAST_FACTOR), MOST_FACTOR)
