"""One replica of the model at work: a step, an evaluation, and the learning-rate clock. Knows nothing of
links or rounds."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from worker.data import fetch
from worker.job import Job, JobError, blamed
from worker.nests import map_tensors
from worker.precision import Precision
from worker.seeding import seed_everything


class Trainer:
    """Model, optimizer and schedule of one job on one device.

    ``total_steps`` is the number of the cohort's steps in the whole run. Builders run under ``seed``, the
    same on every rank; steps and evaluations under autocast of ``precision``. Raises ``JobError`` when the job cannot
    be built.
    """

    def __init__(
        self, job: Job, job_dir: Path, device: torch.device, *, seed: int, total_steps: int, precision: str = "f32"
    ) -> None:
        self.job = job
        self.job_dir = job_dir
        self.device = device
        self.total_steps = total_steps
        seed_everything(seed)
        self.model = _build_model(job, job_dir).to(device)
        self.precision = Precision(precision, device, self.model)
        self.optimizer = _build_optimizer(job, self.model, job_dir)
        self.scheduler = _build_scheduler(job, self.optimizer, total_steps, job_dir)
        # Most optimizers begin without any; some make it when they are built, and cannot step without it.
        self._first_state = {parameter: copy.deepcopy(state) for parameter, state in self.optimizer.state.items()}
        self._clock = 0
        self._stepped = False
        self.model.train()

    def step(self, batch: Any) -> float | None:
        """One optimizer step on a batch that is on the device already: its loss, none when that is not
        finite.

        Returns only when the device is done, so that timing a step times its work (decision 0021). With ``fp16`` a step
        whose gradients overflow changes nothing but the scale; it is a batch like any other, and its loss is told.
        Raises ``JobError`` for a loss that is none, and whatever the job raises.
        """
        self.optimizer.zero_grad(
            set_to_none=True
        )  # an unused parameter then stays where it is, momentum and decay included
        with self.precision.autocast():
            result = self.job.training_step(self.model, batch)
        loss = scalar_loss(result)
        self._stepped |= self.precision.descend(loss, self.optimizer)
        value = float(loss.detach())
        return value if math.isfinite(value) else None

    def restart(self) -> None:
        """Forget what the optimizer gathered on parameters that were spoilt since; the schedule stays where it is."""
        self.optimizer.state.clear()
        self.optimizer.state.update({parameter: copy.deepcopy(state) for parameter, state in self._first_state.items()})
        self.optimizer.zero_grad(set_to_none=True)
        self.precision.restart()

    def advance(self, global_step: int) -> None:
        """Move the schedule up to the cohort's step ``global_step``; it never moves back.

        It stops at the rate of the run's last step: cut batches can make a few more, and some schedules end with an
        error.
        """
        if self.scheduler is None:
            return
        target = min(global_step, self.total_steps - 1)
        while self._clock < target:
            with warnings.catch_warnings():
                if not self._stepped:  # others worked while this rank took no step yet: torch warns of what is meant
                    warnings.simplefilter("ignore")
                self.scheduler.step()
            self._clock += 1

    def learning_rate(self) -> float | None:
        """The rate of the optimizer's first parameter group; none when that has no finite one."""
        rate = self.optimizer.param_groups[0].get("lr")
        if not isinstance(rate, int | float | torch.Tensor):
            return None
        value = float(rate)
        return value if math.isfinite(value) else None

    def peak_bytes(self) -> int:
        """The most bytes that tensors took on the GPU at once; 0 on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def move(self, value: Any) -> Any:
        """The same nest of lists, tuples and dicts with every tensor on the rank's device."""
        if self.device.type == "cpu":
            return value
        return map_tensors(value, lambda tensor: tensor.to(self.device, non_blocking=True))

    def evaluate(self, dataset: Any, batch_size: int) -> dict[str, float]:
        """Metrics over the whole dataset: means of the batches' values, weighted by their samples.

        Raises ``JobError`` for metrics that are no finite numbers, or that change their names from batch to
        batch.
        """
        totals: dict[str, float] = {}
        size = len(dataset)
        if size < 1:
            raise JobError("dataset_empty", "eval_dataset has no sample; return None to train without evaluation")
        self.model.eval()
        try:
            for start in range(0, size, batch_size):
                indices = list(range(start, min(start + batch_size, size)))
                metrics = self._score(self.move(self.job.collate(fetch(dataset, indices))))
                if start and metrics.keys() != totals.keys():
                    raise JobError("metrics_invalid", "eval_step must return the same metrics for every batch")
                for name, value in metrics.items():
                    totals[name] = totals.get(name, 0.0) + value * len(indices)
        finally:
            self.model.train()
        return {name: total / size for name, total in totals.items()}

    @torch.no_grad()
    def _score(self, batch: Any) -> dict[str, float]:
        with self.precision.autocast():
            result = self.job.eval_step(self.model, batch)
        metrics = result if isinstance(result, Mapping) else {"loss": result}
        return {str(name): _metric(str(name), value) for name, value in metrics.items()}


def scalar_loss(result: Any) -> torch.Tensor:
    """The loss in what ``training_step`` returned. Raises ``JobError`` when there is none to train on."""
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, torch.Tensor):
        got = (
            f"a dict with {', '.join(map(str, result)) or 'nothing'}"
            if isinstance(result, Mapping)
            else type(loss).__name__
        )
        raise JobError(
            "loss_invalid",
            f"training_step returned {got}; return the mean loss as a scalar tensor, or under 'loss'",
        )
    if loss.numel() != 1:
        raise JobError(
            "loss_invalid",
            f"the loss has shape {list(loss.shape)}; return its mean over the batch, one number",
        )
    if not loss.requires_grad:
        raise JobError(
            "loss_invalid",
            "the loss depends on no trainable parameter; was it detached, or computed without grad?",
        )
    return loss.reshape(())


def _build_model(job: Job, job_dir: Path) -> torch.nn.Module:
    with blamed("build_failed", "build_model", job_dir):
        model = job.build_model()
    if not isinstance(model, torch.nn.Module):
        raise JobError("build_failed", f"build_model returned a {type(model).__name__}, not a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise JobError("nothing_to_train", "no parameter of the model requires grad, so there is nothing to train")
    return model


def _build_optimizer(job: Job, model: torch.nn.Module, job_dir: Path) -> Optimizer:
    with blamed("build_failed", "build_optimizer", job_dir):
        optimizer = job.build_optimizer(model)
    if not isinstance(optimizer, Optimizer):
        raise JobError("build_failed", f"build_optimizer returned a {type(optimizer).__name__}, not a torch optimizer")
    return optimizer


def _build_scheduler(job: Job, optimizer: Optimizer, total_steps: int, job_dir: Path) -> LRScheduler | None:
    with blamed("build_failed", "build_scheduler", job_dir):
        scheduler = job.build_scheduler(optimizer, total_steps)
    if scheduler is None:
        return None
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise JobError(
            "build_failed",
            f"build_scheduler returned a {type(scheduler).__name__}; it must go by steps, not by a metric",
        )
    return scheduler


def _metric(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise JobError("metrics_invalid", f"metric {name} has shape {list(value.shape)}; return one number per batch")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise JobError("metrics_invalid", f"metric {name} is a {type(value).__name__}, not a number") from error
    if not math.isfinite(number):
        raise JobError("metrics_invalid", f"metric {name} is {number} on the evaluation set")
    return number
