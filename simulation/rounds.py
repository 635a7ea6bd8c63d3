"""The reduce plane as the simulator plays it: who contributed what, when the sum is there, and what it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite

from backend.core.round_cost import Line, RoundCost
from backend.core.vocabulary import AbortRound, Event, NonFiniteValue, OpenRound, RoundBroken, RoundFinished
from simulation.packed import Batch, Packed
from simulation.stage import Stage
from wire.mass import gamma_mass, is_realized, mover_mass

F32_BYTES = 4


@dataclass(slots=True)
class _Attempt:
    opened: OpenRound
    waiting: set[int]
    contributions: dict[int, Packed] = field(default_factory=dict)
    """by rank"""


@dataclass(frozen=True, slots=True)
class Sum:
    """The consensus of an attempt; ``value`` is none when nobody worked."""

    value: float | None
    steps: dict[int, int]
    batches: dict[int, list[Batch]]
    """what is in it, symbolically: the batches behind each rank's contribution"""


class PlayedPlane:
    """One attempt at a time. ``feed`` takes the event that closes it."""

    def __init__(self, stage: Stage, cost: RoundCost, gamma: float, feed: Callable[[Event], object]) -> None:
        self.stage = stage
        self.cost = cost
        self.gamma = gamma
        self.fixed_seconds: float | None = None
        """what every sum takes, in place of the cost from bytes and links; the model then travels once"""
        self.lines: dict[int, Line] = {}
        """by host"""
        self.poisoned: set[int] = set()
        """hosts whose next contribution is refused"""
        self.broken_sums = 0
        """so many sums from now on fail, and no host is to blame"""
        self.staged: dict[tuple[int, int], Sum] = {}
        self._feed = feed
        self._attempt: _Attempt | None = None

    def tell(self, feed: Callable[[Event], object]) -> None:
        """From now on this takes the events."""
        self._feed = feed

    def open(self, effect: OpenRound) -> None:
        """Expect these contributions."""
        assert self._attempt is None, f"round {effect.round} is opened while {self._attempt} is open"
        self._attempt = _Attempt(effect, {rank for ranks in effect.hosts.values() for rank in ranks})

    def abort(self, effect: AbortRound) -> None:
        """Drop the attempt, if it is still open."""
        attempt = self._attempt
        if attempt is not None and (attempt.opened.round, attempt.opened.attempt) == (effect.round, effect.attempt):
            self._attempt = None
        self.staged.pop((effect.round, effect.attempt), None)  # a sum that nobody committed is taken back

    def contribute(self, rank: int, key: tuple[int, int], packed: Packed) -> None:
        """A rank's arena is ready; with the last one the sum starts. ``key`` is round and attempt."""
        attempt = self._attempt
        if attempt is None or (attempt.opened.round, attempt.opened.attempt) != key:
            return
        attempt.contributions[rank] = packed
        attempt.waiting.discard(rank)
        if attempt.waiting:
            return
        seconds = self._seconds(attempt.opened)
        self.stage.after(seconds, self._close, attempt, seconds)

    def _seconds(self, opened: OpenRound) -> float:
        if self.fixed_seconds is not None:
            return self.fixed_seconds
        return self.cost.stream_seconds([self.lines[host] for host in opened.hosts])

    def _bytes(self, opened: OpenRound) -> int:
        copies = len(opened.hosts) if self.fixed_seconds is None else 1
        return copies * (opened.params_elements + opened.buffers_elements) * F32_BYTES

    def _close(self, attempt: _Attempt, seconds: float) -> None:
        if self._attempt is not attempt:
            return
        self._attempt = None
        opened = attempt.opened
        key = (opened.round, opened.attempt)
        culprit = next((host for host in opened.hosts if host in self.poisoned), None)
        if culprit is not None:
            self.poisoned.discard(culprit)
            self._feed(RoundBroken(*key, reason="its contribution is not finite", host=culprit))
            return
        bad = self._not_finite(attempt)
        if bad is not None:
            host = next(host for host, ranks in opened.hosts.items() if bad in ranks)
            what = NonFiniteValue(bad, 0, "nan")
            self._feed(RoundBroken(*key, reason="a value is not finite", host=host, non_finite=what))
            return
        if self.broken_sums:
            self.broken_sums -= 1
            self._feed(RoundBroken(*key, reason="slice 0 could not be summed: MemoryError()"))
            return
        steps = {rank: packed.steps for rank, packed in attempt.contributions.items()}
        mass, value = summed(attempt.contributions, 1.0 if opened.initial else self.gamma)
        batches = {rank: packed.batches for rank, packed in attempt.contributions.items()}
        self.staged[key] = Sum(value, steps, batches)
        realized = is_realized(mass)
        size = self._bytes(opened) if realized else 0
        self._feed(
            RoundFinished(
                *key,
                realized=realized,
                buffers_realized=any(mover_mass(count) for count in steps.values()),
                steps=steps,
                mass=mass,
                bytes_up=size,
                bytes_down=size,
                seconds=seconds,
            )
        )

    @staticmethod
    def _not_finite(attempt: _Attempt) -> int | None:
        """The first rank, host by host, that contributes no number. Who did no work is never read."""
        ranks = (rank for ranks in attempt.opened.hosts.values() for rank in ranks)
        given = attempt.contributions
        return next((rank for rank in ranks if given[rank].steps and not isfinite(given[rank].w)), None)


def summed(given: Mapping[int, Packed], gamma: float) -> tuple[float, float | None]:
    """The mass of these contributions, and their average; none when nobody worked."""
    masses = {rank: gamma_mass(packed.steps, gamma) for rank, packed in given.items()}
    total = sum(masses.values())
    if not is_realized(total):
        return 0.0, None
    return total, sum(masses[rank] * packed.w for rank, packed in given.items() if packed.steps) / total
