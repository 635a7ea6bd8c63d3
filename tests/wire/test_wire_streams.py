"""Streams of one attempt: who contributes, what breaks it, when a slice is complete, and what is summed then."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wire import arithmetic, ranges
from wire.arithmetic import BF16, F32, FloatArray
from wire.messages import Contribution, FoldOrder
from wire.session import ChunkHeader, Section
from wire.streams import ContributionRefused, Slice, Streams, chunk_round, same_round, slices, total

PARAMS, BUFFERS = 10, 4
ORDER = FoldOrder(4, 1, {2: [3, 5], 0: [1]}, PARAMS, BUFFERS)


def contribution(ranks: dict[int, int], **changes: Any) -> Contribution:
    """Steps by rank, masses as gamma 1 makes them."""
    base = Contribution(
        round=4,
        attempt=1,
        steps=ranks,
        masses={rank: float(steps) for rank, steps in ranks.items()},
        mover_masses={rank: float(steps > 0) for rank, steps in ranks.items()},
        params_elements=PARAMS,
        buffers_elements=BUFFERS,
    )
    return msgspec.structs.replace(base, **changes)


def header(offset: int, elements: int, section: int = Section.PARAMS, **changes: int) -> ChunkHeader:
    return ChunkHeader(4, 1, section, offset, elements, **changes)


def payload(size: int, value: float = 0) -> memoryview:
    return memoryview(np.full(size // 4, value, F32).tobytes())


def declared(first: int = 2, second: int = 1, **changes: Any) -> Streams:
    streams = Streams(ORDER)
    assert streams.contribute(2, contribution({3: first, 5: 0}, **changes))
    assert streams.contribute(0, contribution({1: second}))
    return streams


def test_divisor_is_built_from_what_was_accepted() -> None:
    streams = Streams(ORDER)
    assert not streams.declared
    assert streams.contribute(2, contribution({3: 2, 5: 3}))
    assert (streams.mass, streams.mover_mass, streams.declared) == (5.0, 2.0, False)
    assert streams.contribute(0, contribution({1: 4}))
    assert (streams.mass, streams.mover_mass, streams.declared) == (9.0, 3.0, True)
    assert streams.steps == {1: 4, 3: 2, 5: 3}
    assert streams.hosts == [0, 2]
    assert streams.contributors == [0, 2]
    assert streams.realized
    assert streams.buffers_realized


def test_nobody_worked() -> None:
    streams = declared(0, 0)
    assert not streams.realized
    assert not streams.buffers_realized
    assert streams.contributors == []
    assert streams.steps == {1: 0, 3: 0, 5: 0}
    assert streams.slices() == []


REFUSED = [
    pytest.param({"steps": {1: 1, 9: 1}}, "ranks [1, 9], this attempt expects [1]", id="foreign rank"),
    pytest.param({"masses": {}}, "speaks for ranks []", id="rank missing"),
    pytest.param({"mover_masses": {1: 1.0, 3: 1.0}}, "ranks [1, 3]", id="another host's rank"),
    pytest.param({"params_elements": 11}, "11 parameter and 4 buffer elements", id="another model"),
    pytest.param({"buffers_elements": 0}, "10 parameter and 0 buffer elements", id="other buffers"),
    pytest.param({"masses": {1: float("nan")}}, "rank 1 declares a mass of nan", id="nan"),
    pytest.param({"masses": {1: float("inf")}}, "rank 1 declares a mass of inf", id="infinite"),
    pytest.param({"masses": {1: -1.0}}, "rank 1 declares a mass of -1.0", id="negative"),
    pytest.param({"mover_masses": {1: -0.5}}, "a mover mass of -0.5", id="negative mover"),
    pytest.param({"masses": {1: 1e38}}, "outside 1e-30 to 1e+30", id="too large"),
    pytest.param({"masses": {1: 1e-310}}, "outside 1e-30 to 1e+30", id="denormal"),
    pytest.param({"masses": {1: 0.0}}, "4 steps and a mass of 0", id="work without mass"),
    pytest.param({"steps": {1: 0}}, "0 steps and a mass of 4", id="mass without work"),
    pytest.param({"mover_masses": {1: 0.0}}, "4 steps and a mover mass of 0", id="work without mover mass"),
    pytest.param({"still": [(2, 15)]}, "elements 2 to 15 are out of order or beyond 14", id="still beyond the end"),
    pytest.param({"still": [(2, 4), (3, 5)]}, "elements 3 to 5 are out of order", id="still overlaps"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED)
def test_contribution_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    streams = Streams(ORDER)
    with pytest.raises(ContributionRefused) as refused:
        streams.contribute(0, contribution({1: 4}, **changes))
    assert reason in refused.value.reason
    assert refused.value.host == 0
    assert streams.contributions == {}


def test_nothing_is_still_in_the_initial_broadcast() -> None:
    with pytest.raises(ContributionRefused, match="leaves elements out of the initial broadcast"):
        Streams(ORDER, initial=True).contribute(0, contribution({1: 4}, still=[(0, 1)]))


def test_a_repeat_changes_nothing_and_a_second_version_is_refused() -> None:
    streams = declared()
    streams.arrived(0, header(0, 6), payload(24))
    assert not streams.contribute(0, contribution({1: 1}))
    assert streams.held(0) == 6
    with pytest.raises(ContributionRefused, match="two different contributions"):
        streams.contribute(0, contribution({1: 2}))


def test_streams_are_counted_by_where_they_end() -> None:
    streams = declared()
    first, last = Slice(Section.PARAMS, 0, 6), Slice(Section.BUFFERS, 10, 4)
    streams.arrived(0, header(0, 7), payload(28))
    assert not streams.complete(first)
    streams.arrived(2, header(0, 2), payload(8))
    streams.arrived(2, header(2, 4), payload(16))
    assert streams.complete(first)
    streams.arrived(0, header(7, 3), payload(12))
    streams.arrived(0, header(10, 4, Section.BUFFERS), payload(16))
    assert streams.waiting_for() == {2: "elements from 6 of 14"}
    assert not streams.complete(last)


def test_what_is_still_is_not_waited_for() -> None:
    streams = declared(still=[(0, 3), (8, 12)])
    assert streams.slices() == [Slice(Section.PARAMS, 0, 10), Slice(Section.BUFFERS, 10, 4)], "the other host moved it"
    assert streams.waiting_for() == {0: "elements from 0 of 14", 2: "elements from 3 of 14"}
    streams.arrived(2, header(3, 5), payload(20))
    assert streams.complete(Slice(Section.PARAMS, 9, 1)) is False
    streams.arrived(0, header(0, 10), payload(40))
    assert streams.complete(Slice(Section.PARAMS, 0, 10))
    assert streams.waiting_for() == {0: "elements from 10 of 14", 2: "elements from 12 of 14"}


def test_what_no_contributor_moved_is_left_out() -> None:
    streams = Streams(ORDER)
    streams.contribute(0, contribution({1: 1}, still=[(0, 4), (6, 14)]))
    streams.contribute(2, contribution({3: 0, 5: 0}))
    assert streams.still == [(0, 4), (6, 14)]
    assert streams.slices() == [Slice(Section.PARAMS, 4, 2)]


def test_memory_is_counted_until_the_sum_is_made() -> None:
    streams = declared()
    for host in (0, 2):
        streams.arrived(host, header(0, 7), payload(28))
    taken = streams.take(Slice(Section.PARAMS, 0, 4))
    assert [streams.held(host) for host in (0, 2)] == [7, 7]
    streams.summed(taken)
    assert [streams.held(host) for host in (0, 2)] == [3, 3]


def test_shared_memory_sends_no_chunks() -> None:
    streams = Streams(ORDER)
    streams.contribute(0, contribution({1: 1}), streamed=False)
    streams.contribute(2, contribution({3: 1, 5: 0}), streamed=False)
    assert all(map(streams.complete, streams.slices()))
    assert streams.waiting_for() == {}
    assert streams.take(streams.slices()[0]) == {}
    with pytest.raises(ContributionRefused, match="shares its memory and sent chunks"):
        streams.arrived(0, header(0, 4), payload(16))


def test_waiting_for_names_the_silent() -> None:
    streams = Streams(ORDER)
    streams.contribute(2, contribution({3: 0, 5: 0}))
    assert streams.waiting_for() == {0: "its contribution"}


CHUNKS = [
    pytest.param(0, header(1, 3), 12, "element 1 where 0 was due", id="gap"),
    pytest.param(0, header(0, 11), 44, "elements 0 to 11 leaves section 0", id="across the border"),
    pytest.param(0, header(0, 4, Section.BUFFERS), 16, "leaves section 1", id="buffers too early"),
    pytest.param(0, header(12, 4, Section.BUFFERS), 16, "leaves section 1", id="beyond the end"),
    pytest.param(0, header(0, 4), 12, "chunk of 4 elements has 12 bytes", id="short payload"),
    pytest.param(0, header(0, 4, encoding=1), 8, "encoding 1 where 0 (f32) was due", id="another encoding"),
    pytest.param(2, header(0, 4), 16, "declared no work and sent chunks", id="idle host"),
]


@pytest.mark.parametrize(("host", "chunk", "size", "reason"), CHUNKS)
def test_stream_is_refused_by_name(host: int, chunk: ChunkHeader, size: int, reason: str) -> None:
    streams = declared(first=0)
    with pytest.raises(ContributionRefused) as refused:
        streams.arrived(host, chunk, payload(size))
    assert reason in refused.value.reason
    assert refused.value.host == host


def test_bf16_is_for_parameters_only() -> None:
    streams = Streams(msgspec.structs.replace(ORDER, encoding=1))
    streams.contribute(0, contribution({1: 1}, still=[(0, 8)]))
    with pytest.raises(ContributionRefused, match=r"encoding 0 where 1 \(bf16\) was due"):
        streams.arrived(0, header(8, 2), payload(8))
    streams.arrived(0, header(8, 2, encoding=1), payload(4))
    with pytest.raises(ContributionRefused, match=r"encoding 1 where 0 \(f32\) was due"):
        streams.arrived(0, header(10, 4, Section.BUFFERS, encoding=1), payload(8))


def test_chunks_before_the_declaration_are_refused() -> None:
    with pytest.raises(ContributionRefused, match="before its contribution"):
        Streams(ORDER).arrived(0, header(0, 4), payload(16))


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        pytest.param(header(0, 4), "element 0 where 4 was due", id="repeat"),
        pytest.param(header(2, 4), "element 2 where 4 was due", id="overlap"),
        pytest.param(header(4, 3), "elements 4 to 7 goes on beyond 6", id="into still"),
        pytest.param(header(6, 2), "element 6 where 4 was due", id="still"),
    ],
)
def test_a_chunk_that_is_not_due_is_refused(chunk: ChunkHeader, reason: str) -> None:
    streams = declared(still=[(6, 8)])
    streams.arrived(2, header(0, 4), payload(16))
    with pytest.raises(ContributionRefused, match=reason):
        streams.arrived(2, chunk, payload(4 * chunk.elements))


def test_a_chunk_after_the_last_is_refused() -> None:
    streams = declared(still=[(0, 14)])
    with pytest.raises(ContributionRefused, match="element 0 where nothing more was due"):
        streams.arrived(2, header(0, 4), payload(16))


CUTS = [
    (0, 0, 4, [], []),
    (4, 0, 4, [], [(0, 0, 4)]),
    (5, 0, 4, [], [(0, 0, 4), (0, 4, 1)]),
    (5, 3, 4, [], [(0, 0, 4), (0, 4, 1), (1, 5, 3)]),
    (0, 3, 2, [], [(1, 0, 2), (1, 2, 1)]),
    (5, 3, 4, [(1, 3), (4, 6)], [(0, 0, 1), (0, 3, 1), (1, 6, 2)]),
    (5, 3, 4, [(0, 8)], []),
]


@pytest.mark.parametrize(("params", "buffers", "size", "still", "expected"), CUTS)
def test_slices(
    params: int, buffers: int, size: int, still: ranges.Ranges, expected: list[tuple[int, int, int]]
) -> None:
    cut = slices(params, buffers, still, size)
    assert [(int(piece.section), piece.offset, piece.elements) for piece in cut] == expected


@pytest.mark.parametrize("round_", [-1, 0, 7, 2**32 - 2])
def test_rounds_fit_chunk_headers(round_: int) -> None:
    chunk = ChunkHeader(chunk_round(round_), 2, 0, 0, 1)
    assert chunk.problem(4) == ""
    assert same_round(chunk, round_, 2)
    assert not same_round(chunk, round_ + 1, 2)
    assert not same_round(chunk, round_, 1)


# ---------------------------------------------------------------------------------------------------------- sums


def streamed(values: FloatArray, still: ranges.Ranges, encoding: int, dice: random.Random) -> list[Any]:
    """(header, payload) of one host's stream, cut anywhere."""
    chunks = []
    for section, start, stop in ((Section.PARAMS, 0, PARAMS), (Section.BUFFERS, PARAMS, PARAMS + BUFFERS)):
        bf16 = encoding if section == Section.PARAMS else 0
        for offset, end in ranges.complement(still, start, stop):
            while offset < end:
                size = dice.randint(1, min(5, end - offset))
                piece = values[offset : offset + size]
                if bf16:
                    bits = np.empty(size, BF16)
                    arithmetic.encode_bf16(piece, bits)
                    piece = bits
                chunks.append((header(offset, size, section, encoding=bf16), memoryview(piece.tobytes())))
                offset += size
    return chunks


