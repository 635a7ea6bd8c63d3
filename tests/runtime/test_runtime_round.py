"""A whole run over real websockets: join, world formed, relays attached, exact rounds, a checkpoint, the end."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from runtime_scripted import ScriptedCore, moment
from runtime_site import ScriptedHost, config, eventually, site

from backend.api.metrics import exposition
from backend.core.vocabulary import Effect, Event, ExpectRelays, OpenRound, Operator, RoundFinished
from backend.runtime.controller import Controller
from wire.messages import (
    Accept,
    BatchDone,
    ChunkDone,
    Contribution,
    EvalResult,
    Evaluate,
    Exiting,
    HostHeartbeat,
    LocalState,
    RankProgress,
    RankReady,
    RequestLocalState,
    RequestParams,
    RoundCommitted,
    RunEnded,
    Shutdown,
    StartChunk,
    StateTaken,
    SyncAck,
    Update,
    WorldFormed,
)
from wire.session import ChunkHeader

ELEMENTS = 8
SLICE = 1 << 18
PARAMS = np.arange(6, dtype=np.float32)
BUFFERS = np.array([10.0, 20.0], dtype=np.float32)


class Rank:
    """What a rank of the scripted hosts does: its parameters are its number plus one, its pace is not asked for."""

    def __init__(self, host: ScriptedHost, rank: int) -> None:
        self.host = host
        self.rank = rank
        self.steps = 0
        self.since_sync = 0
        self.ends: list[str] = []
        self.arena = np.zeros(ELEMENTS, dtype=np.float32)

    @property
    def params(self) -> np.ndarray:
        return PARAMS + 100.0 * (self.rank + 1)

    async def train(self) -> None:
        """Until told to leave."""
        control = self.host.control
        while True:
            message = (await control.next_message()).message
            match message:
                case StartChunk():
                    await self._work(message)
                case RequestParams():
                    await self._contribute(message)
                case RoundCommitted(realized=realized):
                    await self._adopt(message, realized)
                case Update() | StateTaken():
                    continue
                case Evaluate(epoch=epoch):
                    await control.say(EvalResult(epoch, {"accuracy": 0.5}, 1.0), self.rank)
                case RequestLocalState(checkpoint=checkpoint):
                    body = safetensors.torch.save({"model.count": torch.tensor(7)})
                    await control.say(LocalState(checkpoint, 0, 1, body), self.rank)
                case Shutdown(reason=reason):
                    self.ends.append(reason)
                    await control.say(Exiting(self.steps), self.rank)
                    return
                case _:
                    raise AssertionError(f"rank {self.rank} did not expect {message}")

    async def _work(self, chunk: StartChunk) -> None:
        for _ in range(chunk.batches):
            self.steps += 1
            self.since_sync += 1
            batch = BatchDone(5.0, 1.0, self.steps, 4, 0.25)
            await self.host.control.say(batch, self.rank)
        await self.host.control.say(ChunkDone(chunk.epoch, chunk.offset, chunk.size), self.rank)

    async def _contribute(self, request: RequestParams) -> None:
        steps = int(self.rank == 0) if request.initial else self.since_sync
        await self.host.contribute(request, {self.rank: steps}, self.params, BUFFERS)
        self.since_sync = 0

    async def _adopt(self, commit: RoundCommitted, realized: bool) -> None:
        if realized:
            self.arena = await self.host.consensus(ELEMENTS)
        ack = SyncAck(commit.round, 0.1, 1.0, 1.0, "same", 1.0, 1.0, 1.0, 3.0)
        await self.host.control.say(ack, self.rank)


async def beat(host: ScriptedHost, rank: int) -> None:
    while True:
        told = RankProgress(rank, "working", 1, 0.1, 1 << 20, device_utilisation=40, device_bytes=3 << 30)
        await host.join.say(HostHeartbeat([told]))
        await moment(0.2)


GPU_FIGURES = [
    'marchline_gpu_utilization_ratio{rank="0",run_id="1"} 0.4',
    'marchline_gpu_utilization_ratio{rank="1",run_id="1"} 0.4',
    'marchline_gpu_memory_used_bytes{rank="0",run_id="1"} 3.221225472e+09',
    'marchline_gpu_memory_used_bytes{rank="1",run_id="1"} 3.221225472e+09',
]
"""peak and size are not told, so they are left out"""


def figures_of_gpus(controller: Controller) -> list[str]:
    """The lines of the exposition that are about GPUs."""
    text = exposition(controller, {"streams": 0, "dropped": 0, "sessions": 0, "failures": 0})[0].decode()
    return [line for line in text.splitlines() if line.startswith("marchline_gpu_")]


async def formed(host: ScriptedHost) -> Rank:
    world = await host.join.hear(WorldFormed)
    assert world.world_size == 2
    await host.attach()
    (assignment,) = world.assignments
    assert [assignment.rank] == host.accept.ranks
    await host.control.say(RankReady("layout", 6, 2), assignment.rank)
    return Rank(host, assignment.rank)


async def test_a_run_from_dial_in_to_a_checkpoint(tmp_path: Path) -> None:
    async with site(tmp_path) as where:
        controller = where.controller
        run_id = await controller.create_run(config(epochs=2, fixed_counts=(3, 1), name="march"))
        hosts = [ScriptedHost(where, name) for name in ("left", "right")]
        for host in hosts:
            await host.admitted(size=32)
        view = controller.live_view(run_id)
        assert view is not None
        assert [(member["name"], member["ranks"]) for member in view["members"]] == [("left", [0]), ("right", [1])]
        assert view["members"][0]["address"] == "127.0.0.1"
        await controller.command(run_id, "start")
        ranks = await asyncio.gather(*map(formed, hosts))
        beats = [asyncio.create_task(beat(rank.host, rank.rank)) for rank in ranks]
        await eventually(lambda: figures_of_gpus(controller) == GPU_FIGURES, "the GPUs to be seen")
        await asyncio.wait_for(asyncio.gather(*(rank.train() for rank in ranks)), 30)
        for beating in beats:
            beating.cancel()
        # The ranks have left; their host's links end, as a real agent's would.
        for host in hosts:
            await host.join.close()
        row = await where.until_over(run_id)
        queries = controller.store.queries
        rounds = await asyncio.to_thread(queries.rounds, run_id)
        epochs = await asyncio.to_thread(queries.epochs, run_id)
        first, checkpoint = await asyncio.to_thread(queries.checkpoints, run_id)

    assert (row["phase"], row["name"]) == ("done", "march")
    assert row["started_at"] <= row["ended_at"]
    assert [entry["samples_accepted"] for entry in epochs] == [32, 32]
    # 3:1 windows: (3 * 100 + 1 * 200) / 4 on top of what both share. Exact in f32.
    full = [entry for entry in rounds if entry["realized"] == {"0": 3, "1": 1}]
    assert full, f"no full window among {[entry['realized'] for entry in rounds]}"
    last = rounds[-1]["realized"]
    expected = sum(count * 100.0 * (int(rank) + 1) for rank, count in last.items()) / sum(last.values())
    for rank in ranks:
        np.testing.assert_array_equal(rank.arena[:6], PARAMS + np.float32(expected))
    assert {entry["bytes_up"] for entry in full} == {2 * 4 * ELEMENTS}

    assert (first["reason"], first["epoch"], checkpoint["epoch"]) == ("after epoch 1", 1, 2)
    path = tmp_path / "var" / checkpoint["path"]
    state = safetensors.torch.load_file(path)
    assert torch.equal(state["w"], torch.from_numpy(ranks[0].arena[:6].reshape(2, 3).copy()))
    assert state["count"].item() == 7
    manifest = json.loads(path.with_name("manifest.json").read_text())
    assert manifest["run_id"] == run_id
    assert manifest["metrics"] == {"accuracy": 0.5}


async def test_one_exact_round_by_hand(tmp_path: Path) -> None:
    async with site(tmp_path) as where:
        run_id = await where.controller.create_run(config(fixed_counts=(3, 1)))
        hosts = [ScriptedHost(where, name) for name in ("left", "right")]
        for host in hosts:
            await host.admitted(size=32)
        await where.controller.command(run_id, "start")
        ranks = await asyncio.gather(*map(formed, hosts))
        for rank in ranks:
            request = await rank.host.control.hear(RequestParams, rank.rank)
            assert request.initial
            await rank._contribute(request)
        for rank in ranks:
            await rank._adopt(await rank.host.control.hear(RoundCommitted), True)
            np.testing.assert_array_equal(rank.arena, np.concatenate([PARAMS + 100.0, BUFFERS]))
        for rank in ranks:
            chunk = await rank.host.control.hear(StartChunk, rank.rank)
            assert chunk.batches == (3, 1)[rank.rank]
            await rank._work(chunk)
        for rank in ranks:
            await rank._contribute(await rank.host.control.hear(RequestParams, rank.rank))
        commits = [await rank.host.control.hear(RoundCommitted) for rank in ranks]
        assert [(commit.round, commit.realized, commit.buffers_realized) for commit in commits] == [(0, True, True)] * 2
        for rank in ranks:
            arena = await rank.host.consensus(ELEMENTS)
            np.testing.assert_array_equal(arena[:6], PARAMS + np.float32(125.0))
            # Movers count alike in the buffers, whatever their steps.
            np.testing.assert_array_equal(arena[6:], BUFFERS)
        await where.controller.command(run_id, "abort", by="the test")
        for host in hosts:
            ended = await host.join.hear(RunEnded)
            assert ended.phase == "failed"
            assert "the test" in ended.reason
        row = await where.until_over(run_id)
        assert row["phase"] == "failed"
        assert "the test" in row["reason"]
        await eventually(lambda: where.controller.metrics()["links_control"] == 0, "the relay links to close")


def ended(events: list[Event]) -> list[RoundFinished]:
    return [event for event in events if isinstance(event, RoundFinished)]


async def test_a_round_of_many_slices_is_streamed_exactly_and_in_full_duplex(tmp_path: Path) -> None:
    """Two hosts, some slices of parameters: sealed, summed and sent on by threads, and still bit for bit."""
    params, buffers = 3 * SLICE + 12_345, 7
    opening = OpenRound(4, 0, {1: (0,), 2: (1,)}, False, params, buffers)
    openings = [replace(opening, round=-1, initial=True), opening]

    def answer(event: Event, now: float) -> list[Effect]:
        if isinstance(event, Operator):
            return [ExpectRelays(opening.hosts)] if event.act == "start" else [openings.pop(0)]
        return []

    core = ScriptedCore(answer)
    async with site(tmp_path, core=lambda: core) as where:
        run_id = await where.controller.create_run(config())
        await where.controller.command(run_id, "start")
        (run,) = where.controller._runs.values()
        hosts = []
        for number in (1, 2):
            host = ScriptedHost(where, f"host {number}")
            host.accept = Accept(run_id, number, [number - 1], b"s" * 32, 10.0, 60.0, 30.0, run.secret)
            await host.attach()
            hosts.append(host)
        random = np.random.default_rng(7)
        base, *shares = [random.integers(-1000, 1000, params + buffers).astype(np.float32) for _ in range(3)]

        async def contribute(host: ScriptedHost, round_: int, steps: int, share: np.ndarray) -> np.ndarray:
            (rank,) = host.accept.ranks
            mover = {rank: float(steps > 0)}
            await host.data.say(Contribution(round_, 0, {rank: steps}, {rank: steps}, mover, params, buffers))
            receiving = asyncio.create_task(host.consensus(params + buffers))
            for section, start, stop in ((0, 0, params), (1, params, params + buffers)) if steps else ():
                for offset in range(start, stop, SLICE):
                    values = share[offset : min(offset + SLICE, stop)] * np.float32(steps if section == 0 else 1)
                    await host.data.stream(ChunkHeader(round_ & 0xFFFFFFFF, 0, section, offset, values.size), values)
            return await receiving

        for number, (round_, steps, given) in enumerate([(-1, (1, 0), [base, base]), (4, (3, 1), shares)], 1):
            await where.controller.command(run_id, "stop")
            work = zip(hosts, steps, given, strict=True)
            results = await asyncio.gather(*(contribute(host, round_, n, share) for host, n, share in work))
            await core.until(lambda events: len(ended(events)) == number)  # noqa: B023 awaited here
        finished = ended(core.events)[-1]
    expected = base - np.concatenate(
        [
            (shares[0][:params] * 3 + shares[1][:params]) * np.float32(0.25),
            (shares[0][params:] + shares[1][params:]) * np.float32(0.5),
        ]
    )
    for result in results:
        np.testing.assert_array_equal(result, expected)
    assert (finished.realized, finished.steps, finished.mass) == (True, {0: 3, 1: 1}, 4.0)
    assert finished.bytes_up == finished.bytes_down == 2 * 4 * (params + buffers)
