"""Sums among processes over NCCL, several of them on one GPU."""

import signal
from pathlib import Path

import collective_scenarios as scenarios
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
GPU = "cuda:0"


@pytest.mark.parametrize("count", [2, 4])
def test_a_window_is_the_work_weighted_mean(tmp_path: Path, count: int) -> None:
    scenarios.a_window_is_the_work_weighted_mean(tmp_path, GPU, count)


def test_movers_count_alike_for_buffers(tmp_path: Path) -> None:
    scenarios.movers_count_alike_for_buffers(tmp_path, GPU)


def test_an_idle_cohort_keeps_what_it_has(tmp_path: Path) -> None:
    scenarios.an_idle_cohort_keeps_what_it_has(tmp_path, GPU)


def test_who_is_not_finite_stops_all(tmp_path: Path) -> None:
    scenarios.who_is_not_finite_stops_all(tmp_path, GPU)


def test_a_rank_that_dies_in_its_window(tmp_path: Path) -> None:
    scenarios.a_rank_that_dies_in_its_window(tmp_path, GPU)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_dies_in_a_sum_costs_the_others_nothing(tmp_path: Path, how: signal.Signals) -> None:
    scenarios.a_rank_that_dies_in_a_sum(tmp_path, GPU, how)


def test_a_rank_that_dies_while_all_sum(tmp_path: Path) -> None:
    scenarios.a_rank_that_dies_while_all_sum(tmp_path, GPU, wide=25_000_000)


def test_a_generator_that_dies(tmp_path: Path) -> None:
    scenarios.a_generator_that_dies(tmp_path, GPU)


def test_five_hundred_rounds_grow_nothing(tmp_path: Path) -> None:
    scenarios.many_rounds_grow_nothing(tmp_path, GPU, rounds=500, wide=100_000)


def test_ranks_leave_as_they_like(tmp_path: Path) -> None:
    scenarios.ranks_leave_as_they_like(tmp_path, GPU, sessions=50)
