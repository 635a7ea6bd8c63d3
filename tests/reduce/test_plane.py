"""The plane: order of sums and of slices, attempts, broken rounds, memory."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from plane_kit import ELEMENTS, PARAMS, Bench, arenas, chunks, declared, oracle, share_of, shared

from backend.core.vocabulary import NonFiniteValue, RoundFinished
from wire.arithmetic import F32, FloatArray
from wire.messages import Contribution, NonFinite, UpdateComing
from wire.session import ChunkHeader, Section


async def bench_of(*hosts: int, base: FloatArray | None = None, **more: Any) -> tuple[Bench, FloatArray]:
    """A plane after the initial broadcast to these hosts, and what everybody holds."""
    bench = Bench(**more)
    base = arenas(1, seed=11)[0] if base is None else base
    await bench.start_from(base, *hosts)
    return bench, base


def stream(bench: Bench, host: int, share: FloatArray, **options: Any) -> None:
    for chunk in chunks(share, **options):
        bench.plane.chunk(host, *chunk)


# ---------------------------------------------------------------------------------------------------- one stream


async def test_idle_hosts_send_nothing_and_receive_everything() -> None:
    bench, base = await bench_of(0, 1)
    (share,) = arenas(1)
    bench.open({0: (0,), 1: (1,)})
    bench.plane.contribution(1, declared({1: 0}))
    bench.plane.contribution(0, declared({0: 2}))
    stream(bench, 0, share)
    finished = await bench.finished()
    expected = oracle(base, {0: (declared({0: 2}), share)})
    assert bench.hosts[1].new.tobytes() == bench.hosts[0].new.tobytes() == expected.tobytes()
    assert bench.consensus.tobytes() == expected.tobytes()
    assert (finished.bytes_up, finished.bytes_down) == (4 * ELEMENTS, 2 * 4 * ELEMENTS)
    assert (finished.realized, finished.buffers_realized) == (True, True)


async def test_down_starts_while_up_still_runs() -> None:
    """Full duplex: the first slice is on its way down before the second one has come up."""
    bench, _ = await bench_of(0, 1)
    bench.heard.clear()
    bench.open({0: (0,), 1: (1,)})
    streams = [list(chunks(share)) for share in arenas(2)]
    for host in (0, 1):
        bench.plane.contribution(host, declared({host: 1}))
        assert (bench.host(0).coming is not None) == (host == 1), "said as soon as all have declared"
        bench.plane.chunk(host, *streams[host][0])
    await asyncio.wait_for(bench.heard.wait(), 10)
    assert [header.offset for header in bench.hosts[0].headers] == [0]
    assert bench.results.empty()
    bench.plane.close()


async def test_the_initial_broadcast_is_the_values_to_the_bit() -> None:
    (values,) = arenas(1)
    values[:3] = -0.0, 1e-45, 3e38
    bench, _ = await bench_of(4, 7, base=values)
    for host in (4, 7):
        assert bench.hosts[host].base.tobytes() == values.tobytes()


async def test_the_initial_broadcast_has_a_negative_number() -> None:
    bench, (values,) = Bench(), arenas(1)
    bench.open({0: (0,), 1: (1,)}, -1)
    bench.plane.contribution(0, declared({0: 1}, -1))
    bench.plane.contribution(1, declared({1: 0}, -1))
    stream(bench, 0, values, round_=-1)
    assert (await bench.finished()).round == -1
    assert all(header.problem(None) == "" for header in bench.hosts[1].headers)
    assert bench.hosts[1].told == [UpdateComing(-1, 0, absolute=True)]


@pytest.mark.parametrize(("params", "buffers"), [(0, 0), (3, 0), (0, 3)])
async def test_models_without_a_section(params: int, buffers: int) -> None:
    bench = Bench()
    bench.open({0: (0,)}, -1, params_elements=params, buffers_elements=buffers)
    share = msgspec.structs.replace(declared({0: 2}, -1), params_elements=params, buffers_elements=buffers)
    bench.plane.contribution(0, share)
    if params + buffers:
        section = Section.PARAMS if params else Section.BUFFERS
        payload = memoryview(np.full(3, 6, dtype=np.float32).tobytes())
        bench.plane.chunk(0, ChunkHeader(0xFFFFFFFF, 0, section, 0, 3), payload)
    finished = await bench.finished()
    assert finished.realized
    assert finished.buffers_realized == (buffers > 0)
    assert bench.consensus.tolist() == [3.0] * params + [6.0] * buffers
    bench.plane.close()


async def test_what_is_still_is_neither_sent_nor_touched() -> None:
    bench, base = await bench_of(0, 1)
    stills = {0: [(0, 20), (30, 63)], 1: [(10, 40), (50, 68)]}
    values = {host: base + arena for host, arena in enumerate(arenas(2))}
    shares = {}
    for host, still in stills.items():
        contribution = declared({host: host + 1}, still=still)
        shares[host] = contribution, share_of(contribution, base, {host: values[host]})
    bench.open({0: (0,), 1: (1,)})
    for host, (contribution, share) in shares.items():
        bench.plane.contribution(host, contribution)
        stream(bench, host, share, still=stills[host])
    finished = await bench.finished()
    coming = bench.hosts[0].coming
    assert coming == UpdateComing(0, 0, absolute=False, still=[(10, 20), (30, 40), (50, 63)])
    assert finished.bytes_up == 4 * (ELEMENTS - 53 + ELEMENTS - 48)
    assert finished.bytes_down == 2 * 4 * (ELEMENTS - 33)
    expected = oracle(base, shares)
    assert bench.consensus.tobytes() == bench.hosts[0].new.tobytes() == expected.tobytes()


async def test_what_lay_still_is_up_to_date_in_the_other_buffer() -> None:
    """Two buffers take turns; what did not move in this round may have moved in the one before."""
    bench, base = await bench_of(0)
    dice, rng = random.Random(5), np.random.default_rng(5)
    for round_ in range(12):
        cut = sorted(dice.sample(range(ELEMENTS + 1), 4))
        still = [(cut[0], cut[1]), (cut[2], cut[3])] if round_ % 4 else [(0, ELEMENTS)]
        contribution = declared({0: 3}, round_, still=still)
        values = base + rng.standard_normal(ELEMENTS).astype(F32)
        share = share_of(contribution, base, {0: values})
        bench.open({0: (0,)}, round_)
        bench.plane.contribution(0, contribution)
        stream(bench, 0, share, round_=round_, still=still)
        await bench.finished()
        base = oracle(base, {0: (contribution, share)})
        bench.commit()
        assert bench.consensus.tobytes() == bench.hosts[0].base.tobytes() == base.tobytes(), round_
    bench.plane.close()


async def test_a_round_before_the_initial_broadcast_is_refused() -> None:
    with pytest.raises(ValueError, match="before there is a consensus to differ from"):
        Bench().open({0: (0,)}, 0)


async def test_another_model_than_the_consensus_is_refused() -> None:
    bench, _ = await bench_of(0)
    with pytest.raises(ValueError, match="has 12 elements, the consensus 68"):
        bench.open({0: (0,)}, params_elements=5)


# ----------------------------------------------------------------------------------------- attempts and failures


async def whole_round(bench: Bench, share: FloatArray, round_: int, attempt: int = 0) -> RoundFinished:
    bench.open({0: (0,)}, round_, attempt)
    bench.plane.contribution(0, declared({0: 1}, round_, attempt))
    stream(bench, 0, share, round_=round_, attempt=attempt)
    finished = await bench.finished()
    bench.hosts[0].commit()
    return finished


async def test_late_frames_are_ignored_and_counted() -> None:
    bench, base = await bench_of(0, 1)
    old, new = arenas(2)
    bench.open({0: (0,), 1: (1,)})
    bench.plane.contribution(0, declared({0: 1}))
    stale = list(chunks(old))
    bench.plane.chunk(0, *stale[0])
    bench.plane.abort(0, 0, "rank 1 died")
    bench.plane.chunk(0, *stale[1])
    bench.open({0: (0,)}, attempt=1)
    bench.plane.chunk(0, *stale[2])
    bench.plane.contribution(1, declared({1: 1}))
    bench.plane.non_finite(1, NonFinite(0, 0, 1, 5, "nan"))
    bench.plane.contribution(0, declared({0: 1}, attempt=1))
    bench.plane.contribution(0, declared({0: 1}, attempt=1))
    stream(bench, 0, new, attempt=1)
    finished = await bench.finished()
    assert (finished.attempt, finished.bytes_up) == (1, 4 * ELEMENTS)
    assert bench.hosts[0].new.tobytes() == (base - new).tobytes()
    assert bench.plane.ignored == 5


async def test_sums_of_an_aborted_attempt_cannot_touch_the_next() -> None:
    """Abort and retry at every point of the stream: the survivors' value, to the bit, every time."""
    shares = arenas(2)
    streams = [list(chunks(share)) for share in shares]
    for seed in range(40):
        dice = random.Random(seed)
        bench, base = await bench_of(0, 1, tuning={"threads": 4})
        bench.open({0: (0,), 1: (1,)})
        for host in (0, 1):
            bench.plane.contribution(host, declared({host: 1}))
        for index in range(dice.randint(0, len(streams[0]))):
            for host in (0, 1):
                bench.plane.chunk(host, *streams[host][index])
            if dice.random() < 0.5:
                await asyncio.sleep(0)
        bench.plane.abort(0, 0, "rank 1 died")
        while not bench.results.empty():
            bench.results.get_nowait()
        bench.open({0: (0,)}, attempt=1)
        bench.plane.contribution(0, declared({0: 1}, attempt=1))
        stream(bench, 0, shares[0], attempt=1)
        assert (await bench.finished()).attempt == 1
        assert bench.consensus.tobytes() == bench.hosts[0].new.tobytes() == (base - shares[0]).tobytes(), seed
        bench.plane.close()


