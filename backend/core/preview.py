"""What a run will be like, before it starts: allotments, idle time, rounds and gain, from what is known of its ranks.

ElChe itself is asked: it is told windows as they would be measured until its allotments stay, and an epoch of such
windows is added up. The same figures come out of the simulator, event by event; a test holds the two together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from backend.core.allotments import window_plan
from backend.core.config import RunConfig
from backend.core.round_cost import Line, RoundCost, link_bytes_per_second
from backend.core.scheduling import Scheduler, scheduler_for
from backend.core.timing import WindowReport
from backend.core.verdicts import Stable
from backend.core.work import EpochPool

Source = Literal["measured", "declared", "guessed"]

ASSUMED_MBIT = 1000.0
ASSUMED_LATENCY_SECONDS = 0.001
"""of every link, there and back, while no round was timed"""
GUESSED_MS = 50.0
"""a batch, when nothing at all is known; shares do not depend on it, the round's weight does"""
MOST_WINDOWS = 40
"""in which ElChe's allotments must have settled"""


@dataclass(frozen=True, slots=True)
class RankHint:
    """What is known of a rank: ms a batch, measured or declared, or none."""

    rank: int
    ms_per_batch: float | None
    measured: bool = False
    host: int = 0


@dataclass(frozen=True, slots=True)
class Outlook:
    """All that a preview rests on. ``round_seconds`` is a round's duration where one was timed."""

    ranks: tuple[RankHint, ...]
    config: RunConfig
    dataset_size: int
    model_bytes: int
    round_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class RankPreview:
    """One rank in a full window."""

    rank: int
    ms_per_batch: float
    source: Source
    batches: int
    share: float
    """of the window's batches"""
    idle_share: float
    """of an epoch: waiting for others, the rounds themselves aside"""


@dataclass(frozen=True, slots=True)
class Expectation:
    """An epoch, once ElChe has settled. Seconds; shares of the epoch's time."""

    anchor: int
    anchor_rank: int | None
    window_batches: int
    window_seconds: float
    """with as much of the round as does not overlap work"""
    round_seconds: float
    windows: int
    epoch_seconds: float
    idle_share: float
    """mean of the ranks'"""
    round_share: float
    batches_per_second: float
    efficiency: float
    """against the sum of what each rank does alone"""
    gain: float
    """how many times as fast as the fastest rank alone"""


@dataclass(frozen=True, slots=True)
class Preview:
    """``expectation`` is none while there is nothing to expect; ``reason`` says why, or what all of it rests on."""

    ranks: tuple[RankPreview, ...]
    expectation: Expectation | None
    guess: bool
    """some rank's speed is neither measured nor declared"""
    round_assumed: bool
    """no round was timed: its duration follows from the model's size and an assumed link"""
    reason: str


def preview(outlook: Outlook) -> Preview:
    """What to expect. Pure; a few ms for ten ranks."""
    hints = sorted(outlook.ranks, key=lambda hint: hint.rank)
    guess = any(hint.ms_per_batch is None for hint in hints)
    assumed = outlook.round_seconds is None
    missing = _missing(outlook)
    if missing:
        return Preview((), None, guess, assumed, missing)
    ms = _speeds(hints)
    round_seconds = outlook.round_seconds if outlook.round_seconds is not None else assumed_round_seconds(outlook)
    scheduler = _settled(outlook, ms, round_seconds)
    counts = scheduler.counts
    epoch = _Epoch(ms, round_seconds, stop_seconds(outlook, round_seconds))
    epoch.walk(scheduler, _batches(outlook))
    ranks = tuple(
        RankPreview(
            rank=hint.rank,
            ms_per_batch=ms[hint.rank],
            source=_source(hint),
            batches=counts[hint.rank],
            share=counts[hint.rank] / sum(counts.values()),
            idle_share=epoch.idle[hint.rank] / epoch.seconds,
        )
        for hint in hints
    )
    return Preview(ranks, epoch.expectation(scheduler), guess, assumed, _reason(hints, ms, assumed))


def assumed_round_seconds(outlook: Outlook) -> float:
    """A round over links as they usually are."""
    speed = link_bytes_per_second(ASSUMED_MBIT)
    hosts = Counter(hint.host for hint in outlook.ranks)
    lines = [Line(speed, ASSUMED_LATENCY_SECONDS, ranks) for ranks in hosts.values()]
    return RoundCost(outlook.model_bytes, speed).seconds(lines)


def stop_seconds(outlook: Outlook, round_seconds: float) -> float:
    """How long a round keeps ranks from working: all of it, or where it overlaps work, packing and loading only."""
    if not outlook.config.mode.endswith("_async"):
        return round_seconds
    cost = RoundCost(outlook.model_bytes, math.inf)
    return min(round_seconds, cost.pack_seconds + cost.load_seconds)


def _missing(outlook: Outlook) -> str:
    """Why there is nothing to expect yet; empty when there is."""
    ranks = len(outlook.ranks)
    if ranks < 2:
        who = "Only one rank" if ranks else "No rank"
        return f"{who} has joined yet; a run shares its work among two or more."
    if outlook.dataset_size < 1:
        return "The dataset's size is not known yet."
    forced = outlook.config.fixed_counts
    if forced is not None and {hint.rank for hint in outlook.ranks} != set(range(len(forced))):
        return f"The forced counts name {len(forced)} ranks, and {ranks} are here."
    return ""


