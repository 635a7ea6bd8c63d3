"""A rank whose contribution was refused: it declares no work, takes the last consensus, and starts anew."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from rank_rig import Cohort, chunk_of, plan, start_rank

from wire.messages import RequestParams, RoundCommitted, SnapshotReady
from worker.control import Adopt, Control, Pack, Resend, State
from worker.job import load_job
from worker.trainer import Trainer

ODO = "odometer.py:Odometer"


def request(attempt: int = 0, *, number: int = 0, excluded: bool = False) -> RequestParams:
    return RequestParams(round=number, attempt=attempt, initial=False, excluded=excluded)


def commit(attempt: int, *, realized: bool, number: int = 0) -> RoundCommitted:
    return RoundCommitted(round=number, attempt=attempt, realized=realized, buffers_realized=realized)


def ready(attempt: int, steps: int, *, number: int = 0) -> SnapshotReady:
    return SnapshotReady(number, attempt, steps=steps, mass=float(steps), mover_mass=float(steps > 0))


def worked(steps: int, *, overlap: bool = False) -> Control:
    control = Control(rank=1, gamma=1.0, overlap=overlap)
    control.receive(chunk_of(20))
    for _ in range(steps):
        control.step_done()
    return control


@pytest.mark.parametrize("realized", [True, False])
def test_an_excluded_rank_declares_nothing_and_takes_all_of_the_consensus(realized: bool) -> None:
    control = worked(3)
    assert control.receive(request()) == [Pack(ready(0, 3))]
    assert control.receive(request(1, excluded=True)) == [Resend(ready(1, 0))]
    whole = Adopt(0, params=True, buffers=True, restart=True)
    assert control.receive(commit(1, realized=realized)) == [whole], "whether or not anybody else worked"
    assert control.steps_since_round == 0


def test_who_is_excluded_once_is_so_for_the_whole_round_and_for_no_other() -> None:
    control = worked(3)
    control.receive(request())
    control.receive(request(1, excluded=True))
    assert control.receive(request(2)) == [Resend(ready(2, 0))], "another rank died meanwhile"
    control.receive(commit(2, realized=True))
    control.step_done()
    assert control.receive(request(number=1)) == [Pack(ready(0, 1, number=1))]
    adopt = Adopt(1, params=True, buffers=True)
    assert control.receive(commit(0, realized=True, number=1)) == [adopt]


def test_what_was_trained_ahead_of_a_refused_contribution_is_void() -> None:
    control = worked(3, overlap=True)
    control.receive(request())
    control.step_done()
    control.receive(request(1, excluded=True))
    control.step_done()
    adopted = control.receive(commit(1, realized=True))
    assert adopted == [Adopt(0, params=True, buffers=True, ahead=False, restart=True)], "never merged"
    assert (control.steps_since_round, control.steps, control.state) == (0, 5, State.WORKING)


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
        lambda parameters: torch.optim.Adam(parameters, lr=0.5),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.5),
    ],
    ids=["momentum", "Adam", "Adagrad"],
)
def test_a_restarted_trainer_steps_like_a_new_one(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    jobs = Path(__file__).parent.parent / "jobs"

    def built() -> Trainer:
        job = load_job(ODO, jobs, {"samples": 8})
        job.build_optimizer = lambda model: make(model.parameters())  # type: ignore[method-assign]
        return Trainer(job, jobs, torch.device("cpu"), seed=1, total_steps=100)

    spoilt, fresh = built(), built()
    for _ in range(3):
        spoilt.step(torch.zeros(1))
    for state in spoilt.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.fill_(math.nan)
    with torch.no_grad():
        spoilt.model.w.zero_()
    spoilt.restart()
    for trainer in (spoilt, fresh):
        trainer.step(torch.zeros(1))
        trainer.step(torch.zeros(1))
    assert float(spoilt.model.w.detach()) == float(fresh.model.w.detach()) != 0.0


def test_a_restart_leaves_the_schedule_where_it_is(tmp_path: Path) -> None:
    jobs = Path(__file__).parent.parent / "jobs"
    job = load_job(ODO, jobs, {"samples": 8})
    job.build_scheduler = lambda optimizer, steps: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # type: ignore[method-assign]
    trainer = Trainer(job, jobs, torch.device("cpu"), seed=1, total_steps=100)
    trainer.step(torch.zeros(1))
    trainer.advance(3)
    rate = trainer.learning_rate()
    trainer.restart()
    assert trainer.learning_rate() == rate == 0.125


@pytest.mark.parametrize("others_worked", [True, False])
def test_a_spoilt_replica_is_the_last_consensus_again(tmp_path: Path, others_worked: bool) -> None:
    """In a realized round, and in one in which nobody worked: that must not leave NaN where it is."""
    plans = plan(ODO, total_samples=256, params={"samples": 256, "momentum": 0.5})
    cohort = Cohort([start_rank(tmp_path, plans, rank) for rank in range(2)])
    cohort.reduce(-1, initial=True)
    cohort.window({0: chunk_of(2), 1: chunk_of(2, offset=64)}, 0)
    models = [rig.workload.trainer.model for rig in cohort.ranks]
    assert [float(model.w.detach()) for model in models] == [2.5, 2.5]

    cohort.ranks[1].train(chunk_of(2, offset=128))
    if others_worked:
        cohort.ranks[0].train(chunk_of(1, offset=192))
    with torch.no_grad():
        models[1].w.fill_(math.nan)
    cohort.reduce(1, excluded=1)
    # Rank 0's third step: 1 + 0.5 * (1 + 0.5 * 1); rank 1's work counts nowhere.
    agreed = 2.5 + 1.75 if others_worked else 2.5
    assert [float(model.w.detach()) for model in models] == [agreed, agreed]
    assert not cohort.ranks[1].workload.trainer.optimizer.state, "its momentum is gone"
    cohort.leave()
