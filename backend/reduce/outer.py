"""The outer optimizer: a round's update taken as the gradient of one step of the cohort (DiLoCo, arXiv:2311.08105;
behaviour G10).

With p the last consensus and d the round's update, which is the way from the average to p (Nesterov, as torch's SGD):

    m <- momentum * m + d
    p <- p - lr * (d + momentum * m)

element by element in f32: with lr 1 and momentum 0 the step is the update itself. It happens once, here, before a slice
is streamed, so that everybody applies the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backend.core.config import RunConfig
from wire.arithmetic import FloatArray, scratch
from wire.ranges import Ranges


@dataclass(frozen=True, slots=True)
class Nesterov:
    """The settings of an outer optimizer: ``lr`` above 0, ``momentum`` from 0 to below 1."""

    lr: float
    momentum: float

    def step(self, update: FloatArray, before: FloatArray | None, after: FloatArray) -> None:
        """Turn ``update`` into the outer update in place, and write the momentum to ``after``.

        ``before`` is the momentum that the last consensus was reached with (none: zeros). All are (n,) f32, with n at
        most ``BLOCK_ELEMENTS``.
        """
        if before is None:
            np.copyto(after, update)
        else:
            np.multiply(before, np.float32(self.momentum), out=after)
            np.add(after, update, out=after)
        ahead = np.multiply(after, np.float32(self.momentum), out=scratch.product[: after.size])
        np.add(update, ahead, out=update)
        np.multiply(update, np.float32(self.lr), out=update)


@dataclass(frozen=True, slots=True)
class OuterStep:
    """What the steps of one attempt read and write, (params_elements,) each."""

    optimizer: Nesterov
    before: FloatArray | None
    zero: Ranges
    """where ``before`` is zero and ``after`` was never written"""
    after: FloatArray
    initial: bool
    """no step: values are handed out, and the momentum goes on"""

    def take(self, update: FloatArray, start: int, stop: int) -> None:
        """Step these elements of the parameters, in place."""
        before = None if self.before is None else self.before[start:stop]
        after = self.after[start:stop]
        if self.initial:
            np.copyto(after, 0.0 if before is None else before)
            return
        self.optimizer.step(update, before, after)


def outer_optimizer(config: RunConfig) -> Nesterov | None:
    """The outer optimizer of a run; none when the average is adopted as it is."""
    if config.outer_optimizer == "none":
        return None
    return Nesterov(config.outer_lr, config.outer_momentum)
