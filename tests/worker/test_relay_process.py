"""The relay as a real process: rounds, deaths, and every way in which it ends."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from relay_kit import ROOT, Controller, Rank, RelayProcess, controller, relay, soon
from torch import nn

from backend.core.vocabulary import RoundBroken, RoundFinished
from wire.messages import (
    BatchDone,
    Contribution,
    DeclareDead,
    Exiting,
    Message,
    RankHello,
    RankReady,
    RoundAborted,
    RoundCommitted,
    Shutdown,
    StartChunk,
    Update,
)
from wire.session import Channel
from worker.local_link import AsyncLink, pack

pytestmark = pytest.mark.slow


class Car(nn.Module):
    """ODO with company: w moves by 1 a step; the rest makes the arena long enough for many chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1000))
        self.register_buffer("seen", torch.zeros(10))

    @torch.no_grad()
    def drive(self, steps: int) -> None:
        self.w += steps
        self.seen.fill_(float(steps))


class World:
    """Relay processes and ranks of all hosts around one controller."""

    def __init__(self, served: Controller, directory: Path) -> None:
        self.controller = served
        self.directory = directory
        self.relays: dict[int, RelayProcess] = {}
        self.ranks: dict[int, Rank] = {}

    @classmethod
    async def form(cls, stack: AsyncExitStack, hosts: dict[int, list[int]], directory: Path) -> World:
        served = await stack.enter_async_context(controller(hosts))
        world = cls(served, directory)
        for host, ranks in hosts.items():
            started = await stack.enter_async_context(relay(served.url, directory / f"host{host}", host, ranks))
            world.relays[host] = started
        for host, ranks in hosts.items():
            await world.relays[host].listening()
            await soon(served.attached[host].wait())
            for rank in ranks:
                world.ranks[rank] = await Rank.join(rank, Car(), directory / f"host{host}")
                stack.push_async_callback(world.ranks[rank].leave)
                assert await world.heard() == (rank, RankReady(world.ranks[rank].arena.layout_hash, 1000, 10))
        return world

    async def heard(self) -> tuple[int, Message]:
        return await soon(self.controller.heard.get())

    def open(self, round_: int, attempt: int = 0, dead: tuple[int, ...] = ()) -> None:
        alive = {
            host: living
            for host, ranks in self.controller.hosts.items()
            if (living := tuple(rank for rank in ranks if rank not in dead))
        }
        self.controller.open(round_, attempt, alive, self.ranks[0].arena)

    async def reduced(self) -> RoundFinished:
        result = await soon(self.controller.results.get())
        assert isinstance(result, RoundFinished), result
        return result

    async def round(self, round_: int, steps: dict[int, int]) -> None:
        """One whole window and its round among all ranks."""
        for number, rank in self.ranks.items():
            rank.steps = steps.get(number, 0)
            rank.model.drive(rank.steps)
        self.open(round_)
        for rank in self.ranks.values():
            assert (await rank.answers()).round == round_
        self.controller.commit(await self.reduced())
        for rank in self.ranks.values():
            await rank.adopts()

    def values(self, *dead: int) -> set[float]:
        return {value for number, rank in self.ranks.items() if number not in dead for value in rank.model.w.tolist()}

    def buffers(self) -> set[float]:
        return {value for rank in self.ranks.values() for value in rank.model.seen.tolist()}


# -------------------------------------------------------------------------------------------------------- rounds


