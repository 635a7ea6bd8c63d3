"""Join links: which run a host comes to, what it hears and says, and how a link ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
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
)

from backend.core.vocabulary import (
    CloseLink,
    Effect,
    Event,
    HostSaid,
    LinkLost,
    Operator,
    Record,
    SendHost,
)
from backend.runtime.limits import Limits
from backend.runtime.run_links import MAX_BEATS, RunLinks
from wire.messages import (
    Accept,
    Exiting,
    Hello,
    HostHeartbeat,
    JobOffer,
    Leaving,
    Reject,
    RunEnded,
    Shutdown,
)
from wire.session import Channel

SHORT = Limits(handshake_seconds=0.1, hello_seconds=0.3, send_stall_seconds=0.3, close_seconds=0.5, expect_seconds=0.2)


def accept(run_id: int = 1, beat: float = 60.0) -> Accept:
    return Accept(run_id, 1, [0], b"s" * 32, 10.0, beat, 30.0)


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


async def test_ever_new_names_fill_no_memory() -> None:
    """A hello is counted before anybody is admitted, and with open admission anybody may say one."""
    links = RunLinks(lambda _: None)
    known = links.beats_of("box", 1.0)
    for number in range(2 * MAX_BEATS):
        links.beats_of(f"{number}" + "x" * 60_000, 1.0)
    assert len(links.beats) == MAX_BEATS
    assert max(map(len, links.beats)) == 253
    assert links.beats_of(" box ", 1.0) is known


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


async def test_a_host_whose_link_the_core_has_closed_is_not_heard_while_it_is_flushed(tmp_path: Path) -> None:
    bulk = SendHost(0, JobOffer(1, "toy.py:Toy", {"text": "x" * 60_000}, ""))
    core = on_hello(*[bulk] * 400, CloseLink(0, "enough"))
    async with site(tmp_path, core=lambda: core) as where:
        await where.controller.create_run(config())
        link = await Link.dial(where.url(Channel.JOIN), Channel.JOIN, where.join_secret)
        await link.say(hello("box"))
        link.socket.transport.pause_reading()
        await core.heard(HostSaid)
        assert await asyncio.wait_for(where.controller.command(1, "start"), 5) is None
        await link.say(HostHeartbeat([]))
        await link.say(Shutdown("out of place, so that the link ends here"))
        await eventually(lambda: where.controller.metrics()["links_join"] == 0, "the link to be gone")
        link.socket.transport.abort()
    assert [type(event) for event in core.events] == [HostSaid, Operator]


async def test_an_accepted_host_hears_heartbeats(tmp_path: Path) -> None:
    core = on_hello(SendHost(0, accept(beat=0.03)))
    async with joined(tmp_path, core) as (_, link):
        await link.hear(Accept)
        beats = [link.session.receive(await asyncio.wait_for(link.socket.recv(), 30)) for _ in range(3)]
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


async def test_records_are_written_before_a_host_is_answered(tmp_path: Path) -> None:
    row = {"host": 1, "name": "box", "state": "admitted"}
    core = on_hello(Record("hosts", row, durable=True), SendHost(0, accept()))
    async with joined(tmp_path, core) as (where, link):
        await link.hear(Accept)
        assert where.controller.store.queries.hosts(1)[0]["name"] == "box"
