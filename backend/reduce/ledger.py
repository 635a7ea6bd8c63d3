"""The consensus in force, the one before it, and what the next one is built in."""

from __future__ import annotations

import numpy as np

from backend.core.vocabulary import OpenRound
from backend.reduce.attempt import Attempt
from backend.reduce.buffers import Buffer
from backend.reduce.outer import Nesterov, OuterStep
from wire.arithmetic import F32, FloatArray


class Ledger:
    """Two buffers that take turns; one that somebody outside holds is replaced by a new one."""

    def __init__(self, outer: Nesterov | None) -> None:
        self.consensus: Buffer | None = None
        """what everybody holds"""
        self._outer = outer
        self._before: Buffer | None = None
        self._restored: FloatArray | None = None
        self._start: FloatArray | None = None
        self._last: tuple[int, int] | None = None

    @property
    def values(self) -> FloatArray | None:
        """The consensus, for somebody outside."""
        return None if self.consensus is None else self.consensus.lend(self.consensus.values)

    @property
    def momentum(self) -> FloatArray | None:
        """The outer momentum behind it, for somebody outside."""
        if self.consensus is None or self.consensus.momentum is None:
            return None
        return self.consensus.lend(self.consensus.momentum)

    def restore(self, momentum: FloatArray) -> None:
        """Begin with this outer momentum. Raises ``ValueError``, see ``ReducePlane.restore_outer``."""
        if self._outer is None:
            raise ValueError("this run has no outer optimizer whose momentum could be restored")
        if self.consensus is not None:
            raise ValueError("the outer momentum can be restored before the first round only")
        if momentum.dtype != F32 or momentum.ndim != 1:
            raise ValueError(f"the outer momentum is one f32 vector, not {momentum.dtype} of shape {momentum.shape}")
        if not np.isfinite(momentum).all():
            raise ValueError("the outer momentum to restore is not finite")
        self._restored = momentum.copy()

    def start_from(self, values: FloatArray) -> None:
        """Have the initial broadcast bring this arena. Raises ``ValueError``, see ``ReducePlane.restore_consensus``."""
        if self.consensus is not None:
            raise ValueError("the consensus can be restored before the first round only")
        if values.dtype != F32 or values.ndim != 1:
            raise ValueError(f"the consensus is one f32 vector, not {values.dtype} of shape {values.shape}")
        if not np.isfinite(values).all():
            raise ValueError("the consensus to restore is not finite")
        self._start = values

    def start(self, initial: bool) -> FloatArray | None:
        """What the initial broadcast brings instead of a rank's values; let go of once it is behind us."""
        if not initial:
            self._start = None
        return self._start

    def check(self, opening: OpenRound) -> None:
        """Raises ``ValueError`` before the initial broadcast, for another model than the consensus, restored or
        not, is of, and for a restored momentum of another length than the parameters."""
        elements = opening.params_elements + opening.buffers_elements
        if self._start is not None and self._start.size != elements:
            raise ValueError(f"the restored consensus has {self._start.size} elements, the model {elements}")
        if self.consensus is None and not opening.initial:
            raise ValueError(f"round {opening.round} was opened before there is a consensus to differ from")
        if self.consensus is not None and self.consensus.values.size != elements:
            known = self.consensus.values.size
            raise ValueError(f"round {opening.round} has {elements} elements, the consensus {known}")
        if self.consensus is None and self._restored is not None and self._restored.size != opening.params_elements:
            sizes = f"{self._restored.size} elements, the parameters {opening.params_elements}"
            raise ValueError(f"the restored outer momentum has {sizes}")

    def take_buffer(self, opening: OpenRound) -> Buffer:
        """The arena to build in: the consensus before the last one, unless somebody may still read it."""
        self._last = None
        spare, self._before = self._before, None
        if spare is not None and not spare.lent:
            return spare
        elements = opening.params_elements + opening.buffers_elements
        return Buffer(elements, None if self._outer is None else opening.params_elements)

    def outer_step(self, built: Buffer, initial: bool) -> OuterStep | None:
        """What the outer optimizer goes on from; none without one."""
        if self._outer is None:
            return None
        assert built.momentum is not None, "made with the buffer"
        if self.consensus is not None:
            last = self.consensus
            return OuterStep(self._outer, last.momentum, last.momentum_zero, built.momentum, initial)
        zero = built.momentum_zero if self._restored is None else []
        return OuterStep(self._outer, self._restored, zero, built.momentum, initial)

    def commit(self, attempt: Attempt) -> None:
        """What the attempt built is the consensus now."""
        attempt.commit(self.consensus)
        self._before, self.consensus = self.consensus, attempt.built
        self._last = attempt.number

    def take_back(self, number: tuple[int, int]) -> None:
        """The attempt that was committed last does not count: the consensus is what it was before. Nothing happens for
        any other attempt, or once another one began."""
        if self._last == number:
            self.consensus, self._before, self._last = self._before, None, None
