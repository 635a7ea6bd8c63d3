"""The plane: order of sums and of slices, attempts, broken rounds, memory."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from plane_kit import ELEMENTS, PARAMS, Bench, arenas, chunks, declared, oracle

from backend.core.vocabulary import OpenRound, RoundFinished
from wire.messages import Contribution
from wire.session import ChunkHeader, Section

# ------------------------------------------------------------------------------------------------- the same bits


async def test_same_bits_whatever_the_arrival_order_and_the_cuts() -> None:
    given = arenas(4)
    expected = oracle(given, 10.0, 4.0).tobytes()
    for seed in range(100):
        dice = random.Random(seed)
        bench = Bench({"slice_elements": dice.randint(1, 30), "threads": dice.randint(1, 4)})
        bench.open({7: (0,), 1: (1,), 4: (2,), 2: (3,)})
        by_host = dict(zip((1, 2, 4, 7), given, strict=True))
        queues: dict[int, list[Any]] = {
            host: [declared({rank: rank + 1}), *chunks(by_host[host], dice.randint(1, 40), dice=dice)]
            for host, rank in ((7, 0), (1, 1), (4, 2), (2, 3))
        }
        while waiting := [host for host, queue in queues.items() if queue]:
            host = dice.choice(waiting)
            item = queues[host].pop(0)
            if isinstance(item, Contribution):
                bench.plane.contribution(host, item)
            else:
                bench.plane.chunk(host, *item)
            if dice.random() < 0.2:
                await asyncio.sleep(0)
        finished = await bench.finished()
        assert (finished.mass, finished.steps) == (10.0, {0: 1, 1: 2, 2: 3, 3: 4})
        for host in by_host:
            assert bench.arenas[host].tobytes() == expected, f"seed {seed}, host {host}"
            offsets = [header.offset for header in bench.sent[host]]
            assert offsets == sorted(offsets), "slices go out in order"
        assert bench.plane.consensus is not None
        assert bench.plane.consensus.tobytes() == expected
        bench.plane.close()


async def test_idle_hosts_send_nothing_and_receive_everything() -> None:
    bench, (arena,) = Bench(), arenas(1)
    bench.open({0: (0,), 1: (1,)})
    bench.plane.contribution(1, declared({1: 0}))
    bench.plane.contribution(0, declared({0: 2}))
    for header, payload in chunks(arena):
        bench.plane.chunk(0, header, payload)
    finished = await bench.finished()
    assert bench.arenas[1].tobytes() == oracle([arena], 2.0, 1.0).tobytes()
    assert (finished.bytes_up, finished.bytes_down) == (4 * ELEMENTS, 2 * 4 * ELEMENTS)
    assert (finished.realized, finished.buffers_realized) == (True, True)


async def test_down_starts_while_up_still_runs() -> None:
    """Full duplex: the first slice is on its way down before the second one has come up."""
    bench, given = Bench(), arenas(2)
    bench.open({0: (0,), 1: (1,)})
    streams = [list(chunks(arena)) for arena in given]
    for host in (0, 1):
        bench.plane.contribution(host, declared({host: 1}))
        bench.plane.chunk(host, *streams[host][0])
    await asyncio.wait_for(bench.heard.wait(), 10)
    assert [header.offset for header in bench.sent[0]] == [0]
    assert bench.results.empty()


async def test_the_initial_broadcast_has_a_negative_number() -> None:
    bench, (arena,) = Bench(), arenas(1)
    bench.open({0: (0,), 1: (1,)}, round_=-1)
    bench.plane.contribution(0, declared({0: 1}, round_=-1))
    bench.plane.contribution(1, declared({1: 0}, round_=-1))
    for header, payload in chunks(arena, round_=-1):
        bench.plane.chunk(0, header, payload)
    finished = await bench.finished()
    assert finished.round == -1
    assert all(header.problem(None) == "" for header in bench.sent[1])
    assert bench.arenas[1].tobytes() == arena.tobytes()


@pytest.mark.parametrize(("params", "buffers"), [(0, 0), (3, 0), (0, 3)])
async def test_models_without_a_section(params: int, buffers: int) -> None:
    bench = Bench()
    bench.plane.open(OpenRound(0, 0, {0: (0,)}, False, params, buffers))
    share = msgspec.structs.replace(declared({0: 2}), params_elements=params, buffers_elements=buffers)
    bench.plane.contribution(0, share)
    if params + buffers:
        section = Section.PARAMS if params else Section.BUFFERS
        payload = memoryview(np.full(3, 6, dtype=np.float32).tobytes())
        bench.plane.chunk(0, ChunkHeader(0, 0, section, 0, 3), payload)
    finished = await bench.finished()
    assert finished.realized
    assert finished.buffers_realized == (buffers > 0)
    assert bench.plane.consensus is not None
    assert bench.plane.consensus.tolist() == [3.0] * params + [6.0] * buffers


# ----------------------------------------------------------------------------------------- attempts and failures


async def whole_round(bench: Bench, arena: np.ndarray, round_: int, attempt: int = 0) -> RoundFinished:
    bench.open({0: (0,)}, round_, attempt)
    bench.plane.contribution(0, declared({0: 1}, round_, attempt))
    for header, payload in chunks(arena, round_=round_, attempt=attempt):
        bench.plane.chunk(0, header, payload)
    return await bench.finished()


async def test_late_frames_are_ignored_and_counted() -> None:
    bench, (old, new) = Bench(), arenas(2)
    bench.open({0: (0,), 1: (1,)})
    bench.plane.contribution(0, declared({0: 1}))
    stale = list(chunks(old))
    bench.plane.chunk(0, *stale[0])
    bench.plane.abort(0, 0, "rank 1 died")
    bench.plane.chunk(0, *stale[1])
    bench.open({0: (0,)}, attempt=1)
    bench.plane.chunk(0, *stale[2])
    bench.plane.contribution(1, declared({1: 1}))
    bench.plane.contribution(0, declared({0: 1}, attempt=1))
    for header, payload in chunks(new, attempt=1):
        bench.plane.chunk(0, header, payload)
        bench.plane.chunk(0, header, payload)
    finished = await bench.finished()
    assert (finished.attempt, finished.bytes_up) == (1, 4 * ELEMENTS)
    assert bench.arenas[0].tobytes() == new.tobytes()
    assert bench.plane.ignored == 3 + len(stale)


async def test_sums_of_an_aborted_attempt_cannot_touch_the_next() -> None:
    """Abort and retry at every point of the stream: the survivors' value, to the bit, every time."""
    given = arenas(2)
    for seed in range(40):
        dice = random.Random(seed)
        bench = Bench({"threads": 4})
        bench.open({0: (0,), 1: (1,)})
        streams = [list(chunks(arena)) for arena in given]
        for host in (0, 1):
            bench.plane.contribution(host, declared({host: 1}))
        for index in range(dice.randint(0, len(streams[0]))):
            for host in (0, 1):
                bench.plane.chunk(host, *streams[host][index])
            if dice.random() < 0.5:
                await asyncio.sleep(0)
        bench.plane.abort(0, 0, "rank 1 died")
        bench.arenas.clear()
        while not bench.results.empty():
            bench.results.get_nowait()
        bench.open({0: (0,)}, attempt=1)
        bench.plane.contribution(0, declared({0: 1}, attempt=1))
        for header, payload in chunks(given[0], attempt=1):
            bench.plane.chunk(0, header, payload)
        assert (await bench.finished()).attempt == 1
        assert bench.plane.consensus is not None
        assert bench.plane.consensus.tobytes() == given[0].tobytes(), seed
        bench.plane.close()


