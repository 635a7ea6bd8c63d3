"""How long a device takes for a batch: speed, jitter, drift, the data's cost, and pauses."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BatchCost:
    """One batch, in ms."""

    compute_ms: float
    data_ms: float
    solo_ms: float
    """what it would have cost without windows and rounds: no first batch after a fresh start"""


@dataclass(slots=True)
class Pace:
    """One device. Times in ms a batch; everything random comes from ``dice``."""

    ms: float
    data_ms: float = 0.0
    """waiting for the data of each batch"""
    fill_ms: float = 0.0
    """what the first batch of a chunk waits on top: a cold loader"""
    jitter: float = 0.0
    """spread of single batches: the standard deviation of the logarithm"""
    drift: float = 0.0
    """how far the speed wanders to both sides, as a share"""
    drift_seconds: float = 60.0
    """a full swing"""
    phase: float = 0.0
    """where in the swing it starts, in radians"""
    paused_until: float = 0.0
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    @classmethod
    def of(cls, pace: float | Pace) -> Pace:
        """A number is the ms a batch."""
        return pace if isinstance(pace, Pace) else cls(ms=float(pace))

    def batch(self, now: float, *, first: bool) -> BatchCost:
        """The cost of the batch that starts now; ``first`` of its chunk. A pause counts as computing."""
        ms, data_ms = self.ms, self.data_ms
        if self.drift:
            ms *= 1.0 + self.drift * math.sin(2.0 * math.pi * now / self.drift_seconds + self.phase)
        if self.jitter:
            ms *= self.dice.lognormvariate(0.0, self.jitter)
        if now < self.paused_until:
            ms += (self.paused_until - now) * 1000.0
        fill_ms = self.fill_ms if first else 0.0
        return BatchCost(compute_ms=ms, data_ms=data_ms + fill_ms, solo_ms=ms + data_ms)

    @property
    def solo_ms(self) -> float:
        """What a batch costs on average when nothing else is there."""
        return self.ms + self.data_ms
