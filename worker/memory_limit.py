"""What the kernel tells about memory: how often it killed a process of this host's control group, and at which limit.

Version 2 of control groups says it in ``memory.events`` and ``memory.max``, version 1 in ``memory.oom_control`` and
``memory.limit_in_bytes``. A kill is evidence for a process that ended by SIGKILL at that time, and for one only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

RECENT_SECONDS = 3.0
"""A kill that was counted within this time of a process's end is taken for its cause."""
_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""version 1 says so with a number near 2^63"""


class ControlGroup:
    """The control group of this process. ``membership`` is the text of ``/proc/self/cgroup``."""

    def __init__(self, root: Path = _ROOT, membership: str | None = None) -> None:
        if membership is None:
            membership = _text(Path("/proc/self/cgroup"))
        self._folders = list(_folders(root, membership))

    def kills(self) -> int:
        """Processes of the group that were killed for memory so far; 0 where the kernel does not say."""
        for folder in self._folders:
            for name in ("memory.events", "memory.oom_control"):
                counts = dict(line.split(maxsplit=1) for line in _text(folder / name).splitlines() if " " in line)
                if counts.get("oom_kill", "").isdigit():
                    return int(counts["oom_kill"])
        return 0

    def limit_bytes(self) -> int:
        """The lowest memory limit of the group and those around it; 0 when there is none, or none that is seen."""
        limits = [int(text) for text in self._limits() if text.isdigit() and int(text) < _NO_LIMIT]
        return min(limits, default=0)

    def _limits(self) -> Iterator[str]:
        for folder in self._folders:
            for name in ("memory.max", "memory.limit_in_bytes"):
                yield _text(folder / name).strip()


class MemoryKills:
    """Which end of a process a memory kill explains. ``look`` now and then; times in monotonic seconds."""

    def __init__(self, group: ControlGroup, now: float) -> None:
        self.group = group
        self._readings = deque([(now, group.kills())])
        """(time, count), the first of them older than ``RECENT_SECONDS`` where one is"""
        self._claimed = 0

    def look(self, now: float) -> None:
        """Read the kernel's count."""
        self._readings.append((now, self.group.kills()))
        while len(self._readings) > 1 and self._readings[1][0] <= now - RECENT_SECONDS:
            self._readings.popleft()

    def claim(self, now: float) -> int:
        """How many kills of the last moments no other end was explained by; one of them is explained by this end."""
        self.look(now)
        before, count = self._readings[0][1], self._readings[-1][1]
        kills = count - max(before, self._claimed)
        if kills > 0:
            self._claimed = max(before, self._claimed) + 1
        return max(0, kills)


def _folders(root: Path, membership: str) -> Iterator[Path]:
    """Where the group's files may be, innermost first; in a container the path can be the host's, unknown in here."""
    for line in membership.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        folder = top / path.lstrip("/")
        while folder != top:
            yield folder
            folder = folder.parent
        yield top


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
