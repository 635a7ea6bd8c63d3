"""The arrays behind a relay's round: ranks' arenas folded upwards, an update taken into the consensus downwards.

No torch, no asyncio; everything here may run in any thread, one piece beside another.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from wire import arithmetic, ranges
from wire.arithmetic import BF16, F32, BitsArray, FloatArray
from wire.messages import UpdateComing
from wire.session import ChunkHeader, Encoding
from worker.arena_file import ArenaFile
from worker.fold import Piece


class NotFinite(Exception):
    """A rank's work is no number."""

    def __init__(self, rank: int, element: int, value: str) -> None:
        super().__init__(f"rank {rank} contributes {value} at element {element}")
        self.rank = rank
        self.element = element
        self.value = value


def fold(piece: Piece, arenas: Mapping[int, FloatArray], base: FloatArray | None) -> FloatArray | BitsArray:
    """One piece of the host's contribution, as its encoding says: f32, or bf16 bits.

    Without ``base``, in the initial broadcast, values are folded instead of differences. Raises ``NotFinite``, naming
    the lowest rank whose part is none, and its first bad element.
    """
    start, stop = piece.header.offset, piece.stop
    values = [arenas[rank][start:stop] for rank in piece.masses]
    before = None if base is None else base[start:stop]
    folded = np.empty(stop - start, F32)
    arithmetic.contribution(before, values, list(piece.masses.values()), folded)
    if not arithmetic.all_finite(folded):
        raise _culprit(piece, values, before, folded)
    if piece.header.encoding != Encoding.BF16:
        return folded
    encoded = np.empty(stop - start, BF16)
    arithmetic.encode_bf16(folded, encoded)
    return encoded


def _culprit(piece: Piece, values: list[FloatArray], base: FloatArray | None, folded: FloatArray) -> NotFinite:
    start = piece.header.offset
    for (rank, mass), value in zip(piece.masses.items(), values, strict=True):
        if (found := arithmetic.first_non_finite(value)) is None:
            weighed = np.empty_like(folded)
            arithmetic.contribution(base, [value], [mass], weighed)
            found = arithmetic.first_non_finite(weighed)
        if found is not None:
            return NotFinite(rank, start + found[0], found[1])
    index, name = arithmetic.first_non_finite(folded) or (0, "inf")  # each is finite, their sum is not
    return NotFinite(max(piece.masses), start + index, name)


class ConsensusPair:
    """Two files: the consensus in force (``base``), and the one that is being built from it and an update.

    What an update leaves out is copied from one to the other, where the two differ: where the round before moved.
    """

    def __init__(self, directory: Path, elements: int, session: int = 0) -> None:
        """Make ``consensus.SESSION.0`` and ``consensus.SESSION.1``. Raises ``ArenaError``."""
        paths = [directory / f"consensus.{session}.{number}" for number in range(2)]
        self._files = [ArenaFile.create(path, elements) for path in paths]
        self._building = 0
        self._absolute = True
        self._moving: ranges.Ranges = []
        self._stale: ranges.Ranges = []
        """where the file that is built may differ from the one in force"""
        self.base: FloatArray | None = None
        """(elements,) f32, what every rank adopted last; none before the initial broadcast"""

    def begin(self, update: UpdateComing) -> None:
        """An update comes: fill in what it leaves out."""
        self._absolute = update.absolute
        whole = self._files[self._building].values
        if self.base is not None:
            for start, stop in ranges.intersection(update.still, self._stale):
                np.copyto(whole[start:stop], self.base[start:stop])
        self._moving = ranges.complement(update.still, 0, whole.size)
        self._stale = ranges.union(self._stale, self._moving)  # should it be aborted

    def take(self, header: ChunkHeader, payload: memoryview) -> None:
        """Build these elements: the consensus in force less the update, or the values as they came."""
        start, stop = header.offset, header.offset + header.elements
        base = None if self._absolute or self.base is None else self.base[start:stop]
        out = self._files[self._building].values[start:stop]
        if header.encoding == Encoding.F32:
            arithmetic.apply(base, np.frombuffer(payload, F32), out)
            return
        encoded = np.frombuffer(payload, BF16)
        for cut in arithmetic.blocks(header.elements):
            update = arithmetic.scratch.free[0][: cut.stop - cut.start]
            arithmetic.decode_bf16(encoded[cut], update)
            arithmetic.apply(None if base is None else base[cut], update, out[cut])

    @property
    def path(self) -> str:
        """Of the file that is being built."""
        return str(self._files[self._building].path)

    def promote(self) -> str:
        """What was built is in force now; its path."""
        file = self._files[self._building]
        self._stale = self._moving  # the other file holds what was in force until now
        self.base = file.values
        self._building = 1 - self._building
        return str(file.path)