async def test_what_an_outbox_still_holds_of_an_aborted_attempt_is_not_overwritten() -> None:
    bench, _ = await bench_of(0, 1, tuning={"outgoing_slices": 100})
    old, new = arenas(2)
    held: list[memoryview] = []

    def hold(host: int, header: ChunkHeader, payload: memoryview) -> None:
        held.append(payload)
        bench.heard.set()

    bench.plane._send = hold
    bench.heard.clear()
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
    bench, base = await bench_of(0)
    first, second, third = arenas(3)
    await whole_round(bench, first, 0)
    after_first = base - first
    bench.open({0: (0,)}, 1)
    bench.plane.contribution(0, declared({0: 1}, 1))
    stream(bench, 0, second, round_=1)
    await bench.finished()
    bench.plane.abort(1, 0, "rank 1 died, before anybody heard that the round was finished")
    assert bench.consensus.tobytes() == after_first.tobytes()
    await whole_round(bench, third, 1, attempt=1)
    assert bench.consensus.tobytes() == bench.hosts[0].base.tobytes() == (after_first - third).tobytes()


async def test_an_abort_of_a_closed_round_changes_nothing() -> None:
    bench, base = await bench_of(0)
    first, second = arenas(2)
    await whole_round(bench, first, 0)
    await whole_round(bench, second, 1)
    bench.open({0: (0,)}, 2)
    bench.plane.abort(1, 0, "too late")
    assert bench.consensus.tobytes() == ((base - first) - second).tobytes()
    assert bench.plane.waiting_for == {0: "its contribution"}


