"""The work on one piece of a round, in any thread: sum the contributions, make the update, apply it, look at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backend.reduce.outer import OuterStep
from wire import arithmetic, ranges
from wire.arithmetic import BF16, F32, FloatArray
from wire.ranges import Ranges
from wire.streams import Slice, Source, Values, total


@dataclass(frozen=True, slots=True)
class Mapped:
    """A source that is read where it lies: one host's ranks, ascending, those with a mass above zero."""

    base: FloatArray | None
    """the consensus in force, (elements,); none: the initial broadcast"""
    ranks: Sequence[int]
    values: Sequence[FloatArray]
    """(elements,) by rank"""
    masses: Sequence[float]
    still: Ranges
    rounded: bool
    """the host's contribution would travel as bf16, so it counts as if it had"""

    def read(self, start: int, stop: int, spare: FloatArray) -> FloatArray:
        base = None if self.base is None else self.base[start:stop]
        arithmetic.contribution(base, [values[start:stop] for values in self.values], self.masses, spare)
        for first, last in ranges.intersection(self.still, [(start, stop)]):
            spare[first - start : last - start] = 0.0
        if self.rounded:
            arithmetic.round_bf16(spare)
        return spare


@dataclass(frozen=True, slots=True)
class Culprit:
    """Why a piece has no usable result. ``host`` None: every contribution is finite, and only the result is not."""

    element: int
    """the first bad one, counted from the arena's start"""
    value: str
    host: int | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """One slice and all that its sum reads and writes; arrays are whole arenas."""

    cut: Slice
    sources: dict[int, Source]
    """by host, ascending"""
    scale: np.float32
    base: FloatArray | None
    new: FloatArray
    outer: OuterStep | None
    rounded: bool
    """the update is rounded to bf16"""
    streamed: bool
    """somebody is sent the update"""


def reduce_piece(piece: Piece) -> Values | Culprit | None:
    """Write the piece's new consensus. The update as it is to be sent, or none; a ``Culprit`` if it isn't finite."""
    cut = piece.cut
    payload: Values | None = None
    if piece.streamed:
        payload = np.empty(cut.elements, BF16 if piece.rounded else F32)
    with np.errstate(all="ignore"):  # what is not finite is looked for below, once
        for block in arithmetic.blocks(cut.elements):
            start, stop = cut.offset + block.start, cut.offset + block.stop
            spare = arithmetic.scratch.free[1][: stop - start]
            update = spare if payload is None or piece.rounded else payload[block]
            _make_update(piece, start, stop, update)
            if payload is not None and piece.rounded:
                arithmetic.encode_bf16(update, payload[block])
                arithmetic.decode_bf16(payload[block], update)
            elif piece.rounded:
                arithmetic.round_bf16(update)
            new = piece.new[start:stop]
            arithmetic.apply(None if piece.base is None else piece.base[start:stop], update, new)
            if not arithmetic.all_finite(new):
                return _blame(piece, start, stop)
    return payload


def copy(source: FloatArray, target: FloatArray, start: int, stop: int) -> None:
    """Bring what did not move up to date."""
    np.copyto(target[start:stop], source[start:stop])


def _make_update(piece: Piece, start: int, stop: int, update: FloatArray) -> None:
    if piece.sources:
        total(list(piece.sources.values()), start, stop, update)
        if piece.scale != 1:
            np.multiply(update, piece.scale, out=update)
    else:
        update.fill(0.0)
    if piece.outer is not None:
        piece.outer.take(update, start, stop)


def _blame(piece: Piece, start: int, stop: int) -> Culprit:
    """Who contributed the first value that is not finite, in the order of the sum."""
    spare = arithmetic.scratch.free[0][: stop - start]
    for host, source in piece.sources.items():
        if found := arithmetic.first_non_finite(source.read(start, stop, spare)):
            return _blame_rank(host, source, start, stop) or Culprit(start + found[0], found[1], host)
    found = arithmetic.first_non_finite(piece.new[start:stop])
    assert found is not None, "it was looked at because it is not finite"
    return Culprit(start + found[0], found[1])


def _blame_rank(host: int, source: Source, start: int, stop: int) -> Culprit | None:
    if not isinstance(source, Mapped):
        return None
    spare = arithmetic.scratch.free[0][: stop - start]
    for rank, values, mass in zip(source.ranks, source.values, source.masses, strict=True):
        alone = Mapped(source.base, [rank], [values], [mass], source.still, source.rounded)
        if found := arithmetic.first_non_finite(alone.read(start, stop, spare)):
            return Culprit(start + found[0], found[1], host, rank)
    return None
