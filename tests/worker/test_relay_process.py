"""The relay as a real process: rounds, deaths, and who may say what."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from relay_kit import Rank, controller, relay, soon
from relay_world import World
from torch import nn

from backend.core.vocabulary import RoundBroken
from wire.frames import Channel, Encoding
from wire.messages import (
    BatchDone,
    ChunkDone,
    Contribution,
    DeclareDead,
    RankHello,
    RequestParams,
    RoundAborted,
    SnapshotReady,
    StartChunk,
    Update,
)
from worker.local_link import AsyncLink, pack

pytestmark = pytest.mark.slow

# -------------------------------------------------------------------------------------------------------- rounds


PATHS = [
    pytest.param((), id="stream"),
    pytest.param((0, 1, 2), id="shared memory"),
    pytest.param((1,), id="mixed"),
]


@pytest.mark.parametrize("encoding", [Encoding.F32, Encoding.BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("sharing", PATHS)
async def test_three_unequal_hosts_agree_round_after_round(
    tmp_path: Path, sharing: tuple[int, ...], encoding: int
) -> None:
    async with AsyncExitStack() as stack:
        world = await World.form(stack, {0: [0, 1, 2], 1: [3], 2: [4, 5]}, tmp_path, sharing)
        await world.begin(0.5)
        await world.round(0, {0: 2, 3: 4, 5: 2}, encoding)  # 0.5 + (4 + 16 + 4) / 8
        assert world.values() == {3.5}
        assert sorted(world.buffers()) == [pytest.approx(8 / 3)]
        await world.round(1, {}, encoding)
        assert world.values() == {3.5}
        await world.round(2, {1: 3, 4: 1}, encoding)
        assert world.values() == {6.0}
        assert len({rank.hash for rank in world.ranks.values()}) == 1
        for host in world.relays:
            door = world.controller.doors[Channel.DATA, host]
            assert door.shared.is_set() == (host in sharing)
            assert (door.chunks == 0) == (host in sharing)
            built = sorted(path.name for path in (tmp_path / f"host{host}").glob("consensus*"))
            assert built == ([] if host in sharing else ["consensus.0.0", "consensus.0.1"])


async def test_what_nobody_moved_is_not_streamed(tmp_path: Path) -> None:
    """Case J09: most of the model is frozen; one host's ranks disagree on how much."""
    async with AsyncExitStack() as stack:
        world = await World.form(stack, {0: [0, 1], 1: [2]}, tmp_path)
        await world.begin(0.5)
        for rank in world.ranks.values():
            rank.model.w.requires_grad_(False)
        doors = [world.controller.doors[Channel.DATA, host] for host in (0, 1)]
        up = [door.elements for door in doors]
        for number in range(3):
            for rank in world.ranks.values():
                rank.steps = 1
                rank.model.seen.fill_(number)
            world.ranks[1].model.w.requires_grad_(number == 2)
            world.open(number)
            for rank in world.ranks.values():
                await rank.answers()
            finished = await world.reduced()
            world.controller.commit(finished)
            for rank in world.ranks.values():
                await rank.adopts()
            assert world.values() == {0.5}
            assert world.buffers() == {float(number)}
        assert [door.elements - before for door, before in zip(doors, up, strict=True)] == [1030, 30]