def _speeds(hints: list[RankHint]) -> dict[int, float]:
    """ms a batch of every rank; one of which nothing is known counts as fast as the middle one of the others."""
    known = sorted(hint.ms_per_batch for hint in hints if hint.ms_per_batch is not None)
    guess = known[(len(known) - 1) // 2] if known else GUESSED_MS
    return {hint.rank: guess if hint.ms_per_batch is None else hint.ms_per_batch for hint in hints}


def _source(hint: RankHint) -> Source:
    if hint.ms_per_batch is None:
        return "guessed"
    return "measured" if hint.measured else "declared"


def _batches(outlook: Outlook) -> int:
    return -(-outlook.dataset_size // outlook.config.batch_size)


def _settled(outlook: Outlook, ms: Mapping[int, float], round_seconds: float) -> Scheduler:
    """The run's scheduler after so many windows at these speeds that nothing moves any more."""
    scheduler = scheduler_for(outlook.config, ms)
    scheduler.set_max_total(_batches(outlook))
    before = None
    for _ in range(MOST_WINDOWS):
        counts, known = scheduler.counts, scheduler.phase in ("stable", "mature")
        scheduler.report_window(
            WindowReport(
                ms={rank: count * ms[rank] for rank, count in counts.items()},
                batches=counts,
                fill_ms=dict.fromkeys(counts, 0.0),
                sync_ms=1000.0 * round_seconds,
                scale="delivered",
                compute_seconds={},
                data_seconds={},
            )
        )
        scheduler.apply(Stable("Nothing is known that would speak against longer windows."))
        after = (scheduler.counts, scheduler.anchor)
        if after == before and known:
            break  # and not before: until a rank's pace is well known, growth is held to a higher threshold
        before = after
    return scheduler


class _Epoch:
    """The windows of an epoch, added up."""

    def __init__(self, ms: Mapping[int, float], round_seconds: float, stop_seconds: float) -> None:
        self.ms = ms
        self.round_seconds = round_seconds
        self.stop_seconds = stop_seconds
        self.windows = 0
        self.batches = 0
        self.seconds = 0.0
        self.stopped = 0.0
        """of ``seconds``, by rounds"""
        self.idle = dict.fromkeys(ms, 0.0)

    def walk(self, scheduler: Scheduler, batches: int) -> None:
        """Deal the epoch's batches window by window, the many that are alike in one step."""
        counts, left = scheduler.counts, batches
        whole = sum(counts.values())
        alike = max(0, left - whole - len(counts)) // whole
        self._add(counts, alike)
        left -= alike * whole
        while left > 0:
            plan = window_plan(EpochPool(0, left, 1), counts, counts, forced=scheduler.forced)
            self._add(plan, 1)
            left -= sum(plan.values())
        self.stopped += self.round_seconds - self.stop_seconds  # the last round has nothing left to overlap with
        self.seconds += self.round_seconds - self.stop_seconds

    def expectation(self, scheduler: Scheduler) -> Expectation:
        """What the epoch comes to."""
        counts = scheduler.counts
        rate = self.batches / self.seconds
        return Expectation(
            anchor=scheduler.anchor,
            anchor_rank=scheduler.anchor_rank,
            window_batches=sum(counts.values()),
            window_seconds=self._work_seconds(counts) + self.stop_seconds,
            round_seconds=self.round_seconds,
            windows=self.windows,
            epoch_seconds=self.seconds,
            idle_share=sum(self.idle.values()) / len(self.idle) / self.seconds,
            round_share=self.stopped / self.seconds,
            batches_per_second=rate,
            efficiency=rate / sum(1000.0 / ms for ms in self.ms.values()),
            gain=rate * min(self.ms.values()) / 1000.0,
        )

    def _add(self, plan: Mapping[int, int], times: int) -> None:
        work = self._work_seconds(plan)
        self.windows += times
        self.batches += times * sum(plan.values())
        self.seconds += times * (work + self.stop_seconds)
        self.stopped += times * self.stop_seconds
        for rank, ms in self.ms.items():
            self.idle[rank] += times * (work - plan[rank] * ms / 1000.0)

    def _work_seconds(self, plan: Mapping[int, int]) -> float:
        return max(plan[rank] * ms for rank, ms in self.ms.items()) / 1000.0


def _reason(hints: list[RankHint], ms: Mapping[int, float], assumed: bool) -> str:
    """What the figures rest on, in a sentence or two."""
    counts = Counter(_source(hint) for hint in hints)
    parts = [_said(counts[source], source) for source in ("measured", "declared", "guessed") if counts[source]]
    text = f"Of the {len(hints)} ranks' speeds {_joined(parts)}."
    if counts["guessed"]:
        guess = next(ms[hint.rank] for hint in hints if hint.ms_per_batch is None)
        alone = counts["guessed"] == len(hints)
        like = "all count as equally fast" if alone else "those guessed count as fast as the middle one of the others"
        text += f" Until a batch is timed {like}, {guess:g} ms a batch."
    if assumed:
        text += f" The round's duration follows from the model's size over links of {ASSUMED_MBIT:g} Mbit/s."
    return text


def _said(count: int, source: Source) -> str:
    verb = "is" if count == 1 else "are"
    return f"{count} {verb} {'declared by their hosts' if source == 'declared' else source}"


def _joined(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
