"""The 64 bytes of shared memory in which a rank says what it is doing, and its agent reads it (design
section 2).

The rank's loop writes them between pieces of user code, so a batch that never ends, or holds the
interpreter, shows as ``working`` with growing age. There is no lock: every field is one aligned store, and
the time of a change is written before the state it belongs to, so that a reader between the two stores sees
an age that is too small, never one that is too large.

    0   8 bytes  magic and layout version
    8   u8       state, an index into ``STATES``
    16  u64      local optimizer steps since the rank started
    24  u64      CLOCK_MONOTONIC nanoseconds at the last change: a new state, or a new batch within
    ``working``
    32  u64      the most bytes that the rank's tensors took on its GPU at once; 0 when that is not known
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

SIZE = 64
STATES = ("starting", "idle", "working", "reducing", "evaluating", "saving", "exited")
_MAGIC = b"MLPROG\x00\x02"
_U64 = struct.Struct("<Q")
_STATE, _STEPS, _CHANGED, _PEAK = 8, 16, 24, 32


class ProgressError(Exception):
    """A progress block cannot be used; the text names the file."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at a rank. ``age_seconds`` is the time since its last change."""

    state: str
    steps: int
    age_seconds: float
    device_peak_bytes: int = 0


class ProgressBlock:
    """One mapped block; the rank writes, the agent reads. Times are monotonic nanoseconds of the host."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self.path = path
        self._memory = memory

    @classmethod
    def create(cls, path: Path, now_ns: int) -> ProgressBlock:
        """Make the file (mode 0600), in state ``starting``. Raises ``ProgressError``."""
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ProgressError(f"{path} cannot be made: {error.strerror}") from error
        try:
            os.write(descriptor, _MAGIC.ljust(SIZE, b"\0"))
            block = cls(path, mmap.mmap(descriptor, SIZE))
        finally:
            os.close(descriptor)
        block.enter("starting", now_ns)
        return block

    @classmethod
    def open(cls, path: Path) -> ProgressBlock:
        """Map a block that another process made. Raises ``ProgressError`` when it is none."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise ProgressError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            if os.fstat(descriptor).st_size != SIZE:
                raise ProgressError(f"{path} is no progress block: it has not {SIZE} bytes")
            memory = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        if memory[: len(_MAGIC)] != _MAGIC:
            raise ProgressError(f"{path} is no progress block of this version")
        return cls(path, memory)

    def enter(self, state: str, now_ns: int) -> None:
        """Note that the rank is in ``state`` since now; entering ``working`` again marks the next batch."""
        _U64.pack_into(self._memory, _CHANGED, now_ns)
        self._memory[_STATE] = STATES.index(state)

    def count(self, steps: int) -> None:
        """Note the rank's local optimizer steps since it started."""
        _U64.pack_into(self._memory, _STEPS, steps)

    def note_device_peak(self, size: int) -> None:
        """Note the most bytes that the rank's tensors took on its GPU at once."""
        _U64.pack_into(self._memory, _PEAK, size)

    def read(self, now_ns: int) -> Reading:
        """What the rank is doing. An index that no version knows reads as ``starting``."""
        index = self._memory[_STATE]
        (steps,) = _U64.unpack_from(self._memory, _STEPS)
        (changed,) = _U64.unpack_from(self._memory, _CHANGED)
        (peak,) = _U64.unpack_from(self._memory, _PEAK)
        state = STATES[index] if index < len(STATES) else STATES[0]
        return Reading(state, steps, max(0, now_ns - changed) / 1e9, peak)

    def close(self) -> None:
        """Unmap it."""
        self._memory.close()
