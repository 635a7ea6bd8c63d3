"""The port of a relay-only host: what passes through unread, and what is refused."""

from __future__ import annotations

import asyncio

import httpx2
import pytest
from site_kit import PATIENCE, RUN, SECRET, SITE, TOKEN, Far, Running, running
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidMessage, InvalidStatus

from wire.errors import ErrorCode, RemoteProtocolError
from wire.messages import (
    Accept,
    BatchDone,
    Hello,
    HostHeartbeat,
    Leaving,
    Message,
    Reject,
    RelayHello,
    RelayWelcome,
    Shutdown,
    Versions,
)
from wire.sealing import join_secret, run_secret
from wire.session import Channel, Session
from worker.site_door import SiteLimits

HELLO = Hello("box", [], Versions("0.1.0", 1, "3.11"))
OTHER_RUN, OTHER_SECRET = RUN + 1, run_secret(join_secret(TOKEN), b"other" * 8)


async def behind(site: Running, channel: Channel, first: Message) -> tuple[Far, Far]:
    """Both ends of a link that passes through, established."""
    secret = join_secret(TOKEN) if channel is Channel.JOIN else SECRET
    far = await site.dial(channel, secret, 0 if channel is Channel.JOIN else RUN)
    near = await site.controller.link(channel)
    await far.say(first)
    assert await near.hear(type(first)) == first
    return far, near


async def test_join_and_control_links_pass_through_both_ways() -> None:
    async with running() as site:
        await site.admitted()
        for channel, first, down, up in (
            (Channel.JOIN, HELLO, Accept(RUN, 1, [0], b"s" * 32, 1.0, 1.0, 1.0), Leaving("bye")),
            (Channel.CONTROL, RelayHello(1, [0]), Shutdown("done"), BatchDone(1.0, 1.0, 1, 1, 0.5)),
        ):
            far, near = await behind(site, channel, first)
            await near.say(down, 0)
            assert await far.hear(type(down)) == down
            await far.say(up, 0)
            assert await near.hear(type(up)) == up


@pytest.mark.parametrize("channel", [Channel.JOIN, Channel.CONTROL])
async def test_an_end_is_passed_on_with_its_code_and_reason(channel: Channel) -> None:
    async with running() as site:
        await site.admitted()
        first: Message = HELLO if channel is Channel.JOIN else RelayHello(1, [0])
        far, near = await behind(site, channel, first)
        await near.say(Shutdown("last words"))
        await near.socket.close(4410, "trained 3 epochs")
        await far.hear(Shutdown)
        assert await far.ended() == (4410, "trained 3 epochs")
        far, near = await behind(site, channel, first)
        await far.say(Leaving("last words"))
        await far.socket.close(1001, "the operator said so")
        await near.hear(Leaving)
        assert await near.ended() == (1001, "the operator said so")


@pytest.mark.parametrize("broken", ["near", "far"])
async def test_a_broken_connection_breaks_the_other(broken: str) -> None:
    async with running() as site:
        await site.admitted()
        far, near = await behind(site, Channel.CONTROL, RelayHello(1, [0]))
        one, other = (near, far) if broken == "near" else (far, near)
        one.socket.transport.abort()
        assert (await other.ended())[0] == 1006


async def test_a_wrong_token_is_refused_by_the_controller_itself() -> None:
    async with running() as site:
        await site.admitted()
        session = Session.client(Channel.JOIN, join_secret("wrong"))
        async with connect(f"{site.url}/ws/join", compression=None) as socket:
            await socket.send(session.opening())
            with pytest.raises(RemoteProtocolError) as refused:
                session.receive(await asyncio.wait_for(socket.recv(), PATIENCE))
            assert refused.value.code == ErrorCode.BAD_MAC


async def test_a_data_link_of_another_run_passes_through() -> None:
    async with running() as site:
        await site.formed()
        other = await site.dial(Channel.DATA, OTHER_SECRET, OTHER_RUN)
        near = await site.controller.link(Channel.DATA)
        await other.say(RelayHello(1, [0]))
        assert await near.hear(RelayHello) == RelayHello(1, [0])
        await near.say(RelayWelcome())
        await other.hear(RelayWelcome)
        assert site.up.silent


async def test_a_host_that_joins_has_this_one_join_first() -> None:
    """Out of any run, and in the middle of a long pause between two dials."""
    async with running(persist=True) as site:
        first = await site.controller.link(Channel.JOIN)
        await first.hear(Hello)
        await first.say(Reject("no_open_window", "no run has an open join window now"))
        await first.socket.close(4403)
        site.site.agent.patience = type(site.site.agent.patience)(persist=True, first_back_off_seconds=3600.0)
        second = await site.controller.link(Channel.JOIN)
        await second.hear(Hello)
        await second.say(Reject("no_open_window", "no run has an open join window now"))
        await second.socket.close(4403)
        await second.ended()
        joining = asyncio.create_task(site.dial(Channel.JOIN, join_secret(TOKEN), 0))
        own = await site.controller.link(Channel.JOIN)
        assert (await own.hear(Hello)).relay_only
        await own.say(Accept(RUN, SITE, [], bytes(range(32)), 60.0, 0.2, 30.0))
        far = await joining
        await far.say(HELLO)
        assert await (await site.controller.link(Channel.JOIN)).hear(Hello) == HELLO


