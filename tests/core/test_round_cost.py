"""What a round takes, from bytes and links."""

from __future__ import annotations

import pytest

from backend.core.round_cost import SLICE_BYTES, Line, RoundCost, link_bytes_per_second

GIGABIT = link_bytes_per_second(1000.0)
INFINITE = float("inf")


def lines(*speeds: float, latency: float = 0.0, ranks: int = 1) -> list[Line]:
    return [Line(speed, latency, ranks) for speed in speeds]


def test_megabits_are_bits() -> None:
    assert GIGABIT == 125e6


@pytest.mark.parametrize(
    ("hosts", "controller", "seconds"),
    [
        (lines(GIGABIT), INFINITE, 0.8),  # 100 MB over 125 MB/s, up and down at once
        (lines(GIGABIT, GIGABIT, GIGABIT), INFINITE, 0.8),
        (lines(GIGABIT, GIGABIT / 4), INFINITE, 3.2),  # the slowest uplink sets the pace
        (lines(GIGABIT, GIGABIT, GIGABIT), GIGABIT, 2.4),  # the controller's link carries the model for each host
        (lines(INFINITE), INFINITE, 0.1),  # folding one rank at the speed of memory
        (lines(INFINITE, ranks=8), INFINITE, 0.8),
    ],
)
def test_the_slowest_part_sets_the_pace(hosts: list[Line], controller: float, seconds: float) -> None:
    cost = RoundCost(100e6, controller, memory_bytes_per_second=1e9)
    last_slice = SLICE_BYTES / min(line.bytes_per_second for line in hosts)
    assert cost.stream_seconds(hosts) == pytest.approx(seconds + last_slice)


def test_a_small_model_goes_up_and_then_down() -> None:
    assert RoundCost(1e5, INFINITE).stream_seconds(lines(1e6)) == pytest.approx(0.2)


def test_a_round_is_asked_for_packed_streamed_loaded_and_acknowledged() -> None:
    cost = RoundCost(100e6, INFINITE, memory_bytes_per_second=1e9)
    hosts = [*lines(GIGABIT, latency=0.02), *lines(GIGABIT, latency=0.15)]
    assert cost.pack_seconds == cost.load_seconds == pytest.approx(0.1)
    assert cost.seconds(hosts) == pytest.approx(0.3 + 0.1 + cost.stream_seconds(hosts) + 0.1)


def test_a_round_among_nobody_streams_nothing() -> None:
    assert RoundCost(100e6, GIGABIT).stream_seconds([]) == 0.0
