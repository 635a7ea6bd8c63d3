"""ElChe: how many batches each rank does per window, so that all of them reach the reduce together (behaviour C).

The slow device is the *anchor*: it does ``anchor`` batches a window, every other rank as many as it can do in the same
time. Measured rates go in once a round, allotments and a sentence that explains them come out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from backend.core.config import RunConfig
from backend.core.elche_fixed import FixedCounts
from backend.core.elche_rules import (
    COUNTS_HISTORY,
    DEAD_ZONE,
    MATURE_AFTER,
    STABLE_AFTER,
    Decision,
    Phase,
    Rates,
    Saved,
    capped,
    elect,
    read_saved,
    target_count,
)
from backend.core.elche_words import explain
from backend.core.timing import WindowReport


class Scheduler(Protocol):
    """What the cycle needs from whoever sets the allotments: ``ElChe`` or ``FixedCounts``."""

    @property
    def counts(self) -> dict[int, int]: ...
    @property
    def anchor(self) -> int: ...
    @property
    def anchor_rank(self) -> int | None: ...
    @property
    def calibrated(self) -> bool: ...
    @property
    def phase(self) -> Phase: ...
    @property
    def forced(self) -> bool:
        """Counts are given, not measured; ``work.window_plan`` must not pad them."""
        ...

    def smoothed(self, rank: int) -> float: ...
    def set_max_total(self, batches: int) -> None: ...
    def report_window(self, report: WindowReport) -> Decision: ...
    def drop(self, rank: int) -> Decision: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...
    def check(self) -> None: ...


class ElChe:
    """The adaptive scheduler. Not calibrated until the first window with timing is reported; until then all ranks get
    the initial anchor."""

    forced = False

    def __init__(
        self,
        ranks: Iterable[int],
        *,
        initial_anchor: int = 10,
        min_anchor: int | None = None,
        max_anchor: int = 1000,
        max_batch_diff: int | None = None,
    ) -> None:
        members = sorted(set(ranks))
        if len(members) < 2:
            raise ValueError(f"ElChe balances at least two ranks, not {len(members)}")
        self._max_anchor = max(1, max_anchor)
        self._min_anchor = min(max(1, initial_anchor if min_anchor is None else min_anchor), self._max_anchor)
        self._anchor = min(max(self._min_anchor, initial_anchor), self._max_anchor)
        self._max_batch_diff = max_batch_diff
        self._max_total = 0
        self._cap_binding = False
        self._rates = Rates(members)
        self._counts = dict.fromkeys(members, self._anchor)
        self._history: deque[dict[int, int]] = deque(maxlen=COUNTS_HISTORY)
        self._anchor_rank: int | None = None
        self._calibrated = False
        self._calibrations = 0
        self._phase: Phase = "probe"

    # ------------------------------------------------------------------------------------------- readings

    @property
    def counts(self) -> dict[int, int]:
        """Batches of every rank in the next window."""
        return dict(self._counts)

    @property
    def anchor(self) -> int:
        """Batches that the anchor rank does per window, before the epoch's cap."""
        return self._anchor

    @property
    def anchor_rank(self) -> int | None:
        """The rank that sets the pace, once one is elected."""
        return self._anchor_rank

    @property
    def calibrated(self) -> bool:
        """Whether counts rest on a measurement."""
        return self._calibrated

    @property
    def calibrations(self) -> int:
        """Windows that counted as a measurement."""
        return self._calibrations

    @property
    def phase(self) -> Phase:
        """How much is known: ``probe`` nothing, ``warmup`` little, ``stable`` and ``mature`` enough to elect anew."""
        return self._phase

    @property
    def cap_binding(self) -> bool:
        """Whether the epoch's length cut the last counts."""
        return self._cap_binding

    def smoothed(self, rank: int) -> float:
        """The rank's ms a batch; 0 when unknown."""
        return self._rates.smoothed(rank)

    def anchor_wall_ms(self) -> float:
        """How long the anchor's window takes; 0 before calibration (C18)."""
        return self._anchor * self.smoothed(self._anchor_rank) if self._anchor_rank is not None else 0.0

    def recent_share(self) -> dict[int, float]:
        """Every rank's share of the batches allotted lately; sums to 1 (C17)."""
        windows = list(self._history) or [self._counts]
        sums = {rank: sum(window[rank] for window in windows) for rank in self._counts}
        whole = sum(sums.values())
        return {rank: batches / whole for rank, batches in sums.items()}

    # ---------------------------------------------------------------------------------------------- moves

    def set_max_total(self, batches: int) -> None:
        """Batches of an epoch: no window may be longer (C15). 0 lifts the cap. Acts from the next report on."""
        self._max_total = max(0, batches)

    def report_window(self, report: WindowReport) -> Decision:
        """Learn from a window and set the allotments of the next one (C5, C6)."""
        if not self._rates.observe(report):
            return self._unchanged("No rank reported any timing in this window, so the allotments stay as they are.")
        if self._anchor_rank is None or self._phase in ("stable", "mature"):
            self._elect()
        anchor = self._anchor_rank
        if anchor is not None and self._rates.is_silent(anchor):
            self._elect()  # a pinned anchor that never reports must not freeze the allotments (M16)
        if self._anchor_rank is None or self.smoothed(self._anchor_rank) <= 0.0:
            return self._unchanged(self._waiting_for_anchor())
        decision = self._recompute()
        self._history.append(dict(self._counts))
        self._calibrated = True
        self._calibrations += 1
        self._advance_phase()
        return decision

    def drop(self, rank: int) -> Decision:
        """A rank died or left: its history goes, and another sets the pace if it was the anchor.

        Raises ``ValueError`` for a rank that is not scheduled. The last rank can be dropped; then no counts remain.
        """
        if rank not in self._counts:
            raise ValueError(f"rank {rank} is not scheduled; ranks are {sorted(self._counts)}")
        was_anchor = rank == self._anchor_rank
        del self._counts[rank]
        self._rates.drop(rank)
        for window in self._history:
            window.pop(rank, None)
        if was_anchor:
            self._anchor_rank = None
            self._elect()
        gone = f"Rank {rank} left the cohort."
        if not self._counts:
            return self._unchanged(f"{gone} No rank is left.")
        if self._anchor_rank is None or self.smoothed(self._anchor_rank) <= 0.0:
            return self._unchanged(f"{gone} The others keep their allotments.")
        decision = self._recompute(free=was_anchor)
        return Decision(decision.counts, decision.anchor, decision.anchor_rank, True, f"{gone} {decision.reason}")

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps (C19), JSON-ready: rank keys are strings."""
        saved = Saved(self._anchor, self._anchor_rank, self._rates.by_rank(), self._phase, self._calibrations)
        return saved.as_json()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state. Raises ``ValueError``, and changes nothing, unless it is of exactly these ranks."""
        saved = read_saved(state, self._counts)
        self._rates.restore(saved.smoothed)
        self._anchor = min(saved.anchor, self._max_anchor)
        self._anchor_rank = saved.anchor_rank
        self._phase = saved.phase
        self._calibrations = saved.calibrations
        self._calibrated = any(ms > 0.0 for ms in self._rates.by_rank().values())
        self._cap_binding = False
        self._history.clear()
        self._counts = dict.fromkeys(self._counts, self._anchor)
        if self._anchor_rank is not None and self.smoothed(self._anchor_rank) > 0.0:
            self._recompute(free=True)

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        assert all(count >= 1 for count in self._counts.values()), f"an allotment is below 1: {self._counts}"
        assert 1 <= self._anchor <= self._max_anchor, f"anchor {self._anchor} is outside 1 to {self._max_anchor}"
        assert self._rates.by_rank().keys() == self._counts.keys(), "rates and allotments name different ranks"
        assert self._anchor_rank is None or self._anchor_rank in self._counts, (
            f"rank {self._anchor_rank} sets the pace but is not in the cohort"
        )
        if self._cap_binding:
            total, floor = sum(self._counts.values()), len(self._counts)
            assert total <= max(self._max_total, floor), f"a window of {total} exceeds the epoch's {self._max_total}"

    # ------------------------------------------------------------------------------------------- inside

    def _elect(self) -> None:
        self._anchor_rank = elect(self._rates.by_rank(), self._anchor_rank)

    def _recompute(self, *, free: bool = False) -> Decision:
        """Set the counts from the rates (C12); ``free`` moves them without dead zone or step limit."""
        assert self._anchor_rank is not None
        before = dict(self._counts)
        rates = self._rates.by_rank()
        slow_ms = rates[self._anchor_rank]
        free = free or not self._calibrated
        limited = False
        for rank, current in before.items():
            target = target_count(self._anchor, slow_ms, rates[rank])
            self._counts[rank] = target if free else self._held_back(current, target)
            limited = limited or abs(target - self._counts[rank]) > DEAD_ZONE * current
        self._cap_binding = 0 < self._max_total < sum(self._counts.values())
        if self._cap_binding:
            self._counts = capped(self._counts, self._max_total)
        reason = explain(
            before=before,
            counts=self._counts,
            rates=rates,
            anchor_rank=self._anchor_rank,
            cap=self._max_total if self._cap_binding else None,
            step=self._max_batch_diff if limited else None,
        )
        return Decision(dict(self._counts), self._anchor, self._anchor_rank, self._counts != before, reason)

    def _held_back(self, current: int, target: int) -> int:
        if abs(target - current) <= DEAD_ZONE * current:
            return current
        if self._max_batch_diff is None:
            return target
        step = self._max_batch_diff
        return min(current + step, max(current - step, target))

    def _advance_phase(self) -> None:
        if self._phase == "probe":
            self._phase = "warmup"
        elif self._phase == "warmup" and self._calibrations >= STABLE_AFTER:
            self._phase = "stable"
        elif self._phase == "stable" and self._calibrations >= MATURE_AFTER:
            self._phase = "mature"

    def _unchanged(self, reason: str) -> Decision:
        return Decision(dict(self._counts), self._anchor, self._anchor_rank, False, reason)

    def _waiting_for_anchor(self) -> str:
        if self._anchor_rank is None:
            return "No rank has a usable timing yet, so the allotments stay as they are."
        return f"Rank {self._anchor_rank} sets the pace but has not reported its timing yet, so the allotments stay."


def scheduler_for(config: RunConfig, ranks: Iterable[int]) -> ElChe | FixedCounts:
    """The scheduler of a run: forced counts, one batch each in the sync modes, or ElChe.

    Raises ``ValueError`` when forced counts do not name exactly the ranks 0 to world_size - 1.
    """
    members = sorted(set(ranks))
    if config.fixed_counts is not None:
        if members != list(range(len(config.fixed_counts))):
            raise ValueError(f"fixed_counts forces {len(config.fixed_counts)} allotments, but the ranks are {members}")
        return FixedCounts(dict(enumerate(config.fixed_counts)))
    if config.mode.endswith("_sync"):
        return FixedCounts(
            dict.fromkeys(members, 1),
            reason=f"Every rank does one batch per window: {config.mode} averages after each.",
        )
    return ElChe(
        members,
        initial_anchor=config.initial_anchor,
        min_anchor=config.min_anchor,
        max_anchor=config.max_anchor,
        max_batch_diff=config.max_batch_diff,
    )
