"""Relay-only hosts at the controller: whose data links end at them, what they are told to fold, and who is lost with
whom."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from runtime_scripted import ScriptedCore
from runtime_site import ScriptedHost, Site, config, eventually, site

from backend.core.vocabulary import (
    AbortRound,
    DropHost,
    Effect,
    Event,
    ExpectRelays,
    OpenRound,
    Operator,
    RelayAttached,
    RelayLost,
    RoundBroken,
)
from wire.messages import (
    Accept,
    ChildAttached,
    ChildLost,
    Contribution,
    FoldOrder,
    NonFinite,
    Reject,
    RelayWelcome,
    RoundAborted,
)
from wire.session import Channel

SITE, LEFT, RIGHT, DIRECT = 0, 1, 2, 3
HOSTS: dict[int, tuple[int, ...]] = {SITE: (), LEFT: (0, 1), RIGHT: (2,), DIRECT: (3,)}
OPEN = OpenRound(-1, 1, {LEFT: (0, 1), RIGHT: (2,), DIRECT: (3,)}, True, 6, 2)


@contextlib.asynccontextmanager
async def world(tmp_path: Path, *then: Effect) -> AsyncIterator[tuple[Site, ScriptedCore, dict[int, ScriptedHost]]]:
    """A run whose world is known; ``then`` are the effects of the operator's stop."""

    def answer(event: Event, now: float) -> list[Effect]:
        if isinstance(event, Operator) and event.act == "start":
            return [ExpectRelays(HOSTS)]
        return list(then) if isinstance(event, Operator) else []

    core = ScriptedCore(answer)
    async with site(tmp_path, core=lambda: core) as where:
        run_id = await where.controller.create_run(config())
        (run,) = where.controller._runs.values()
        hosts = {number: ScriptedHost(where, f"host{number}") for number in HOSTS}
        for number, host in hosts.items():
            host.accept = Accept(run_id, number, list(HOSTS[number]), b"s" * 32, 10.0, 60.0, 30.0, run.secret)
        await where.controller.command(run_id, "start")
        yield where, core, hosts


async def attach(core: ScriptedCore, hosts: dict[int, ScriptedHost], *children: int) -> None:
    """The relay-only host's data link, and these hosts behind it."""
    hosts[SITE].data = await hosts[SITE].relay(Channel.DATA)
    await hosts[SITE].data.hear(RelayWelcome)
    for number in children:
        await hosts[SITE].data.say(ChildAttached(number, list(HOSTS[number])))
        hosts[number].control = await hosts[number].relay(Channel.CONTROL)
        await hosts[number].control.hear(RelayWelcome)
    await core.until(lambda events: attached(events) >= {(number, SITE) for number in children})


def attached(events: list[Event]) -> set[tuple[int, int | None]]:
    return {(event.host, event.via) for event in events if isinstance(event, RelayAttached)}


def lost(core: ScriptedCore) -> dict[int, str]:
    return {event.host: event.reason for event in core.events if isinstance(event, RelayLost)}


async def test_a_host_behind_it_is_attached_with_its_own_control_link(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, core, hosts):
        await attach(core, hosts, LEFT, RIGHT)
        await hosts[DIRECT].attach()
        await core.until(lambda events: attached(events) == {(LEFT, SITE), (RIGHT, SITE), (DIRECT, None)})


async def test_it_has_no_control_link_of_its_own(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, _, hosts):
        link = await hosts[SITE].relay(Channel.CONTROL)
        assert "no ranks that could speak" in (await link.hear(Reject)).reason


@pytest.mark.parametrize(
    ("claim", "named"),
    [
        (ChildAttached(LEFT, [0]), "owns ranks"),
        (ChildAttached(9, [0]), "not part of this run"),
        (ChildAttached(DIRECT, [3]), "attached already"),
    ],
)
async def test_its_claims_are_checked_like_any_relays(tmp_path: Path, claim: ChildAttached, named: str) -> None:
    async with world(tmp_path) as (_, core, hosts):
        await hosts[DIRECT].attach()
        await attach(core, hosts)
        await hosts[SITE].data.say(claim)
        answer = await hosts[SITE].data.hear(ChildLost)
        assert answer.host == claim.host
        assert named in answer.reason
        assert not lost(core)


async def test_a_host_with_ranks_may_not_speak_for_others(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, core, hosts):
        await hosts[DIRECT].attach()
        await hosts[DIRECT].data.say(ChildAttached(LEFT, [0, 1]))
        assert (await hosts[DIRECT].data.closed())[0] == 4400
        assert (await core.heard(RelayLost)).host == DIRECT


