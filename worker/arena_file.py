"""A flat f32 array in a file that processes of one host map together (design section 6). No torch in here.

Space is reserved when the file is made: on a full file system that is an error with a name, where a sparse
file would kill whoever writes it later (SIGBUS).
"""

from __future__ import annotations

import mmap
import os
import stat
from collections import OrderedDict
from pathlib import Path

import numpy as np
import numpy.typing as npt

F32 = np.dtype("<f4")
FloatArray = npt.NDArray[np.float32]


class ArenaError(Exception):
    """An arena cannot be made or used; the text names the file or tensor and the cure."""


class ConsensusGone(ArenaError):
    """A consensus lay in the memory of a controller that is gone, and nobody else has it."""


class ArenaFile:
    """One mapped file. ``values`` is its content: 1-d f32, ``elements`` long; it stays valid while anyone
    holds it."""

    def __init__(self, path: Path, values: FloatArray) -> None:
        self.path = path
        self.values = values

    @classmethod
    def create(cls, path: Path, elements: int) -> ArenaFile:
        """Make the file (mode 0600), zero-filled and with its space reserved, and map it for writing.

        Raises ``ArenaError`` when it exists, or the file system has no room for ``4 * elements`` bytes.
        """
        size = _size(elements)
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise ArenaError(f"{path} exists already; use a fresh directory for each run") from None
        except OSError as error:
            raise ArenaError(f"{path} cannot be made: {error.strerror}") from error
        try:
            if size:
                os.posix_fallocate(descriptor, 0, size)
            return cls(path, _mapped(descriptor, size, writable=True))
        except OSError as error:
            path.unlink(missing_ok=True)
            text = f"no room for {size} bytes at {path} ({error.strerror}); free space or use another directory"
            raise ArenaError(text) from error
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, path: Path, elements: int, *, writable: bool = False) -> ArenaFile:
        """Map a file that another process made. Raises ``ArenaError`` when it is missing or not ``4 *
        elements`` bytes long."""
        descriptor = _opened(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW)
        try:
            size = _checked_size(path, os.fstat(descriptor), elements)
            return cls(path, _mapped(descriptor, size, writable=writable))
        finally:
            os.close(descriptor)

    @property
    def elements(self) -> int:
        """Length of ``values``."""
        return int(self.values.size)

    def unlink(self) -> None:
        """Remove the name; memory is freed once the last process that maps it lets go. Idempotent."""
        self.path.unlink(missing_ok=True)


class ConsensusFiles:
    """The consensus files that a rank reads, mapped once each and read-only; the latest few are kept.

    A path may lead through ``/proc/<pid>/fd`` into the controller's memory, where the number of a buffer that is gone
    comes back for another one: it is the file that counts, not its name.
    """

    def __init__(self, elements: int, kept: int = 3) -> None:
        self._elements = elements
        self._kept = kept
        self._mapped: OrderedDict[tuple[int, int], FloatArray] = OrderedDict()

    def read(self, path: str) -> FloatArray:
        """The file's content, (elements,), not writable. Raises ``ArenaError`` for anything but a regular file of this
        user and the model's size, ``ConsensusGone`` where it went with its owner's process."""
        try:
            descriptor = _opened(Path(path), os.O_RDONLY | os.O_NONBLOCK)
        except ArenaError as error:
            if path.startswith("/proc/"):
                raise ConsensusGone(str(error)) from error
            raise
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                raise ArenaError(f"{path} is no regular file of this user, so it is no consensus")
            size = _checked_size(Path(path), status, self._elements)
            number = (status.st_dev, status.st_ino)
            if number not in self._mapped:
                self._mapped[number] = _mapped(descriptor, size, writable=False)
            self._mapped.move_to_end(number)
            while len(self._mapped) > self._kept:
                self._mapped.popitem(last=False)
            return self._mapped[number]
        finally:
            os.close(descriptor)


def _opened(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise ArenaError(f"{path} cannot be opened: {error.strerror}; did its owner make it?") from error


def _checked_size(path: Path, status: os.stat_result, elements: int) -> int:
    found, size = status.st_size, _size(elements)
    if found != size:
        text = f"{path} has {found} bytes, {elements} elements take {size}"
        raise ArenaError(f"{text}; do both processes hold the same model?")
    return size


def _size(elements: int) -> int:
    if elements < 0:
        raise ArenaError(f"an arena cannot have {elements} elements")
    return elements * F32.itemsize


def _mapped(descriptor: int, size: int, *, writable: bool) -> FloatArray:
    if size == 0:  # a mapping cannot be empty, a model without parameters can
        return np.empty(0, dtype=F32)
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    return np.frombuffer(mmap.mmap(descriptor, size, access=access), dtype=F32)
