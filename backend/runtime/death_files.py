"""The death of a rank as a file beside the run's checkpoints: for whoever has the directory and not the database.

    data_dir/runs/<run>/checkpoints/model.rank<N>.death.json

Written once when the rank is declared dead and once more when the cohort is over it, each time whole or not at all.
That it cannot be written is worth a line in the log, and costs nothing else (behaviour J10).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from backend.runtime.bundle import MODEL
from backend.runtime.view import jsonable

SCHEMA_VERSION = 1

Row = dict[str, Any]

log = logging.getLogger(__name__)


class DeathFiles:
    """The death files of one run, written one after the other off the event loop. ``run`` is its row."""

    def __init__(self, root: Path, run: Row, spawn: Callable[[Coroutine[Any, Any, None], str], object]) -> None:
        self._root = root
        self._run = {"run_id": run["id"], "run": run["name"], "job": run["job"], "mode": run["mode"]}
        self._spawn = spawn
        self._waiting: deque[Row] = deque()
        self._idle = asyncio.Event()
        self._idle.set()

    def put(self, row: Row) -> None:
        """Write a row of ``deaths``, in place of what was written of this rank before."""
        self._waiting.append(row)
        if self._idle.is_set():
            self._idle.clear()
            self._spawn(self._write_all(), f"death files of run {self._run['run_id']}")

    async def written(self) -> None:
        """Wait until everything is on the disk, or was given up."""
        await self._idle.wait()

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                await asyncio.to_thread(write_death, self._root, self._run, self._waiting.popleft())
        finally:
            self._idle.set()


def write_death(root: Path, run: Row, row: Row) -> None:
    """Write one; blocks on the disk."""
    path = death_file(root, row["rank"])
    temporary = root / f".death.{secrets.token_hex(4)}"
    kept = {name: value for name, value in row.items() if name not in ("id", "run_id")}
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with temporary.open("x", encoding="utf-8") as file:
            json.dump(jsonable({"schema_version": SCHEMA_VERSION} | run | kept), file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        log.error("%s could not be written: %s", path, error.strerror or error)
        with contextlib.suppress(OSError):  # it may refuse that as well
            temporary.unlink(missing_ok=True)


def death_file(root: Path, rank: int) -> Path:
    """Where the death of a rank is written, below a run's checkpoints."""
    return root / f"{Path(MODEL).stem}.rank{rank}.death.json"
