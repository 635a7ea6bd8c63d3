"""Sums among processes over gloo: stopped and killed peers, and everything else in a thorough run.

``tests/gpu/test_gpu_collective.py`` is the same over NCCL.
"""

import os
import signal
from pathlib import Path

import collective_scenarios as scenarios
import pytest

pytestmark = pytest.mark.slow
thorough = pytest.mark.skipif(
    not os.environ.get("MARCHLINE_TEST_THOROUGH"),
    reason="the same as in test_collective.py, in processes: a minute; MARCHLINE_TEST_THOROUGH=1",
)


@pytest.mark.parametrize("how", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=thorough)])
def test_a_rank_that_dies_in_a_sum_costs_the_others_nothing(tmp_path: Path, how: signal.Signals) -> None:
    scenarios.a_rank_that_dies_in_a_sum(tmp_path, "cpu", how)


def test_a_session_of_processes_that_open_and_close_files(tmp_path: Path) -> None:
    scenarios.a_session_of_processes_that_open_and_close_files(tmp_path, "cpu")


@thorough
@pytest.mark.parametrize("count", [2, 4])
def test_a_window_is_the_work_weighted_mean(tmp_path: Path, count: int) -> None:
    scenarios.a_window_is_the_work_weighted_mean(tmp_path, "cpu", count)


@thorough
def test_movers_count_alike_for_buffers(tmp_path: Path) -> None:
    scenarios.movers_count_alike_for_buffers(tmp_path, "cpu")


@thorough
def test_an_idle_cohort_keeps_what_it_has(tmp_path: Path) -> None:
    scenarios.an_idle_cohort_keeps_what_it_has(tmp_path, "cpu")


@thorough
def test_who_is_not_finite_stops_all(tmp_path: Path) -> None:
    scenarios.who_is_not_finite_stops_all(tmp_path, "cpu")


@thorough
def test_a_rank_that_dies_in_its_window(tmp_path: Path) -> None:
    scenarios.a_rank_that_dies_in_its_window(tmp_path, "cpu")


@thorough
def test_a_rank_that_dies_while_all_sum(tmp_path: Path) -> None:
    scenarios.a_rank_that_dies_while_all_sum(tmp_path, "cpu", wide=1_000_000)


@thorough
def test_a_generator_that_dies(tmp_path: Path) -> None:
    scenarios.a_generator_that_dies(tmp_path, "cpu")


@thorough
def test_many_rounds_grow_nothing(tmp_path: Path) -> None:
    scenarios.many_rounds_grow_nothing(tmp_path, "cpu", rounds=500, wide=1000)


@thorough
def test_ranks_leave_as_they_like(tmp_path: Path) -> None:
    scenarios.ranks_leave_as_they_like(tmp_path, "cpu", sessions=50)
