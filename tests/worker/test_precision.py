"""Mixed precision on one rank: what autocast lowers, when a scaled step is left out, and that the scale is kept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_rig import chunk_of, plan, start_rank
from torch import nn

from wire.messages import Shutdown
from worker.job import Job, JobError, NoParams
from worker.local_state import capture, restore
from worker.trainer import Trainer

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Seen(Job):
    """Notes the dtype that a layer answers with; ``batch`` is what the loss is multiplied by."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(NoParams())
        self.dtype = dtype
        self.seen: list[torch.dtype] = []

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 2).to(self.dtype)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.05)

    def train_dataset(self) -> Any:
        return range(8)

    def training_step(self, model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(torch.ones(3, 4, dtype=self.dtype))
        self.seen.append(out.dtype)
        return (out.float() - 3.0).square().mean() * batch

    def eval_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"bytes": model(torch.ones(1, 4)).element_size()}

    def build_scheduler(self, optimizer: Any, total_steps: int) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 100)


def trainer(tmp_path: Path, precision: str, job: Job | None = None) -> Trainer:
    return Trainer(job or Seen(), tmp_path, torch.device("cpu"), seed=1, total_steps=50, precision=precision)


@pytest.mark.parametrize("precision", DTYPES)
def test_steps_and_evaluation_run_in_the_precision_and_parameters_stay(tmp_path: Path, precision: str) -> None:
    one = trainer(tmp_path, precision)
    losses = [one.step(1.0) for _ in range(40)]
    assert set(one.job.seen) == {DTYPES[precision]}
    assert one.evaluate(range(3), 2) == {"bytes": DTYPES[precision].itemsize}
    assert {p.dtype for p in one.model.parameters()} == {torch.float32}
    assert losses[-1] < losses[0] / 4


def test_the_jobs_own_autocast_goes_first(tmp_path: Path) -> None:
    class Own(Seen):
        def training_step(self, model: nn.Module, batch: Any) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().training_step(model, batch)

    one = trainer(tmp_path, "bf16", Own())
    one.step(1.0)
    assert one.job.seen == [torch.float32]


def test_a_rank_trains_in_the_precision_of_its_plan(tmp_path: Path) -> None:
    rig = start_rank(tmp_path, plan("regression.py:Regression", total_samples=256, precision="bf16"))
    within = rig.workload.trainer.precision.autocast()
    assert isinstance(within, torch.autocast)
    assert within.fast_dtype == torch.bfloat16
    assert all(done.loss is not None for done in rig.train(chunk_of(3)))
    rig.send(Shutdown(reason=""))
    rig.end()


def scale(one: Trainer) -> float:
    state = one.precision.state()
    assert state is not None
    return state["scale"]


@pytest.mark.parametrize("factor", [math.inf, math.nan, 1e36])
def test_a_step_whose_gradients_overflow_changes_nothing_but_the_scale(tmp_path: Path, factor: float) -> None:
    one = trainer(tmp_path, "fp16")
    one.step(1.0)
    before, was = [p.clone() for p in one.model.parameters()], scale(one)
    loss = one.step(factor)
    assert (loss is not None) == (factor == 1e36), "the loss is told as it is"
    assert scale(one) == was / 2
    assert all(torch.equal(a, b) for a, b in zip(before, one.model.parameters(), strict=True))
    one.step(1.0)
    assert not all(torch.equal(a, b) for a, b in zip(before, one.model.parameters(), strict=True))


def test_a_schedule_moves_past_a_step_that_was_left_out_without_a_warning(tmp_path: Path) -> None:
    one = trainer(tmp_path, "fp16")
    one.step(math.inf)
    one.advance(1)
    one.step(1.0)
    one.advance(2)


def test_a_rank_that_starts_anew_forgets_the_scale_that_spoilt_values_left(tmp_path: Path) -> None:
    one = trainer(tmp_path, "fp16")
    fresh = one.precision.state()
    for _ in range(30):
        one.step(math.nan)
    assert scale(one) < 1e-4
    one.restart()
    assert one.precision.state() == fresh


def test_a_batch_that_reaches_no_parameter_of_the_optimizer_is_a_batch(tmp_path: Path) -> None:
    class Partly(Seen):
        def build_model(self) -> nn.Module:
            return nn.ModuleList([nn.Linear(4, 2), nn.Linear(1, 1)])

        def build_optimizer(self, model: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(model[0].parameters(), lr=0.1)

        def training_step(self, model: Any, batch: Any) -> torch.Tensor:
            return model[1](torch.ones(1, 1)).sum()

    assert trainer(tmp_path, "fp16", Partly()).step(1.0) is not None


def test_parameters_that_are_half_already_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="parameter weight is float16 itself") as caught:
        trainer(tmp_path, "fp16", Seen(torch.float16))
    assert caught.value.code == "build_failed"
    trainer(tmp_path, "fp16", Seen(torch.bfloat16))
    trainer(tmp_path, "f32", Seen(torch.float16))


def saved(one: Trainer) -> bytearray:
    snapshot, error = capture(one, {})
    assert error == ""
    return bytearray(b"".join(snapshot.cut()))


def test_the_scale_is_saved_and_taken_up(tmp_path: Path) -> None:
    one = trainer(tmp_path, "fp16")
    for factor in (1.0, math.inf, math.inf, 1.0, 1.0):
        one.step(factor)
    again = trainer(tmp_path, "fp16")
    assert restore(saved(one), again, own=False) == []
    assert again.precision.state() == one.precision.state()
    assert scale(again) <= 2.0**14, "two infinite losses at least"


@pytest.mark.parametrize(("before", "after", "notes"), [("f32", "fp16", 1), ("fp16", "f32", 0), ("bf16", "f32", 0)])
def test_a_run_may_go_on_in_another_precision(tmp_path: Path, before: str, after: str, notes: int) -> None:
    one, two = trainer(tmp_path, before), trainer(tmp_path, after)
    one.step(1.0)
    told = restore(saved(one), two, own=True)
    assert told == ["no loss scale was saved, so it is sought anew"] * notes
    assert two.step(1.0) is not None


@pytest.mark.parametrize("spoilt", [3, {}, {"scale": 1.0}, {"scale": "wide"}])
def test_a_scale_that_is_none_is_not_taken_up(tmp_path: Path, spoilt: Any) -> None:
    one = trainer(tmp_path, "fp16")
    fresh = one.precision.state()
    assert fresh is not None
    for wrong in (spoilt, fresh | {"scale": math.nan}, fresh | {"scale": -1.0}, fresh | {"scale": "1"}):
        assert "cannot be read" in one.precision.restore(wrong)
    assert one.precision.state() == fresh
