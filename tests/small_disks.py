"""A disk of a few megabytes that can be filled, for tests of what happens on a full one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(path: Path, size: str = "1m") -> Iterator[Path]:
    """A file system of its own at ``path``; skips the test where none can be mounted."""
    path.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None or not _mounted(path, f"size={size}"):
        pytest.skip("needs root, to mount a small file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path) -> Path:
    """Leave no byte free; answers the file to be removed again."""
    ballast = disk / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    assert shutil.disk_usage(disk).free == 0
    return ballast


def _mounted(path: Path, *options: str) -> bool:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(path)], capture_output=True)
    return done.returncode == 0