async def test_three_unequal_hosts_agree_round_after_round(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        world = await World.form(stack, {0: [0, 1, 2], 1: [3], 2: [4, 5]}, tmp_path)
        world.ranks[0].model.w.data.fill_(0.5)
        world.ranks[0].steps = 1  # the initial broadcast: rank 0 alone has mass
        world.open(-1)
        for rank in world.ranks.values():
            assert (await rank.answers()).initial
        finished = await world.reduced()
        assert finished.steps == {0: 1, 1: 0, 2: 0, 3: 0, 4: 0, 5: 0}
        world.controller.commit(finished)
        for rank in world.ranks.values():
            assert (await rank.adopts()).round == -1
        assert world.values() == {0.5}

        await world.round(0, {0: 2, 3: 4, 5: 2})  # 0.5 + (4 + 16 + 4) / 8
        assert world.values() == {3.5}
        assert sorted(world.buffers()) == [pytest.approx(8 / 3)]
        await world.round(1, {})
        assert world.values() == {3.5}
        await world.round(2, {1: 3, 4: 1})
        assert world.values() == {6.0}
        assert len({rank.arena.tensors_hash() for rank in world.ranks.values()}) == 1


async def test_death_mid_round_leaves_the_survivors_value(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        world = await World.form(stack, {0: [0, 1], 1: [2]}, tmp_path)
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
        world.ranks[1].model.w.data[700] = float("nan")
        for rank in world.ranks.values():
            rank.steps = 1
        world.open(0)
        for rank in world.ranks.values():
            await rank.answers()
        broken = await soon(world.controller.results.get())
        assert isinstance(broken, RoundBroken)
        assert broken.reason == "host 1 (ranks 1) contributed nan at element 700 (params)"
        world.controller.send_rank(1, Update(round=0, global_step=0))
        await world.ranks[1].hears(Update)


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


async def test_the_dead_lose_their_link(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        world = await World.form(stack, {0: [0, 1]}, tmp_path)
        world.controller.send_relays(DeclareDead(rank=0, reason="silent"))
        assert await soon(world.ranks[0].link.receive()) is None
        world.controller.send_rank(1, Update(round=0, global_step=3))
        await world.ranks[1].hears(Update)


# ----------------------------------------------------------------------------------------------------- the ends


async def test_sigterm_ends_it_within_a_second(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        world = await World.form(stack, {0: [0]}, tmp_path)
        started = time.monotonic()
        world.relays[0].process.send_signal(signal.SIGTERM)
        code, _ = await world.relays[0].ends()
        assert (code, time.monotonic() - started < 1.0) == (0, True)
        assert await soon(world.ranks[0].link.receive()) is None
        assert not (world.relays[0].directory / "relay.sock").exists()


async def test_sigterm_ends_it_while_the_controller_does_not_read(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(controller({0: [0]}))
        started = await stack.enter_async_context(relay(served.url, tmp_path / "host0"))
        await started.listening()
        await soon(served.attached[0].wait())
        rank = await Rank.join(0, nn.Linear(2000, 2000), tmp_path / "host0")
        stack.push_async_callback(rank.leave)
        rank.steps = 1
        await soon(served.heard.get())
        served.gate.clear()
        served.open(0, 0, {0: (0,)}, rank.arena)
        await rank.answers()
        begun = time.monotonic()
        started.process.send_signal(signal.SIGTERM)
        code, _ = await started.ends()
        assert (code, time.monotonic() - begun < 1.5) == (0, True)


async def test_sigterm_ends_it_while_it_still_dials(tmp_path: Path) -> None:
    async with relay("ws://127.0.0.1:9", tmp_path / "host0") as started:
        await started.listening()
        started.process.send_signal(signal.SIGTERM)
        assert (await started.ends())[0] == 0


async def test_the_end_of_stdin_ends_it(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        world = await World.form(stack, {0: [0]}, tmp_path)
        stdin = world.relays[0].process.stdin
        assert stdin is not None
        stdin.close()
        assert await soon(world.relays[0].process.wait()) != 0
        assert await soon(world.ranks[0].link.receive()) is None


@pytest.mark.parametrize("channel", [Channel.CONTROL, Channel.DATA])
async def test_a_lost_link_ends_it_with_a_reason(tmp_path: Path, channel: Channel) -> None:
    async with AsyncExitStack() as stack:
        world = await World.form(stack, {0: [0]}, tmp_path)
        world.controller.doors[channel, 0].websocket.transport.abort()
        code, last = await world.relays[0].ends()
        assert (code, last) == (
            1,
            f"relay: the {channel.name.lower()} link to the controller ended: the connection broke (0)",
        )


async def test_the_end_of_the_run_reaches_the_ranks_first(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        world = await World.form(stack, {0: [0, 1]}, tmp_path)
        for rank in (0, 1):
            world.controller.send_rank(rank, Shutdown(reason="done"))
        await world.controller.end_run()
        for rank in world.ranks.values():
            await rank.hears(Shutdown)
            await rank.link.send(Exiting(steps=0))
            await rank.leave()
        assert await world.relays[0].ends() == (0, "relay: the run is over: done")


async def test_a_refused_relay_does_not_dial_again(tmp_path: Path) -> None:
    async with controller({0: [0]}) as served:
        served.refuse = "host 0 is out of this run"
        async with relay(served.url, tmp_path / "host0") as started:
            code, last = await started.ends()
    assert (code, last) == (1, "relay: the controller refused the control link: host 0 is out of this run")
    assert len(served.paths) == 1


async def test_another_secret_is_refused_by_name(tmp_path: Path) -> None:
    async with controller({0: [0]}) as served, relay(served.url, tmp_path / "h", run_secret="ab" * 32) as started:
        code, last = await started.ends()
    assert code == 1
    assert last.startswith("relay: ")
    assert "another secret" in last
    assert "abab" not in last


async def test_an_absent_controller_is_dialled_until_the_budget_is_spent(tmp_path: Path) -> None:
    async with relay("ws://127.0.0.1:9", tmp_path / "host0", connect_seconds=0.5) as started:
        code, last = await started.ends()
    assert code == 1
    assert last.startswith("relay: the controller at ws://127.0.0.1:9 could not be reached within 0.5 s: ")
    assert "refused" in last.lower() or "111" in last


async def test_a_controller_that_is_late_is_reached_under_any_prefix(tmp_path: Path) -> None:
    served = Controller({0: [0]})
    await served.start()
    port = served.port
    await served.stop()
    async with relay(f"ws://127.0.0.1:{port}/behind/a/proxy/", tmp_path / "host0") as started:
        await started.listening()
        again = Controller({0: [0]})
        await again.start(port)
        await soon(again.attached[0].wait())
        assert again.paths == ["/behind/a/proxy/ws/control", "/behind/a/proxy/ws/data"]
        started.process.send_signal(signal.SIGTERM)
        await started.ends()
        await again.stop()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"url": "controller:8470"}, "url 'controller:8470' is not of the form", id="url"),
        pytest.param({"run_secret": "abcd"}, "run_secret has 2 bytes", id="short secret"),
        pytest.param({"run_secret": "secret!"}, "run_secret is not hexadecimal", id="no hex"),
        pytest.param({"ranks": [1, 1]}, r"ranks [1, 1] must be given, each once", id="ranks"),
        pytest.param({"connect_seconds": 0.0}, "must be above 0", id="budget"),
    ],
)
async def test_impossible_orders_are_refused_by_name(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    arguments = {"url": "ws://127.0.0.1:9", "directory": tmp_path / "h"} | changes
    async with relay(**arguments) as started:  # type: ignore[arg-type]
        code, last = await started.ends()
    assert code == 1
    assert reason in last
    assert "secret!" not in last


def test_it_imports_no_torch() -> None:
    check = "import sys, worker.relay; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=False).returncode == 0


def test_committed_is_a_message_for_ranks_too() -> None:
    """The relay passes the commit on as it came: both ends read the same fields."""
    assert RoundCommitted(0, 0, True, True) == RoundCommitted(0, 0, realized=True, buffers_realized=True)