async def test_what_an_outbox_still_holds_of_an_aborted_attempt_is_not_overwritten() -> None:
    bench, (old, new) = Bench(), arenas(2)
    held: list[memoryview] = []

    def hold(host: int, header: ChunkHeader, payload: memoryview) -> None:
        held.append(payload)
        bench.heard.set()

    bench.plane._send = hold
    bench.open({0: (0,), 1: (1,)})
    bench.plane.contribution(0, declared({0: 1}))
    bench.plane.contribution(1, declared({1: 0}))
    bench.plane.chunk(0, *next(chunks(old)))
    await asyncio.wait_for(bench.heard.wait(), 10)
    first = held[0]
    bench.plane.abort(0, 0, "rank 1 died")
    await whole_round(bench, new, 0, attempt=1)
    assert first.tobytes() == old[:8].tobytes()


async def test_an_abort_that_crosses_the_finish_takes_it_back() -> None:
    bench, (first, second, third) = Bench(), arenas(3)
    await whole_round(bench, first, 0)
    await whole_round(bench, second, 1)
    bench.plane.abort(1, 0, "rank 1 died, before anybody heard that the round was finished")
    assert bench.plane.consensus is not None
    assert bench.plane.consensus.tobytes() == first.tobytes()
    await whole_round(bench, third, 1, attempt=1)
    assert bench.plane.consensus.tobytes() == third.tobytes()


async def test_an_abort_of_a_closed_round_changes_nothing() -> None:
    bench, (first, second) = Bench(), arenas(2)
    await whole_round(bench, first, 0)
    await whole_round(bench, second, 1)
    bench.open({0: (0,)}, 2)
    bench.plane.abort(1, 0, "too late")
    assert bench.plane.consensus is not None
    assert bench.plane.consensus.tobytes() == second.tobytes()
    assert bench.plane.waiting_for == {0: "its contribution"}


