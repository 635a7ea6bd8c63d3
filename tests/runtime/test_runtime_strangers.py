"""Strangers on the three sockets: garbage, silence, wrong secrets. Named, counted, slowed, and of no consequence."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import websockets
from runtime_scripted import ScriptedCore
from runtime_site import (
    OPEN_SECRET,
    Link,
    config,
    eventually,
    hello,
    site,
    stranger,
)

from backend.core.vocabulary import (
    HostSaid,
    StrangerRefused,
)
from backend.runtime.limits import Limits
from wire.errors import RemoteProtocolError
from wire.messages import (
    Leaving,
)
from wire.session import Channel, Session

SHORT = Limits(handshake_seconds=0.1, hello_seconds=0.3, send_stall_seconds=0.3, close_seconds=0.5, expect_seconds=0.2)
CHANNELS = list(Channel)


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


async def test_a_link_that_opened_has_longer_for_its_hello_than_one_that_did_not(tmp_path: Path) -> None:
    async with site(tmp_path, core=ScriptedCore, limits=Limits(handshake_seconds=0.1, hello_seconds=30.0)) as where:
        await where.controller.create_run(config())
        link = await Link.dial(where.url(Channel.JOIN), Channel.JOIN, where.join_secret)
        while not link.session.established:
            await link._read()
        assert (await stranger(where, Channel.JOIN))[0] == 4408, "a silent one that came later is gone already"
        await link.say(hello("slow to speak"))
        await where.core().heard(HostSaid)


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