async def test_two_buffers_serve_all_rounds() -> None:
    """Nobody asked for the consensus, so building alternates between two buffers."""
    bench, _ = await bench_of(0)
    addresses = []
    for round_ in range(6):
        await whole_round(bench, arenas(1)[0], round_)
        assert bench.plane._ledger.consensus is not None
        addresses.append(bench.plane._ledger.consensus.values.ctypes.data)
    assert addresses == addresses[:2] * 3
    assert addresses[0] != addresses[1]


async def test_a_consensus_that_was_handed_out_is_never_written_again() -> None:
    bench, _ = await bench_of(0)
    kept = []
    for round_ in range(5):
        await whole_round(bench, arenas(1, seed=round_)[0], round_)
        lent = bench.plane.consensus
        assert lent is not None
        with pytest.raises(ValueError, match="read-only"):
            lent[0] = 1
        kept.append((lent, lent.tobytes()))
    assert all(lent.tobytes() == bits for lent, bits in kept)


async def test_a_bad_contribution_breaks_the_round_and_names_the_host() -> None:
    bench, _ = await bench_of(0, 3)
    bench.open({0: (0,), 3: (1,)})
    bench.plane.contribution(3, declared({1: 1, 2: 1}))
    broken = await bench.broken()
    assert (broken.round, broken.attempt, broken.host) == (0, 0, 3)
    assert broken.reason == "it speaks for ranks [1, 2], this attempt expects [1]"
    bench.plane.contribution(0, declared({0: 1}))
    assert bench.plane.ignored == 1


async def test_a_bad_stream_breaks_the_round_and_names_the_host() -> None:
    bench, _ = await bench_of(0, 3)
    bench.open({0: (0,), 3: (1,)})
    bench.plane.contribution(3, declared({1: 1}))
    bench.plane.chunk(3, *list(chunks(arenas(1)[0]))[1])
    broken = await bench.broken()
    assert (broken.host, broken.reason) == (3, "its chunk starts at element 8 where 0 was due")


