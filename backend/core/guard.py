"""The convergence guard: watches how far the replicas drift apart between two rounds, and objects to windows that are
too long (behaviour K1 to K5).

    level    objects while the divergence rises, three rounds in a row, above a threshold
    growth   objects when the divergence grows exponentially per batch, and shortens the window when it does so fast
    none     never objects
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from backend.core.config import RunConfig
from backend.core.verdicts import NudgeDown, Stable, SuppressGrowth, Verdict
from wire.messages import SyncAck

HISTORY = 5
RISES = 3
"""values that must rise strictly for the level guard to object"""
LEVEL_THRESHOLD = 0.05
FLOOR = 1e-8
"""divergence at or below it says nothing about growth"""
SMOOTHING = 0.9
SUPPRESS_RATE, NUDGE_RATE = 1e-3, 1e-2
"""smoothed growth of the logarithm of the divergence, per batch"""
STREAK = 3
NUDGE_FACTOR = 0.5


@dataclass(frozen=True, slots=True)
class DivergenceReport:
    """How far each replica was from the consensus that it adopted (K1). ``deltas`` are norms of the difference over the
    norm of the consensus; norms are those of the parameters, ``pre`` before and ``post`` after the round."""

    deltas: dict[int, float]
    pre_norms: dict[int, float]
    post_norm: float
    batches: int
    """the cohort's batches in the window"""
    k_max: int
    """the most batches that one rank did"""

    @property
    def divergence(self) -> float:
        """The largest delta; 0 when no rank has one."""
        return max(self.deltas.values(), default=0.0)

    def cosine(self, rank: int) -> float | None:
        """Between the rank's parameters and the consensus, -1 to 1; none where a norm is missing or zero."""
        pre, post, delta = self.pre_norms.get(rank), self.post_norm, self.deltas.get(rank)
        if pre is None or delta is None or pre <= 0.0 or post <= 0.0:
            return None
        return min(1.0, max(-1.0, (pre**2 + post**2 - (delta * post) ** 2) / (2.0 * pre * post)))

    def magnitude_shift(self, rank: int) -> float | None:
        """By how much averaging shrank the rank's parameters: a large one with a small cosine is cancellation."""
        pre = self.pre_norms.get(rank)
        return None if pre is None else pre - self.post_norm


def divergence_report(acks: Mapping[int, SyncAck], steps: Mapping[int, int]) -> DivergenceReport:
    """From a round's acknowledgements and its accepted steps. What is not finite counts as missing; norms before the
    round are used only if every rank has one."""
    deltas = {rank: ack.divergence for rank, ack in acks.items() if math.isfinite(ack.divergence)}
    norms = {rank: ack.pre_norm for rank, ack in acks.items() if math.isfinite(ack.pre_norm)}
    post = next((ack.post_norm for _, ack in sorted(acks.items()) if math.isfinite(ack.post_norm)), 0.0)
    return DivergenceReport(
        deltas=deltas,
        pre_norms=norms if len(norms) == len(acks) else {},
        post_norm=post,
        batches=sum(steps.values()),
        k_max=max(steps.values(), default=0),
    )


class Guard(Protocol):
    """Judges each realized round; its history goes with a checkpoint."""

    def judge(self, report: DivergenceReport) -> Verdict: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> bool:
        """Take up a saved history. False, and nothing changed, when it is another guard's. Raises ``ValueError`` when
        it is this one's and cannot be read."""
        ...


class LevelGuard:
    """Objects while the divergence rises above a threshold (K3); never shortens a window."""

    kind = "level"

    def __init__(self, threshold: float = LEVEL_THRESHOLD, *, relax_up: bool = False) -> None:
        self.threshold = threshold
        self._relax_up = relax_up
        self._history: deque[float] = deque(maxlen=HISTORY)

    def judge(self, report: DivergenceReport) -> Verdict:
        """Take one round's divergence into the history and judge by the last three."""
        self._history.append(report.divergence)
        recent = list(self._history)[-RISES:]
        if len(recent) < RISES:
            return Stable(f"The guard has seen {len(recent)} of the {RISES} rounds that it needs.")
        newest = recent[-1]
        said = f"The replicas were {newest:.3g} apart"
        if newest <= self.threshold:
            return Stable(f"{said}, within the guard's {self.threshold:g}.", relax_up=self._relax_up)
        if all(earlier < later for earlier, later in pairwise(recent)):
            return SuppressGrowth(f"{said}, above the guard's {self.threshold:g} and rising for {RISES} rounds.")
        return Stable(f"{said}, above the guard's {self.threshold:g}, but not rising for {RISES} rounds.")

    def state(self) -> dict[str, Any]:
        """The last values of the divergence, JSON-ready."""
        return {"kind": self.kind, "history": list(self._history)}

    def restore(self, state: Mapping[str, Any]) -> bool:
        """See ``Guard``."""
        if state.get("kind") != self.kind:
            return False
        history = [_number(value) for value in _field(state, "history", list)]
        self._history = deque(history, maxlen=HISTORY)
        return True


