"""From the closed window to the first window of work: relays attach, ranks build their model, all agree on its
layout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from backend.core.config import RunConfig
from backend.core.model import sizes
from backend.core.vocabulary import Effect, Record, SendHost
from backend.core.world import HostSeat, World
from wire.messages import Message, RankReady, TensorSpec, TrainingPlan, WorldFormed

if TYPE_CHECKING:
    from backend.core.march import March

GENERATION = 0
"""Raised when the world changes during a run; today it never does."""


def plan_of(run_id: int, config: RunConfig, dataset_size: int, *, resumed: bool) -> TrainingPlan:
    """What every rank of the run is told to train."""
    return TrainingPlan(
        run_id=run_id,
        job=config.job,
        params=dict(config.params),
        mode=config.mode,
        batch_size=config.batch_size,
        epochs=config.epochs,
        seed=config.seed,
        gamma=config.gamma,
        verify_consensus=config.verify_consensus,
        total_samples=dataset_size,
        write_back=config.write_back,
        blend_alpha=config.blend_alpha,
        resumed=resumed,
        precision=config.precision,
    )


def announce(world: World, seat: HostSeat, plan: TrainingPlan, reattach_seconds: float) -> list[Effect]:
    """The world is formed: write down a host's ranks, and tell it its part, and how long to wait for a controller that
    it loses."""
    assignments = world.assignments(seat.host)
    formed = WorldFormed(plan, len(world.ranks), GENERATION, assignments, reattach_seconds)
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
        self.root = 0
        """whose parameters the initial broadcast brings"""
        self.brings: int | None = None
        """the round that they are the consensus of, where a cohort goes on from one"""
        self.first_round = 0
        """no round before this one is begun"""
        self.last_words = ""
        """why there is nothing but to save once it is complete"""
        self.holds_work = False
        """there is trained work to save: an operator's stop waits for that"""
        self.restored = True
        """the schedule is that of this world; else whoever dies leaves it when it is"""
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

    def returned(self, link: int, message: Message, address: str, now: float) -> list[Effect]:
        """Somebody without a seat spoke; what a forming has to say to it, which here is nothing."""
        return []

    def begin(self, march: March, now: float) -> bool:
        """Everybody is there; whether the initial broadcast may begin."""
        return True

    def expired(self, march: March, now: float) -> None:
        """Time is up."""
        waited = f"{march.config.forming_seconds:g} s"
        march.fail(f"The cohort did not form within {waited}. {march.plane.waits() or self.missing()}", now)

    def bereaved(self, march: March, reason: str, now: float) -> None:
        """Ranks were buried before it was complete."""
        self.over(march, reason, now)

    def over(self, march: March, reason: str, now: float) -> None:
        """It cannot come to a world that trains."""
        march.fail(f"The cohort could not form: {reason}", now)

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
