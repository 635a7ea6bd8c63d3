"""A whole cohort in one process: real models and arenas, the relay's fold and staging, the controller's plane."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
from torch import nn

from backend.core.vocabulary import OpenRound, RoundBroken, RoundFinished
from backend.reduce import ReducePlane, SharedArenas
from wire.mass import gamma_mass, mover_mass
from wire.messages import Message, NonFinite, RequestParams, RoundAborted, RoundCommitted, SnapshotReady, UpdateComing
from wire.session import ChunkHeader
from worker.arena import AdoptResult, Arena
from worker.arena_file import ArenaFile
from worker.fold import Fold, FoldPlan, Model
from worker.folding import ConsensusPair, NotFinite, fold
from worker.staging import Staging

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
        self.adopted = ""
        """hash of the consensus as it was read"""

    def snapshot(self, request: RequestParams, gamma: float) -> SnapshotReady:
        steps = int(self.number == 0) if request.initial else self.steps
        still = self.arena.pack()
        return SnapshotReady(request.round, request.attempt, steps, gamma_mass(steps, gamma), mover_mass(steps), still)


class Host:
    """What a relay does, without its links."""

    def __init__(self, number: int, models: dict[int, nn.Module], directory: Path, *, shared: bool) -> None:
        directory.mkdir(mode=0o700, parents=True)
        self.number = number
        self.ranks = {rank: Rank(rank, model, directory) for rank, model in models.items()}
        first = next(iter(self.ranks.values())).arena
        self.fold = Fold(models)
        self.fold.model = self.model = Model(first.params_elements, first.buffers_elements)
        self.staging = Staging()
        self.pair = None if shared else ConsensusPair(directory, first.elements)
        self.released: list[tuple[RoundCommitted, str]] = []
        self.directory = directory

    def plan(self, request: RequestParams, gamma: float) -> FoldPlan:
        assert self.fold.requested(request)
        self.staging.opened(request)
        plans = [self.fold.ready(rank, self.ranks[rank].snapshot(request, gamma)) for rank in sorted(self.fold.live)]
        assert plans[-1] is not None
        return plans[-1]

    def stream(self, plan: FoldPlan) -> list[tuple[ChunkHeader, bytes]]:
        if self.pair is None:
            return []
        base = None if plan.initial else self.pair.base
        arenas = {rank: self._arena(rank) for rank in self.ranks}
        return [(piece.header, fold(piece, arenas, base).tobytes()) for piece in plan.pieces(SLICE)]

    def tell(self, message: Message) -> None:
        assert isinstance(message, UpdateComing)
        if self.staging.coming(message, self.model) and not message.path:
            assert self.pair is not None
            self.pair.begin(message)
        self._release(self.staging.release())

    def stage(self, header: ChunkHeader, payload: memoryview) -> None:
        if self.staging.accepts(header, self.model):
            assert self.pair is not None
            self.pair.take(header, payload)
            self._release(self.staging.staged(header))

    def commit(self, message: RoundCommitted) -> None:
        self._release(self.staging.committed(message))

    def _release(self, commit: RoundCommitted | None) -> None:
        if commit is not None:
            path = ""
            if commit.realized:
                path = self.staging.path or (self.pair.promote() if self.pair is not None else "")
            self.released.append((commit, path))

    def _arena(self, rank: int) -> np.ndarray:
        return ArenaFile.open(self.directory / f"rank{rank}.out", self.model.elements).values


class Cohort:
    """Hosts by number, each with models by rank."""

    def __init__(
        self,
        layout: dict[int, list[int]],
        build: Callable[[], nn.Module],
        directory: Path,
        shared: Collection[int] = (),
        encoding: int = 0,
    ) -> None:
        """``shared``: hosts that share their memory; the others stream."""
        self.encoding = encoding
        self.hosts = {
            host: Host(host, {rank: build() for rank in ranks}, directory / f"host{host}", shared=host in shared)
            for host, ranks in layout.items()
        }
        self.results: asyncio.Queue[RoundFinished | RoundBroken] = asyncio.Queue()
        self.plane = ReducePlane(
            send=lambda host, header, payload: self.hosts[host].stage(header, payload),
            tell=lambda host, message: self.hosts[host].tell(message),
            finished=self.results.put_nowait,
            broken=self.results.put_nowait,
            tuning={"slice_elements": SLICE, "mapped_elements": 2 * SLICE},
        )
        for host in shared:
            self.plane.share(host, SharedArenas(str(self.hosts[host].directory)))

    @classmethod
    async def begun(
        cls,
        layout: dict[int, list[int]],
        build: Callable[[], nn.Module],
        directory: Path,
        shared: Collection[int] = (),
        encoding: int = 0,
    ) -> Cohort:
        """A cohort after the initial broadcast: every rank starts from rank 0's values."""
        cohort = cls(layout, build, directory, shared, encoding)
        await cohort.window(-1)
        return cohort

    @property
    def ranks(self) -> dict[int, Rank]:
        return {rank.number: rank for host in self.hosts.values() for rank in host.ranks.values()}

    def open(self, round_: int, attempt: int = 0) -> RequestParams:
        model = next(iter(self.hosts.values())).model
        expected = {number: tuple(sorted(host.fold.live)) for number, host in self.hosts.items()}
        initial = round_ < 0
        encoding = 0 if initial else self.encoding
        sizes = model.params_elements, model.buffers_elements
        self.plane.open(OpenRound(round_, attempt, expected, initial, *sizes, encoding))
        return RequestParams(round_, attempt, initial, encoding)

    def abort(self, round_: int, attempt: int) -> None:
        self.plane.abort(round_, attempt, "a rank died")
        for host in self.hosts.values():
            host.fold.aborted(RoundAborted(round_, attempt, "a rank died"))
            host.staging.aborted(RoundAborted(round_, attempt, "a rank died"))

    async def reduce(self, round_: int = 0, attempt: int = 0, gamma: float = 1.0) -> RoundFinished | RoundBroken:
        """One attempt from the request to the result; hosts stream one after the other, the last one first."""
        request = self.open(round_, attempt)
        plans = {host: self.hosts[host].plan(request, gamma) for host in self.hosts}
        for host, plan in reversed(plans.items()):
            self.plane.contribution(host, plan.contribution)
            try:
                for header, payload in self.hosts[host].stream(plan):
                    self.plane.chunk(host, header, memoryview(payload))
            except NotFinite as bad:
                self.plane.non_finite(host, NonFinite(round_, attempt, bad.rank, bad.element, bad.value))
        return await asyncio.wait_for(self.results.get(), 10)

    def adopt(self, finished: RoundFinished) -> dict[int, AdoptResult]:
        """Commit, and let every living rank adopt what its host has staged."""
        commit = RoundCommitted(finished.round, finished.attempt, finished.realized, finished.buffers_realized)
        moved = {}
        for host in self.hosts.values():
            host.commit(commit)
            released, path = host.released.pop()
            assert released == commit
            for rank in sorted(host.fold.live):
                taken = {"params": commit.realized, "buffers": commit.buffers_realized}
                moved[rank] = host.ranks[rank].arena.adopt(path, **taken)
                host.ranks[rank].adopted = moved[rank].consensus_hash
                host.ranks[rank].steps = 0
        return moved

    async def window(self, round_: int = 0, gamma: float = 1.0) -> dict[int, AdoptResult]:
        """A round that must succeed."""
        finished = await self.reduce(round_, gamma=gamma)
        assert isinstance(finished, RoundFinished), finished
        return self.adopt(finished)
