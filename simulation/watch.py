"""Who looks on while a play goes by: watchers of its events and effects, and a stopwatch for the core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from backend.core.vocabulary import Effect, Event
from simulation.played import Batch
from simulation.rounds import Sum


class Watcher:
    """Sees the play go by; overrides what it wants to know."""

    def event(self, now: float, event: Event) -> None:
        """The core is about to be told."""

    def effect(self, now: float, effect: Effect) -> None:
        """The core said so, and it is about to be performed."""

    def handled(self, now: float, event: Event, effects: list[Effect]) -> None:
        """The core was told, and all that it said is performed."""

    def trained(self, rank: int, batch: Batch) -> None:
        """A rank trained on a batch."""

    def restarted(self, rank: int, batches: list[Batch]) -> None:
        """A rank starts anew from the consensus; these batches, since the last round, were done in vain."""

    def committed(self, number: int, result: Sum, batches: dict[int, list[Batch]]) -> None:
        """A round is committed: its number, its sum, and the batches behind each rank's contribution."""


@dataclass(slots=True)
class CoreTime:
    """What the core itself cost, when a stopwatch was given."""

    stopwatch: Callable[[], float] | None = None
    events: int = 0
    seconds: float = 0.0
    by_kind: dict[str, tuple[int, float]] = field(default_factory=dict)

    def add(self, kind: str, seconds: float) -> None:
        """One event."""
        self.events += 1
        self.seconds += seconds
        count, before = self.by_kind.get(kind, (0, 0.0))
        self.by_kind[kind] = (count + 1, before + seconds)
