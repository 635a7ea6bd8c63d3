"""What a world left behind: rows of its database, the witness' lines, checkpoints, processes, shared memory."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from backend.runtime import bundle
from backend.runtime.bundle import BundleError, CheckpointPlace
from benchmarks.havoc.exact import Reading, Saved, Trace, read_batches
from benchmarks.havoc.site import marked
from worker.shared_dir import PREFIX, default_places, reap_abandoned

DATABASE = "marchline.sqlite3"
LEAVING_SECONDS = 10.0
"""for processes whose agent is gone"""
_JSON = ("realized", "recovery", "data")


def rows(data_dir: Path, table: str, run: int) -> list[dict[str, Any]]:
    """All of a run, in the order in which they were written. The controller need not run."""
    with contextlib.closing(sqlite3.connect(f"file:{data_dir / DATABASE}?mode=ro", uri=True)) as database:
        database.row_factory = sqlite3.Row
        order = "round" if table == "rounds" else "id"
        key = "id" if table == "runs" else "run_id"
        found = database.execute(f"SELECT * FROM {table} WHERE {key} = ? ORDER BY {order}", (run,)).fetchall()
    return [{name: _value(name, row[name]) for name in row.keys()} for row in found]  # noqa: SIM118 no mapping


def integrity(data_dir: Path) -> list[str]:
    """What SQLite finds wrong with its file."""
    with contextlib.closing(sqlite3.connect(f"file:{data_dir / DATABASE}?mode=ro", uri=True)) as database:
        found = [row[0] for row in database.execute("PRAGMA integrity_check")]
    return [] if found == ["ok"] else [f"the database is damaged: {'; '.join(found[:3])}"]


def trace(data_dir: Path, run: int, ledger: Path, start: Reading, overlaps: bool, whole: bool) -> Trace:
    """What a run did."""
    text = ledger.read_text() if ledger.exists() else ""
    return Trace(rows(data_dir, "rounds", run), read_batches(text), start, overlaps, whole)


def newest_checkpoint(data_dir: Path, run: int, elements: int) -> Saved | None:
    """The newest complete checkpoint of a run, loaded as a resumed run would; none when there is none."""
    place = CheckpointPlace(data_dir, run)
    complete = place.complete()
    if not complete:
        return None
    directory = place.bundle(complete[-1])
    try:
        manifest = bundle.verify(directory)
        values = bundle.load(directory, manifest).consensus
    except BundleError as error:
        return Saved(complete[-1], -1, Reading(0.0, 0.0), error=str(error))
    params, buffers = values[:elements], values[elements:]
    whole = bool(np.ptp(params) == 0 and np.ptp(buffers) == 0)
    return Saved(complete[-1], int(manifest["round"]), Reading(float(params[0]), float(buffers[0])), whole)


# --------------------------------------------------------------------------------------------------- leftovers


def shared_directories(mark: str) -> set[Path]:
    """Directories that a world's agents hold in shared memory or the temporary directory."""
    found = set()
    for process in marked(mark):
        with contextlib.suppress(OSError, psutil.Error):
            for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    directory = descriptor.readlink().parent
                    if directory.name.startswith(PREFIX):
                        found.add(directory)
    return found


def leftovers(mark: str, directories: Iterable[Path], place: Path) -> list[str]:
    """Processes, shared directories and half-written checkpoints that should be gone. What killed agents left in
    memory the next agent on the host removes: that is done here first."""
    deadline = time.monotonic() + LEAVING_SECONDS
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    problems = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            problems.append(f"process {process.pid} is left: {' '.join(process.cmdline())[:200]}")
    reap_abandoned(time.time(), [*default_places(), place])
    problems += [f"shared memory is left: {directory}" for directory in sorted(directories) if directory.exists()]
    return problems


def _value(name: str, value: Any) -> Any:
    return json.loads(value) if name in _JSON and isinstance(value, str) else value