async def test_death_mid_round_leaves_the_survivors_value(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        world = await World.form(stack, {0: [0, 1], 1: [2]}, tmp_path)
        await world.begin()
        for number, steps in {0: 6, 1: 3, 2: 2}.items():
            world.ranks[number].steps = steps
            world.ranks[number].model.drive(steps)
        world.open(0)
        await world.ranks[0].answers()
        await world.ranks[2].answers()
        await world.ranks[1].leave()  # the process is gone, and has not declared: the host waits for DeclareDead

        world.controller.send_relays(DeclareDead(rank=1, reason="killed"))
        world.controller.plane.abort(0, 0, "rank 1 died")
        world.controller.send_relays(RoundAborted(0, 0, "rank 1 died"))
        world.open(0, attempt=1, dead=(1,))
        for number in (0, 2):
            assert (await world.ranks[number].answers(pack=False)).attempt == 1
        finished = await world.reduced()
        assert (finished.attempt, finished.steps) == (1, {0: 6, 2: 2})
        world.controller.commit(finished)
        for number in (0, 2):
            assert (await world.ranks[number].adopts()).attempt == 1
        assert world.values(1) == {5.0}  # (36 + 4) / 8


async def test_a_retry_streams_from_untouched_arenas(tmp_path: Path) -> None:
    """Aborted after everything was declared and half streamed, and once more after it was wholly summed."""
    async with AsyncExitStack() as stack:
        world = await World.form(stack, {0: [0, 1], 1: [2]}, tmp_path)
        await world.begin()
        for number, steps in {0: 4, 1: 2, 2: 2}.items():
            world.ranks[number].steps = steps
            world.ranks[number].model.drive(steps)
        for attempt in range(3):
            world.open(0, attempt)
            for rank in world.ranks.values():
                await rank.answers(pack=attempt == 0)
            finished = await world.reduced() if attempt else None
            if attempt < 2:
                world.controller.plane.abort(0, attempt, "again")
                world.controller.send_relays(RoundAborted(0, attempt, "again"))
        assert finished is not None
        world.controller.commit(finished)
        for rank in world.ranks.values():
            await rank.adopts()
        assert world.values() == {3.0}  # (16 + 4 + 4) / 8


async def test_nan_is_blamed_on_the_host_and_the_relay_survives(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        world = await World.form(stack, {0: [0], 1: [1]}, tmp_path)
        await world.begin()
        world.ranks[1].model.w.data[700] = float("nan")
        for rank in world.ranks.values():
            rank.steps = 1
        world.open(0)
        for rank in world.ranks.values():
            await rank.answers()
        broken = await soon(world.controller.results.get())
        assert isinstance(broken, RoundBroken)
        assert broken.reason == "rank 1 of host 1 contributed nan at element 700 (params)"
        world.controller.send_rank(1, Update(round=0, global_step=0))
        await world.ranks[1].hears(Update)


async def test_a_data_link_that_stands_still_delays_no_message(tmp_path: Path) -> None:
    """One host is far ahead of the other, so nobody reads its data; what ranks say and hear passes by, and the relay's
    heartbeats do."""
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(controller({0: [0], 1: [1]}, 1 << 18))
        ranks = []
        for host in (0, 1):
            place = tmp_path / f"host{host}"
            started = await stack.enter_async_context(relay(served.url, place, host, [host], heartbeat_seconds=0.05))
            await started.listening()
            ranks.append(await Rank.join(host, nn.Linear(2000, 2000), place))
            stack.push_async_callback(ranks[host].leave)
            await soon(served.heard.get())
        ranks[0].steps = 1
        served.open(-1, 0, {0: (0,), 1: (1,)}, ranks[0].arena)
        await ranks[0].answers()
        await ranks[1].hears(RequestParams)
        for number in range(50):
            served.send_rank(0, Update(round=-1, global_step=number))
            assert (await ranks[0].hears(Update)).global_step == number
            await ranks[0].link.send(ChunkDone(0, number, 1))
            assert await soon(served.heard.get()) == (0, ChunkDone(0, number, 1))
        assert served.doors[Channel.DATA, 0].elements < ranks[0].arena.elements, "the stream stands still"
        await served.beating(0)
        await ranks[1].link.send(SnapshotReady(-1, 0, 0, 0.0, 0.0))
        finished = await soon(served.results.get())
        served.commit(finished)
        for rank in ranks:
            await rank.adopts()
        assert torch.equal(ranks[0].model.weight, ranks[1].model.weight)


# ----------------------------------------------------------------------------------------------------- messages


async def test_messages_pass_through_with_their_rank(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        world = await World.form(stack, {0: [0, 7]}, tmp_path)
        chunk = StartChunk(epoch=0, offset=8, size=4, batches=2, global_step=0)
        world.controller.send_rank(7, chunk)
        assert await world.ranks[7].hears(StartChunk) == chunk
        done = BatchDone(batch_ms=1.0, data_ms=0.1, steps=1, samples=2, loss=0.5)
        for number in (7, 0):
            await world.ranks[number].link.send(done)
            assert await world.heard() == (number, done)


@pytest.mark.parametrize(
    "illegal",
    [
        pytest.param(pack(Contribution(0, 0, {0: 1}, {0: 1.0}, {0: 1.0}, 1000, 10)), id="not a rank's message"),
        pytest.param(b"\xff\xff\xff\xff", id="not a message"),
        pytest.param(pack(RankHello(rank=0))[:-1], id="cut"),
    ],
)
async def test_a_rank_that_speaks_nonsense_loses_its_own_link_only(tmp_path: Path, illegal: bytes) -> None:
    async with AsyncExitStack() as stack:
        world = await World.form(stack, {0: [0, 1]}, tmp_path)
        world.ranks[0].writer.write(illegal)
        world.ranks[0].writer.write_eof()
        assert await soon(world.ranks[0].link.receive()) is None
        world.controller.send_rank(1, Update(round=0, global_step=3))
        await world.ranks[1].hears(Update)


@pytest.mark.parametrize("number", [0, 9], ids=["connected already", "not of this host"])
async def test_strange_ranks_are_turned_away(tmp_path: Path, number: int) -> None:
    async with AsyncExitStack() as stack:
        world = await World.form(stack, {0: [0]}, tmp_path)
        reader, writer = await asyncio.open_unix_connection(world.relays[0].directory / "relay.sock")
        link = AsyncLink(reader, writer)
        await link.send(RankHello(rank=number))
        assert await soon(link.receive()) is None
        link.close()
        await writer.wait_closed()
        world.controller.send_rank(0, Update(round=0, global_step=3))
        await world.ranks[0].hears(Update)


async def test_the_dead_hear_why_and_lose_their_link(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        world = await World.form(stack, {0: [0, 1]}, tmp_path)
        world.controller.send_relays(DeclareDead(rank=0, reason="silent"))
        assert await soon(world.ranks[0].link.receive()) == DeclareDead(rank=0, reason="silent")
        assert await soon(world.ranks[0].link.receive()) is None
        world.controller.send_rank(1, Update(round=0, global_step=3))
        await world.ranks[1].hears(Update)
