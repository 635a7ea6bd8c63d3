"""Rounds average parameters and float buffers; the optimizer's state stays with its rank (case N06)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_rig import JOBS, Cohort, RankRig, chunk_of, plan, start_rank

from worker.data import SampleFeed
from worker.job import load_job
from worker.seeding import seed_everything

BATCHES, PERIOD = 50, 5


def weights_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def weights(rig: RankRig) -> torch.Tensor:
    return weights_of(rig.workload.trainer.model)


def trained(directory: Path, world: int) -> torch.Tensor:
    """Fifty batches with a round every five, all ranks on the same samples."""
    directory.mkdir()
    plans = plan("regression.py:Regression", total_samples=256)
    cohort = Cohort([start_rank(directory, plans, rank) for rank in range(world)])
    cohort.reduce(-1, initial=True)
    for number in range(BATCHES // PERIOD):
        chunk = chunk_of(PERIOD, offset=4 * PERIOD * number, step=world * PERIOD * number)
        cohort.window(dict.fromkeys(range(world), chunk), number)
    cohort.leave()
    found = {tuple(weights(rig).tolist()) for rig in cohort.ranks}
    assert len(found) == 1
    return weights(cohort.ranks[0])


def reference() -> tuple[torch.Tensor, torch.Tensor]:
    """The same fifty batches in a loop of plain torch that never heard of rounds: weights before and after."""
    job = load_job("regression.py:Regression", JOBS, {})
    seed_everything(42)
    model = job.build_model()
    optimizer = job.build_optimizer(model)
    start = weights_of(model)
    for batch, _ in SampleFeed(job.train_dataset(), job.collate, seed=42, batch_size=4).batches(0, 0, 4 * BATCHES):
        optimizer.zero_grad()
        job.training_step(model, batch).backward()
        optimizer.step()
    return start, weights_of(model)


def test_the_same_data_on_every_rank_is_the_same_as_one_rank(tmp_path: Path) -> None:
    """N06 a."""
    start, alone = reference()
    assert float((alone - start).norm() / alone.norm()) > 0.1, "it did learn"
    for world in (1, 2, 3):
        cohort = trained(tmp_path / str(world), world)
        assert float((cohort - alone).norm() / alone.norm()) <= 1e-6
        torch.testing.assert_close(cohort, alone, rtol=1e-6, atol=1e-7)


def test_momentum_is_neither_averaged_nor_forgotten(tmp_path: Path) -> None:
    """N06 b: 3:1 with momentum 0.9. One rank went 1 + 1.9 + 2.71, the other 1; weighted by work that is 4.4575."""
    params = {"samples": 256, "momentum": 0.9}
    plans = plan("odometer.py:Odometer", total_samples=256, params=params)
    cohort = Cohort([start_rank(tmp_path, plans, rank) for rank in range(2)])
    cohort.reduce(-1, initial=True)
    cohort.window({0: chunk_of(3), 1: chunk_of(1, offset=64)}, 0)
    assert [float(weights(rig)) for rig in cohort.ranks] == pytest.approx([4.4575] * 2, rel=1e-6)
    assert buffers(cohort) == pytest.approx([2.71, 1.0], rel=1e-6)
    cohort.window({0: chunk_of(1, epoch=1), 1: chunk_of(1, offset=64, epoch=1)}, 1)
    assert buffers(cohort) == pytest.approx([0.9 * 2.71 + 1, 1.9], rel=1e-6), "each goes on with its own"
    moved = (0.9 * 2.71 + 1 + 1.9) / 2
    assert [float(weights(rig)) for rig in cohort.ranks] == pytest.approx([4.4575 + moved] * 2, rel=1e-6)
    cohort.leave()


def buffers(cohort: Cohort) -> list[float]:
    """Each rank's momentum buffer, with the sign of the way that it went."""
    states = [rig.workload.trainer.optimizer.state.values() for rig in cohort.ranks]
    return [-float(next(iter(state))["momentum_buffer"]) for state in states]
