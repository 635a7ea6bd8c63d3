"""Epoch pools: which samples went to whom, were trained, were committed, or came back (behaviour E; design section 8).

Every sample of an epoch is in exactly one state, and moves only like this::

    pool -> in flight with one rank -> delivered -> accepted
      ^            |                      |
      +------------+----------------------+   forfeit: the rank died and its round is closed
                   |                      |
                   +----------------------+-> lost      the contribution that they are behind was refused

*Delivered* samples were trained but live only in that rank's parameters; the round that commits them makes them
*accepted*. A rank that trains on while a round is open delivers nothing as a chunk: the round accepts the first batches
that it was dealt, as many as its snapshot held (``accept_batches``). Unlike the reference the last, partial batch is
dealt too. *Lost* samples are listed with their reason and never dealt again: one that makes whoever trains on it
diverge would go round for ever. A pool may begin with samples accepted or lost, when a run is resumed in an epoch.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


class WorkError(Exception):
    """A step that the states above do not allow; the caller, or a rank, claimed work that it did not have."""


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Positions ``offset`` to ``offset + size`` of the epoch's permutation, in samples."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        """First position after the range."""
        return self.offset + self.size


@dataclass(frozen=True, slots=True)
class Lost:
    """Samples that were trained in vain: in which part of the epoch, by whom, and why no round accepts them."""

    piece: Range
    rank: int
    reason: str

    def row(self) -> dict[str, Any]:
        """As the store keeps it: offset and size in samples of the epoch's permutation."""
        return {"offset": self.piece.offset, "size": self.piece.size, "rank": self.rank, "reason": self.reason}


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Sorted, with neighbours that touch joined into one. Overlaps stay visible as two ranges."""
    result: list[Range] = []
    for piece in sorted(ranges):
        if result and result[-1].end == piece.offset:
            result[-1] = Range(result[-1].offset, result[-1].size + piece.size)
        else:
            result.append(piece)
    return result


class EpochPool:
    """The samples of one epoch and where each of them is. Chunks start on a batch boundary, and only the chunk that
    ends the epoch, or what a resumed run had left of it, may end inside a batch."""

    def __init__(
        self,
        epoch: int,
        samples: int,
        batch_size: int,
        accepted: Iterable[Range] = (),
        lost: Iterable[Lost] = (),
    ) -> None:
        """``accepted`` were trained before, and ``lost``, by the run that this one resumes, perhaps in batches of
        another size: then each range that is left is cut into batches from its own start. Raises ``ValueError``."""
        if samples < 1 or batch_size < 1:
            raise ValueError(
                f"an epoch needs at least one sample and batches of at least one, not {samples} and {batch_size}"
            )
        self.epoch = epoch
        self.samples = samples
        self.batch_size = batch_size
        self._cursor = 0
        self._accepted = merged(accepted)
        self._lost = list(lost)
        closed = [*self._accepted, *(one.piece for one in self._lost)]
        _check_disjoint(closed, samples)
        self._reclaimed = self.uncovered() if closed else []
        if closed:
            self._cursor = samples
        self._starts = [piece.offset for piece in self._reclaimed] or [0]
        """where the batches of a range begin to count"""
        self._in_flight: dict[int, list[Range]] = {}
        self._delivered: dict[int, list[Range]] = {}

    # ------------------------------------------------------------------------------------------- readings

    @property
    def remaining_batches(self) -> int:
        """Batches in the pool: not dealt yet, or returned."""
        return self._batches(self.samples - self._cursor) + sum(self._batches(piece.size) for piece in self._reclaimed)

    @property
    def accepted_samples(self) -> int:
        """Samples whose round is committed."""
        return sum(piece.size for piece in self._accepted)

    def accepted(self) -> list[Range]:
        """What no resumed run has to do again, sorted."""
        return list(self._accepted)

    @property
    def lost(self) -> list[Lost]:
        """Samples that no round will accept, in the order of the epoch."""
        return sorted(self._lost, key=lambda lost: lost.piece)

    @property
    def lost_samples(self) -> int:
        """Samples that no round will accept."""
        return sum(lost.piece.size for lost in self._lost)

    @property
    def is_done(self) -> bool:
        """Every sample is accepted or lost."""
        return self.accepted_samples + self.lost_samples == self.samples

    @property
    def is_dealt(self) -> bool:
        """Nothing is left to deal, though some may still be in flight or unaccepted."""
        return self._cursor == self.samples and not self._reclaimed

    @property
    def anything_in_flight(self) -> bool:
        """Whether any rank holds a chunk that it has not delivered."""
        return bool(self._in_flight)

    def in_flight(self, rank: int) -> bool:
        """Whether the rank holds a chunk that it has not delivered."""
        return rank in self._in_flight

    def in_flight_ranges(self, rank: int) -> list[Range]:
        """The rank's chunks that it has not delivered, oldest first."""
        return list(self._in_flight.get(rank, ()))

    def delivered_samples(self, rank: int) -> int:
        """Samples the rank has trained on in the window whose round is not committed."""
        return sum(piece.size for piece in self._delivered.get(rank, ()))

    def held_batches(self, rank: int) -> int:
        """Batches that the rank was dealt and no round has accepted."""
        pieces = (*self._delivered.get(rank, ()), *self._in_flight.get(rank, ()))
        return sum(self._batches(piece.size) for piece in pieces)

    def uncovered(self) -> list[Range]:
        """Everything neither accepted nor lost, sorted: what a resumed run has to do again (E12)."""
        result, position = [], 0
        for piece in merged([*self._accepted, *(lost.piece for lost in self._lost)]):
            if piece.offset > position:
                result.append(Range(position, piece.offset - position))
            position = piece.end
        if position < self.samples:
            result.append(Range(position, self.samples - position))
        return result

    # ---------------------------------------------------------------------------------------------- moves

    def take(self, batches: int, rank: int) -> Range | None:
        """Deal up to ``batches`` to the rank; returned ranges first, one range a call. None when nothing is left."""
        if batches < 1:
            return None
        limit = batches * self.batch_size
        if self._reclaimed:
            source = self._reclaimed.pop(0)
            piece = Range(source.offset, min(limit, source.size))
            if piece.size < source.size:
                self._reclaimed.insert(0, Range(piece.end, source.size - piece.size))
        elif self._cursor < self.samples:
            piece = Range(self._cursor, min(limit, self.samples - self._cursor))
            self._cursor = piece.end
        else:
            return None
        self._in_flight.setdefault(rank, []).append(piece)
        return piece

    def rollback(self, rank: int) -> Range:
        """Undo the rank's newest take: its chunk could not be sent. Raises ``WorkError`` when it holds none."""
        held = self._in_flight.get(rank)
        if not held:
            raise WorkError(f"rank {rank} has no chunk in flight in epoch {self.epoch} that could be taken back")
        piece = held.pop()
        if not held:
            del self._in_flight[rank]
        self._put_back([piece])
        return piece

    def deliver(self, rank: int, offset: int, size: int) -> None:
        """The rank trained on every sample of a chunk. Raises ``WorkError`` if it does not hold exactly that chunk."""
        held = self._in_flight.get(rank, [])
        piece = Range(offset, size)
        if piece not in held:
            has = ", ".join(f"[{r.offset}, {r.end})" for r in held) or "no chunk"
            claim = f"rank {rank} reports samples [{offset}, {offset + size}) of epoch {self.epoch} as trained"
            raise WorkError(f"{claim}, but holds {has}")
        held.remove(piece)
        if not held:
            del self._in_flight[rank]
        self._delivered.setdefault(rank, []).append(piece)

    def accept(self, ranks: Iterable[int]) -> dict[int, int]:
        """A round with these contributors is committed: what they delivered is accepted. Returns samples by rank."""
        pieces = {rank: self._delivered.pop(rank, []) for rank in sorted(set(ranks))}
        self._accepted = merged([*self._accepted, *(piece for held in pieces.values() for piece in held)])
        return {rank: sum(piece.size for piece in held) for rank, held in pieces.items()}

    def accept_batches(self, steps: Mapping[int, int]) -> int:
        """A committed round holds, by rank, the first so many batches of what the rank was dealt, in that order and
        whatever its chunks; the rest stays in flight. Returns samples. Raises ``WorkError``, and changes nothing, when
        a rank was dealt fewer."""
        for rank, batches in steps.items():
            held = self.held_batches(rank)
            if batches > held:
                raise WorkError(f"rank {rank} contributed {batches} batches of epoch {self.epoch}, but holds {held}")
        taken = [piece for rank, batches in steps.items() for piece in self._oldest(rank, batches)]
        self._accepted = merged([*self._accepted, *taken])
        return sum(piece.size for piece in taken)

    def lose(self, rank: int, batches: int, reason: str) -> int:
        """The first so many batches of what the rank was dealt, or all that it holds, are lost. Returns samples."""
        pieces = merged(self._oldest(rank, min(batches, self.held_batches(rank))))
        self._lost += [Lost(piece, rank, reason) for piece in pieces]
        return sum(piece.size for piece in pieces)

    def forfeit(self, rank: int) -> list[Range]:
        """A dead rank's unaccepted work goes back to the pool. Returns it, merged; a second call returns nothing.

        Only once the rank's round is closed: until then its host's fold may already hold the work (design section 6).
        """
        pieces = merged([*self._in_flight.pop(rank, []), *self._delivered.pop(rank, [])])
        self._put_back(pieces)
        return pieces

    def check(self) -> None:
        """Assert that every sample is in exactly one state and that every chunk keeps to batch boundaries."""
        pool = list(self._reclaimed)
        if self._cursor < self.samples:
            pool.append(Range(self._cursor, self.samples - self._cursor))
        held = [piece for pieces in (*self._in_flight.values(), *self._delivered.values()) for piece in pieces]
        position = 0
        for piece in sorted([*pool, *held, *self._accepted, *(lost.piece for lost in self._lost)]):
            assert piece.size > 0, f"epoch {self.epoch}: an empty range at {piece.offset}"
            assert piece.offset == position, (
                f"epoch {self.epoch}: samples {position} to {piece.offset} are lost or dealt twice"
            )
            position = piece.end
        for piece in (*pool, *held):
            start = self._starts[bisect_right(self._starts, piece.offset) - 1]
            assert (piece.offset - start) % self.batch_size == 0, (
                f"epoch {self.epoch}: a chunk starts inside a batch at {piece.offset}"
            )
        assert position == self.samples, f"epoch {self.epoch}: covers {position} of {self.samples} samples"
        assert all(self._in_flight.values()), f"epoch {self.epoch}: a rank is in flight with nothing"
        assert self.is_done == (not self.uncovered()), f"epoch {self.epoch}: done and uncovered disagree"

    def _oldest(self, rank: int, batches: int) -> list[Range]:
        """Take so many batches off what the rank was dealt first; the rest stays in flight."""
        queue = deque([*self._delivered.pop(rank, []), *self._in_flight.pop(rank, [])])
        taken: list[Range] = []
        while batches > 0:
            piece = queue.popleft()
            part = Range(piece.offset, min(batches * self.batch_size, piece.size))
            if part.size < piece.size:
                queue.appendleft(Range(part.end, piece.size - part.size))
            taken.append(part)
            batches -= self._batches(part.size)
        if queue:
            self._in_flight[rank] = list(queue)
        return taken

    def _put_back(self, pieces: Iterable[Range]) -> None:
        for piece in pieces:
            insort(self._reclaimed, piece)
        self._reclaimed = merged(self._reclaimed)
        if self._reclaimed and self._reclaimed[-1].end == self._cursor:
            self._cursor = self._reclaimed.pop().offset

    def _batches(self, samples: int) -> int:
        return -(-samples // self.batch_size)


def _check_disjoint(pieces: Iterable[Range], samples: int) -> None:
    """Raise ``ValueError`` unless they are disjoint ranges of the epoch."""
    position = 0
    for piece in sorted(pieces):
        if piece.size < 1 or piece.offset < position or piece.end > samples:
            raise ValueError(f"samples [{piece.offset}, {piece.end}) are no part of {samples}, or are there twice")
        position = piece.end
