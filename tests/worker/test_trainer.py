"""One replica alone: losses, gradients, metrics, and what is said when they will not do."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from worker.job import Job, JobError, load_job
from worker.trainer import Trainer, scalar_loss

JOBS = Path(__file__).parent.parent / "jobs"


def trainer_of(job: Job, total_steps: int = 100) -> Trainer:
    return Trainer(job, JOBS, torch.device("cpu"), seed=1, total_steps=total_steps)


class Small(Job):
    """A job in one place, for the tests to bend."""

    def build_model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    def train_dataset(self) -> Any:
        return range(4)

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": model(batch).mean(), "extra": torch.zeros(3)}


def small(**methods: Any) -> Job:
    return type("Bent", (Small,), methods)(None)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(()))
        self.q = nn.Parameter(torch.ones(()))


def test_a_parameter_that_a_batch_does_not_use_stays_where_it_is() -> None:
    """Case J11: p used in every batch, q only in the first; zeros instead of nothing would give 0.4791."""
    job = small(
        build_model=lambda self: Branches(),
        training_step=lambda self, model, batch: model.p + (model.q if batch == 0 else 0),
    )
    trainer = trainer_of(job)
    for batch in range(5):
        trainer.step(batch)
    assert float(trainer.model.q.detach()) == pytest.approx(0.89)
    assert float(trainer.model.p.detach()) < 0.5


def test_every_rank_builds_the_same_model_from_one_seed() -> None:
    first, second = trainer_of(small()), trainer_of(small())
    assert torch.equal(first.model.weight, second.model.weight)


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (1.0, "returned float"),
        (None, "returned NoneType"),
        ({"accuracy": 1}, "a dict with accuracy"),
        ({}, "a dict with nothing"),
        (torch.zeros(2, requires_grad=True), r"shape \[2\]"),
        (torch.zeros(()), "no trainable parameter"),
    ],
)
def test_a_loss_that_is_none_is_refused_by_what_it_is(result: Any, says: str) -> None:
    with pytest.raises(JobError, match=says) as caught:
        scalar_loss(result)
    assert caught.value.code == "loss_invalid"


def test_a_loss_of_one_element_will_do() -> None:
    assert scalar_loss(torch.ones(1, 1, requires_grad=True)).shape == ()
    assert scalar_loss({"loss": torch.ones((), requires_grad=True)}).item() == 1.0


def test_a_loss_that_is_not_finite_is_none_and_training_goes_on() -> None:
    trainer = trainer_of(small(training_step=lambda self, model, batch: model.weight.sum() * batch))
    assert trainer.step(math.inf) is None
    assert trainer.step(math.nan) is None


@pytest.mark.parametrize(
    ("methods", "code", "says"),
    [
        ({"build_model": lambda self: 3}, "build_failed", "returned a int"),
        ({"build_model": lambda self: 1 / 0}, "build_failed", "ZeroDivisionError"),
        ({"build_model": lambda self: nn.ReLU()}, "nothing_to_train", "no parameter"),
        ({"build_model": lambda self: nn.Linear(1, 1).requires_grad_(False)}, "nothing_to_train", "no parameter"),
        ({"build_optimizer": lambda self, model: None}, "build_failed", "NoneType, not a torch optimizer"),
        ({"build_scheduler": lambda self, optimizer, total: 5}, "build_failed", "returned a int"),
        (
            {"build_scheduler": lambda self, o, total: torch.optim.lr_scheduler.ReduceLROnPlateau(o)},
            "build_failed",
            "not by a metric",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(methods: dict, code: str, says: str) -> None:
    with pytest.raises(JobError, match=says) as caught:
        trainer_of(small(**methods))
    assert caught.value.code == code


def test_a_one_cycle_schedule_is_never_driven_past_its_end() -> None:
    trainer = trainer_of(
        small(build_scheduler=lambda self, o, total: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=total)), 10
    )
    trainer.step(torch.ones(1, 2))
    trainer.advance(1000)
    assert trainer.optimizer.param_groups[0]["lr"] < 1e-3


def test_metrics_are_weighted_by_samples() -> None:
    job = small(eval_step=lambda self, model, batch: {"mean": batch.double().mean(), "size": len(batch)})
    assert trainer_of(job).evaluate(range(10), 4) == {"mean": pytest.approx(4.5), "size": pytest.approx(3.6)}


def test_without_an_eval_step_the_training_loss_is_the_metric() -> None:
    job = small(training_step=lambda self, model, batch: model.weight.sum() * 0 + 2.0)
    trainer = trainer_of(job)
    assert trainer.evaluate(range(3), 2) == {"loss": 2.0}
    assert not any(parameter.grad is not None for parameter in trainer.model.parameters())


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (lambda self, model, batch: {"a": torch.zeros(2)}, r"a has shape \[2\]"),
        (lambda self, model, batch: {"a": "good"}, "a is a str"),
        (lambda self, model, batch: {"a": math.nan}, "a is nan"),
        (lambda self, model, batch: {str(int(batch[0])): 1.0}, "same metrics for every batch"),
    ],
)
def test_metrics_that_are_no_numbers_are_refused(step: Any, says: str) -> None:
    trainer = trainer_of(small(eval_step=step))
    with pytest.raises(JobError, match=says):
        trainer.evaluate(range(4), 2)
    assert trainer.model.training


def test_an_empty_evaluation_set_is_refused() -> None:
    with pytest.raises(JobError, match="eval_dataset has no sample"):
        trainer_of(small()).evaluate([], 2)


def test_nested_batches_move_whole() -> None:
    trainer = trainer_of(load_job("odometer.py:Odometer", JOBS, {}))
    trainer.device = torch.device("meta")
    batch = {"x": [torch.zeros(2)], "y": (torch.zeros(1), "text"), "n": 3}
    moved = trainer.move(batch)
    assert moved["x"][0].is_meta
    assert moved["y"][0].is_meta
    assert moved["y"][1] == "text"
    assert moved["n"] == 3
