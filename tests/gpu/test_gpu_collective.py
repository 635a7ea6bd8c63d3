"""Sums among processes over NCCL: a GPU each where there are enough, else all on one."""

import signal
from pathlib import Path

import collective_scenarios as scenarios
import pytest
import torch
from collective_rig import cohort, consensus

from wire.messages import SyncRefused

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
GPU = "cuda"


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


@pytest.mark.parametrize("part", range(5))
def test_ranks_leave_as_they_like(tmp_path: Path, part: int) -> None:
    """Fifty sessions, in five parts that may go beside each other."""
    scenarios.ranks_leave_as_they_like(tmp_path, GPU, sessions=10)


def test_a_loop_sums_over_nccl_and_hands_its_consensus_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank alone, but from its link to its model, whose one number tells whose work counts."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo")
    ranks = cohort(tmp_path, 1, device="cuda:0")
    (joined,) = ranks.session()
    assert joined.transport.startswith("NCCL 2.") and joined.transport.endswith(" on lo")
    ranks.reduce(-1, initial=True)
    model, flat = ranks.ranks[0].workload.trainer.model, ranks.ranks[0].workload.flat
    assert flat is not None and model.w.data_ptr() == flat.vector.data_ptr()
    (ack,) = ranks.round(0, (3,))
    assert (ranks.odometers(), ack.pre_norm, ack.divergence, len(ack.params_hash)) == ([3.0], 3.0, 0.0, 16)
    assert model.w.untyped_storage().nbytes() == 4  # whoever saves it does not save all
    ranks.train(1, (2,))
    assert consensus(ranks.ranks[0]) == [3.0]
    ranks.sync(1)
    ranks.abort()
    ranks.session()
    ranks.sync(1, 1)
    ranks.commit(1, 1)
    assert (ranks.odometers(), consensus(ranks.ranks[0])) == ([5.0], [5.0])
    with torch.no_grad():
        model.w.fill_(float("nan"))
    ranks.train(2, (1,))
    ranks.ask(2)
    assert ranks.ranks[0].expect(SyncRefused) == SyncRefused(2, 0, 0, "nan")
    ranks.sync(2, 1, excluded=[0])
    ranks.commit(2, 1)
    assert ranks.odometers() == [5.0]
    ranks.leave()
