"""Relay links: who may attach, who may speak for which rank, and what a loss looks like."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from runtime_scripted import ScriptedCore
from runtime_site import (
    Link,
    ScriptedHost,
    Site,
    config,
    eventually,
    site,
    stranger,
)

from backend.core.vocabulary import (
    DropHost,
    Effect,
    Event,
    ExpectRelays,
    Operator,
    RankSaid,
    RelayAttached,
    RelayHeard,
    RelayLost,
    SendRank,
    SendRelay,
    StrangerRefused,
)
from backend.runtime.limits import Limits
from wire.messages import (
    Accept,
    BatchDone,
    DeclareDead,
    Exiting,
    Reject,
    RelayHeartbeat,
    RelayHello,
    RelayWelcome,
    Shutdown,
)
from wire.session import Channel, ChunkHeader, Session

SHORT = Limits(handshake_seconds=0.1, hello_seconds=0.3, send_stall_seconds=0.3, close_seconds=0.5, expect_seconds=0.2)


def world(hosts: dict[int, tuple[int, ...]], *then: Effect) -> ScriptedCore:
    """A core that expects these relays once the operator presses start, and does more when they do so again."""

    def answer(event: Event, now: float) -> list[Effect]:
        if isinstance(event, Operator) and event.act == "start":
            return [ExpectRelays(hosts)]
        if isinstance(event, Operator) and event.act == "stop":
            return list(then)
        return []

    return ScriptedCore(answer)


@contextlib.asynccontextmanager
async def expecting(
    tmp_path: Path, core: ScriptedCore, limits: Limits | None = None, start: bool = True
) -> AsyncIterator[tuple[Site, ScriptedHost]]:
    """A run whose world is known, and host 1 of it, which owns ranks 0 and 1."""
    async with site(tmp_path, core=lambda: core, limits=limits) as where:
        run_id = await where.controller.create_run(config())
        (run,) = where.controller._runs.values()
        host = ScriptedHost(where, "box")
        host.accept = Accept(run_id, 1, [0, 1], b"s" * 32, 10.0, 60.0, 30.0, run.secret)
        if start:
            await where.controller.command(run_id, "start")
        yield where, host


HOSTS = {1: (0, 1), 2: (2,)}


async def test_a_relay_is_attached_once_both_of_its_links_are(tmp_path: Path) -> None:
    core = world(HOSTS)
    async with expecting(tmp_path, core) as (_, host):
        control = await host.relay(Channel.CONTROL)
        await control.hear(RelayWelcome)
        assert not any(isinstance(event, RelayAttached) for event in core.events)
        data = await host.relay(Channel.DATA)
        await data.hear(RelayWelcome)
        assert (await core.heard(RelayAttached)).host == 1


@pytest.mark.parametrize("channel", [Channel.CONTROL, Channel.DATA])
async def test_a_relay_lost_is_told_once_and_its_other_link_is_closed(tmp_path: Path, channel: Channel) -> None:
    core = world(HOSTS)
    async with expecting(tmp_path, core) as (where, host):
        await host.attach()
        await core.heard(RelayAttached)
        ended, other = (host.control, host.data) if channel is Channel.CONTROL else (host.data, host.control)
        ended.socket.transport.abort()
        lost = await core.heard(RelayLost)
        assert (lost.host, channel.name.lower() in lost.reason) == (1, True)
        assert (await other.closed())[0] == 4403
        await eventually(lambda: where.controller.metrics()["links_data"] == 0, "both links to be gone")
        again = await host.relay(Channel.CONTROL)
        assert "lost before" in (await again.hear(Reject)).reason
    assert sum(isinstance(event, RelayLost) for event in core.events) == 1


@pytest.mark.parametrize(
    ("host_id", "ranks", "named"),
    [(1, [0], "owns ranks"), (1, [0, 1, 2], "owns ranks"), (1, [1, 0], "owns ranks"), (3, [0], "host 3 is not part")],
)
@pytest.mark.parametrize("channel", [Channel.CONTROL, Channel.DATA])
async def test_a_relay_may_claim_exactly_its_own(
    tmp_path: Path, channel: Channel, host_id: int, ranks: list[int], named: str
) -> None:
    core = world(HOSTS)
    async with expecting(tmp_path, core) as (_, host):
        link = await host.relay(channel, ranks, host_id)
        assert named in (await link.hear(Reject)).reason
        assert (await link.closed())[0] == 4403
        assert (await core.heard(StrangerRefused)).code == "relay_refused"
        assert not any(isinstance(event, RelayLost) for event in core.events)


async def test_a_second_link_of_the_same_relay_does_not_displace_the_first(tmp_path: Path) -> None:
    core = world(HOSTS)
    async with expecting(tmp_path, core) as (_, host):
        await host.attach()
        second = await host.relay(Channel.CONTROL)
        assert "attached already" in (await second.hear(Reject)).reason
        await host.control.say(Exiting(1), 0)
        assert (await core.heard(RankSaid)).rank == 0


async def test_a_relay_may_be_quicker_than_the_world_it_belongs_to(tmp_path: Path) -> None:
    core = world(HOSTS)
    async with expecting(tmp_path, core, start=False) as (where, host):
        link = await Link.dial(where.url(Channel.CONTROL), Channel.CONTROL, host.run_secret, host.accept.run_id)
        await eventually(lambda: where.controller.metrics()["strangers"] == 1, "the relay to be at the door")
        await link.say(RelayHello(1, [0, 1]))
        await eventually(lambda: where.controller.metrics()["strangers"] == 0, "its hello to be read")
        await where.controller.command(1, "start")
        await link.hear(RelayWelcome)


async def test_a_relay_of_a_world_that_never_forms_is_refused(tmp_path: Path) -> None:
    async with expecting(tmp_path, world(HOSTS), SHORT, start=False) as (_, host):
        link = await host.relay(Channel.CONTROL)
        assert "not part" in (await link.hear(Reject)).reason


async def test_a_relay_of_an_unknown_run_is_refused_in_the_handshake(tmp_path: Path) -> None:
    async with site(tmp_path, core=ScriptedCore) as where:
        opening = Session.client(Channel.CONTROL, b"k" * 32, run_id=5).opening()
        closed, reason, _ = await stranger(where, Channel.CONTROL, opening)
        assert closed == 4403
        assert "run 5" in reason


async def test_a_session_for_another_channel_is_refused(tmp_path: Path) -> None:
    async with site(tmp_path, core=ScriptedCore) as where:
        await where.controller.create_run(config())
        opening = Session.client(Channel.DATA, b"k" * 32, run_id=1).opening()
        closed, reason, _ = await stranger(where, Channel.CONTROL, opening)
        assert closed == 4400
        assert "control channel" in reason


async def test_a_rank_is_heard_only_from_its_own_relay(tmp_path: Path) -> None:
    core = world(HOSTS)
    async with expecting(tmp_path, core) as (_, host):
        await host.attach()
        batch = BatchDone(1.0, 1.0, 1, 4, 0.5)
        await host.control.say(batch, 1)
        assert await core.heard(RankSaid) == RankSaid(1, batch)
        await host.control.say(batch, 2)
        code, reason = await host.control.closed()
        assert code == 4400
        assert "rank 2" in reason
        await core.heard(RelayLost)
    assert sum(isinstance(event, RankSaid) for event in core.events) == 1


async def test_a_relays_heartbeat_is_its_own_and_no_ranks(tmp_path: Path) -> None:
    core = world(HOSTS)
    async with expecting(tmp_path, core) as (_, host):
        await host.attach()
        await host.control.say(RelayHeartbeat())
        assert await core.heard(RelayHeard) == RelayHeard(1)
        await host.control.say(RelayHeartbeat(), 1)
        assert (await host.control.closed())[0] == 4400
        await core.heard(RelayLost)


@pytest.mark.parametrize("rank", [0, 0xFFFFFFFF])
async def test_a_relay_that_speaks_out_of_place_loses_its_link(tmp_path: Path, rank: int) -> None:
    core = world(HOSTS)
    async with expecting(tmp_path, core) as (_, host):
        await host.attach()
        await host.control.say(Shutdown("no") if rank == 0 else Exiting(1), rank)
        assert (await host.control.closed())[0] == 4400


async def test_messages_reach_their_rank_and_their_relay_in_order(tmp_path: Path) -> None:
    dead = DeclareDead(2, "gone")
    core = world(HOSTS, SendRank(1, Shutdown("first")), SendRelay(1, dead), SendRank(0, Shutdown("third")))
    async with expecting(tmp_path, core) as (where, host):
        await host.attach()
        await where.controller.command(1, "stop")
        assert (await host.control.hear(Shutdown, 1)).reason == "first"
        assert await host.control.hear(DeclareDead) == dead
        assert (await host.control.hear(Shutdown, 0)).reason == "third"


async def test_a_message_for_a_rank_whose_relay_is_not_there_comes_back_as_a_loss(tmp_path: Path) -> None:
    core = world(HOSTS, SendRank(2, Shutdown("x")), SendRank(2, Shutdown("y")), SendRank(0, Shutdown("z")))
    async with expecting(tmp_path, core) as (where, host):
        await host.attach()
        await where.controller.command(1, "stop")
        assert (await host.control.hear(Shutdown, 0)).reason == "z", "one rank's failure does not park the others"
        lost = await core.heard(RelayLost)
    assert lost == RelayLost(2, "its control link is not attached")
    assert sum(isinstance(event, RelayLost) for event in core.events) == 1


async def test_a_dropped_host_is_closed_and_refused_from_then_on(tmp_path: Path) -> None:
    core = world(HOSTS, DropHost(1, "no sign of life"))
    async with expecting(tmp_path, core) as (where, host):
        await host.attach()
        await where.controller.command(1, "stop")
        assert await host.control.closed() == (4403, "no sign of life")
        assert (await host.data.closed())[0] == 4403
        again = await host.relay(Channel.CONTROL)
        assert "no sign of life" in (await again.hear(Reject)).reason
        assert not any(isinstance(event, RelayLost) for event in core.events)


async def test_a_busy_data_link_does_not_delay_the_control_link(tmp_path: Path) -> None:
    core = world(HOSTS)
    async with expecting(tmp_path, core) as (_, host):
        await host.attach()
        values = np.zeros(1 << 18, dtype=np.float32)
        frames = [
            bytes(host.data.session.seal_chunk(ChunkHeader(0, 0, 0, n << 18, 1 << 18), values.data)) for n in range(24)
        ]

        async def pour() -> None:
            for frame in frames:
                await host.data.socket.send(frame)

        pouring = asyncio.create_task(pour())
        batch = BatchDone(1.0, 1.0, 1, 4, 0.5)
        await host.control.say(batch, 0)
        assert (await core.heard(RankSaid, seconds=2.0)).message == batch
        await asyncio.wait_for(pouring, 10)


async def test_a_bad_chunk_ends_the_data_link(tmp_path: Path) -> None:
    core = world(HOSTS)
    async with expecting(tmp_path, core) as (_, host):
        await host.attach()
        values = np.zeros(1 << 16, dtype=np.float32)
        frame = bytearray(host.data.session.seal_chunk(ChunkHeader(0, 0, 0, 0, 1 << 16), values.data))
        frame[100] ^= 1
        await host.data.socket.send(bytes(frame))
        assert (await host.data.closed())[0] == 4401
        assert "bad_mac" in (await core.heard(RelayLost)).reason