async def test_two_arenas_serve_all_rounds() -> None:
    """Nobody asked for the consensus, so building alternates between two buffers."""
    bench, (arena,) = Bench(), arenas(1)
    addresses = []
    original = bench._send

    def remember(host: int, header: ChunkHeader, payload: memoryview) -> None:
        if header.offset == 0:
            addresses.append(np.frombuffer(payload, "<f4").ctypes.data)
        original(host, header, payload)

    bench.plane._send = remember
    for round_ in range(6):
        await whole_round(bench, arena, round_)
    assert addresses == addresses[:2] * 3
    assert addresses[0] != addresses[1]


async def test_a_bad_contribution_breaks_the_round_and_names_the_host() -> None:
    bench = Bench()
    bench.open({0: (0,), 3: (1,)})
    bench.plane.contribution(3, declared({1: 1, 2: 1}))
    broken = await bench.broken()
    assert (broken.round, broken.attempt, broken.host) == (0, 0, 3)
    assert broken.reason == "it speaks for ranks [1, 2], this attempt expects [1]"
    bench.plane.contribution(0, declared({0: 1}))
    assert bench.plane.ignored == 1


async def test_a_bad_stream_breaks_the_round_and_names_the_host() -> None:
    bench, (arena,) = Bench(), arenas(1)
    bench.open({0: (0,), 3: (1,)})
    bench.plane.contribution(3, declared({1: 1}))
    stream = list(chunks(arena))
    bench.plane.chunk(3, *stream[1])
    broken = await bench.broken()
    assert (broken.host, broken.reason) == (3, "its chunk starts at element 8 where 0 was due")


async def test_non_finite_values_name_host_and_element() -> None:
    bench, given = Bench(), arenas(3)
    given[1][PARAMS + 2] = np.inf
    given[2][3:] = np.nan
    bench.open({0: (0,), 5: (1, 2), 6: (3,)})
    shares = {0: {0: 1}, 5: {1: 1, 2: 0}, 6: {3: 1}}
    for host, share in shares.items():
        bench.plane.contribution(host, declared(share))
    for host, arena in zip(shares, given, strict=True):
        for header, payload in chunks(arena):
            bench.plane.chunk(host, header, payload)
    broken = await bench.broken()
    assert (broken.host, broken.reason) == (6, "host 6 (ranks 3) contributed nan at element 3 (params)")
    assert bench.plane.consensus is None
    bench.open({0: (0,), 5: (1, 2)}, attempt=1)
    for host in (0, 5):
        bench.plane.contribution(host, declared(shares[host], attempt=1))
        for header, payload in chunks(given[host == 5], attempt=1):
            bench.plane.chunk(host, header, payload)
    broken = await bench.broken()
    assert broken.host == 5
    assert broken.reason == f"host 5 (ranks 1, 2) contributed inf at element {PARAMS + 2} (buffers)"


async def test_a_round_without_hosts_is_refused() -> None:
    with pytest.raises(ValueError, match="opened without hosts"):
        Bench().open({})


async def test_time_comes_from_the_clock() -> None:
    ticks = iter([10.0, 13.5])
    bench, (arena,) = Bench({"clock": lambda: next(ticks)}), arenas(1)
    assert (await whole_round(bench, arena, 0)).seconds == 3.5


# ------------------------------------------------------------------------------------------------------- memory


async def reads(bench: Bench, host: int, stream: list[Any], taken: list[int]) -> None:
    """A data link's reader, as the runtime has it."""
    for header, payload in stream:
        await bench.plane.room(host)
        bench.plane.chunk(host, header, payload)
        taken.append(header.offset)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_fast_host_waits_for_the_slow_one() -> None:
    bench, given = Bench({"window_slices": 2}), arenas(2)
    bench.open({0: (0,), 1: (1,)})
    for host in (0, 1):
        bench.plane.contribution(host, declared({host: 1}))
    fast: list[int] = []
    slow: list[int] = []
    reader = asyncio.create_task(reads(bench, 0, list(chunks(given[0])), fast))
    await settle()
    assert fast == [0, 8], "two slices ahead and no further"
    await asyncio.wait_for(reads(bench, 1, list(chunks(given[1])), slow), 10)
    await asyncio.wait_for(reader, 10)
    await bench.finished()
    assert bench.arenas[0].tobytes() == oracle(given, 2.0, 2.0).tobytes()


@pytest.mark.parametrize("ending", ["abort", "break", "close"])
async def test_the_end_of_an_attempt_frees_who_waits(ending: str) -> None:
    bench, (arena,) = Bench({"window_slices": 1}), arenas(1)
    bench.open({0: (0,), 1: (1,)})
    bench.plane.contribution(0, declared({0: 1}))
    taken: list[int] = []
    reader = asyncio.create_task(reads(bench, 0, list(chunks(arena)), taken))
    await settle()
    assert not reader.done()
    if ending == "abort":
        bench.plane.abort(0, 0, "rank 1 died")
    elif ending == "break":
        bench.plane.contribution(1, declared({9: 1}))
    else:
        bench.plane.close()
    await asyncio.wait_for(reader, 10)
    assert taken == [header.offset for header, _ in chunks(arena)], "it reads on, and the rest is ignored"
