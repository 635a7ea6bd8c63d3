"""ElChe's arithmetic: smoothed rates, who sets the pace, how many batches that gives, how the epoch caps them
(behaviour C1, C3, C7, C11, C12, C19)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from backend.core.allotments import scaled_down
from backend.core.timing import WindowReport

Phase = Literal["probe", "warmup", "stable", "mature"]
PHASE_ORDER: tuple[Phase, ...] = ("probe", "warmup", "stable", "mature")

COHORT_BAND = 0.15
"""ranks within this of the slowest may be the anchor"""
DOMINANCE_MARGIN = 0.10
"""another rank must be this much slower than the anchor to replace it"""
TRUST_WINDOW = 5
"""readings behind a rank's smoothed rate; also the missing reports after which it is forgotten"""
MAX_SPEED_RATIO = 64.0
"""a tiny sample may claim more; no real pair of devices differs so much"""
DEAD_ZONE = 0.05
"""a count that would move by no more than this share stays"""
COUNTS_HISTORY = 10
STABLE_AFTER = 5
MATURE_AFTER = 20
SAME_RATE_MS = 1e-6
DRIFT = 0.30
"""two readings in a row that are both this far from the mean of the earlier ones are a new pace, not noise"""
DRIFT_AGREEMENT = 0.15
"""the two readings of a new pace differ by no more than this"""
SLACK_FLOOR_MS = 100.0
SLACK_FLOOR_SHARE = 0.05
"""an errand that costs less than either floor (a share of the anchor's window) is not worth a change"""


@dataclass(frozen=True, slots=True)
class SpeedHint:
    """What is believed before anything is measured (C3, C4): this rank is the slow one, and how many times as fast
    every other rank is; 1 leaves the shares equal."""

    slow_rank: int
    ratio: float = 1.0
    configured: bool = True
    """the operator said so; else it was guessed from the devices' names and memory"""


@dataclass(frozen=True, slots=True)
class Decision:
    """Allotments (batches by rank) for the next window and, in a sentence for the operator, why."""

    counts: dict[int, int]
    anchor: int
    anchor_rank: int | None
    changed: bool
    """whether any allotment differs from the window before"""
    reason: str


