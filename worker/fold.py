"""A relay's bookkeeping of one round at a time: who is ready to be folded, and what of the answer is staged.

Pure: no clock, no I/O, no arrays. A new ``(round, attempt)`` begins when the controller asks a rank for its
parameters, and ends with the commit, the abort or the next request (behaviour G9, G10, M29; law L8).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from wire.frames import MAX_CHUNK_ELEMENTS
from wire.messages import Contribution, RequestParams, RoundAborted, RoundCommitted, SnapshotReady
from wire.session import ChunkHeader, Encoding, Section

SLICE_ELEMENTS = MAX_CHUNK_ELEMENTS
"""f32 elements of one chunk upwards: 1 MiB"""
_ROUND_BITS = 0xFFFFFFFF
"""chunk headers hold 32 bits of a round's number: the initial broadcast, -1, wraps around"""


class FoldError(Exception):
    """The controller's stream cannot be staged; the text names the elements."""


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
    """A slice of the arena and the ranks whose arenas are summed there, ascending."""

    header: ChunkHeader
    ranks: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.header.offset + self.header.elements


@dataclass(frozen=True, slots=True)
class FoldPlan:
    """What the host sends for one attempt: the declaration, then these pieces in order; none if nobody worked."""

    contribution: Contribution

    @property
    def number(self) -> tuple[int, int]:
        return self.contribution.round, self.contribution.attempt

    def pieces(self, slice_elements: int = SLICE_ELEMENTS) -> Iterator[Piece]:
        """Slices of at most ``slice_elements``, params then buffers; a section without mass is left out."""
        share = self.contribution
        border, end = share.params_elements, share.params_elements + share.buffers_elements
        for section, start, stop, masses in (
            (Section.PARAMS, 0, border, share.masses),
            (Section.BUFFERS, border, end, share.mover_masses),
        ):
            ranks = tuple(sorted(rank for rank, mass in masses.items() if mass > 0))
            for offset in range(start, stop if ranks else start, slice_elements):
                elements = min(slice_elements, stop - offset)
                header = ChunkHeader(share.round & _ROUND_BITS, share.attempt, section, offset, elements)
                yield Piece(header, ranks)


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
        self._ready = {}
        return True

    def ready(self, rank: int, snapshot: SnapshotReady) -> FoldPlan | None:
        """A rank packed its arena. The plan, once it was the last one missing."""
        if rank not in self.live or not self._open or (snapshot.round, snapshot.attempt) != self._number:
            self.ignored += 1
            return None
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
        return FoldPlan(
            Contribution(
                round=self._number[0],
                attempt=self._number[1],
                steps={rank: self._ready[rank].steps for rank in sorted(self.live)},
                masses={rank: self._ready[rank].mass for rank in sorted(self.live)},
                mover_masses={rank: self._ready[rank].mover_mass for rank in sorted(self.live)},
                params_elements=self.model.params_elements,
                buffers_elements=self.model.buffers_elements,
            )
        )


class Staging:
    """How much of an attempt's consensus has arrived, and whether it may be adopted: committed, and all there."""

    def __init__(self) -> None:
        self._number: tuple[int, int] | None = None
        self._staged = 0
        self._commit: RoundCommitted | None = None
        self.ignored = 0
        """chunks and commits of another attempt"""

    def opened(self, round_: int, attempt: int) -> None:
        """Expect the consensus of this attempt from its first element."""
        self._number, self._staged, self._commit = (round_, attempt), 0, None

    def aborted(self, message: RoundAborted) -> None:
        """What is staged of this attempt is void."""
        if self._number == (message.round, message.attempt):
            self._number = None

    def accepts(self, header: ChunkHeader, model: Model) -> bool:
        """Whether to copy this chunk in; False for one of another attempt.

        Raises ``FoldError`` for a gap, a repeat, or elements beyond the model: the link is in order, so the
        stream is broken.
        """
        if not self._is_current(header):
            self.ignored += 1
            return False
        if header.encoding != Encoding.F32:
            raise FoldError(f"the consensus has encoding {header.encoding}, this run uses f32")
        if header.offset != self._staged:
            raise FoldError(f"the consensus goes on at element {header.offset} where {self._staged} was due")
        if header.offset + header.elements > model.elements:
            raise FoldError(f"the consensus goes on beyond the model's {model.elements} elements")
        return True

    def staged(self, header: ChunkHeader, model: Model) -> RoundCommitted | None:
        """A chunk that was accepted is copied in. The commit to pass on, if it waited for this."""
        self._staged = header.offset + header.elements
        return self._release(model)

    def committed(self, message: RoundCommitted, model: Model) -> RoundCommitted | None:
        """The controller committed the attempt. The commit to pass on, if everything is here already."""
        if self._number != (message.round, message.attempt):
            self.ignored += 1
            return None
        self._commit = message
        return self._release(model)

    def _is_current(self, header: ChunkHeader) -> bool:
        if self._number is None:
            return False
        round_, attempt = self._number
        return header.round == round_ & _ROUND_BITS and header.attempt == attempt

    def _release(self, model: Model) -> RoundCommitted | None:
        commit = self._commit
        if commit is None:
            return None
        needed = model.params_elements if commit.realized else 0
        if commit.realized and commit.buffers_realized:
            needed = model.elements
        if self._staged < needed:
            return None
        self._number = self._commit = None
        return commit
