"""The arithmetic of a round: a slice at a time, in f32, in a fixed order, divided once (behaviour A1, A2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F32 = np.dtype("<f4")
FloatArray = npt.NDArray[np.float32]
Pieces = Sequence[FloatArray]
"""one contributor's elements of a slice, cut wherever its chunks happened to end"""


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A slice without a usable result. ``contributor`` is a position in the given order; None: every contribution is
    finite, and only ``what`` was made of them is not."""

    contributor: int | None
    index: int
    """first bad element, counted from the slice's start"""
    value: float
    what: str = "the sum"


def sum_slice(contributions: Sequence[Pieces], out: FloatArray, scale: np.float32) -> NonFinite | None:
    """Write ``scale * (first + second + ...)`` to ``out``; return what is wrong with it, if anything.

    Every contributor's pieces together are exactly as long as ``out``. The order of the additions is that of
    ``contributions``, so equal inputs give equal bits however they arrived. Runs in any thread.
    """
    with np.errstate(all="ignore"):  # overflow and NaN are looked for below, once
        for position, pieces in enumerate(contributions):
            start = 0
            for piece in pieces:
                target = out[start : start + piece.size]
                if position == 0:
                    np.copyto(target, piece)
                else:
                    np.add(target, piece, out=target)
                start += piece.size
            if start != out.size:
                raise ValueError(f"contributor {position} has {start} elements of a slice of {out.size}")
        np.multiply(out, scale, out=out)
    if np.isfinite(out).all():  # a NaN or infinity in any addend survives into the sum
        return None
    return _blame(contributions, out)


def reciprocal(mass: float) -> np.float32:
    """The one division of a round: 1 / total mass, as f32. ``mass`` is above zero."""
    return np.float32(1.0 / mass)


def _blame(contributions: Sequence[Pieces], out: FloatArray) -> NonFinite:
    for position, pieces in enumerate(contributions):
        start = 0
        for piece in pieces:
            bad = np.flatnonzero(~np.isfinite(piece))
            if bad.size:
                return NonFinite(position, start + int(bad[0]), float(piece[bad[0]]))
            start += piece.size
    index = int(np.flatnonzero(~np.isfinite(out))[0])
    return NonFinite(None, index, float(out[index]))
