"""What a play amounts to: who worked when, who waited for whom, and what all of it is worth.

*Idle* is the time in which a rank has nothing to do while another one works: it waits for its peers. The time in which
nobody works is the *round* itself. *Efficiency* is the batches done over what the same devices do alone in that time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from simulation.stage import Stage


@dataclass(slots=True)
class _Account:
    """One rank since the measurement began. Seconds."""

    nominal_ms: float
    since: float
    since_work: float
    """of ``Meter.work_seconds``"""
    until: float | None = None
    until_work: float | None = None
    batches: int = 0
    busy: float = 0.0
    solo: float = 0.0
    rounds: float = 0.0
    """packing and loading while others worked"""


@dataclass(frozen=True, slots=True)
class Figures:
    """The play between the two rounds that bound it. Shares are of the time a rank lived in it."""

    seconds: float
    batches: int
    efficiency: float
    """batches done over the sum of what each rank does alone"""
    round_share: float
    """time in which nobody worked"""
    idle: dict[int, float] = field(default_factory=dict)
    """by rank: it had nothing to do while somebody else worked"""
    batches_by_rank: dict[int, int] = field(default_factory=dict)

    @property
    def idle_worst(self) -> float:
        """The largest idle share of any rank."""
        return max(self.idle.values(), default=0.0)

    @property
    def idle_mean(self) -> float:
        """The mean idle share."""
        return sum(self.idle.values()) / len(self.idle) if self.idle else 0.0

    def as_json(self) -> dict[str, Any]:
        """JSON-ready: rank keys are strings."""
        return {
            "seconds": self.seconds,
            "batches": self.batches,
            "efficiency": self.efficiency,
            "round_share": self.round_share,
            "idle_worst": self.idle_worst,
            "idle_mean": self.idle_mean,
            "idle": {str(rank): share for rank, share in self.idle.items()},
            "batches_by_rank": {str(rank): count for rank, count in self.batches_by_rank.items()},
        }


class Meter:
    """Keeps the accounts. ``begin`` starts the measurement, ``note`` moves its end to the present."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._working: set[int] = set()
        self._work = 0.0
        self._work_since = 0.0
        self._ranks: dict[int, _Account] = {}
        self._began: float | None = None
        self._began_work = 0.0
        self.figures: Figures | None = None
        """as of the last ``note``"""

    @property
    def work_seconds(self) -> float:
        """Time so far in which at least one rank worked."""
        return self._work + (self._stage.now - self._work_since if self._working else 0.0)

    def join(self, rank: int, nominal_ms: float) -> None:
        """A rank is there; ``nominal_ms`` a batch when it never does one."""
        self._ranks[rank] = _Account(nominal_ms, self._stage.now, self.work_seconds)

    def works(self, rank: int) -> None:
        """The rank has batches to do."""
        if not self._working:
            self._work_since = self._stage.now
        self._working.add(rank)

    def rests(self, rank: int) -> None:
        """The rank has none any more."""
        if rank not in self._working:
            return
        self._working.discard(rank)
        if not self._working:
            self._work += self._stage.now - self._work_since

    def batch(self, rank: int, seconds: float, solo_seconds: float) -> None:
        """A batch is done."""
        account = self._ranks[rank]
        account.batches += 1
        account.busy += seconds
        account.solo += solo_seconds

    def round_work(self, rank: int, seconds: float) -> None:
        """The rank packs or loads from now on, for so long. It counts where others work meanwhile."""
        if rank in self._working:
            self._ranks[rank].rounds += seconds

    def gone(self, rank: int) -> None:
        """The rank is dead or left; nothing is expected of it."""
        self.rests(rank)
        account = self._ranks[rank]
        if account.until is None:
            account.until, account.until_work = self._stage.now, self.work_seconds

    def begin(self) -> None:
        """Forget what was, and measure from now on the ranks that are there."""
        self._began = self._stage.now
        self._began_work = work = self.work_seconds
        self._ranks = {
            rank: _Account(account.nominal_ms, self._stage.now, work)
            for rank, account in self._ranks.items()
            if account.until is None
        }

    def note(self) -> None:
        """The measurement extends to the present."""
        if self._began is not None and self._stage.now > self._began:
            self.figures = self._sum(self._stage.now - self._began)

    def _sum(self, seconds: float) -> Figures:
        now, work = self._stage.now, self.work_seconds
        batches, possible, idle = 0, 0.0, {}
        for rank, account in self._ranks.items():
            lived = (now if account.until is None else account.until) - account.since
            worked = (work if account.until_work is None else account.until_work) - account.since_work
            batches += account.batches
            solo_ms = 1000.0 * account.solo / account.batches if account.batches else account.nominal_ms
            possible += 1000.0 * lived / solo_ms
            if lived > 0.0:
                idle[rank] = max(0.0, worked - account.busy - account.rounds) / lived
        return Figures(
            seconds=seconds,
            batches=batches,
            efficiency=batches / possible if possible else 0.0,
            round_share=max(0.0, 1.0 - (work - self._began_work) / seconds),
            idle=idle,
            batches_by_rank={rank: account.batches for rank, account in self._ranks.items()},
        )
