"""Averaging among the ranks themselves: out of place, in two phases (design section 7, decision 0019).

With ``live`` the flat vector that the model lives in, one sync is two collectives, or one where nobody worked:

    COUNT               int64 sum of every rank's steps, and of a flag from each whose values are not finite
    PARAM and BUFFER    spare = sum of live * f32(steps ** gamma / total mass) for parameters, and of
                        live * f32(1 / movers) for f32 buffers; idle ranks 0 (behaviour H3)

``live`` is only read until every rank has its sum; adopting copies ``spare`` into it and swaps ``spare`` with ``base``,
the consensus that was adopted last. So a sync that ends half-way has changed nothing. (Behaviour A1, A6, G5, H8.)
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wire import arithmetic
from wire.mass import gamma_mass, is_realized
from worker.adoption import AdoptResult
from worker.checksum import as_text, checksum, norm_squares
from worker.communicator import Communicator
from worker.flat import FlatModel
from worker.sessions import Place

_SEARCHED = 1 << 24
"""elements that are looked at in one go for one that is not finite"""
_NOTHING = 1e-10
"""norm of a consensus of zeros"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SyncName:
    """Which sync this is, for the log."""

    round: int
    attempt: int
    generation: int


@dataclass(frozen=True, slots=True)
class Summed:
    """The sum is complete here. ``total_steps`` and ``mass`` are the same on every rank."""

    total_steps: int
    mass: float
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class Spoilt:
    """Somebody's values are not finite, so nothing was summed. Without an element, it is another rank's."""

    element: int | None = None
    """counted from the arena's start"""
    value: str = ""


