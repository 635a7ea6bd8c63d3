"""Shared memory over real links: the offer, the answer, a round without chunks, and refusals by name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runtime_scripted import ScriptedCore
from runtime_site import Link, ScriptedHost, Site, config, eventually, site

from backend.core.vocabulary import (
    AbortRound,
    Effect,
    Event,
    ExpectRelays,
    NonFiniteValue,
    OpenRound,
    Operator,
    RankSaid,
    RelayLost,
    RoundBroken,
    RoundFinished,
)
from backend.reduce.plane import OUTGOING_SLICES
from wire.messages import Accept, Contribution, Exiting, Message, NonFinite, RelayWelcome, SharedMemory, UpdateComing
from wire.session import ChunkHeader

PARAMS, BUFFERS = 5000, 7
INITIAL = OpenRound(-1, 0, {1: (0,), 2: (1,)}, True, PARAMS, BUFFERS)
FIRST = replace(INITIAL, round=0, initial=False)


@asynccontextmanager
async def two_hosts(tmp_path: Path, *steps: Effect) -> AsyncIterator[tuple[Site, ScriptedCore, list[ScriptedHost]]]:
    """Two hosts with attached relays; each press of stop has the next of these effects performed."""
    todo = list(steps)

    def answer(event: Event, now: float) -> list[Effect]:
        if isinstance(event, Operator):
            return [ExpectRelays(INITIAL.hosts)] if event.act == "start" else [todo.pop(0)]
        return []

    core = ScriptedCore(answer)
    async with site(tmp_path, core=lambda: core) as where:
        run_id = await where.controller.create_run(config())
        await where.controller.command(run_id, "start")
        (run,) = where.controller._runs.values()
        hosts = []
        for number in (1, 2):
            host = ScriptedHost(where, f"host {number}")
            host.unread = 2
            host.accept = Accept(run_id, number, [number - 1], b"s" * 32, 10.0, 60.0, 30.0, run.secret)
            await host.attach()
            hosts.append(host)
        yield where, core, hosts


def memory(tmp_path: Path, name: str, values: dict[int, np.ndarray], mode: int = 0o700) -> str:
    directory = tmp_path / name
    directory.mkdir(mode=mode)
    directory.chmod(mode)
    for rank, arena in values.items():
        (directory / f"rank{rank}.out").write_bytes(arena.tobytes())
    return str(directory)


async def next_step(where: Site) -> None:
    await where.controller.command(where.controller.live_run_ids()[0], "stop")


def declared(rank: int, steps: int, round_: int = 0) -> Contribution:
    return Contribution(round_, 0, {rank: steps}, {rank: float(steps)}, {rank: float(steps > 0)}, PARAMS, BUFFERS)


async def test_the_offer_is_for_data_links_of_this_machine(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (_, _, hosts):
        for host in hosts:
            control, data = host.welcomes
            assert control == RelayWelcome()
            assert len(data.proof) == 32
            assert np.fromfile(data.proof_path, np.uint8).tobytes() == data.proof


async def test_a_round_between_memory_and_a_stream(tmp_path: Path) -> None:
    """One host shares its memory, one streams: both end with the same bits, and only one is sent chunks."""
    rng = np.random.default_rng(2)
    base, one, two = (rng.standard_normal(PARAMS + BUFFERS).astype(np.float32) for _ in range(3))
    async with two_hosts(tmp_path, INITIAL, FIRST) as (where, core, (left, right)):
        directory = memory(tmp_path, "left", {0: base})
        await left.data.say(SharedMemory(directory))
        await next_step(where)
        await left.data.say(declared(0, 1, -1))
        await right.data.say(declared(1, 0, -1))
        for host in (left, right):
            coming = await host.data.hear(UpdateComing)
            assert coming.absolute
            if coming.path:
                assert np.fromfile(coming.path, np.float32).tobytes() == base.tobytes()
        for _ in range(2):
            await right.data.next_chunk()

        (tmp_path / "left" / "rank0.out").write_bytes(one.tobytes())
        await next_step(where)
        await left.data.say(declared(0, 3))
        await right.data.say(declared(1, 1))
        for section, start, stop in ((0, 0, PARAMS), (1, PARAMS, PARAMS + BUFFERS)):
            header = ChunkHeader(0, 0, section, start, stop - start)
            await right.data.stream(header, (base - two)[start:stop])
        streamed = base.copy()
        assert (await right.data.hear(UpdateComing)).path == ""
        for _ in range(2):
            header, update = await right.data.next_chunk()
            streamed[header.offset : header.offset + header.elements] -= update
        mapped = np.fromfile((await left.data.hear(UpdateComing)).path, np.float32)
        assert mapped.tobytes() == streamed.tobytes()
        done = [event for event in core.events if isinstance(event, RoundFinished)]
        assert (done[-1].bytes_up, done[-1].bytes_down) == (4 * (PARAMS + BUFFERS),) * 2
        (run,) = where.controller._runs.values()
        assert run.links.data_paths() == {1: "shared memory", 2: "stream"}
    np.testing.assert_allclose(mapped[:PARAMS], (3 * one + two)[:PARAMS] / 4, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", [0o755, 0o500])
async def test_a_directory_that_others_may_enter_ends_the_link_by_name(tmp_path: Path, mode: int) -> None:
    async with two_hosts(tmp_path) as (_, core, (left, _)):
        await left.data.say(SharedMemory(memory(tmp_path, "left", {}, mode)))
        lost = await core.heard(RelayLost)
        assert lost.host == 1
        assert f"its shared memory is refused: {tmp_path}/left has mode {mode:04o}, not 0700" in lost.reason


async def test_bad_memory_of_one_host_is_named_when_the_round_needs_it(tmp_path: Path) -> None:
    async with two_hosts(tmp_path, INITIAL) as (where, core, (left, _)):
        await left.data.say(SharedMemory(memory(tmp_path, "left", {0: np.zeros(3, np.float32)})))
        await next_step(where)
        await left.data.say(declared(0, 1, -1))
        broken = await core.heard(RoundBroken)
        assert (broken.host, broken.non_finite) == (1, None)
        assert "rank0.out has 12 bytes, 5007 elements take 20028" in broken.reason


async def test_what_a_relay_found_reaches_the_core(tmp_path: Path) -> None:
    async with two_hosts(tmp_path, INITIAL) as (where, core, (left, _)):
        await next_step(where)
        await left.data.say(declared(0, 1, -1))
        await left.data.say(NonFinite(-1, 0, 0, 77, "nan"))
        broken = await core.heard(RoundBroken)
        assert (broken.host, broken.non_finite) == (1, NonFiniteValue(0, 77, "nan"))


@pytest.mark.parametrize("message", [RelayWelcome(), UpdateComing(0, 0, False)])
async def test_nothing_else_has_a_place_on_the_data_link(tmp_path: Path, message: Message) -> None:
    async with two_hosts(tmp_path) as (_, core, (left, _)):
        await left.data.say(message)
        lost = await core.heard(RelayLost)
        assert f"{type(message).__name__} has no place on this link" in lost.reason


async def test_a_host_that_does_not_read_holds_up_nobody_elses_control(tmp_path: Path) -> None:
    """Back-pressure is per link: what waits for the one that doesn't read delays nothing on the other's links."""
    big = 1 << 20
    opening = replace(INITIAL, params_elements=8 * big, buffers_elements=0)
    async with two_hosts(tmp_path, opening, AbortRound(-1, 0, "enough")) as (where, core, (left, right)):
        await next_step(where)
        for host, steps in ((left, 1), (right, 0)):
            (rank,) = host.accept.ranks
            share = {rank: float(steps)}
            await host.data.say(Contribution(-1, 0, {rank: steps}, share, share, 8 * big, 0))
        values = np.ones(1 << 18, np.float32)

        async def upload() -> None:
            for offset in range(0, 8 * big, values.size):
                await left.data.stream(ChunkHeader(0xFFFFFFFF, 0, 0, offset, values.size), values)

        work = [asyncio.create_task(upload()), asyncio.create_task(drain(left.data, 8 * big))]
        (run,) = where.controller._runs.values()
        waiting = run.links.data(2)
        assert waiting is not None
        assert run.plane._open is not None
        outgoing = run.plane._open.outgoing
        await eventually(lambda: outgoing.count == OUTGOING_SLICES, "the slow link to hold the sums up")
        await left.control.say(Exiting(1), 0)
        assert (await core.heard(RankSaid)).message == Exiting(1)
        assert waiting.waiting > 0
        await next_step(where)
        await eventually(lambda: waiting.waiting == 0 and outgoing.count <= 1, "what waits to be dropped")
        await work[0]  # the rest of the aborted attempt is taken and ignored
        work[1].cancel()
        await asyncio.gather(*work, return_exceptions=True)
        right.data.socket.transport.abort()
        await right.data.socket.wait_closed()


async def drain(link: Link, elements: int) -> None:
    await link.hear(UpdateComing)
    with contextlib.suppress(TimeoutError):
        while elements:
            header, _ = await link.next_chunk()
            elements -= header.elements
