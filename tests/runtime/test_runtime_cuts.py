"""Uploads that are cut at random places, over real sockets: the consensus is that of what was accepted, and whole."""

from __future__ import annotations

import asyncio
import contextlib
import random
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import websockets
from runtime_scripted import moment
from runtime_site import ScriptedHost, Site, config, eventually, site
from safetensors.numpy import load_file, save

from benchmarks.havoc.proxy import Proxy, proxied
from wire.messages import (
    BatchDone,
    ChunkDone,
    Contribution,
    DeclareDead,
    EvalResult,
    Evaluate,
    Exiting,
    HostHeartbeat,
    LocalState,
    ProbeReport,
    RankReady,
    RequestLocalState,
    RequestParams,
    RoundAborted,
    RoundCommitted,
    Shutdown,
    StartChunk,
    StateTaken,
    SyncAck,
    TensorSpec,
    Update,
    UpdateComing,
    WorldFormed,
)
from wire.session import ChunkHeader, ChunkReceived, Received

ELEMENTS = 1_000_000
SLICE = 1 << 18
CUTS = 10


class Hauler(ScriptedHost):
    """A host of one rank, each batch of which moves every element by 1."""

    def __init__(self, where: Site, proxy: Proxy, name: str) -> None:
        super().__init__(replace(where, port=int(proxy.url.rpartition(":")[2])), name)
        self.proxy = proxy
        self.steps = self.since_round = 0
        self.held: list[float] = []
        """the consensus after each round that it adopted; all elements are alike"""

    async def report(self, offer: Any, size: int = 8) -> None:
        layout = [TensorSpec("w", "params", "float32", [ELEMENTS], 0)]
        await self.join.say(
            ProbeReport(
                job_hash=offer.job_hash,
                sources_hash="s" * 64,
                layout=layout,
                dataset_signature="d" * 64,
                dataset_size=size,
            )
        )

    async def march(self) -> None:
        """From the world's formation to the end of the run, or of one of its links."""
        world = await self.join.hear(WorldFormed)
        self.rank = world.assignments[0].rank
        await self.attach()
        await self.control.say(RankReady("layout", ELEMENTS, 0), self.rank)
        with contextlib.suppress(websockets.ConnectionClosed):
            while await self._obey((await self.control.next_message()).message):
                pass

    async def leave(self) -> None:
        """Close every link, the broken ones too."""
        for link in (self.control, self.data, self.join):
            await link.close()

    async def _obey(self, message: Any) -> bool:
        match message:
            case StartChunk():
                await self._work(message)
            case RequestParams():
                await self._contribute(message)
            case RoundCommitted():
                await self._adopt(message)
            case Evaluate(epoch=epoch):
                await self.control.say(EvalResult(epoch, {}, 1.0), self.rank)
            case RequestLocalState(checkpoint=checkpoint):
                await self.control.say(LocalState(checkpoint, 0, 1, save({})), self.rank)
            case Shutdown():
                await self.control.say(Exiting(self.steps), self.rank)
                return False
            case _:
                assert isinstance(message, Update | RoundAborted | DeclareDead | StateTaken), message
        return True

    async def _work(self, chunk: StartChunk) -> None:
        for _ in range(chunk.batches):
            self.steps += 1
            self.since_round += 1
            await self.control.say(BatchDone(1.0, 0.0, self.steps, chunk.size // chunk.batches, 0.5), self.rank)
        await self.control.say(ChunkDone(chunk.epoch, chunk.offset, chunk.size), self.rank)

    async def _contribute(self, request: RequestParams) -> None:
        steps = int(self.rank == 0) if request.initial else self.since_round
        mass = float(steps)
        masses, movers = {self.rank: mass}, {self.rank: min(1.0, mass)}
        share = Contribution(request.round, request.attempt, {self.rank: steps}, masses, movers, ELEMENTS, 0)
        await self.data.say(share)
        for start in range(0, ELEMENTS if steps else 0, SLICE):
            size = min(SLICE, ELEMENTS - start)
            header = ChunkHeader(request.round & 0xFFFFFFFF, request.attempt, 0, start, size)
            moved = np.float32(0.0 if request.initial else -steps)
            await self.data.stream(header, np.full(size, np.float32(mass) * moved, np.float32))

    async def _adopt(self, commit: RoundCommitted) -> None:
        if commit.realized:
            base = np.zeros(ELEMENTS, np.float32) if commit.round < 0 else self.base
            self.base = await self._update_of(commit, base)
            assert np.ptp(self.base) == 0, f"{self.name} adopted a part of round {commit.round}"
            self.held += [float(self.base[0])] if commit.round >= 0 else []
            self.since_round = 0
        await self.control.say(SyncAck(commit.round, 0.1, 1.0, 1.0, "same", 1.0, 1.0, 1.0, 3.0), self.rank)

    async def _update_of(self, commit: RoundCommitted, base: np.ndarray) -> np.ndarray:
        """The consensus of this attempt; what came before of attempts that were aborted is passed over."""
        number, filled, new = (commit.round & 0xFFFFFFFF, commit.attempt), 0, base.copy()
        while filled < ELEMENTS:
            event = await self.data._next(lambda event: True)
            if isinstance(event, Received):
                assert isinstance(event.message, UpdateComing) and event.message.still == []
            elif isinstance(event, ChunkReceived) and (event.header.round, event.header.attempt) == number:
                assert event.header.offset == filled
                cut = slice(filled, filled + event.header.elements)
                new[cut] = base[cut] - np.frombuffer(event.payload, dtype="<f4")
                filled = cut.stop
        return new


async def beat(host: Hauler) -> None:
    with contextlib.suppress(websockets.ConnectionClosed):
        while True:
            await host.join.say(HostHeartbeat([]))
            await moment(0.5)


@pytest.mark.timeout(240)
async def test_ten_uploads_are_cut_at_random_places(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    places = [random.Random(seed + number).randrange(1, 4 * ELEMENTS) for number in range(CUTS)]
    print(f"seed {seed}: cut after {places} of {4 * ELEMENTS} bytes")
    counts = tuple(range(CUTS + 1, 0, -1))
    with ExitStack() as stack:
        async with site(tmp_path) as where:
            controller = where.controller
            run_id = await controller.create_run(config(quorum=CUTS + 1, fixed_counts=counts, batch_size=1))
            address = f"http://127.0.0.1:{where.port}"
            hosts = [Hauler(where, stack.enter_context(proxied(address)), f"host-{n}") for n in range(CUTS + 1)]
            for host in hosts:
                await host.admitted(size=1_000_000)
            tasks = [asyncio.create_task(beat(host)) for host in hosts]
            await controller.command(run_id, "start")
            marches = [asyncio.create_task(host.march()) for host in hosts]
            await eventually(lambda: hosts[0].held or done_with_error(marches), "a round with everybody", 60)
            for victim, place in enumerate(places, start=1):
                hosts[victim].proxy.cut_after(place)
                await eventually(lambda: marches[victim].done(), f"host {victim} to be cut", 60)  # noqa: B023
                marches[victim].result()
                assert hosts[victim].proxy.cut.is_set()
            alone = len(hosts[0].held)
            await eventually(lambda: len(hosts[0].held) > alone + 1, "the last host to go on", 60)
            await controller.command(run_id, "stop")
            await asyncio.wait_for(marches[0], 60)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*(host.leave() for host in hosts))
            row = await where.until_over(run_id)
            queries = controller.store.queries
            rounds = await asyncio.to_thread(queries.rounds, run_id, limit=400)
            deaths = await asyncio.to_thread(queries.deaths, run_id)
            checkpoint = (await asyncio.to_thread(queries.checkpoints, run_id))[-1]
    assert row["phase"] == "done", row["reason"]
    assert sorted(death["rank"] for death in deaths) == sorted(host.rank for host in hosts[1:]), "each once"
    exact = [0.0]
    for entry in rounds:
        done = [count for count in entry["realized"].values() if count]
        exact.append(exact[-1] + sum(n * n for n in done) / sum(done))
    for host in hosts:
        assert host.held == pytest.approx(exact[1 : 1 + len(host.held)], rel=1e-5), host.name
        accepted = [entry["round"] for entry in rounds if entry["realized"].get(str(host.rank))]
        assert accepted == list(range(len(accepted))), f"{host.name}: in every round up to its end, in none after it"
        # A host that was cut in round n adopted n rounds; what it had sent of round n counts for nothing, unless all
        # of it was there.
        assert len(accepted) - len(host.held) in (0, 1), host.name
    assert len(hosts[0].held) == len(rounds)
    saved = load_file(tmp_path / "var" / checkpoint["path"])["w"]
    assert np.ptp(saved) == 0
    assert float(saved[0]) == pytest.approx(exact[-1], rel=1e-5)


def done_with_error(marches: list[asyncio.Task[None]]) -> bool:
    for march in marches:
        if march.done():
            march.result()
    return False
