"""From the closed window to the first window of work: relays attach, ranks build their model, all agree on its
layout."""

from __future__ import annotations

from collections.abc import Iterable

from backend.core.model import sizes
from backend.core.vocabulary import Effect, Record, SendHost
from backend.core.world import HostSeat, World
from wire.messages import RankReady, TensorSpec, TrainingPlan, WorldFormed

GENERATION = 0
"""Raised when the world changes during a run; today it never does."""


def announce(world: World, seat: HostSeat, plan: TrainingPlan) -> list[Effect]:
    """The world is formed: write down a host's ranks, and tell it its part."""
    assignments = world.assignments(seat.host)
    formed = WorldFormed(plan=plan, world_size=len(world.ranks), generation=GENERATION, assignments=assignments)
    rows: list[Effect] = [
        Record(
            "ranks",
            {
                "rank": assignment.rank,
                "host": seat.host,
                "local_rank": assignment.local_rank,
                "device": assignment.device,
                "emulate_ms_per_batch": seat.emulate_ms_per_batch,
                "state": "starting",
            },
        )
        for assignment in assignments
    ]
    return [*rows, SendHost(seat.link, formed)]


class Forming:
    """Who is still missing before training can start, and until when that may last."""

    def __init__(self, world: World, deadline: float, layout: Iterable[TensorSpec]) -> None:
        self.world = world
        self.deadline = deadline
        self._sizes = sizes(layout)
        """elements of parameters and buffers, as every host found them when it looked at the job"""

    def relay_attached(self, host: int, via: int | None = None) -> None:
        """Both links of the host's relay are up, the data link by way of relay-only host ``via``."""
        seat = self.world.hosts[host]
        seat.relay_up, seat.via = True, via

    def rank_ready(self, rank: int, ready: RankReady) -> str | None:
        """Take a rank's report. Answers why the cohort cannot form, or none when it agrees with the others
        (behaviour B11)."""
        seat = self.world.ranks[rank]
        seat.ready = ready
        seat.state = "ready"
        for other in self.world.ranks.values():
            if other.ready is not None and other.ready.layout_hash != ready.layout_hash:
                return (
                    f"{self.world.where(rank)} built a model unlike that of {self.world.where(other.rank)}: "
                    f"{ready.params_elements} against {other.ready.params_elements} parameter elements, "
                    f"{ready.buffers_elements} against {other.ready.buffers_elements} in buffers; "
                    "build_model must not depend on the host"
                )
        if (ready.params_elements, ready.buffers_elements) != self._sizes:
            return (
                f"{self.world.where(rank)} built a model of {ready.params_elements} parameter and "
                f"{ready.buffers_elements} buffer elements, not of {self._sizes[0]} and {self._sizes[1]} as its "
                "host found when it looked at the job; build_model must build the same each time"
            )
        if ready.params_elements + ready.buffers_elements == 0:
            return "the model has no floating-point tensor, so there is nothing to train"
        return None

    @property
    def complete(self) -> bool:
        return not self._relays_missing() and all(seat.ready is not None for seat in self.world.ranks.values())

    def missing(self) -> str:
        """What the cohort waits for, as a sentence."""
        relays = self._relays_missing()
        ranks = [self.world.where(rank) for rank, seat in self.world.ranks.items() if seat.ready is None]
        waits = []
        if relays:
            waits.append(f"the relay of {', '.join(relays)}")
        if ranks:
            waits.append(f"{', '.join(ranks)} to build the model")
        if not waits:
            return "Every rank is ready; rank 0's parameters are on their way to the others."
        return f"Waiting for {' and for '.join(waits)}."

    def _relays_missing(self) -> list[str]:
        """A relay-only host is missed through the hosts that it carries."""
        return [seat.name for seat in self.world.hosts.values() if seat.ranks and not seat.relay_up]