class Collective:
    """One rank's vectors. Call it from the thread that trains, on the training stream.

    Two more vectors lie beside the model from ``begin`` on.
    """

    def __init__(self, flat: FlatModel, *, gamma: float) -> None:
        self.flat = flat
        self._gamma = gamma
        self._base: Tensor | None = None
        self._spare = torch.empty(0)
        self._extremes: Tensor | None = None
        """the least and the most of this rank's values, (2,), which are finite if all are"""
        self._summed: Summed | None = None
        self._sequence = 0
        self._entered: list[tuple[object, ...]] = []
        """collectives that may be under way"""

    @torch.no_grad()
    def begin(self) -> None:
        """Hold what the arena has adopted: the run's first consensus."""
        self.flat.arena.unstage()
        self._base = torch.zeros_like(self.flat.vector)
        self._spare = torch.zeros_like(self.flat.vector)
        self.flat.fill(self._base, self.flat.arena.consensus)

    @torch.no_grad()
    def prepare(self, steps: int) -> None:
        """Have the values in the vector; those of a rank that worked are looked at, whether they are finite. The device
        may still be at it."""
        self.flat.gather()
        self._extremes = torch.stack(torch.aminmax(self.flat.vector)) if steps else None

    @torch.no_grad()
    def sum(self, session: Communicator, place: Place, steps: int, name: SyncName) -> Summed | Spoilt:
        """Sum with the others. Raises ``Aborted``, ``SessionError``; what the model holds is untouched then, too."""
        self._summed, self._sequence, self._entered = None, 0, []
        counts = self._count(session, place, steps, name)
        # A rank that worked knows that somebody did. It waits for nothing here, since each wait costs it a turn of a
        # device that it shares.
        if steps or int(self._awaited(session, counts)[: place.size].sum()):
            self._weigh(self._factors(counts[: place.size], place.index) if steps else None)
            buffers = self.flat.params < self._spare.numel()
            self._enter(name, "PARAM and BUFFER" if buffers else "PARAM", self._spare.numel())
            session.sum(self._spare, "the sum")
        found = self._awaited(session, counts).tolist()
        worked, bad = found[: place.size], found[place.size :]
        if any(bad):
            return self._search() or Spoilt()
        mass = sum(gamma_mass(one, self._gamma) for one in worked)
        moved = 4 * self.flat.arena.elements if is_realized(mass) else 0
        self._summed = Summed(sum(worked), mass, moved)
        return self._summed

    @torch.no_grad()
    def adopt(self, *, restart: bool, hashed: bool) -> AdoptResult:
        """Take what was summed last into the model; where nobody worked, keep what it holds, or take the consensus
        before again to ``restart`` from. On return the device is done.

        ``divergence`` is norm(before - after) / norm(after), 0 where there is nothing after.
        """
        summed, base, live = self._summed, self._base, self.flat.vector
        assert summed is not None and base is not None, "a sync was committed that was not summed"
        self._summed = None
        realized, params = is_realized(summed.mass), self.flat.params
        if not (realized or restart):
            norm = math.sqrt(float(norm_squares(live[:params])))
            return AdoptResult(0.0, norm, norm)
        after, unused = (self._spare, base) if realized else (base, self._spare)
        moved = torch.sub(live[:params], after[:params], out=unused[:params])
        squares = [norm_squares(live[:params]), norm_squares(moved), norm_squares(after[:params])]
        live.copy_(after)
        self.flat.scatter()
        self._base, self._spare = after, unused
        check = checksum(after) if hashed else torch.zeros_like(squares[0], dtype=torch.int64)
        # One copy, for which the device is waited for: the next batch is timed from its end (M21).
        numbers = torch.cat((torch.stack(squares).view(torch.int64), check.reshape(1))).cpu()
        pre, delta, post = numbers[:3].view(torch.float64).sqrt().tolist()
        text = as_text(int(numbers[3])) if hashed else ""
        return AdoptResult(delta / post if post > _NOTHING else 0.0, pre, post, text)

    def consensus(self) -> Tensor | None:
        """The consensus that was adopted last, (arena elements,) f32 on the CPU, parameters then buffers; None before
        the first one."""
        return None if self._base is None else self.flat.in_arena_order(self._base)

    # ------------------------------------------------------------------------------------------- the collectives

    def _count(self, session: Communicator, place: Place, steps: int, name: SyncName) -> Tensor:
        """Steps of each rank, then for each whether its values are not finite."""
        values = torch.zeros(2 * place.size, dtype=torch.int64, device=self.flat.device)
        values[place.index] = steps
        if self._extremes is not None:
            values[place.size + place.index] = self._extremes.isfinite().all().logical_not()
        self._enter(name, "COUNT", values.numel())
        session.sum(values, "the count")
        return values

    def _factors(self, worked: Tensor, index: int) -> Tensor:
        """What this rank's parameters and buffers weigh, (2,) f32, computed where they are: ``gamma_mass`` and
        ``mover_mass``, of the ranks' total."""
        moved = worked > 0
        masses = torch.stack((torch.where(moved, worked.double().pow(self._gamma), 0.0), moved.double()))
        return (masses[:, index] / masses.sum(dim=1)).float()

    def _weigh(self, factors: Tensor | None) -> None:
        """Have this rank's weighted values in ``spare``. Without factors it contributes nothing, whatever it holds."""
        if factors is None:
            self._spare.zero_()
            return
        border = self.flat.params
        for section, factor in zip((slice(0, border), slice(border, None)), factors, strict=True):
            torch.mul(self.flat.vector[section], factor, out=self._spare[section])

    def _awaited(self, session: Communicator, counts: Tensor) -> Tensor:
        """The counts on the CPU, once everything that was begun is complete: one wait for the device, copy included."""
        copy = counts.to("cpu", non_blocking=True)
        session.wait()
        while self._entered:
            logger.debug("round %s.%s session %s #%s: exit %s of %s", *self._entered.pop(0))
        return copy

    def _enter(self, name: SyncName, kind: str, elements: int) -> None:
        """Who stands where in a run that hangs, the log tells."""
        self._sequence += 1
        where = (name.round, name.attempt, name.generation, self._sequence, kind, elements)
        logger.debug("round %s.%s session %s #%s: enter %s of %s", *where)
        self._entered.append(where)

    def _search(self) -> Spoilt | None:
        """The first element of this rank's that is not finite; none where another's is not."""
        if self._extremes is None or bool(self._extremes.isfinite().all()):
            return None
        live = self.flat.vector
        for start in range(0, live.numel(), _SEARCHED):
            block = live[start : start + _SEARCHED]
            found = torch.isfinite(block).logical_not_().nonzero()
            if found.numel():
                index = int(found[0])
                return Spoilt(self.flat.arena_element(start + index), arithmetic.name(float(block[index])))
        return None
