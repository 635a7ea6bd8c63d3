"""The simulator as the core's tests use it: everything is remembered, a sum takes what the test says, and replicas can
be made to differ.

Every rank is an odometer (one number w that each batch raises by 1), so the consensus of every round has an exact
value. After each event the core's invariants are checked.
"""

from __future__ import annotations

from backend.core.config import RunConfig
from simulation.played import Batch, Packed, PlayedHost, PlayedRank
from simulation.rounds import Sum
from simulation.theatre import Theatre
from simulation.transcript import Log
from wire.messages import RankAssignment, SyncAck, TensorSpec


class Memory(Log):
    """Everything that was said and done, trained and agreed on."""

    def __init__(self, play: Rehearsal) -> None:
        super().__init__()
        self.play = play
        self.consensus: list[tuple[int, float]] = []

    def trained(self, rank: int, batch: Batch) -> None:
        self.play.ranks[rank].seen.append(batch)

    def committed(self, number: int, result: Sum, batches: dict[int, list[Batch]]) -> None:
        if result.value is not None:
            self.consensus.append((number, result.value))


class Rehearsal(Theatre):
    """Play a run. ``hosts`` join by ``join``; ``run`` goes on until the cohort ended or ``until`` passed."""

    def __init__(
        self,
        config: RunConfig,
        *,
        samples: int = 60,
        layout: list[TensorSpec] | None = None,
        salt: bytes = b"salt",
        reduce_seconds: float = 0.002,
    ) -> None:
        super().__init__(config, samples=samples, layout=layout, salt=salt)
        self.plane.fixed_seconds = reduce_seconds
        memory = Memory(self)
        self.watchers.append(memory)
        self.log, self.consensus = memory.entries, memory.consensus
        self.spawns = True
        """False: hosts never start their processes"""
        self.flaw: tuple[int, int] | None = None
        """(rank, round) whose replica comes out different"""

    def events(self) -> list[str]:
        """The kinds of events recorded, in order."""
        return [row["kind"] for row in self.rows("events")]

    def spawn(self, host: PlayedHost, assignments: list[RankAssignment]) -> None:
        if self.spawns:
            super().spawn(host, assignments)

    def acknowledgement(self, played: PlayedRank, packed: Packed, when: float) -> SyncAck:
        flawed = self.flaw == (played.rank, packed.round)
        w = played.w + flawed
        return SyncAck(
            round=packed.round,
            divergence=0.0,
            pre_norm=w,
            post_norm=w,
            params_hash=f"{w:.6f}" if flawed else self.hash(played),
            pack_ms=0.1,
            load_ms=0.1,
            wait_ms=0.0,
            reduce_ms=2.0,
        )


def lose_relay(play: Rehearsal, name: str) -> None:
    """A host's relay link ends while its agent lives on."""
    play.lose_relay(name)