class Rates:
    """Each rank's recent cost in ms a batch: the plain mean of its last five readings, 0 when there are none. A rank
    that changed its pace for good loses the readings from before, so that a drift is followed within three windows
    (decision 0009)."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._readings: dict[int, deque[float]] = {rank: deque(maxlen=TRUST_WINDOW) for rank in sorted(set(ranks))}
        self._misses = dict.fromkeys(self._readings, 0)

    def observe(self, report: WindowReport) -> bool:
        """Take one window's readings; false, and nothing learnt, when no rank has any (C5). A rank that gave none for
        five windows in a row is forgotten (C6.1)."""
        if not any(ms > 0.0 for ms in report.ms.values()):
            return False
        for rank, readings in self._readings.items():
            ms, batches = report.ms.get(rank, 0.0), report.batches.get(rank, 0)
            if batches > 0 and ms > 0.0 and math.isfinite(ms):
                readings.append(ms / batches)
                if _drifted(readings):
                    for _ in range(len(readings) - 2):
                        readings.popleft()
                self._misses[rank] = 0
                continue
            self._misses[rank] += 1
            if self._misses[rank] >= TRUST_WINDOW:
                readings.clear()
        return True

    def smoothed(self, rank: int) -> float:
        """ms a batch; 0 for a rank that is unknown or has not reported."""
        readings = self._readings.get(rank)
        return sum(readings) / len(readings) if readings else 0.0

    def is_silent(self, rank: int) -> bool:
        """Whether the rank gave no reading for so long that its history was cleared."""
        return self._misses[rank] >= TRUST_WINDOW

    def by_rank(self) -> dict[int, float]:
        """Smoothed ms a batch of every rank, 0 for those without a reading."""
        return {rank: self.smoothed(rank) for rank in self._readings}

    def drop(self, rank: int) -> None:
        """Forget a rank that left the cohort."""
        self._readings.pop(rank, None)
        self._misses.pop(rank, None)

    def restore(self, smoothed: Mapping[int, float]) -> None:
        """Seed every rank with one reading, its saved mean (C19)."""
        for rank, readings in self._readings.items():
            readings.clear()
            self._misses[rank] = 0
            if smoothed[rank] > 0.0 and math.isfinite(smoothed[rank]):
                readings.append(smoothed[rank])


def _drifted(readings: deque[float]) -> bool:
    """Whether the two newest readings agree with each other and not with the mean of those before."""
    if len(readings) < 3:
        return False
    *earlier, one, two = readings
    low, high = min(one, two), max(one, two)
    if high - low > DRIFT_AGREEMENT * low:
        return False
    mean = sum(earlier) / len(earlier)
    return low > (1.0 + DRIFT) * mean or high * (1.0 + DRIFT) < mean


def elect(smoothed: Mapping[int, float], current: int | None) -> int | None:
    """The rank that sets the pace (C7): the sitting one while it is among the slow and none there dominates it, else
    the lowest rank among the slow. None when no rank has a rate."""
    slowest = max(smoothed.values(), default=0.0)
    if slowest <= 0.0:
        return None
    cohort = {rank: ms for rank, ms in smoothed.items() if ms >= (1.0 - COHORT_BAND) * slowest}
    if current in cohort and len(cohort) > 1:
        rival = max(ms for rank, ms in cohort.items() if rank != current)
        if rival <= (1.0 + DOMINANCE_MARGIN) * cohort[current]:
            return current
    return min(cohort)


def target_count(anchor: int, slow_ms: float, ms: float) -> int:
    """Batches that a rank of ``ms`` a batch does while the anchor does ``anchor`` of ``slow_ms`` (C12.1)."""
    if ms <= 0.0 or abs(ms - slow_ms) < SAME_RATE_MS:
        return anchor
    return max(1, round_half_away(anchor * min(slow_ms / ms, MAX_SPEED_RATIO)))


def capped(counts: Mapping[int, int], total: int) -> dict[int, int]:
    """Counts cut to sum to ``total``, or to 1 each if there are more ranks than that; what rounding leaves over goes to
    the largest, the highest rank among equals (C12)."""
    result = scaled_down(counts, total)
    leftover = total - sum(result.values())
    if leftover > 0:
        result[max(result, key=lambda rank: (result[rank], rank))] += leftover
    return result


def hinted_counts(ranks: Iterable[int], anchor: int, hint: SpeedHint | None) -> dict[int, int]:
    """The first allotments: the anchor for everybody, or for the hinted slow rank and in proportion for the others
    (C3)."""
    if hint is None:
        return dict.fromkeys(ranks, anchor)
    faster = max(1, round_half_away(anchor * min(hint.ratio, MAX_SPEED_RATIO)))
    return {rank: anchor if rank == hint.slow_rank else faster for rank in ranks}


def may_relax(anchor: int, rates: Iterable[float], max_batch_diff: int | None) -> bool:
    """Whether one batch more for the anchor keeps the fastest rank within ``max_batch_diff`` of it (C11)."""
    known = [ms for ms in rates if ms > 0.0]
    if max_batch_diff is None or not known:
        return True
    ahead = round_half_away((anchor + 1) * min(max(known) / min(known), MAX_SPEED_RATIO)) - (anchor + 1)
    return ahead <= max_batch_diff


def slack_batches(slack_ms: float, ms: float) -> int:
    """Batches that a rank of ``ms`` a batch cannot do while it is away on an errand of ``slack_ms`` (C12.2)."""
    return math.ceil(slack_ms / ms) if slack_ms > 0.0 and ms > 0.0 else 0


def round_half_away(value: float) -> int:
    """Round a non-negative number to the nearest whole one, halves up."""
    whole = math.floor(value)
    return whole + 1 if value - whole >= 0.5 else whole


@dataclass(frozen=True, slots=True)
class Saved:
    """A schedule as a checkpoint keeps it (C19)."""

    anchor: int
    anchor_rank: int | None
    smoothed: dict[int, float]
    phase: Phase
    calibrations: int

    def as_json(self) -> dict[str, Any]:
        """JSON-ready: rank keys are strings."""
        return {
            "anchor": self.anchor,
            "anchor_rank": self.anchor_rank,
            "smoothed_ms_per_batch": {str(rank): ms for rank, ms in self.smoothed.items()},
            "phase": self.phase,
            "calibration_count": self.calibrations,
        }


def read_saved(state: Mapping[str, Any], ranks: Iterable[int]) -> Saved:
    """Read a saved schedule. Raises ``ValueError`` when it is malformed or of other ranks than these."""
    try:
        rank = state["anchor_rank"]
        saved = Saved(
            anchor=max(1, int(state["anchor"])),
            anchor_rank=None if rank is None else int(rank),
            smoothed={int(rank): float(ms) for rank, ms in state["smoothed_ms_per_batch"].items()},
            phase=state["phase"],
            calibrations=max(0, int(state["calibration_count"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"the saved schedule cannot be read: {type(error).__name__}: {error}") from error
    members = sorted(ranks)
    if sorted(saved.smoothed) != members:
        raise ValueError(f"the saved schedule is of ranks {sorted(saved.smoothed)}, this cohort has {members}")
    if saved.anchor_rank is not None and saved.anchor_rank not in saved.smoothed:
        raise ValueError(f"the saved anchor rank {saved.anchor_rank} is not in the cohort {members}")
    if saved.phase not in PHASE_ORDER:
        raise ValueError(f"the saved phase {saved.phase!r} is none of {', '.join(PHASE_ORDER)}")
    return saved
