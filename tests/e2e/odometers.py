"""What every element of the FREIGHT job must be, by the rounds in the database, and what the ranks wrote down of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from stage import Stage

from wire.failpoints import LOG_VARIABLE, POINTS_VARIABLE, injections

TOLERANCE = 1e-5
"""relative; another set of contributions is off by more than a hundredth"""


@dataclass(frozen=True)
class Reading:
    """All elements of a rank's parameters, and of its buffers, before one of its batches."""

    params: float
    buffers: float


def armed(points: str, journal: Path) -> dict[str, str]:
    """The environment that arms these failpoints."""
    return {POINTS_VARIABLE: points, LOG_VARIABLE: str(journal)}


def injected(journal: Path, action: str = "kill") -> list[str]:
    """The sites at which this action was taken, sorted."""
    return sorted(line["site"] for line in injections(journal) if line["action"] == action)


def consensus(rounds: list[dict[str, Any]]) -> list[Reading]:
    """Before the first round, and after each: a round of n batches a rank moves the parameters by sum(n^2) / sum(n),
    and the buffers, averaged over the ranks that worked, by sum(n) / movers."""
    found = [Reading(0.0, 0.0)]
    for row in rounds:
        counts = [count for count in row["realized"].values() if count]
        moved = Reading(sum(n * n for n in counts) / sum(counts), sum(counts) / len(counts))
        found.append(Reading(found[-1].params + moved.params, found[-1].buffers + moved.buffers))
    return found


def readings(path: Path, spread_by: float = 0.0) -> dict[int, list[Reading]]:
    """What each rank wrote, in order. No rank ever held a tensor whose elements differ: that would be a part of one
    consensus beside a part of another. ``spread_by``: relatively so much they may differ, where each part of a tensor
    is summed in another order."""
    found: dict[int, list[Reading]] = {}
    for line in path.read_text().splitlines():
        rank, batch, *spread = line.split()
        low, high, buffers_low, buffers_high = map(float, spread)
        near_high = pytest.approx((high, buffers_high), rel=spread_by, abs=0.0)
        assert (low, buffers_low) == near_high, f"rank {rank} held a partial consensus before batch {batch}"
        found.setdefault(int(rank), []).append(Reading(low, buffers_low))
    return found


def assert_exact(marchline: Stage, run: int, ledger: Path) -> list[dict[str, Any]]:
    """Every rank started each of its windows from exactly the consensus of what the round's row says was accepted, and
    so does the checkpoint. Answers the rounds."""
    rounds = marchline.items(run, "rounds")
    held = consensus(rounds)
    spread_by = TOLERANCE if marchline.view(run)["mode"].startswith("nccl") else 0.0
    for rank, seen in readings(ledger, spread_by).items():
        _follow(rank, seen, held, rounds)
    final = _model(marchline, run)
    for name, value in (("w", held[-1].params), ("b", held[-1].buffers)):
        assert np.ptp(final[name]) <= spread_by * abs(value), f"{name} of the checkpoint is of two rounds"
        assert float(final[name][0]) == pytest.approx(value, rel=TOLERANCE), name
    return rounds


def _follow(rank: int, seen: list[Reading], held: list[Reading], rounds: list[dict[str, Any]]) -> None:
    """One rank's readings, window by window; what it did in its last, which no round accepted, comes at the end."""
    at, last = 0, 0
    for number, row in enumerate(rounds):
        for own in range(row["realized"].get(str(rank)) or 0):
            assert at < len(seen), f"rank {rank}: round {number} accepts a batch that it never did"
            assert_near(seen[at], held[number], own, f"rank {rank}, round {number}, batch {own}")
            at, last = at + 1, number + 1
    rest = seen[at:]
    if rest:
        starts = [reading for reading in held[last:] if near(rest[0], reading, 0)]
        assert starts, f"rank {rank} went on from {rest[0]}, which is no consensus of round {last} or later"
        for own, reading in enumerate(rest):
            assert_near(reading, starts[0], own, f"rank {rank}, unaccepted batch {own}")


def near(reading: Reading, start: Reading, own: int) -> bool:
    """Whether it is this consensus, after so many batches of one's own."""
    wanted = (start.params + own, start.buffers + own)
    return (reading.params, reading.buffers) == pytest.approx(wanted, rel=TOLERANCE)


def assert_near(reading: Reading, start: Reading, own: int, where: str) -> None:
    assert near(reading, start, own), f"{where}: {reading}, not {start} and {own} batches"


def _model(marchline: Stage, run: int) -> Mapping[str, np.ndarray]:
    path = marchline.data_dir / marchline.items(run, "checkpoints")[-1]["path"]
    return dict(load_file(path))
