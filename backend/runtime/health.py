"""How promptly a run is served, in numbers: durations by size, at a fixed cost in memory and time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from wire.beats import Beats
from wire.messages import HostHeartbeat

FINEST_SECONDS = 1e-5
STEPS_PER_OCTAVE = 4
"""two neighbouring steps are 19 % apart: that's how exact a quantile is"""
OCTAVES = 24
_STEPS = OCTAVES * STEPS_PER_OCTAVE + 1
"""up to 141 s; what is longer counts in the last step, and exactly in ``worst``"""


class Histogram:
    """Durations in seconds."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.worst = 0.0
        self._steps = [0] * _STEPS

    def add(self, seconds: float) -> None:
        """Count one; what a clock makes negative counts as none at all."""
        seconds = max(0.0, seconds)
        self.count += 1
        self.total += seconds
        self.worst = max(self.worst, seconds)
        self._steps[_step(seconds)] += 1

    def merge(self, other: Histogram) -> None:
        """Count what the other one has counted."""
        self.count += other.count
        self.total += other.total
        self.worst = max(self.worst, other.worst)
        self._steps = [mine + theirs for mine, theirs in zip(self._steps, other._steps, strict=True)]

    def quantile(self, share: float) -> float:
        """The duration that this share of all did not exceed, 19 % too long at most; 0 without any."""
        wanted = share * self.count
        seen = 0
        for step, number in enumerate(self._steps):
            seen += number
            if number and seen >= wanted:
                return min(_bound(step), self.worst) if step < _STEPS - 1 else self.worst
        return 0.0

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Upper bounds an octave apart, and how many were no longer; the last bound is infinite."""
        seen = 0
        for step, number in enumerate(self._steps):
            seen += number
            if step == _STEPS - 1:
                yield math.inf, seen
            elif step % STEPS_PER_OCTAVE == 0:
                yield _bound(step), seen

    def figures(self) -> dict[str, Any]:
        """It in a few numbers."""
        return {
            "count": self.count,
            "p50_seconds": self.quantile(0.5),
            "p99_seconds": self.quantile(0.99),
            "worst_seconds": self.worst,
        }


@dataclass(slots=True)
class LoopHealth:
    """How promptly one run's core was served."""

    latency: Histogram = field(default_factory=Histogram)
    """from the moment an event came, or a deadline was due, to the moment the core had handled it"""
    handling: Histogram = field(default_factory=Histogram)
    """an event in the core"""
    effects: Histogram = field(default_factory=Histogram)
    """performing what the core answered to an event, commits of durable rows included"""

    def merge(self, other: LoopHealth) -> None:
        """Count what the other one has counted."""
        self.latency.merge(other.latency)
        self.handling.merge(other.handling)
        self.effects.merge(other.effects)


@dataclass(slots=True)
class HostBeats:
    """The heartbeats of one host, as they come here, and ours, as the host says that they come there."""

    here: Beats
    there_late: int = 0
    there_worst_late_seconds: float = 0.0

    def heard(self, heartbeat: HostHeartbeat, now: float) -> None:
        """A heartbeat came, with what the host says of ours."""
        self.here.heard(now)
        self.there_late = heartbeat.late
        self.there_worst_late_seconds = heartbeat.worst_late_seconds


def heartbeat_figures(hosts: dict[str, HostBeats]) -> dict[str, Any]:
    """All hosts together: how many heartbeats came more than a period late, and the worst, both ways."""
    return {
        "late": sum(beats.here.late_count for beats in hosts.values()),
        "worst_late_seconds": max((beats.here.worst_late_seconds for beats in hosts.values()), default=0.0),
        "controller_late": sum(beats.there_late for beats in hosts.values()),
        "controller_worst_late_seconds": max((beats.there_worst_late_seconds for beats in hosts.values()), default=0.0),
    }


def _step(seconds: float) -> int:
    if seconds <= FINEST_SECONDS:
        return 0
    return min(_STEPS - 1, math.ceil(math.log2(seconds / FINEST_SECONDS) * STEPS_PER_OCTAVE))


def _bound(step: int) -> float:
    return FINEST_SECONDS * math.exp2(step / STEPS_PER_OCTAVE)