class GrowthGuard:
    """Objects to exponential growth of the divergence: lambda = ln(d / previous d) / most batches of a rank, smoothed
    (K4)."""

    kind = "growth"

    def __init__(self, *, relax_up: bool = False) -> None:
        self._relax_up = relax_up
        self._previous: float | None = None
        self._average = 0.0
        self._events = 0
        self._streaks = {"suppress": 0, "nudge": 0}

    @property
    def rate(self) -> float | None:
        """The smoothed lambda, corrected for its start at zero; none before the first pair of rounds."""
        return self._average / (1.0 - SMOOTHING**self._events) if self._events else None

    def judge(self, report: DivergenceReport) -> Verdict:
        """Take one round in. A round that says nothing about growth leaves the streaks as they are."""
        previous, newest = self._previous, report.divergence
        self._previous = newest if newest > FLOOR else None
        if previous is None or newest <= FLOOR or report.k_max <= 0:
            return Stable("This round and the one before do not show how fast the divergence grows.")
        self._average = SMOOTHING * self._average + (1.0 - SMOOTHING) * math.log(newest / previous) / report.k_max
        self._events += 1
        rate = self.rate
        assert rate is not None
        nudge, suppress = self._fires("nudge", rate, NUDGE_RATE), self._fires("suppress", rate, SUPPRESS_RATE)
        said = f"The divergence changes by {rate:.2g} in its logarithm per batch"
        if nudge:
            return NudgeDown(NUDGE_FACTOR, f"{said}, more than {NUDGE_RATE:g} for {STREAK} rounds")
        if suppress:
            return SuppressGrowth(f"{said}, more than {SUPPRESS_RATE:g} for {STREAK} rounds.")
        calm = rate <= SUPPRESS_RATE
        return Stable(f"{said}{', which is calm' if calm else ''}.", relax_up=self._relax_up and calm)

    def state(self) -> dict[str, Any]:
        """Previous divergence, running average and streaks, JSON-ready."""
        return {
            "kind": self.kind,
            "previous": self._previous,
            "average": self._average,
            "events": self._events,
            "streaks": dict(self._streaks),
        }

    def restore(self, state: Mapping[str, Any]) -> bool:
        """See ``Guard``."""
        if state.get("kind") != self.kind:
            return False
        previous = state.get("previous")
        saved = _field(state, "streaks", dict)
        streaks = {name: int(_number(saved.get(name))) for name in self._streaks}
        average, events = _number(state.get("average")), int(_number(state.get("events")))
        self._previous = None if previous is None else _number(previous)
        self._average, self._events, self._streaks = average, max(0, events), streaks
        return True

    def _fires(self, name: str, rate: float, limit: float) -> bool:
        """Whether this streak is full; a full one starts over and leaves the other alone."""
        self._streaks[name] = self._streaks[name] + 1 if rate > limit else 0
        if self._streaks[name] < STREAK:
            return False
        self._streaks[name] = 0
        return True


class NoGuard:
    """Never objects, and says so."""

    kind = "none"

    def judge(self, report: DivergenceReport) -> Verdict:
        """Always stable."""
        return Stable("No guard watches the divergence.")

    def state(self) -> dict[str, Any]:
        """Nothing to remember."""
        return {"kind": self.kind}

    def restore(self, state: Mapping[str, Any]) -> bool:
        """See ``Guard``."""
        return state.get("kind") == self.kind


def guard_for(config: RunConfig) -> Guard:
    """The guard that the run's configuration names."""
    if config.guard == "growth":
        return GrowthGuard(relax_up=config.relax_up)
    if config.guard == "none":
        return NoGuard()
    threshold = LEVEL_THRESHOLD if config.guard_threshold is None else config.guard_threshold
    return LevelGuard(threshold, relax_up=config.relax_up)


def _field(state: Mapping[str, Any], name: str, kind: type) -> Any:
    value = state.get(name)
    if not isinstance(value, kind):
        raise ValueError(f"the saved guard's {name} is {value!r}, not a {kind.__name__}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"the saved guard holds {value!r} where a number belongs")
    return float(value)
