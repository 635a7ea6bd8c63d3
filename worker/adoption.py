"""Taking a consensus in: one pass over it in blocks that stay in the cache. Numpy and xxhash, no torch.

Each block is hashed, measured against what the rank contributed, and written to where the values live. One thread does
it: torch's and BLAS' own threads spin at barriers, which costs tens of times the work where ranks share the cores.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite, sqrt

import numpy as np
import xxhash

from wire import failpoints
from wire.arithmetic import aligned
from worker.arena_file import FloatArray
from worker.write_back import WriteBack

BLOCK_ELEMENTS = 1 << 18
"""elements of one block: before and after are 1 MiB each, within a cache"""
_ROW = 1 << 13
"""elements of one dot product: short enough for sums of squares in f32, too short for BLAS to use threads"""
_ONES = np.ones(BLOCK_ELEMENTS // _ROW, np.float32)


@dataclass(frozen=True, slots=True)
class AdoptResult:
    """How far the parameters moved: ``divergence`` is norm(before - after) / norm(after), over f32 values."""

    divergence: float
    pre_norm: float
    post_norm: float
    consensus_hash: str = ""
    """XXH3-64 (hex) over the realized sections as they were read; empty when not asked for, or without any"""


@dataclass(frozen=True, slots=True)
class Run:
    """Elements ``start`` to ``stop`` of the arena and where they live, ``target`` (n,); none: somebody else's task."""

    start: int
    stop: int
    target: FloatArray | None
    own: bool = False
    """the target is the model's memory, not the arena's: what the rank did since it packed is there"""

    @property
    def at_home(self) -> bool:
        """Whether the values live where they were contributed from."""
        return self.target is not None and not self.own


class Adoption:
    """One adoption. ``contributed`` is what this rank declared, ``consensus`` what all agreed on: (n,) f32 each."""

    def __init__(self, contributed: FloatArray, consensus: FloatArray, *, hashed: bool) -> None:
        self._contributed = contributed
        self._consensus = consensus
        self._digest = xxhash.xxh3_64() if hashed else None
        self._difference = aligned(BLOCK_ELEMENTS)
        self._squares = np.empty((BLOCK_ELEMENTS // _ROW, 1, 1), np.float32)
        self._flat_squares = self._squares.reshape(-1)
        self._pre = self._post = self._moved = 0.0
        self._seen = 0
        """all before it is hashed and measured"""

    def look(self, stop: int) -> None:
        """Hash and measure parameters up to ``stop``, whole blocks of them; ``take`` will only have to write them."""
        with np.errstate(all="ignore"):
            while self._seen + BLOCK_ELEMENTS <= stop:
                self._look(self._seen, self._seen + BLOCK_ELEMENTS, None, measured=True)

    def take(self, runs: Iterable[Run], *, measured: bool, ahead: WriteBack | None) -> None:
        """Read these runs in order. ``measured`` ones count in the norms; ``ahead`` merges instead of copying."""
        with np.errstate(all="ignore"):
            for run in runs:
                for start in range(run.start, run.stop, BLOCK_ELEMENTS):
                    self._take_block(run, start, min(start + BLOCK_ELEMENTS, run.stop), measured, ahead)
                    failpoints.hit("rank.adopt.block", offset=start)

    def result(self) -> AdoptResult:
        """Norms and hash of all that was taken."""
        digest = "" if self._digest is None else self._digest.hexdigest()
        return _result(self._pre, self._post, self._moved, digest)

    def _take_block(self, run: Run, start: int, stop: int, measured: bool, ahead: WriteBack | None) -> None:
        if self._seen < stop:
            # At home the difference may take the place that the consensus is copied to in a moment.
            whole = run.at_home and self._seen <= start
            self._look(max(start, self._seen), stop, self._contributed[start:stop] if whole else None, measured)
        if run.target is not None:
            after = self._consensus[start:stop]
            target = run.target[start - run.start : stop - run.start]
            if ahead is None or not run.own:
                np.copyto(target, after)
            else:
                ahead.merge(target, self._contributed[start:stop], after)

    def _look(self, start: int, stop: int, difference: FloatArray | None, measured: bool) -> None:
        """Whoever comes first brings a block from memory: hash and sum of squares do it as fast as memory allows."""
        before, after = self._contributed[start:stop], self._consensus[start:stop]
        if self._digest is not None:
            self._digest.update(after.data)
        if measured:
            self._measure(before, after, self._difference[: before.size] if difference is None else difference)
        self._seen = stop

    def _measure(self, before: FloatArray, after: FloatArray, difference: FloatArray) -> None:
        self._pre += self._square_sum(before)
        np.subtract(before, after, out=difference)
        self._moved += self._square_sum(difference)
        self._post += self._square_sum(after)

    def _square_sum(self, values: FloatArray) -> float:
        """``square_sum`` of a whole block, with as few steps in Python as it takes."""
        if values.size != BLOCK_ELEMENTS:
            return square_sum(values)
        np.matmul(values.reshape(-1, 1, _ROW), values.reshape(-1, _ROW, 1), out=self._squares)
        total = float(self._flat_squares.dot(_ONES))
        return total if isfinite(total) else square_sum(values)


def unmoved(contributed: FloatArray) -> AdoptResult:
    """The result for parameters that keep what they hold."""
    blocks = range(0, contributed.size, BLOCK_ELEMENTS)
    squares = sum(square_sum(contributed[start : start + BLOCK_ELEMENTS]) for start in blocks)
    return _result(squares, squares, 0.0, "")


def same_bits(one: FloatArray, other: FloatArray) -> bool:
    """Whether two (n,) f32 arrays are equal to the bit; signs of zero and NaN's payloads count."""
    for start in range(0, one.size, BLOCK_ELEMENTS):
        block = slice(start, start + BLOCK_ELEMENTS)
        if not np.array_equal(one[block].view(np.uint32), other[block].view(np.uint32)):
            return False
    return True


def square_sum(values: FloatArray) -> float:
    """Sum of squares of (n,) f32 values: f32 within rows, f64 beyond, and f64 throughout where f32 overflows."""
    whole = values.size // _ROW * _ROW
    rows, rest = values[:whole], values[whole:]
    with np.errstate(all="ignore"):
        total = float(np.dot(rest, rest))
        if whole:
            products = np.matmul(rows.reshape(-1, 1, _ROW), rows.reshape(-1, _ROW, 1))
            total += float(products.sum(dtype=np.float64))
        return total if isfinite(total) else float(np.square(values, dtype=np.float64).sum())


def _result(pre: float, post: float, moved: float, digest: str) -> AdoptResult:
    """From a consensus of zeros, the move is relative to what was before."""
    pre, post, moved = sqrt(pre), sqrt(post), sqrt(moved)
    return AdoptResult(moved / (post or pre or 1.0), pre, post, digest)
