"""The clock of learning-rate schedules: the cohort's batches, whoever did them (case J13; behaviour K7)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from rank_rig import Cohort, RankRig, chunk_of, plan, start_rank

from wire.messages import EvalResult, Evaluate, Update

TOTAL = 100
WORLDS = {
    "one": [(10,)] * 9 + [(9,), (1,)],
    "two at 4:1": [(4, 1)] * 19 + [(3, 1), (1, 0)],
    "three at 5:3:2": [(5, 3, 2)] * 9 + [(5, 3, 1), (0, 0, 1)],
    "two that swap": [(9, 1), (1, 9)] * 4 + [(10, 0), (0, 9), (1, 0)],
}
"""batches by rank, window by window: a hundred of them, with rounds at 50 and 99"""


def solo() -> list[float]:
    """The rate of each batch of the same schedule in plain torch on one device, and once more after the last."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, TOTAL)
    rates = []
    for _ in range(TOTAL):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


def tell(ranks: list[RankRig], round_number: int, global_step: int) -> list[float | None]:
    """The news that follows a round, and every rank's rate once it has heard it."""
    for rank in ranks:
        rank.send(Update(round=round_number, global_step=global_step), Evaluate(epoch=0))
        rank.expect(EvalResult)
    return [rank.workload.trainer.learning_rate() for rank in ranks]


@pytest.mark.parametrize("windows", WORLDS.values(), ids=WORLDS)
def test_the_rate_is_a_function_of_the_cohorts_batches(tmp_path: Path, windows: list[tuple[int, ...]]) -> None:
    rates, world = solo(), len(windows[0])
    assert (rates[50], rates[99]) == (pytest.approx(0.5), pytest.approx(0.01))
    plans = plan("scheduled.py:Scheduled", total_samples=TOTAL, batch_size=1)
    cohort = Cohort([start_rank(tmp_path, plans, rank) for rank in range(world)])
    cohort.reduce(-1, initial=True)
    expected: list[list[float]] = [[] for _ in range(world)]
    at_rounds = {}
    step = 0
    for number, counts in enumerate(windows):
        chunks, offset = {}, step
        for rank, count in enumerate(counts):
            if count:
                chunks[rank] = chunk_of(count, offset=offset, step=step, batch_size=1)
            expected[rank] += rates[step : step + count]  # in between, a rank counts its own batches
            offset += count
        cohort.window(chunks, number)
        step = offset
        held = tell(cohort.ranks, number, step)
        assert len(set(held)) == 1, f"after round {number}: {held}"
        at_rounds[step] = held[0]
    cohort.leave()
    assert [rig.workload.trainer.job.rates for rig in cohort.ranks] == [pytest.approx(row) for row in expected]
    assert (at_rounds[50], at_rounds[99]) == (pytest.approx(0.5), pytest.approx(0.01))
    assert at_rounds[TOTAL] == pytest.approx(0.01), "it stops at the last batch's rate: nothing is ever trained at 0"
    assert all(earlier >= later for earlier, later in pairwise(at_rounds.values()))
