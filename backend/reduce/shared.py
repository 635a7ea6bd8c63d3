"""The arenas of a host on this machine, read where they lie: what is checked before a byte of them is touched."""

from __future__ import annotations

import mmap
import os
import stat
import weakref

import numpy as np

from wire.arithmetic import F32, FloatArray


class SharedMemoryRefused(Exception):
    """What a relay offers as its memory is not what it should be; the text names the path and what is wrong."""


class SharedArenas:
    """One host's arena files, ``rank{N}.out`` in its directory, mapped read-only as they are asked for."""

    def __init__(self, directory: str) -> None:
        """Raises ``SharedMemoryRefused`` for anything but an absolute path of a directory that this user alone can
        enter."""
        self.directory = directory
        self._mapped: dict[int, FloatArray] = {}
        if not os.path.isabs(directory):
            raise SharedMemoryRefused(f"{directory!r} is not an absolute path")
        # Held open, so that what is checked here stays what is read later, whatever becomes of the name.
        self._descriptor = _open(directory, os.O_DIRECTORY, directory, None)
        weakref.finalize(self, os.close, self._descriptor)
        status = os.fstat(self._descriptor)
        if status.st_uid != os.geteuid():
            raise SharedMemoryRefused(f"{directory} belongs to user {status.st_uid}, not to {os.geteuid()}")
        if stat.S_IMODE(status.st_mode) != 0o700:
            raise SharedMemoryRefused(f"{directory} has mode {stat.S_IMODE(status.st_mode):04o}, not 0700")

    def values(self, rank: int, elements: int) -> FloatArray:
        """A rank's values, (elements,), as they are at any moment. Raises ``SharedMemoryRefused``."""
        known = self._mapped.get(rank)
        if known is None or known.size != elements:
            known = self._mapped[rank] = self._map(rank, elements)
        return known

    def _map(self, rank: int, elements: int) -> FloatArray:
        path = os.path.join(self.directory, f"rank{rank}.out")
        descriptor = _open(f"rank{rank}.out", os.O_NONBLOCK, path, self._descriptor)
        try:
            status, size = os.fstat(descriptor), elements * F32.itemsize
            if not stat.S_ISREG(status.st_mode):
                raise SharedMemoryRefused(f"{path} is not a regular file")
            if status.st_uid != os.geteuid():
                raise SharedMemoryRefused(f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}")
            if status.st_size != size:
                raise SharedMemoryRefused(f"{path} has {status.st_size} bytes, {elements} elements take {size}")
            if not size:
                return np.empty(0, F32)
            return np.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ), F32)
        finally:
            os.close(descriptor)


def _open(name: str, flags: int, path: str, directory: int | None) -> int:
    try:
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags, dir_fd=directory)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SharedMemoryRefused(f"{path} can't be opened: {reason}") from error
