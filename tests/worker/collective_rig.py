"""Ranks that sum among themselves, over gloo on loopback; the test plays the controller."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
from rank_rig import Cohort, M, RankRig, chunk_of, plan, start_rank

from wire.messages import (
    AbortSession,
    LocalState,
    Message,
    NewSession,
    RequestLocalState,
    RequestSessionId,
    SessionIdGenerated,
    SessionJoined,
    SessionLost,
    StartChunk,
    SyncAck,
    SyncCommitted,
    Synced,
    SyncNow,
)


class CollectiveCohort(Cohort):
    """The initial broadcast is still the relay's; every other round goes through a session."""

    def __init__(self, ranks: list[RankRig]) -> None:
        super().__init__(ranks)
        self.generation = -1
        self.members: list[int] = []

    def begin(self) -> None:
        """The first session, and everybody's first consensus."""
        self.session()
        self.reduce(-1, initial=True)

    def session(self, members: Sequence[int] | None = None) -> list[SessionJoined]:
        """Have these ranks, or all, in a new session; the lowest of them makes its identity."""
        members = self.members = list(range(len(self.ranks)) if members is None else members)
        self.generation += 1
        generator = self.ranks[members[0]]
        generator.send(RequestSessionId(self.generation))
        named = self._heard(generator, SessionIdGenerated)
        assert named.generation == self.generation
        for rank in members:
            self.ranks[rank].send(NewSession(self.generation, named.id, members))
        joined = [self._heard(self.ranks[rank], SessionJoined) for rank in members]
        assert {one.generation for one in joined} == {self.generation}
        return joined

    def nonsense(self) -> None:
        """Have the members refuse a session that cannot be."""
        self.generation += 1
        self.tell(NewSession(self.generation, b"nonsense", self.members))
        for rank in self.members:
            assert self._heard(self.ranks[rank], SessionLost).generation == self.generation

    def _heard(self, rig: RankRig, kind: type[M]) -> M:
        """The next message. Who saw a peer hang up before it was told that the session is over has said so."""
        while isinstance(message := rig.relay.receive(), SessionLost) and message.generation < self.generation:
            continue
        assert isinstance(message, kind), f"expected {kind.__name__}, got {message}"
        return message

    def ask(self, number: int, attempt: int = 0, *, excluded: Iterable[int] = (), ranks: Any = None) -> None:
        """Ask these members of the session, or all, for a sync."""
        for rank in self.members if ranks is None else ranks:
            self.ranks[rank].send(SyncNow(number, attempt, self.generation, excluded=rank in excluded))

    def sync(self, number: int, attempt: int = 0, *, excluded: Iterable[int] = ()) -> list[Synced]:
        """Ask for a sync that works."""
        self.ask(number, attempt, excluded=excluded)
        reports = [self.ranks[rank].expect(Synced) for rank in self.members]
        assert {(one.round, one.attempt) for one in reports} == {(number, attempt)}
        assert {one.total_steps for one in reports} == {sum(one.steps for one in reports)}
        assert len({one.mass for one in reports}) == 1
        return reports

    def commit(self, number: int, attempt: int = 0) -> list[SyncAck]:
        for rank in self.members:
            self.ranks[rank].send(SyncCommitted(number, attempt))
        acks = [self.ranks[rank].expect(SyncAck) for rank in self.members]
        assert {ack.round for ack in acks} == {number}
        assert len({ack.params_hash for ack in acks} - {""}) <= 1
        return acks

    def round(self, number: int, counts: Sequence[int], **options: Any) -> list[SyncAck]:
        """Train so many batches on each member, sync and commit."""
        self.train(number, counts)
        self.sync(number, **options)
        return self.commit(number, **options)

    def train(self, number: int, counts: Sequence[int]) -> None:
        for rank, count in zip(self.members, counts, strict=True):
            if count:
                self.ranks[rank].train(self.chunk(number, rank, count))

    def odometers(self) -> list[float]:
        return [float(rig.workload.trainer.model.w.detach()) for rig in self.ranks]

    @staticmethod
    def chunk(number: int, rank: int, count: int) -> StartChunk:
        return chunk_of(count, offset=rank * 32, epoch=number)

    def abort(self, reason: str = "a rank died") -> None:
        self.tell(AbortSession(self.generation, reason))

    def tell(self, message: Message) -> None:
        for rank in self.members:
            self.ranks[rank].send(message)


def cohort(
    directory: Path,
    count: int,
    job: str = "odometer.py:Odometer",
    samples: int = 256,
    device: str = "cpu",
    **changes: Any,
) -> CollectiveCohort:
    """So many ranks of a job that has ``samples`` as its parameter, or none."""
    params = changes.pop("params", {"samples": samples})
    plans = plan(job, total_samples=samples, params=params, mode="nccl_cadence", **changes)
    return CollectiveCohort([start_rank(directory, plans, rank, device=device) for rank in range(count)])


def consensus(rig: RankRig) -> list[float]:
    """What the rank hands over of it for a checkpoint."""
    rig.send(RequestLocalState(0, consensus=True))
    part = rig.expect(LocalState)
    assert part.parts == 1 and not part.error
    return safetensors.torch.load(part.data)["consensus"].tolist()
