"""A relay's bookkeeping of one round on its way up: who is ready to be folded, and in which pieces.

Pure: no clock, no I/O, no arrays. A new ``(round, attempt)`` begins when the controller asks a rank for its
parameters, and ends with the commit, the abort or the next request (behaviour G9, G10, M29; law L8).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from wire import ranges
from wire.messages import Contribution, RequestParams, RoundAborted, SnapshotReady
from wire.ranges import Ranges
from wire.session import ChunkHeader, Encoding, Section
from wire.streams import SLICE_ELEMENTS, chunk_round, section_encoding, slices


class SnapshotRefused(Exception):
    """A rank declared what cannot be; the text names the elements."""


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of every arena of the cohort, in f32 elements."""

    params_elements: int
    buffers_elements: int

    @property
    def elements(self) -> int:
        return self.params_elements + self.buffers_elements


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of the arena, and the masses of the ranks whose work is in it, in ascending order of rank."""

    header: ChunkHeader
    masses: dict[int, float]

    @property
    def stop(self) -> int:
        return self.header.offset + self.header.elements


@dataclass(frozen=True, slots=True)
class FoldPlan:
    """What the host sends for one attempt: the declaration, then these pieces in order; none if nobody worked."""

    contribution: Contribution
    initial: bool
    encoding: Encoding

    @property
    def number(self) -> tuple[int, int]:
        return self.contribution.round, self.contribution.attempt

    def pieces(self, slice_elements: int = SLICE_ELEMENTS) -> Iterator[Piece]:
        """Slices of at most ``slice_elements`` of all that is not still, params then buffers."""
        share = self.contribution
        if not any(mass > 0 for mass in share.masses.values()):
            return
        for one in slices(share.params_elements, share.buffers_elements, share.still, slice_elements):
            encoding = section_encoding(one.section, self.encoding)
            number = chunk_round(share.round), share.attempt
            header = ChunkHeader(*number, one.section, one.offset, one.elements, encoding)
            masses = share.masses if one.section == Section.PARAMS else share.mover_masses
            yield Piece(header, {rank: mass for rank, mass in sorted(masses.items()) if mass > 0})


class Fold:
    """Collects the ranks' declarations of one attempt; complete when every living rank has made its own.

    A rank is out when the controller says so, never because its socket closed: the controller must expect
    exactly the ranks that the host declares.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.model: Model | None = None
        """set once the first rank has built its model"""
        self.live = set(ranks)
        self._number: tuple[int, int] | None = None
        self._initial = False
        self._encoding = Encoding.F32
        self._open = False
        self._planned = False
        self._ready: dict[int, SnapshotReady] = {}
        self.ignored = 0
        """declarations of another attempt, or of the dead"""

    def requested(self, request: RequestParams) -> bool:
        """The controller asks a rank for its parameters; True when that begins a new attempt."""
        number = (request.round, request.attempt)
        if self._number is not None and number <= self._number:
            return False
        self._number, self._open, self._planned = number, True, False
        self._initial = request.initial
        self._encoding = travels_as(request)
        self._ready = {}
        return True

    def ready(self, rank: int, snapshot: SnapshotReady) -> FoldPlan | None:
        """A rank's values are in its arena. The plan, once it was the last one missing. Raises ``SnapshotRefused``."""
        if rank not in self.live or not self._open or (snapshot.round, snapshot.attempt) != self._number:
            self.ignored += 1
            return None
        if self.model is not None and (problem := ranges.problem(snapshot.still, self.model.elements)):
            raise SnapshotRefused(f"rank {rank} declared that {problem}, as still")
        self._ready[rank] = snapshot
        return self._plan()

    def dead(self, rank: int) -> FoldPlan | None:
        """The controller declared a rank dead. The plan, when the others only waited for it."""
        self.live.discard(rank)
        if not self._planned:
            self._ready.pop(rank, None)
        return self._plan()

    def aborted(self, message: RoundAborted) -> None:
        """Forget the attempt; the arenas stay as they are for the next one."""
        if self._number == (message.round, message.attempt):
            self._open = False

    def is_current(self, plan: FoldPlan) -> bool:
        """Whether this plan is still worth streaming."""
        return self._open and plan.number == self._number

    def _plan(self) -> FoldPlan | None:
        complete = bool(self.live) and self.live <= self._ready.keys()
        if not complete or self._planned or not self._open or self.model is None or self._number is None:
            return None
        self._planned = True
        ready = {rank: self._ready[rank] for rank in sorted(self.live)}
        contribution = Contribution(
            round=self._number[0],
            attempt=self._number[1],
            steps={rank: snapshot.steps for rank, snapshot in ready.items()},
            masses={rank: snapshot.mass for rank, snapshot in ready.items()},
            mover_masses={rank: snapshot.mover_mass for rank, snapshot in ready.items()},
            params_elements=self.model.params_elements,
            buffers_elements=self.model.buffers_elements,
            still=self._still([snapshot for snapshot in ready.values() if snapshot.mass > 0]),
        )
        return FoldPlan(contribution, self._initial, self._encoding)

    def _still(self, contributing: list[SnapshotReady]) -> Ranges:
        """What no rank with work moved; in the initial broadcast there is nothing to be equal to."""
        if self._initial or not contributing:
            return []
        common = contributing[0].still
        for snapshot in contributing[1:]:
            common = ranges.intersection(common, snapshot.still)
        return common


def travels_as(request: RequestParams) -> Encoding:
    """How parameters cross the wire, both ways, in the attempt that this request begins."""
    return Encoding.F32 if request.initial else Encoding(request.encoding)