async def test_a_host_that_joins_where_no_run_is_hears_the_controller_itself() -> None:
    async with running(persist=True) as site:
        first = await site.controller.link(Channel.JOIN)
        await first.hear(Hello)
        await first.say(Reject("no_open_window", "no run has an open join window now"))
        await first.socket.close(4403)
        joining = asyncio.create_task(site.dial(Channel.JOIN, join_secret(TOKEN), 0))
        while not joining.done():
            near = await site.controller.link(Channel.JOIN)
            hello = asyncio.create_task(near.hear(Hello))
            await asyncio.wait((hello, joining), return_when=asyncio.FIRST_COMPLETED)
            if hello.done():
                await near.say(Reject("no_open_window", "no run has an open join window now"))
                await near.socket.close(4403)
            else:
                hello.cancel()
        assert (await joining).session.established


async def test_when_the_controller_is_away_hosts_are_told_to_try_again() -> None:
    async with running() as site:
        await site.admitted()
        site.controller.server.close(close_connections=False)
        async with connect(f"{site.url}/ws/control", compression=None) as socket:
            await socket.send(Session.client(Channel.CONTROL, SECRET, run_id=RUN).opening())
            await asyncio.wait_for(socket.wait_closed(), PATIENCE)
            assert socket.close_code == 1013
            assert "cannot be reached from here" in (socket.close_reason or "")


# --------------------------------------------------------------------------------------------- strangers


@pytest.mark.parametrize("path", ["/", "/api/v1/runs", "/ws/live", "/ws/join/../control", "/ws/join?x=1"])
async def test_nothing_else_is_served(path: str) -> None:
    async with running() as site:
        await site.admitted()
        async with httpx2.AsyncClient(trust_env=False) as client:
            answer = await client.get(site.url.replace("ws:", "http:") + path)
        assert (answer.status_code, "relay-only host" in answer.text) == (404, True)
        with pytest.raises(InvalidStatus) as refused:
            await connect(site.url + path, compression=None)
        assert refused.value.response.status_code == 404


async def test_a_browser_is_refused() -> None:
    async with running() as site:
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"{site.url}/ws/join", origin="http://evil.example", compression=None)
        assert refused.value.response.status_code == 403


@pytest.mark.parametrize(
    ("first", "code"),
    [
        pytest.param(b"", 4400, id="nothing"),
        pytest.param(b"GET / HTTP/1.1", 4400, id="no frame"),
        pytest.param("text", 4400, id="text"),
        pytest.param(Session.client(Channel.CONTROL, SECRET, run_id=RUN).opening(), 4400, id="another channel"),
        pytest.param(Session.client(Channel.JOIN, SECRET).opening()[:-1], 4400, id="cut"),
        pytest.param(bytes(3 << 20), 1009, id="too long"),
    ],
)
async def test_what_is_no_hello_never_reaches_the_controller(first: bytes | str, code: int) -> None:
    async with running() as site:
        await site.admitted()
        async with connect(f"{site.url}/ws/join", compression=None) as socket:
            await socket.send(first)
            await asyncio.wait_for(socket.wait_closed(), PATIENCE)
            assert socket.close_code == code
        assert site.controller.links[Channel.JOIN].empty()


async def test_silence_is_bounded() -> None:
    async with running(limits=SiteLimits(hello_seconds=0.1)) as site:
        await site.admitted()
        async with connect(f"{site.url}/ws/data", compression=None) as socket:
            await asyncio.wait_for(socket.wait_closed(), PATIENCE)
            assert socket.close_code == 4408


async def test_a_data_link_that_never_says_who_it_is_is_closed() -> None:
    async with running(limits=SiteLimits(hello_seconds=0.1)) as site:
        await site.formed()
        far = await site.dial(Channel.DATA)
        assert (await far.ended())[0] == 4408
        assert site.up.silent


async def test_a_data_link_under_another_secret_is_refused() -> None:
    async with running() as site:
        await site.formed()
        session = Session.client(Channel.DATA, b"x" * 32, run_id=RUN)
        async with connect(f"{site.url}/ws/data", compression=None) as socket:
            await socket.send(session.opening())
            with pytest.raises(RemoteProtocolError) as refused:
                session.receive(await asyncio.wait_for(socket.recv(), PATIENCE))
            assert refused.value.code == ErrorCode.BAD_MAC


async def test_a_data_links_first_word_must_be_a_relays_hello() -> None:
    async with running() as site:
        await site.formed()
        far = await site.dial(Channel.DATA)
        await far.say(HostHeartbeat([]))
        code, reason = await far.ended()
        assert (code, "must be RelayHello" in reason) == (4400, True)


async def test_connections_are_bounded_by_source() -> None:
    async with running(limits=SiteLimits(connections_per_source=2)) as site:
        await site.admitted()
        first, _ = await site.dial(Channel.CONTROL), await site.dial(Channel.CONTROL)
        with pytest.raises((InvalidMessage, ConnectionResetError)):
            await connect(f"{site.url}/ws/control", compression=None)
        await first.socket.close()
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    await site.dial(Channel.CONTROL)
                    break
                except (InvalidMessage, ConnectionResetError):
                    await asyncio.sleep(0)
