"""The three sockets against strangers, silence, garbage, members that misbehave, and peers that do not read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import websockets
from runtime_scripted import ScriptedCore
from runtime_site import (
    OPEN_SECRET,
    LateStore,
    Link,
    ScriptedHost,
    Site,
    config,
    eventually,
    hello,
    open_store,
    site,
    stranger,
)

from backend.core.vocabulary import (
    CloseLink,
    DropHost,
    Effect,
    Event,
    ExpectRelays,
    HostSaid,
    LinkLost,
    Operator,
    RankSaid,
    Record,
    RelayAttached,
    RelayLost,
    SendHost,
    SendRank,
    SendRelay,
    StrangerRefused,
)
from backend.runtime.limits import Limits
from wire.errors import RemoteProtocolError
from wire.messages import (
    Accept,
    BatchDone,
    DeclareDead,
    Exiting,
    Hello,
    HostHeartbeat,
    JobOffer,
    Leaving,
    Reject,
    RelayWelcome,
    RunEnded,
    Shutdown,
)
from wire.session import Channel, ChunkHeader, Session

SHORT = Limits(handshake_seconds=0.1, hello_seconds=0.3, send_stall_seconds=0.3, close_seconds=0.5, expect_seconds=0.2)
CHANNELS = list(Channel)


def accept(run_id: int = 1, beat: float = 60.0) -> Accept:
    return Accept(run_id, 1, [0], b"s" * 32, 10.0, beat, 30.0)


# --------------------------------------------------------------------------------------------- strangers


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize(
    ("frames", "close", "code"),
    [
        ((b"GET / HTTP/1.1\r\n\r\n",), 4400, "bad_magic"),
        (("text",), 4400, "bad_magic"),
        ((b"",), 4400, "bad_magic"),
        ((b"MLIN\xff\xff\x01\x00" + bytes(64),), 4400, "version_mismatch"),
        ((b"MLIN\x01\x00\x63\x00" + bytes(64),), 4400, "unknown_kind"),
        ((bytes(1 << 20),), 4400, "bad_magic"),
    ],
)
async def test_garbage_on_every_socket_is_refused_by_name_and_counted(
    tmp_path: Path, channel: Channel, frames: tuple[bytes | str, ...], close: int, code: str
) -> None:
    async with site(tmp_path, core=ScriptedCore) as where:
        await where.controller.create_run(config())
        closed, _, _ = await stranger(where, channel, *frames)
        assert closed == close
        refused = await where.core().heard(StrangerRefused)
        assert (refused.address, refused.code) == ("127.0.0.1", code)
        assert where.controller.metrics()["strangers_refused_total"] == 1


async def test_a_version_mismatch_is_told_in_plain_with_both_versions(tmp_path: Path) -> None:
    async with site(tmp_path, core=ScriptedCore) as where:
        _, _, heard = await stranger(where, Channel.JOIN, b"MLIN\x07\x00\x01\x00" + bytes(64))
        client = Session.client(Channel.JOIN, OPEN_SECRET)
        client.opening()
        with pytest.raises(RemoteProtocolError, match=r"version 7.* 1") as refusal:
            client.receive(heard[-1])
        assert refusal.value.peer_code == "version_mismatch"


@pytest.mark.parametrize("channel", CHANNELS)
async def test_a_frame_beyond_the_limit_is_cut_off(tmp_path: Path, channel: Channel) -> None:
    async with site(tmp_path, core=ScriptedCore) as where:
        closed, _, _ = await stranger(where, channel, bytes(3 << 20))
        assert closed == 1009


@pytest.mark.parametrize("channel", CHANNELS)
async def test_a_link_that_says_nothing_is_closed_as_silent(tmp_path: Path, channel: Channel) -> None:
    async with site(tmp_path, core=ScriptedCore, limits=SHORT) as where:
        await where.controller.create_run(config())
        closed, reason, _ = await stranger(where, channel)
        assert closed == 4408
        assert "nothing" in reason
        assert (await where.core().heard(StrangerRefused)).code == "silent"


async def test_a_link_that_opens_and_says_no_more_is_closed_as_silent(tmp_path: Path) -> None:
    async with site(tmp_path, core=ScriptedCore, limits=SHORT) as where:
        await where.controller.create_run(config())
        opening = Session.client(Channel.JOIN, where.join_secret).opening()
        closed, _, heard = await stranger(where, Channel.JOIN, opening)
        assert closed == 4408
        assert len(heard) == 1, "it was answered, and then waited for"
        assert (await where.core().heard(StrangerRefused)).code == "silent"


async def test_a_wrong_token_is_refused_on_the_first_frame(tmp_path: Path) -> None:
    async with site(tmp_path, core=ScriptedCore) as where:
        await where.controller.create_run(config())
        socket = await websockets.connect(where.url(Channel.JOIN), compression=None)
        session = Session.client(Channel.JOIN, b"w" * 32)
        await socket.send(session.opening())
        with pytest.raises(RemoteProtocolError, match="join token") as client_side:
            session.receive(await socket.recv())
        assert client_side.value.code == "bad_mac"
        await socket.close()
        # The peer noticed by itself; it left without proof, which counts as a stranger too.
        assert (await where.core().heard(StrangerRefused)).code == "closed"


async def test_a_forged_first_message_is_refused(tmp_path: Path) -> None:
    async with site(tmp_path, core=ScriptedCore) as where:
        await where.controller.create_run(config())
        link = await Link.dial(where.url(Channel.JOIN), Channel.JOIN, where.join_secret)
        while not link.session.established:
            await link._read()
        frame = bytearray(link.session.seal(hello("forger")))
        frame[-40] ^= 1
        await link.socket.send(bytes(frame))
        with pytest.raises(RemoteProtocolError):
            await link.closed()
        assert (await where.core().heard(StrangerRefused)).code == "bad_mac"
        assert not any(isinstance(event, HostSaid) for event in where.core().events)


async def test_a_first_message_that_is_no_hello_is_refused(tmp_path: Path) -> None:
    async with site(tmp_path, core=ScriptedCore) as where:
        await where.controller.create_run(config())
        link = await Link.dial(where.url(Channel.JOIN), Channel.JOIN, where.join_secret)
        await link.say(Leaving("already"))
        assert (await link.closed())[0] == 4400
        assert (await where.core().heard(StrangerRefused)).code == "hello_expected"


async def test_repeated_failures_are_slowed_in_their_own_connection_only(tmp_path: Path) -> None:
    naps: list[float] = []
    held = asyncio.Event()

    async def sleep(seconds: float) -> None:
        naps.append(seconds)
        await held.wait()

    limits = Limits(free_failures=1, delay_seconds=0.25, delay_cap_seconds=0.5)
    async with site(tmp_path, core=ScriptedCore, limits=limits, sleep=sleep) as where:
        await where.controller.create_run(config())
        assert (await stranger(where, Channel.JOIN, b"x"))[0] == 4400
        slowed = [asyncio.create_task(stranger(where, channel, b"x")) for channel in (*CHANNELS, Channel.JOIN)]
        await eventually(lambda: len(naps) == 4, "four naps")
        assert sorted(naps) == [0.25, 0.5, 0.5, 0.5]
        # Meanwhile an honest host of the same address is served at once.
        link = await Link.dial(where.url(Channel.JOIN), Channel.JOIN, where.join_secret)
        await link.say(hello("honest"))
        await where.core().heard(HostSaid)
        held.set()
        assert [code for code, _, _ in await asyncio.gather(*slowed)] == [4400] * 4


async def test_a_flood_of_silent_links_does_not_keep_an_honest_host_out(tmp_path: Path) -> None:
    limits = Limits(strangers=8, strangers_per_source=4, handshake_seconds=60.0, hello_seconds=60.0)
    async with site(tmp_path, core=ScriptedCore, limits=limits) as where:
        await where.controller.create_run(config())
        flood = [asyncio.create_task(stranger(where, Channel.JOIN)) for _ in range(12)]
        await eventually(lambda: where.controller.metrics()["strangers_evicted_total"] >= 8, "the oldest to be evicted")
        assert where.controller.metrics()["strangers"] == 4
        link = await Link.dial(where.url(Channel.JOIN), Channel.JOIN, where.join_secret)
        await link.say(hello("honest"))
        await where.core().heard(HostSaid)
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)


# ------------------------------------------------------------------------------------------- which run


async def test_without_an_open_window_a_host_is_told_to_come_back(tmp_path: Path) -> None:
    async with site(tmp_path, core=ScriptedCore) as where:
        link = await Link.dial(where.url(Channel.JOIN), Channel.JOIN, where.join_secret)
        await link.say(hello("early"))
        reject = await link.hear(Reject)
        assert (reject.code, reject.permanent) == ("no_open_window", False)
        assert (await link.closed())[0] == 4403


async def test_a_host_goes_to_the_earliest_open_window_or_to_the_run_it_names(tmp_path: Path) -> None:
    async with site(tmp_path, core=ScriptedCore) as where:
        for _ in range(3):
            await where.controller.create_run(config())
        where.core(0).phase = "training"
        for name, run in (("any", None), ("second", 2), ("third", 3)):
            link = await Link.dial(where.url(Channel.JOIN), Channel.JOIN, where.join_secret)
            await link.say(hello(name, run=run))
        await where.core(1).until(lambda events: len(events) == 2)
        await where.core(2).until(lambda events: len(events) == 1)
        names = [{event.message.host for event in where.core(n).events} for n in range(3)]
        assert names == [set(), {"any", "second"}, {"third"}]
        link = await Link.dial(where.url(Channel.JOIN), Channel.JOIN, where.join_secret)
        await link.say(hello("lost", run=9))
        reject = await link.hear(Reject)
        assert (reject.code, reject.permanent) == ("unknown_run", True)


async def test_open_admission_opens_its_own_run_and_no_other(tmp_path: Path) -> None:
    async with site(tmp_path, core=ScriptedCore) as where:
        await where.controller.create_run(config(open_admission=True))
        await where.controller.create_run(config())
        link = await Link.dial(where.url(Channel.JOIN), Channel.JOIN, OPEN_SECRET)
        await link.say(hello("guest"))
        await where.core(0).heard(HostSaid)
        intruder = await Link.dial(where.url(Channel.JOIN), Channel.JOIN, OPEN_SECRET)
        await intruder.say(hello("intruder", run=2))
        reject = await intruder.hear(Reject)
        assert (reject.code, reject.permanent) == ("token_required", True)
        assert where.core(1).events == []


# ------------------------------------------------------------------------------------------- join links


@contextlib.asynccontextmanager
async def joined(tmp_path: Path, core: ScriptedCore, limits: Limits | None = None) -> AsyncIterator[tuple[Site, Link]]:
    async with site(tmp_path, core=lambda: core, limits=limits) as where:
        await where.controller.create_run(config())
        link = await Link.dial(where.url(Channel.JOIN), Channel.JOIN, where.join_secret)
        await link.say(hello("box"))
        await core.heard(HostSaid)
        yield where, link


def on_hello(*effects: type[Effect] | Effect) -> ScriptedCore:
    """A core that answers each hello with these effects, addressed to its link."""

    def answer(event: Event, now: float) -> list[Effect]:
        if isinstance(event, HostSaid) and isinstance(event.message, Hello):
            return [_addressed(effect, event.link) for effect in effects]
        return []

    return ScriptedCore(answer)


def _addressed(effect: Effect | type[Effect], link: int) -> Effect:
    if isinstance(effect, SendHost):
        return SendHost(link, effect.message)
    if isinstance(effect, CloseLink):
        return CloseLink(link, effect.reason)
    assert not isinstance(effect, type)
    return effect


async def test_what_a_host_says_reaches_the_core_with_its_address_in_order(tmp_path: Path) -> None:
    core = ScriptedCore()
    async with joined(tmp_path, core) as (_, link):
        await link.say(HostHeartbeat([]))
        await link.say(Leaving("closing time"))
        events = await core.until(lambda events: len(events) == 3)
    assert [type(event.message).__name__ for event in events[:3]] == ["Hello", "HostHeartbeat", "Leaving"]
    assert {event.link for event in events[:3]} == {1}
    assert {event.address for event in events[:3]} == {"127.0.0.1"}


async def test_a_link_that_ends_is_lost_once_with_its_reason(tmp_path: Path) -> None:
    core = ScriptedCore()
    async with joined(tmp_path, core) as (_, link):
        await link.socket.close(1000, "going home")
        lost = await core.heard(LinkLost)
    assert (lost.link, "going home" in lost.reason) == (1, True)
    assert sum(isinstance(event, LinkLost) for event in core.events) == 1


@pytest.mark.parametrize("message", [Shutdown("no"), RunEnded("done", "no"), Exiting(3), hello("again")])
async def test_a_host_that_speaks_out_of_place_loses_its_link(tmp_path: Path, message: object) -> None:
    core = ScriptedCore()
    async with joined(tmp_path, core) as (_, link):
        await link.say(message)  # type: ignore[arg-type]
        code, reason = await link.closed()
        assert code == 4400
        assert type(message).__name__ in reason
        assert "bad_message" in (await core.heard(LinkLost)).reason


async def test_a_replayed_frame_ends_the_link(tmp_path: Path) -> None:
    core = ScriptedCore()
    async with joined(tmp_path, core) as (_, link):
        frame = link.session.seal(HostHeartbeat([]))
        await link.socket.send(frame)
        await link.socket.send(frame)
        assert (await link.closed())[0] == 4400
        assert "replay" in (await core.heard(LinkLost)).reason
    assert sum(isinstance(event, HostSaid) for event in core.events) == 2


async def test_a_rejected_host_hears_why_before_it_is_closed_and_is_heard_no_more(tmp_path: Path) -> None:
    reject = Reject(code="duplicate_host", reason="box has joined already", permanent=False)
    core = on_hello(SendHost(0, reject), CloseLink(0, "duplicate_host"))
    async with joined(tmp_path, core) as (where, link):
        assert await link.hear(Reject) == reject
        assert await link.closed() == (4403, "duplicate_host")
        await eventually(lambda: where.controller.metrics()["links_join"] == 0, "the link to be gone")
    assert [type(event) for event in core.events] == [HostSaid], "the core closed it, so it hears nothing of it"


async def test_an_accepted_host_hears_heartbeats(tmp_path: Path) -> None:
    core = on_hello(SendHost(0, accept(beat=0.03)))
    async with joined(tmp_path, core) as (_, link):
        await link.hear(Accept)
        beats = [link.session.receive(await asyncio.wait_for(link.socket.recv(), 5)) for _ in range(3)]
    assert {type(event[0].message).__name__ for event in beats} == {"ControllerHeartbeat"}  # type: ignore[union-attr]


async def test_a_host_that_does_not_read_loses_its_link_and_holds_up_nobody(tmp_path: Path) -> None:
    bulk = SendHost(0, JobOffer(1, "toy.py:Toy", {"text": "x" * 60_000}, ""))
    core = on_hello(*[bulk] * 400)
    async with site(tmp_path, core=lambda: core, limits=SHORT) as where:
        await where.controller.create_run(config())
        deaf = await Link.dial(where.url(Channel.JOIN), Channel.JOIN, where.join_secret)
        await deaf.say(hello("deaf"))
        deaf.socket.transport.pause_reading()
        await core.heard(HostSaid)
        assert await asyncio.wait_for(where.controller.command(1, "start"), 5) is None
        assert "stalled for 0.3 s" in (await core.heard(LinkLost)).reason
        deaf.socket.transport.abort()


async def test_a_host_for_which_too_much_waits_loses_its_link(tmp_path: Path) -> None:
    bulk = SendHost(0, JobOffer(1, "toy.py:Toy", {"text": "x" * 60_000}, ""))
    core = on_hello(*[bulk] * 400)
    limits = Limits(outbox_messages=100, close_seconds=0.5)
    async with joined(tmp_path, core, limits) as (_, _link):
        assert "does not read" in (await core.heard(LinkLost)).reason


async def test_an_admission_whose_reply_cannot_be_written_is_rolled_back(tmp_path: Path) -> None:
    """The real core: the link breaks while the admission is being committed, and the next host gets its ranks."""
    store = open_store(tmp_path, LateStore)
    store.hold = "hosts"
    async with site(tmp_path, store=store) as where:
        run_id = await where.controller.create_run(config())
        ghost = ScriptedHost(where, "ghost")
        await ghost.report(await ghost.offered())
        await eventually(lambda: store.held, "the admission to be written")
        ghost.join.socket.transport.abort()
        await eventually(lambda: where.controller.metrics()["links_join"] == 0, "the link to be gone")
        store.release()
        steady = ScriptedHost(where, "steady")
        assert (await steady.admitted()).ranks == [0]
        view = where.controller.live_view(run_id)
        assert view is not None
        assert [member["name"] for member in view["members"]] == ["steady"]
        events = await asyncio.to_thread(store.queries.events, run_id)
        (left,) = [event for event in events if event["kind"] == "host_left"]
        assert "ghost" in left["text"]
        assert "the connection was lost" in left["text"]


# ------------------------------------------------------------------------------------------ relay links


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
        link = await host.relay(Channel.CONTROL)
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


async def test_records_are_written_before_a_host_is_answered(tmp_path: Path) -> None:
    row = {"host": 1, "name": "box", "state": "admitted"}
    core = on_hello(Record("hosts", row, durable=True), SendHost(0, accept()))
    async with joined(tmp_path, core) as (where, link):
        await link.hear(Accept)
        assert where.controller.store.queries.hosts(1)[0]["name"] == "box"