RANGES = st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), max_size=4).map(ranges.normalized)


@settings(max_examples=300, deadline=None)
@given(
    stills=st.tuples(RANGES, RANGES),
    encoding=st.integers(0, 1),
    longest=st.integers(1, 9),
    seed=st.integers(0, 1 << 32),
)
def test_same_bits_whatever_the_order_the_cuts_and_what_is_left_out(
    stills: tuple[ranges.Ranges, ranges.Ranges], encoding: int, longest: int, seed: int
) -> None:
    dice, rng = random.Random(seed), np.random.default_rng(seed)
    order = msgspec.structs.replace(ORDER, encoding=encoding)
    values = rng.standard_normal((2, PARAMS + BUFFERS)).astype(F32)
    values[rng.random(values.shape) < 0.2] = -0.0
    for host, still in enumerate(stills):
        for start, stop in still:
            values[host, start:stop] = 0.0
    expected = values.copy()
    for host in (0, 1):
        if encoding:
            arithmetic.round_bf16(expected[host, :PARAMS])
    arithmetic.add(expected[0], expected[1])

    streams = Streams(order, longest=longest)
    queues = {host: streamed(values[index], stills[index], encoding, dice) for index, host in enumerate((0, 2))}
    streams.contribute(0, contribution({1: 1}, still=stills[0]))
    streams.contribute(2, contribution({3: 1, 5: 0}, still=stills[1]))
    made = np.zeros(PARAMS + BUFFERS, F32)
    plan, done = streams.slices(), 0
    while done < len(plan):
        while done < len(plan) and streams.complete(plan[done]):
            piece = plan[done]
            taken = streams.take(piece)
            total(list(taken.values()), piece.offset, piece.stop, made[piece.offset : piece.stop])
            streams.summed(taken)
            done += 1
        if waiting := [host for host, queue in queues.items() if queue]:
            host = dice.choice(waiting)
            streams.arrived(host, *queues[host].pop(0))
    assert made.tobytes() == expected[0].tobytes()
    assert streams.held(0) == streams.held(2) == 0
