"""A whole cohort in one process: real models and arenas, the relay's fold and staging, the controller's plane."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import nn

from backend.core.vocabulary import OpenRound, RoundBroken, RoundFinished
from backend.reduce import ReducePlane
from wire.mass import gamma_mass, mover_mass
from wire.messages import RequestParams, RoundAborted, RoundCommitted, SnapshotReady
from wire.session import ChunkHeader
from worker.arena import AdoptResult, Arena
from worker.arena_file import ArenaFile
from worker.fold import Fold, FoldPlan, Model, Staging
from worker.relay import fold

SLICE = 3
"""elements of a slice: small, so that small models have many"""


class Rank:
    """One model, its arena, and the work since the last round."""

    def __init__(self, number: int, model: nn.Module, directory: Path) -> None:
        self.number = number
        self.model = model
        self.steps = 0
        self.arena = Arena.for_model(model)
        self.arena.create_out(directory / f"rank{number}.out")
        self.arena.open_consensus(directory / "consensus")

    def snapshot(self, round_: int, attempt: int, gamma: float, *, pack: bool) -> SnapshotReady:
        mass, mover = gamma_mass(self.steps, gamma), mover_mass(self.steps)
        if pack:
            self.arena.pack(mass, mover)
        return SnapshotReady(round=round_, attempt=attempt, steps=self.steps, mass=mass, mover_mass=mover)


class Host:
    """What a relay does, without its links."""

    def __init__(self, number: int, models: dict[int, nn.Module], directory: Path) -> None:
        directory.mkdir()
        self.number = number
        self.ranks = {rank: Rank(rank, model, directory) for rank, model in models.items()}
        first = next(iter(self.ranks.values())).arena
        self.fold = Fold(models)
        self.fold.model = Model(first.params_elements, first.buffers_elements)
        self.staging = Staging()
        self.consensus = ArenaFile.create(directory / "consensus", first.elements)
        self.released: list[RoundCommitted] = []
        self.directory = directory

    @property
    def model(self) -> Model:
        assert self.fold.model is not None
        return self.fold.model

    def plan(self, round_: int, attempt: int, gamma: float) -> FoldPlan:
        request = RequestParams(round=round_, attempt=attempt, initial=False)
        assert self.fold.requested(request)
        self.staging.opened(round_, attempt)
        plans = [
            self.fold.ready(rank, self.ranks[rank].snapshot(round_, attempt, gamma, pack=attempt == 0))
            for rank in sorted(self.fold.live)
        ]
        assert plans[-1] is not None
        return plans[-1]

    def stream(self, plan: FoldPlan) -> list[tuple[ChunkHeader, bytes]]:
        arenas = {rank: self._arena(rank) for rank in self.ranks}
        return [
            (piece.header, fold([arenas[rank] for rank in piece.ranks], piece).tobytes())
            for piece in plan.pieces(SLICE)
        ]

    def stage(self, header: ChunkHeader, payload: memoryview) -> None:
        if self.staging.accepts(header, self.model):
            self.consensus.values[header.offset : header.offset + header.elements] = np.frombuffer(payload, "<f4")
            self._release(self.staging.staged(header, self.model))

    def commit(self, message: RoundCommitted) -> None:
        self._release(self.staging.committed(message, self.model))

    def _release(self, commit: RoundCommitted | None) -> None:
        if commit is not None:
            self.released.append(commit)

    def _arena(self, rank: int) -> np.ndarray:
        return ArenaFile.open(self.directory / f"rank{rank}.out", self.model.elements).values


class Cohort:
    """Hosts by number, each with models by rank."""

    def __init__(self, layout: dict[int, list[int]], build: Callable[[], nn.Module], directory: Path) -> None:
        self.hosts = {
            host: Host(host, {rank: build() for rank in ranks}, directory / f"host{host}")
            for host, ranks in layout.items()
        }
        self.results: asyncio.Queue[RoundFinished | RoundBroken] = asyncio.Queue()
        self.plane = ReducePlane(
            send=lambda host, header, payload: self.hosts[host].stage(header, payload),
            finished=self.results.put_nowait,
            broken=self.results.put_nowait,
            slice_elements=SLICE,
        )

    @property
    def ranks(self) -> dict[int, Rank]:
        return {rank.number: rank for host in self.hosts.values() for rank in host.ranks.values()}

    def open(self, round_: int, attempt: int = 0) -> None:
        model = next(iter(self.hosts.values())).model
        expected = {number: tuple(sorted(host.fold.live)) for number, host in self.hosts.items()}
        self.plane.open(OpenRound(round_, attempt, expected, False, model.params_elements, model.buffers_elements))

    def abort(self, round_: int, attempt: int) -> None:
        self.plane.abort(round_, attempt, "a rank died")
        for host in self.hosts.values():
            host.fold.aborted(RoundAborted(round_, attempt, "a rank died"))
            host.staging.aborted(RoundAborted(round_, attempt, "a rank died"))

    async def reduce(self, round_: int = 0, attempt: int = 0, gamma: float = 1.0) -> RoundFinished | RoundBroken:
        """One attempt from the request to the result; hosts stream one after the other, the last one first."""
        self.open(round_, attempt)
        plans = {host: self.hosts[host].plan(round_, attempt, gamma) for host in self.hosts}
        for host, plan in reversed(plans.items()):
            self.plane.contribution(host, plan.contribution)
            for header, payload in self.hosts[host].stream(plan):
                self.plane.chunk(host, header, memoryview(payload))
        return await asyncio.wait_for(self.results.get(), 10)

    def adopt(self, finished: RoundFinished) -> dict[int, AdoptResult]:
        """Commit, and let every living rank adopt what its host has staged."""
        commit = RoundCommitted(finished.round, finished.attempt, finished.realized, finished.buffers_realized)
        moved = {}
        for host in self.hosts.values():
            host.commit(commit)
            assert host.released.pop() == commit
            for rank in sorted(host.fold.live):
                moved[rank] = host.ranks[rank].arena.adopt(params=commit.realized, buffers=commit.buffers_realized)
                host.ranks[rank].steps = 0
        return moved

    async def window(self, round_: int = 0, gamma: float = 1.0) -> dict[int, AdoptResult]:
        """A round that must succeed."""
        finished = await self.reduce(round_, gamma=gamma)
        assert isinstance(finished, RoundFinished), finished
        return self.adopt(finished)
