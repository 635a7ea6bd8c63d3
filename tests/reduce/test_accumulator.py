"""Counting: who contributes, what breaks an attempt, when a slice is complete."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from backend.core.vocabulary import OpenRound
from backend.reduce.accumulator import Accumulator, ContributionRefused, Slice, chunk_round, same_round, slices
from wire.messages import Contribution
from wire.session import ChunkHeader, Section

OPENING = OpenRound(4, 1, {2: (3, 5), 0: (1,)}, initial=False, params_elements=10, buffers_elements=4)


def contribution(ranks: dict[int, int], **changes: Any) -> Contribution:
    """Steps by rank, masses as gamma 1 makes them."""
    base = Contribution(
        round=4,
        attempt=1,
        steps=ranks,
        masses={rank: float(steps) for rank, steps in ranks.items()},
        mover_masses={rank: float(steps > 0) for rank, steps in ranks.items()},
        params_elements=10,
        buffers_elements=4,
    )
    return msgspec.structs.replace(base, **changes)


def header(offset: int, elements: int, section: int = Section.PARAMS, **changes: int) -> ChunkHeader:
    return ChunkHeader(4, 1, section, offset, elements, **changes)


def counting(first: int = 2, second: int = 1) -> Accumulator:
    counts = Accumulator(OPENING)
    assert counts.contribute(2, contribution({3: first, 5: 0}))
    assert counts.contribute(0, contribution({1: second}))
    return counts


def test_divisor_is_built_from_what_was_accepted() -> None:
    counts = Accumulator(OPENING)
    assert not counts.declared
    assert counts.contribute(2, contribution({3: 2, 5: 3}))
    assert (counts.mass, counts.mover_mass, counts.declared) == (5.0, 2.0, False)
    assert counts.contribute(0, contribution({1: 4}))
    assert (counts.mass, counts.mover_mass, counts.declared) == (9.0, 3.0, True)
    assert counts.steps == {1: 4, 3: 2, 5: 3}
    assert counts.hosts == [0, 2]
    assert counts.contributors == [0, 2]
    assert counts.realized
    assert counts.buffers_realized


def test_nobody_worked() -> None:
    counts = counting(0, 0)
    assert not counts.realized
    assert not counts.buffers_realized
    assert counts.contributors == []
    assert counts.steps == {1: 0, 3: 0, 5: 0}


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
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED)
def test_contribution_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    counts = Accumulator(OPENING)
    with pytest.raises(ContributionRefused) as refused:
        counts.contribute(0, contribution({1: 4}, **changes))
    assert reason in refused.value.reason
    assert refused.value.host == 0
    assert counts.contributions == {}


def test_a_repeat_changes_nothing_and_a_second_version_is_refused() -> None:
    counts = counting()
    counts.arrived(0, header(0, 6), 24)
    assert not counts.contribute(0, contribution({1: 1}))
    assert counts.received[0] == 6
    with pytest.raises(ContributionRefused, match="two different contributions"):
        counts.contribute(0, contribution({1: 2}))


def test_streams_are_counted_by_where_they_end() -> None:
    counts = counting()
    first, last = Slice(Section.PARAMS, 0, 6), Slice(Section.BUFFERS, 10, 4)
    assert counts.arrived(0, header(0, 7), 28)
    assert not counts.covers(first)
    assert counts.arrived(2, header(0, 2), 8)
    assert counts.arrived(2, header(2, 4), 16)
    assert counts.covers(first)
    assert not counts.arrived(2, header(2, 4), 16), "a repeat"
    assert counts.arrived(0, header(7, 3), 12)
    assert counts.arrived(0, header(10, 4, Section.BUFFERS), 16)
    assert counts.waiting_for() == {2: "elements from 6 of 14"}
    assert not counts.covers(last)


def test_waiting_for_names_the_silent() -> None:
    counts = Accumulator(OPENING)
    counts.contribute(2, contribution({3: 0, 5: 0}))
    assert counts.waiting_for() == {0: "its contribution"}


STREAMS = [
    pytest.param(0, header(1, 3), 12, "element 1 where 0 was due", id="gap"),
    pytest.param(0, header(0, 11), 44, "elements 0 to 11 leaves section 0", id="across the border"),
    pytest.param(0, header(0, 4, Section.BUFFERS), 16, "leaves section 1", id="buffers too early"),
    pytest.param(0, header(12, 4, Section.BUFFERS), 16, "leaves section 1", id="beyond the end"),
    pytest.param(0, header(0, 4), 12, "chunk of 4 elements has 12 bytes", id="short payload"),
    pytest.param(0, header(0, 4, encoding=1), 8, "encoding 1, this run uses 0", id="another encoding"),
    pytest.param(2, header(0, 4), 16, "declared no work and sent chunks", id="idle host"),
]


@pytest.mark.parametrize(("host", "chunk", "size", "reason"), STREAMS)
def test_stream_is_refused_by_name(host: int, chunk: ChunkHeader, size: int, reason: str) -> None:
    counts = counting(first=0)
    with pytest.raises(ContributionRefused) as refused:
        counts.arrived(host, chunk, size)
    assert reason in refused.value.reason
    assert refused.value.host == host


def test_chunks_before_the_declaration_are_refused() -> None:
    with pytest.raises(ContributionRefused, match="before its contribution"):
        Accumulator(OPENING).arrived(0, header(0, 4), 16)


def test_a_chunk_that_overlaps_is_refused() -> None:
    counts = counting()
    counts.arrived(0, header(0, 4), 16)
    with pytest.raises(ContributionRefused, match="element 2 where 4 was due"):
        counts.arrived(0, header(2, 4), 16)


CUTS = [
    (0, 0, 4, []),
    (4, 0, 4, [(0, 0, 4)]),
    (5, 0, 4, [(0, 0, 4), (0, 4, 1)]),
    (5, 3, 4, [(0, 0, 4), (0, 4, 1), (1, 5, 3)]),
    (0, 3, 2, [(1, 0, 2), (1, 2, 1)]),
]


@pytest.mark.parametrize(("params", "buffers", "size", "expected"), CUTS)
def test_slices(params: int, buffers: int, size: int, expected: list[tuple[int, int, int]]) -> None:
    cut = slices(params, buffers, size)
    assert [(int(piece.section), piece.offset, piece.elements) for piece in cut] == expected


@pytest.mark.parametrize("round_", [-1, 0, 7, 2**32 - 2])
def test_rounds_fit_chunk_headers(round_: int) -> None:
    chunk = ChunkHeader(chunk_round(round_), 2, 0, 0, 1)
    assert chunk.problem(4) == ""
    assert same_round(chunk, round_, 2)
    assert not same_round(chunk, round_ + 1, 2)
    assert not same_round(chunk, round_, 1)