async def test_a_round_without_hosts_is_refused() -> None:
    with pytest.raises(ValueError, match="opened without hosts"):
        Bench().open({})


async def test_time_comes_from_the_clock() -> None:
    ticks = itertools.count(100.0, 0.5)
    bench, _ = await bench_of(0, options={"clock": lambda: next(ticks)})
    outcome = await whole_round(bench, arenas(1)[0], 0)
    # One look each: at the opening, at the declaration, at each chunk, at the end.
    assert outcome.declared == 0.5
    assert 0.5 < outcome.arrived == outcome.seconds - 0.5


# --------------------------------------------------------------------------------------------------- not finite


async def broken_by(shares: dict[int, tuple[Contribution, FloatArray]]) -> Any:
    bench, base = await bench_of(*shares)
    bench.open({host: tuple(contribution.masses) for host, (contribution, _) in shares.items()})
    for host, (contribution, _) in shares.items():
        bench.plane.contribution(host, contribution)
    for host, (_, share) in shares.items():
        stream(bench, host, share)
    broken = await bench.broken()
    assert bench.consensus.tobytes() == base.tobytes(), "what was agreed on stays"
    bench.plane.close()
    return broken


async def test_a_stream_that_is_not_finite_names_host_and_element() -> None:
    one, two, three = arenas(3)
    two[PARAMS + 2] = np.inf
    three[3:] = np.nan
    broken = await broken_by({0: (declared({0: 1}), one), 6: (declared({3: 1, 4: 1}), three)})
    assert (broken.host, broken.reason) == (6, "host 6 (ranks 3, 4) contributed nan at element 3 (params)")
    assert broken.non_finite == NonFiniteValue(None, 3, "nan")
    broken = await broken_by({0: (declared({0: 1}), one), 5: (declared({1: 1, 2: 0}), two)})
    assert broken.reason == f"rank 1 of host 5 contributed inf at element {PARAMS + 2} (buffers)"
    assert broken.non_finite == NonFiniteValue(1, PARAMS + 2, "inf"), "only one rank worked there"


async def test_the_first_value_is_named_whichever_thread_is_quicker(tmp_path: Path) -> None:
    """A large piece before a small one: the later one is done first, and is not what is named."""
    base = np.zeros(1 << 20, F32)
    sizes = {"params_elements": base.size - 1, "buffers_elements": 1}
    for values in ({5: np.nan, base.size - 1: np.inf}, {base.size - 1: np.inf}):
        bench = Bench({"mapped_elements": base.size, "threads": 2})
        bench.plane.share(0, shared(tmp_path / str(len(values)), {0: base}))
        bench.open({0: (0,)}, -1, **sizes)
        bench.plane.contribution(0, declared({0: 1}, -1, **sizes))
        await bench.finished()
        bad = base.copy()
        bad[list(values)] = list(values.values())
        bench.plane.share(0, shared(tmp_path / str(len(values)), {0: bad}))
        bench.open({0: (0,)}, 0, **sizes)
        bench.plane.contribution(0, declared({0: 1}, 0, **sizes))
        broken = await bench.broken()
        assert broken.non_finite is not None
        assert broken.non_finite.element == min(values)
        bench.plane.close()


async def test_opposite_infinities_do_not_hide() -> None:
    one, two = arenas(2)
    one[1], two[1] = -np.inf, np.inf
    broken = await broken_by({0: (declared({0: 1}), one), 1: (declared({1: 1}), two)})
    assert broken.non_finite == NonFiniteValue(0, 1, "-inf")


async def test_a_sum_that_overflows_blames_nobody() -> None:
    one, two = arenas(2)
    one[5] = two[5] = 3e38
    broken = await broken_by({0: (declared({0: 1}), one), 1: (declared({1: 1}), two)})
    assert (broken.host, broken.non_finite) == (None, None)
    assert broken.reason == "the new consensus is -inf at element 5 (params), though every contribution is finite"


async def test_a_relay_that_reports_a_value_breaks_the_round_at_once() -> None:
    bench, _ = await bench_of(0, 4)
    bench.open({0: (0,), 4: (1, 2)})
    bench.plane.contribution(4, declared({1: 1, 2: 1}))
    bench.plane.non_finite(4, NonFinite(0, 0, 2, 62, "inf"))
    broken = await bench.broken()
    assert (broken.host, broken.non_finite) == (4, NonFiniteValue(2, 62, "inf"))
    assert broken.reason == "rank 2 of host 4 contributed inf at element 62 (buffers)"


