"""The outer optimizer: a round's average taken as one step of the cohort (DiLoCo, arXiv:2311.08105; behaviour G10).

With p the last consensus, a the average, and d = p - a, which plays the gradient (Nesterov, as in torch's SGD):

    m <- momentum * m + d
    p <- p - lr * (d + momentum * m)   =   a + ((1 - lr) * d - lr * momentum * m)

The right-hand form is the one computed, element by element in f32: with lr 1 and momentum 0 it is the average itself.
It happens once, here, before a slice is streamed, so that every rank adopts the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backend.core.config import RunConfig
from backend.reduce.sums import FloatArray, NonFinite, Pieces, sum_slice


@dataclass(frozen=True, slots=True)
class Nesterov:
    """The settings of an outer optimizer: ``lr`` above 0, ``momentum`` from 0 to below 1."""

    lr: float
    momentum: float

    def step(self, average: FloatArray, start: FloatArray, before: FloatArray | None, after: FloatArray) -> None:
        """Turn ``average`` into what is adopted, and write the momentum to ``after``.

        ``start`` is the last consensus and ``before`` the momentum it was reached with (none: zeros). All are (n,) f32.
        """
        back = start - average
        if before is None:
            np.copyto(after, back)
        else:
            np.multiply(before, np.float32(self.momentum), out=after)
            np.add(after, back, out=after)
        np.multiply(back, np.float32(1.0 - self.lr), out=back)
        np.subtract(back, np.float32(self.lr * self.momentum) * after, out=back)
        np.add(average, back, out=average)


@dataclass(frozen=True, slots=True)
class OuterSlice:
    """What the step of one slice reads and writes, all of the slice's length; ``start`` None makes no step and hands
    the momentum on."""

    optimizer: Nesterov
    start: FloatArray | None
    before: FloatArray | None
    after: FloatArray

    def apply(self, average: FloatArray) -> NonFinite | None:
        """Step in place; return what is not finite afterwards, if anything."""
        if self.start is None:
            np.copyto(self.after, 0.0 if self.before is None else self.before)
            return None
        with np.errstate(all="ignore"):  # looked for below, once
            self.optimizer.step(average, self.start, self.before, self.after)
        for values in (average, self.after):
            bad = np.flatnonzero(~np.isfinite(values))
            if bad.size:
                return NonFinite(None, int(bad[0]), float(values[bad[0]]), what="the outer step")
        return None


def outer_optimizer(config: RunConfig) -> Nesterov | None:
    """The outer optimizer of a run; none when the average is adopted as it is."""
    if config.outer_optimizer == "none":
        return None
    return Nesterov(config.outer_lr, config.outer_momentum)


def reduce_slice(
    contributions: list[Pieces], out: FloatArray, scale: np.float32, outer: OuterSlice | None
) -> NonFinite | None:
    """``sum_slice``, and the outer step on what it made. Runs in any thread."""
    bad = sum_slice(contributions, out, scale)
    return outer.apply(out) if bad is None and outer is not None else bad
