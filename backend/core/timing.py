"""The window ledger: what each rank's batches cost since the last round (behaviour D).

Two costs are kept side by side. *Compute* is the batch itself. *Delivered* adds the wait for data and leaves out the
window's first batch, whose fixed fill (chunk pickup, cold loader) does not scale with the allotment. The ledger advises
ElChe and the operator; the divisor of a round never comes from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Scale = Literal["delivered", "compute"]

DELIVERED_MODES = frozenset({"cpu_cadence", "cpu_async", "nccl_cadence"})


def delivered_capable(mode: str) -> bool:
    """Whether a mode may be scheduled on delivered cost; the sync modes never are (D9)."""
    return mode in DELIVERED_MODES


@dataclass(frozen=True, slots=True)
class WindowReport:
    """One window as ElChe sees it: for every living rank the cost (ms) and the batches that it covers."""

    ms: dict[int, float]
    batches: dict[int, int]
    """the divisor of ``ms``: batches that the cost covers, not the window's steps"""
    fill_ms: dict[int, float]
    """what the first batch cost beyond the rate of the others"""
    sync_ms: float
    """the previous round, from its trigger to the last acknowledgement (D13)"""
    scale: Scale
    compute_seconds: dict[int, float]
    data_seconds: dict[int, float]


@dataclass(slots=True)
class _RankWindow:
    steps: int = 0
    samples: int = 0
    wall_ms: float = 0.0
    timed_batches: int = 0
    """batches in ``wall_ms``: all of them, unless a rank sent a duration that cannot be"""
    data_ms: float = 0.0
    delivered_ms: float = 0.0
    delivered_batches: int = 0
    first_batch_ms: float = 0.0
    loss_sum: float = 0.0
    loss_batches: int = 0

    @property
    def has_delivered_sample(self) -> bool:
        return self.delivered_batches > 0 and self.delivered_ms > 0.0

    @property
    def fill_ms(self) -> float:
        if not self.has_delivered_sample:
            return 0.0
        return max(0.0, self.first_batch_ms - self.delivered_ms / self.delivered_batches)


def _is_duration(ms: float) -> bool:
    return math.isfinite(ms) and ms >= 0.0


class WindowLedger:
    """Cost, loss and steps by rank since the last round. Ranks appear with their first batch and end with ``drop``."""

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        self._windows: dict[int, _RankWindow] = {rank: _RankWindow() for rank in ranks}
        self._dropped: set[int] = set()

    def record_batch(self, rank: int, batch_ms: float, data_ms: float, loss: float | None, samples: int) -> None:
        """Count one batch (D2). A dropped rank's late batch is ignored; durations that are negative or not finite are
        left out of the rates, while the batch itself still counts as a step."""
        if rank in self._dropped:
            return
        window = self._windows.setdefault(rank, _RankWindow())
        window.steps += 1
        window.samples += samples
        if loss is not None and math.isfinite(loss):
            window.loss_sum += loss
            window.loss_batches += 1
        if not (_is_duration(batch_ms) and _is_duration(data_ms)):
            return
        window.wall_ms += batch_ms
        window.data_ms += data_ms
        window.timed_batches += 1
        if window.steps > 1:
            window.delivered_ms += batch_ms + data_ms
            window.delivered_batches += 1
        else:
            window.first_batch_ms = batch_ms + data_ms

    def absorb_callback_cost(self, rank: int, ms: float) -> None:
        """Take what a callback (evaluation, checkpoint) cost out of the rank's rates, never below 0 (D5)."""
        window = self._windows.get(rank)
        if window is None or not _is_duration(ms):
            return
        window.wall_ms = max(0.0, window.wall_ms - ms)
        window.delivered_ms = max(0.0, window.delivered_ms - ms)

    def drop(self, rank: int) -> None:
        """Forget a rank that died or left; nothing it sends later is counted."""
        self._windows.pop(rank, None)
        self._dropped.add(rank)

    # ------------------------------------------------------------------------------------------- readings

    def steps(self, rank: int) -> int:
        """Batches since ``reset_steps``."""
        return self._of(rank).steps

    def samples(self, rank: int) -> int:
        """Samples since ``reset_steps``."""
        return self._of(rank).samples

    def has_delivered_sample(self, rank: int) -> bool:
        """Whether the rank has a rate on the delivered scale; a window of one batch has none (D3)."""
        return self._of(rank).has_delivered_sample

    def delivered(self, rank: int) -> tuple[float, int]:
        """Delivered cost in ms and the batches that it covers (the first one is not among them)."""
        window = self._of(rank)
        return window.delivered_ms, window.delivered_batches

    def fill_excess_ms(self, rank: int) -> float:
        """What the first batch cost beyond the rate of the others; 0 without such a rate (D4)."""
        return self._of(rank).fill_ms

    def per_batch_wall_ms(self, rank: int) -> float:
        """Compute ms a batch; infinite without one, so that it sorts last among the fastest (D7)."""
        window = self._of(rank)
        return window.wall_ms / window.timed_batches if window.timed_batches else math.inf

    def mean_loss(self, ranks: Iterable[int]) -> float | None:
        """Mean loss a batch over these ranks, so weighted by work; none without a finite one (D6)."""
        windows = [self._of(rank) for rank in ranks]
        batches = sum(window.loss_batches for window in windows)
        if not batches:
            return None
        mean = sum(window.loss_sum for window in windows) / batches
        return mean if math.isfinite(mean) else None

    def movers_delivered_complete(self, ranks: Iterable[int]) -> bool:
        """Whether every one of these ranks that did any step has a delivered rate (D8)."""
        return all(w.has_delivered_sample for w in map(self._of, ranks) if w.steps > 0)

    def report(self, ranks: Iterable[int], *, coherent_capable: bool, sync_ms: float) -> WindowReport:
        """The window of these (living) ranks on one scale.

        Rates on two scales cannot be compared: one slow loader would turn the allotment round. So either every mover
        has a delivered rate and all feed it, or all feed compute (D10, D11).
        """
        windows = {rank: self._of(rank) for rank in sorted(ranks)}
        delivered = coherent_capable and self.movers_delivered_complete(windows)
        feed = {rank: self._feed(window, delivered) for rank, window in windows.items()}
        return WindowReport(
            ms={rank: ms for rank, (ms, _) in feed.items()},
            batches={rank: batches for rank, (_, batches) in feed.items()},
            fill_ms={rank: window.fill_ms for rank, window in windows.items()},
            sync_ms=sync_ms,
            scale="delivered" if delivered else "compute",
            compute_seconds={rank: window.wall_ms / 1000.0 for rank, window in windows.items()},
            data_seconds={rank: window.data_ms / 1000.0 for rank, window in windows.items()},
        )

    # --------------------------------------------------------------------------------------------- resets

    def reset_steps(self) -> None:
        """A new window begins: its first batch is the next one. Before the next chunk is dealt (D6, M3)."""
        for window in self._windows.values():
            window.steps = 0
            window.samples = 0

    def reset_timing(self) -> None:
        """Clear cost and loss, after the report was read (D6)."""
        for rank, window in self._windows.items():
            self._windows[rank] = _RankWindow(steps=window.steps, samples=window.samples)

    def _of(self, rank: int) -> _RankWindow:
        return self._windows.get(rank) or _RankWindow()

    @staticmethod
    def _feed(window: _RankWindow, delivered: bool) -> tuple[float, int]:
        if delivered and window.has_delivered_sample:
            return window.delivered_ms, window.delivered_batches
        return window.wall_ms, window.timed_batches
