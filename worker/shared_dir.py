"""The directory in which a host's processes meet: sockets, arenas and progress blocks, gone with the agent that
made it.

Its owner holds a lock on a file inside for as long as it lives, so that a later agent can tell a directory in use
from one that a killed agent left behind, whatever process numbers have been used again since.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PREFIX = "marchline-"
_LOCK = "owner.lock"
_MEMORY = Path("/dev/shm")
_MAKING_SECONDS = 60.0
"""a directory whose making was cut short is abandoned after so long; making one takes a moment"""


class SharedDirError(Exception):
    """The directory cannot be made; names the place and the cure."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """What a killed owner left: the directory, the names in it and their size."""

    path: Path
    names: tuple[str, ...]
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.path} ({', '.join(self.names) or 'empty'}; {self.size_bytes / 1e6:.1f} MB)"


class SharedDir:
    """A directory of mode 0700, locked by this process. ``path`` is absolute."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, needed_bytes: int, places: Iterable[Path] | None = None) -> SharedDir:
        """Make one in the first place with room for ``needed_bytes``: memory if it has it, else the temporary
        directory.

        Raises ``SharedDirError`` when no place has the room.
        """
        looked: list[str] = []
        for place in places or default_places():
            free = _free(place)
            if free >= needed_bytes:
                return cls._create_in(place)
            looked.append(f"{place} has {free >> 20} MiB")
        raise SharedDirError(
            f"no room for {needed_bytes >> 20} MiB of shared arenas: {', '.join(looked)}; free memory or set TMPDIR"
        )

    @classmethod
    def _create_in(cls, place: Path) -> SharedDir:
        # Locked under a name that nobody reaps, then renamed: no moment in which it looks abandoned.
        fresh = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=place))
        lock = os.open(fresh / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path = place / fresh.name.removeprefix(".")
        fresh.rename(path)
        return cls(path, lock)

    def remove(self) -> None:
        """Delete it with all that is in it; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def default_places() -> list[Path]:
    """Shared memory first, where the system has it; then the temporary directory, a disk as a rule."""
    memory = [_MEMORY] if os.access(_MEMORY, os.W_OK) else []
    return [*memory, Path(tempfile.gettempdir())]


def reap_abandoned(now: float, places: Iterable[Path] | None = None) -> list[Abandoned]:
    """Delete this user's directories whose owner is dead; returns what was deleted. ``now``: seconds since the epoch,
    the file system's clock."""
    reaped = []
    for place in places or default_places():
        whole = [path for path in sorted(place.glob(f"{PREFIX}*")) if _is_ours(path) and _unlocked(path, bare=False)]
        begun = [path for path in sorted(place.glob(f".{PREFIX}*")) if _is_ours(path) and _cut_short(path, now)]
        for path in (*whole, *begun):
            with contextlib.suppress(FileNotFoundError):  # another agent on this host was quicker
                reaped.append(_looked_at(path))
                shutil.rmtree(path, ignore_errors=True)
    return reaped


def _is_ours(path: Path) -> bool:
    try:
        return path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid()
    except OSError:
        return False


def _cut_short(path: Path, now: float) -> bool:
    """Whether its maker was killed before it had the lock, or before it gave the directory its name."""
    try:
        return now - path.stat().st_ctime > _MAKING_SECONDS and _unlocked(path, bare=True)
    except OSError:
        return False


def _unlocked(path: Path, *, bare: bool) -> bool:
    """Whether nobody holds the directory's lock; ``bare`` is the answer for one that has no lock at all."""
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return bare
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(lock)


def _looked_at(path: Path) -> Abandoned:
    names, size = [], 0
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.name != _LOCK:
            names.append(entry.name)
            size += entry.stat(follow_symlinks=False).st_size
    return Abandoned(path, tuple(names), size)


def _free(place: Path) -> int:
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return 0
