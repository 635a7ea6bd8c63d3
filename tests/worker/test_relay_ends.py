"""Every way in which a relay process ends: within its time, and with a reason."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from relay_kit import PATIENCE, ROOT, Controller, Rank, controller, relay, soon
from relay_world import World
from torch import nn

from wire.messages import BatchDone, DeclareDead, Exiting, Rewind, Shutdown
from wire.session import Channel

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_ends_it_within_seconds(tmp_path: Path, number: signal.Signals) -> None:
    """Of that signal, so that its agent knows."""
    async with AsyncExitStack() as stack:
        world = await World.form(stack, {0: [0]}, tmp_path)
        started = time.monotonic()
        world.relays[0].process.send_signal(number)
        code, _ = await world.relays[0].ends()
        assert (code, time.monotonic() - started < 5.0) == (-number, True)
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
        served.open(-1, 0, {0: (0,)}, rank.arena)
        await rank.answers()
        begun = time.monotonic()
        started.process.send_signal(signal.SIGTERM)
        code, _ = await started.ends()
        assert (code, time.monotonic() - begun < 5.0) == (-signal.SIGTERM, True)


async def test_sigterm_ends_it_while_it_still_dials(tmp_path: Path) -> None:
    async with relay("ws://127.0.0.1:9", tmp_path / "host0") as started:
        await started.listening()
        started.process.send_signal(signal.SIGTERM)
        assert (await started.ends())[0] == -signal.SIGTERM


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
    """The data link closes first, and the control link still holds the ranks' last orders."""
    async with AsyncExitStack() as stack:
        world = await World.form(stack, {0: [0, 1]}, tmp_path)
        await world.controller.end(Channel.DATA)
        for rank in (0, 1):
            world.controller.send_rank(rank, Shutdown(reason="done"))
        await world.controller.end(Channel.CONTROL)
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


async def test_it_waits_for_another_controller_and_one_more(tmp_path: Path) -> None:
    """The second one is gone before the ranks have gone back: each is heard once by the third."""
    async with AsyncExitStack() as stack:
        world = await World.form(stack, {0: [0, 1]}, tmp_path, reattach_seconds=PATIENCE)
        await world.begin()
        await world.round(0, {0: 3, 1: 1})
        port, place = world.controller.port, world.relays[0].directory
        await world.controller.stop()
        second = Controller({0: [0, 1]})
        await second.start(port)
        await soon(second.attached[0].wait())
        await second.stop()
        third = world.controller = Controller({0: [0, 1]})
        stack.push_async_callback(third.stop)
        await third.start(port)
        await soon(third.attached[0].wait())
        await world.ranks[0].link.send(BatchDone(1.0, 1.0, 4, 1, None))
        for rank in world.ranks.values():
            for _ in range(2):
                await rank.hears(Rewind)
                await rank.ready(held_round=0, held_hash=rank.arena.rewind())
            number, ready = await world.heard()
            assert (number, ready.held_round, ready.held_hash) == (rank.number, 0, rank.hash)
            old = {path.name for path in place.glob("consensus.*") if not path.name.startswith("consensus.2.")}
            assert bool(old) is (rank.number == 0), "a rank that is late may still have to open one"
        assert world.values() == {2.5}
        await world.begin(2.5)
        await world.round(1, {0: 1, 1: 1})
        assert world.values() == {3.5}
        third.send_relays(DeclareDead(rank=1, reason="test over"))
        assert isinstance(await world.ranks[1].hears(DeclareDead), DeclareDead)


async def test_a_controller_that_is_never_back_is_dialled_once(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        changes = {"reattach_seconds": 0.2, "heartbeat_timeout_seconds": 0.3}
        world = await World.form(stack, {0: [0]}, tmp_path, **changes)
        await world.begin()
        await world.controller.stop()
        await world.ranks[0].hears(Rewind)
        code, last = await world.relays[0].ends()
        assert (code, "could not be reached within 0.7 s" in last) == (1, True), last
        assert await soon(world.ranks[0].link.receive()) is None, "asked to go back once"


async def test_both_links_are_made_to_one_controller(tmp_path: Path) -> None:
    """The first one dies between the two: the link that it had is dialled anew, to the second."""
    first = Controller({0: [0]})
    first.deaf[Channel.DATA] = asyncio.Event()
    await first.start()
    port = first.port
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(relay(f"ws://127.0.0.1:{port}", tmp_path / "host0"))
        await soon(first.deaf[Channel.DATA].wait())
        await first.stop()
        second = Controller({0: [0]})
        stack.push_async_callback(second.stop)
        await second.start(port)
        await soon(second.attached[0].wait())
        assert second.paths == ["/ws/control", "/ws/data"]
