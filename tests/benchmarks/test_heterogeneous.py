"""Figures and table of the heterogeneous benchmark, from what ranks did."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.figures import (
    EntryFailed,
    Window,
    figures,
    solo_rates,
    table,
    time_to,
    window_of_rounds,
    window_of_steps,
)


def steps(ms: float, seconds: float, start: float = 100.0) -> list[float]:
    """Moments at which a rank's steps end that does one every ``ms``."""
    return [start + (number + 1) * ms / 1000 for number in range(round(seconds * 1000 / ms))]


def test_ranks_that_never_wait_have_all_of_the_solo_rates_and_no_idle_share() -> None:
    ms = (10.0, 20.0, 40.0)
    window = window_of_steps([steps(one, 20.0) for one in ms], 100.0, batch_size=32)
    found = figures(window, ms, 32)
    assert solo_rates(ms) == 175.0
    assert found.fraction == pytest.approx(1.0, abs=0.01)
    assert found.samples_per_second == pytest.approx(32 * 175.0, rel=0.01)
    assert found.idle == pytest.approx((0.0, 0.0, 0.0), abs=0.01)


def test_in_lock_step_the_fast_ranks_idle() -> None:
    ms = (10.0, 20.0, 40.0)
    found = figures(window_of_steps([steps(40.0, 20.0)] * 3, 100.0, batch_size=8), ms, 8)
    assert found.fraction == pytest.approx(3 * 25 / 175, rel=0.01)
    assert found.idle == pytest.approx((0.75, 0.5, 0.0), abs=0.01)


def test_the_window_begins_after_the_warm_up_and_ends_with_the_first_rank() -> None:
    window = window_of_steps([steps(10.0, 10.0), steps(10.0, 40.0)], 100.0, batch_size=1)
    assert window.seconds == pytest.approx(7.0)  # 10 s less 3 of warm-up
    assert window.batches == pytest.approx((700, 700), abs=1)
    assert window.samples == sum(window.batches)


def test_of_a_long_run_a_fifth_is_warm_up_and_of_a_short_one_too() -> None:
    assert window_of_steps([steps(10.0, 50.0)], 100.0, 1).seconds == pytest.approx(40.0)
    assert window_of_steps([steps(10.0, 5.0)], 100.0, 1).seconds == pytest.approx(4.0)


def test_a_rank_without_a_step_is_no_result() -> None:
    with pytest.raises(EntryFailed, match="no step"):
        window_of_steps([steps(10.0, 5.0), []], 100.0, 1)


def rounds(count: int) -> list[dict[str, Any]]:
    return [{"realized": {"0": 4, "1": 2}, "samples": 60} for _ in range(count)]


def test_rounds_count_after_the_third_and_by_the_wall_clock() -> None:
    window = window_of_rounds(rounds(6), [0.0, 1.0, 2.0, 3.0, 4.5, 7.0], ranks=2, skip=3)
    assert window == Window(seconds=5.0, batches=(12, 6), samples=180)


def test_a_round_in_which_nobody_worked_counts_its_time() -> None:
    told = [*rounds(4), {"realized": None, "samples": 0}]
    assert window_of_rounds(told, [0.0, 1.0, 2.0, 3.0, 4.0], ranks=2, skip=3) == Window(2.0, (4, 2), 60)


def test_too_few_rounds_are_no_result() -> None:
    with pytest.raises(EntryFailed, match="only 3 rounds"):
        window_of_rounds(rounds(3), [0.0, 1.0, 2.0], ranks=2, skip=3)


def test_time_to_the_target_is_the_first_moment_from_which_it_is_met_three_times_in_a_row() -> None:
    curve = [(0.5, 0.3), (1.0, 0.86), (1.5, 0.84), (2.0, 0.9), (2.5, 0.85), (3.0, 0.88)]
    assert time_to(0.85, curve) == 2.0
    assert time_to(0.86, curve) is None
    assert time_to(0.3, curve) == 0.5
    assert time_to(0.0, curve[:2]) is None


def test_the_table_has_a_line_for_each_entry_and_the_reasons_of_those_that_did_not_run() -> None:
    ran = {
        "name": "ours",
        "samples_per_second": 6543.2,
        "fraction": 0.9312,
        "idle": (0.05, 0.062),
        "seconds_to_target": None,
        "accuracy": 0.8512,
        "loss": 0.43215,
        "wall_seconds": 12.34,
        "load": (1.25, 1.0, 1.0),
    }
    lines = table([ran, {"name": "theirs", "failed": "no module named theirs"}], target=0.85)
    assert "s to 85%" in lines[0]
    assert lines[2] == "| ours | 6,543 | 0.931 | 5% 6% | - | 0.851 | 0.4321 | 12.3 | 1.2 |"
    assert lines[-1] == "theirs did not run: no module named theirs"
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")
