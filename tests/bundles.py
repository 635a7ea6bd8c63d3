"""Checkpoints as the core has them written, for tests of whoever reads them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np

from backend.core.config import RunConfig
from backend.core.vocabulary import WriteCheckpoint
from backend.runtime import bundle
from backend.runtime.bundle import CheckpointPlace
from backend.runtime.checkpoint import CheckpointWriter, Committed

JOB = "j.py:J"
Layout = list[dict[str, Any]]


def noon() -> datetime:
    return datetime(2026, 11, 29, 12, 0, 0, 123000, tzinfo=UTC)


def spec(**changes: Any) -> Layout:
    """A model of one tensor."""
    return [{"name": "w", "section": "params", "dtype": "float32", "shape": [2], "offset": 0, "alias_of": ""} | changes]


def manifest(layout: Layout, *, job: str = JOB, **changes: Any) -> dict[str, Any]:
    """What the core writes, in the middle of an epoch."""
    progress = {
        "samples_accepted": [64], "epoch": 1, "accepted": [[0, 20]], "lost": [], "batches": 5, "seconds": 1.0,
        "samples_lost": 0, "loss_sum": 2.0, "loss_batches": 5, "loss": 0.4, "evaluated": None,
    }  # fmt: skip
    whole = {
        "run_id": 3, "config": RunConfig(job=job, epochs=9).as_dict(), "layout": layout,
        "dataset_size": 64, "world_size": 2,
        "seats": [["a", "cpu:0"], ["a", "cpu:1"]], "scheduler": {}, "guard": {}, "meta": None, "progress": progress,
        "reason": "test", "loss": 0.4, "metrics": {}, "round": 7, "epoch": 1, "global_step": 21,
    }  # fmt: skip
    return whole | changes


def save(
    place: CheckpointPlace,
    number: int,
    values: list[float],
    *,
    keep: int = -1,
    layout: Layout | None = None,
    momentum: np.ndarray | None = None,
    states: dict[int, bytes] | None = None,
    **changes: Any,
) -> bundle.Arena:
    """One bundle of a model with the tensor ``w``; answers the consensus behind it."""
    layout = layout or spec(shape=[len(values)])
    arena = np.array(values, dtype=np.float32)
    writer = CheckpointWriter(place, noon, {"job_hash": "h"})
    writer.open(number, Committed(arena, momentum))
    for rank, body in (states or {}).items():
        writer.keep(number, rank, body)
    whole = tuple(sorted(states or {}))
    written = writer.write(WriteCheckpoint(number, "test", whole, manifest(layout, **changes), keep))
    assert written.error == "", written.error
    return arena