async def test_a_data_link_that_ends_behind_it_loses_that_host_only(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, core, hosts):
        await attach(core, hosts, LEFT, RIGHT)
        await hosts[SITE].data.say(ChildLost(DIRECT, "it does not carry that one"))
        await hosts[SITE].data.say(ChildLost(LEFT, "the cable"))
        await core.heard(RelayLost)
        assert list(lost(core)) == [LEFT]
        assert "relay-only host 0 ended: the cable" in lost(core)[LEFT]
        assert (await hosts[LEFT].control.closed())[0] == 4403


async def test_a_host_whose_control_link_ends_is_dropped_there_too(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, core, hosts):
        await attach(core, hosts, LEFT, RIGHT)
        hosts[LEFT].control.socket.transport.abort()
        assert (await hosts[SITE].data.hear(ChildLost)).host == LEFT
        assert list(lost(core)) == [LEFT]


async def test_its_hosts_are_lost_with_it_by_name(tmp_path: Path) -> None:
    async with world(tmp_path) as (where, core, hosts):
        await hosts[DIRECT].attach()
        await core.heard(RelayAttached)
        hosts[SITE].data = await hosts[SITE].relay(Channel.DATA)
        await hosts[SITE].data.hear(RelayWelcome)
        await hosts[SITE].data.say(ChildAttached(LEFT, [0, 1]))
        hosts[LEFT].control = await hosts[LEFT].relay(Channel.CONTROL)
        await core.until(lambda events: (LEFT, SITE) in attached(events))
        hosts[SITE].data.socket.transport.abort()
        await core.until(lambda _: len(lost(core)) == 2)
        assert set(lost(core)) == {SITE, LEFT}
        assert "relay-only host 0, which carried its data, was lost" in lost(core)[LEFT]
        assert (await hosts[LEFT].control.closed())[0] == 4403
        await eventually(lambda: where.controller.metrics()["links_control"] == 1, "the direct host to stay")


async def test_when_the_core_drops_it_its_hosts_are_lost(tmp_path: Path) -> None:
    async with world(tmp_path, DropHost(SITE, "it brought rank 7")) as (where, core, hosts):
        await attach(core, hosts, LEFT)
        await where.controller.command(1, "stop")
        await core.heard(RelayLost)
        assert "it brought rank 7" in lost(core)[LEFT]
        assert (await hosts[SITE].data.closed())[0] == 4403


async def test_a_round_orders_it_to_fold_who_is_behind_it(tmp_path: Path) -> None:
    abort = AbortRound(-1, 1, "somebody died")
    async with world(tmp_path, OPEN, abort) as (where, core, hosts):
        await attach(core, hosts, LEFT, RIGHT)
        await hosts[DIRECT].attach()
        await core.until(lambda events: len(attached(events)) == 3)
        await where.controller.command(1, "stop")
        order = await hosts[SITE].data.hear(FoldOrder)
        assert order == FoldOrder(-1, 1, {LEFT: [0, 1], RIGHT: [2]}, 6, 2)
        assert await hosts[SITE].data.hear(RoundAborted) == RoundAborted(-1, 1, "somebody died")


async def test_its_contribution_must_hold_exactly_the_ranks_behind_it(tmp_path: Path) -> None:
    async with world(tmp_path, OPEN) as (where, core, hosts):
        await attach(core, hosts, LEFT, RIGHT)
        await where.controller.command(1, "stop")
        await hosts[SITE].data.hear(FoldOrder)
        steps = {0: 1, 1: 1}
        masses = {0: 1.0, 1: 1.0}
        await hosts[SITE].data.say(Contribution(-1, 1, steps, masses, masses, 6, 2))
        broken = await core.heard(RoundBroken)
        assert (broken.host, "ranks" in broken.reason) == (SITE, True)


@pytest.mark.parametrize(("rank", "blamed"), [(2, RIGHT), (3, SITE)])
async def test_a_value_that_is_not_finite_is_its_own_hosts(tmp_path: Path, rank: int, blamed: int) -> None:
    """Unless the relay-only host speaks of a rank that is not behind it."""
    async with world(tmp_path, OPEN) as (where, core, hosts):
        await attach(core, hosts, LEFT, RIGHT)
        await where.controller.command(1, "stop")
        await hosts[SITE].data.hear(FoldOrder)
        works = {0: 1, 1: 0, 2: 1}
        masses = {rank: float(steps) for rank, steps in works.items()}
        await hosts[SITE].data.say(Contribution(-1, 1, works, masses, masses, 6, 2))
        await hosts[SITE].data.say(NonFinite(-1, 1, rank, 5, "nan"))
        broken = await core.heard(RoundBroken)
        assert (broken.host, broken.non_finite is not None) == (blamed, blamed == RIGHT)
