"""The orders that an agent writes to its children: one JSON line each, on stdin."""

from __future__ import annotations

from typing import Any

import msgspec

from wire.messages import TrainingPlan


class RankSpec(msgspec.Struct, frozen=True):
    """What one rank needs to know. Paths are absolute."""

    plan: TrainingPlan
    rank: int
    device: str
    """as torch names it inside the process: ``cpu``, or ``cuda:0`` of the one visible device"""
    shm_dir: str
    job_dir: str
    emulate_ms_per_batch: float | None = None
    """each training step is padded to at least this"""
    interface: str = ""
    """the network interface over which ranks reach each other, where they sum among themselves"""
    connect_seconds: float = 30.0
    """how long the relay's socket may take to appear"""


class ProbeSpec(msgspec.Struct, frozen=True):
    """What the probe of a job needs to know. Paths are absolute."""

    job: str
    params: dict[str, Any]
    job_dir: str


def line(spec: msgspec.Struct) -> bytes:
    """A spec as the one line that goes down a child's stdin."""
    return msgspec.json.encode(spec) + b"\n"