@pytest.mark.parametrize(("rank", "element"), [(0, 5), (1, ELEMENTS), (1, -1)])
async def test_a_relay_speaks_for_its_own_ranks_only(rank: int, element: int) -> None:
    bench, _ = await bench_of(0, 4)
    bench.open({0: (0,), 4: (1,)})
    bench.plane.non_finite(4, NonFinite(0, 0, rank, element, "nan"))
    broken = await bench.broken()
    assert (broken.host, broken.non_finite) == (4, None)
    assert broken.reason == f"it speaks of element {element} of rank {rank}, of which it knows nothing"


# ------------------------------------------------------------------------------------------------------- memory


async def reads(bench: Bench, host: int, share: FloatArray, taken: list[int]) -> None:
    """A data link's reader, as the runtime has it."""
    for header, payload in chunks(share):
        await bench.plane.room(host)
        bench.plane.chunk(host, header, payload)
        taken.append(header.offset)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_fast_host_waits_for_the_slow_one() -> None:
    bench, base = await bench_of(0, 1, tuning={"window_slices": 2})
    shares = arenas(2)
    bench.open({0: (0,), 1: (1,)})
    for host in (0, 1):
        bench.plane.contribution(host, declared({host: 1}))
    fast: list[int] = []
    slow: list[int] = []
    reader = asyncio.create_task(reads(bench, 0, shares[0], fast))
    await settle()
    assert fast == [0, 8], "two slices ahead and no further"
    await asyncio.wait_for(reads(bench, 1, shares[1], slow), 10)
    await asyncio.wait_for(reader, 10)
    await bench.finished()
    expected = oracle(base, {host: (declared({host: 1}), share) for host, share in enumerate(shares)})
    assert bench.hosts[0].new.tobytes() == expected.tobytes()


async def test_sums_wait_for_a_link_that_is_slow_to_send() -> None:
    """What is summed and not sent costs memory, once for all hosts; it goes on as soon as somebody lets go of it."""
    bench, base = await bench_of(0, 1, tuning={"outgoing_slices": 3, "threads": 2})
    (share,) = arenas(1)
    queue: list[Any] = []
    bench.plane._send = lambda *item: queue.append(item)
    bench.open({0: (0,), 1: (1,)})
    bench.plane.contribution(1, declared({1: 0}))
    bench.plane.contribution(0, declared({0: 1}))
    stream(bench, 0, share)
    most = 0
    while bench.results.empty():
        await settle()
        most = max(most, len(queue))
        if queue:
            bench.host(queue[0][0]).take(*queue.pop(0)[1:])
    assert most == 2 * 3, "three slices, for two hosts each"
    while queue:
        bench.host(queue[0][0]).take(*queue.pop(0)[1:])
    assert bench.hosts[0].new.tobytes() == bench.hosts[1].new.tobytes() == (base - share).tobytes()
    assert len(bench.hosts[1].headers) == len(bench.hosts[0].headers) == 9


async def test_a_link_that_is_stuck_with_an_aborted_attempt_does_not_hold_up_the_next() -> None:
    bench, base = await bench_of(0, tuning={"outgoing_slices": 1})
    first, second = arenas(2)
    queue: list[Any] = []
    send = bench.plane._send

    def hold(*item: Any) -> None:
        queue.append(item)
        bench.heard.set()

    bench.plane._send = hold
    bench.heard.clear()
    bench.open({0: (0,)})
    bench.plane.contribution(0, declared({0: 1}))
    stream(bench, 0, first)
    await asyncio.wait_for(bench.heard.wait(), 10)
    bench.plane.abort(0, 0, "somebody died")
    bench.plane._send = send
    await whole_round(bench, second, 0, attempt=1)
    assert bench.hosts[0].base.tobytes() == (base - second).tobytes()


@pytest.mark.parametrize("ending", ["abort", "break", "close"])
async def test_the_end_of_an_attempt_frees_who_waits(ending: str) -> None:
    bench, _ = await bench_of(0, 1, tuning={"window_slices": 1})
    bench.open({0: (0,), 1: (1,)})
    bench.plane.contribution(0, declared({0: 1}))
    taken: list[int] = []
    reader = asyncio.create_task(reads(bench, 0, arenas(1)[0], taken))
    await settle()
    assert not reader.done()
    if ending == "abort":
        bench.plane.abort(0, 0, "rank 1 died")
    elif ending == "break":
        bench.plane.contribution(1, declared({9: 1}))
    else:
        bench.plane.close()
    await asyncio.wait_for(reader, 10)
    assert taken == [header.offset for header, _ in chunks(arenas(1)[0])], "it reads on, and the rest is ignored"
