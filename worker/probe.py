"""What a host finds when it loads a job, builds the model and opens the dataset: the door's evidence, and a
check for people.

``python -m worker job probe`` is run by the agent, which must not import torch itself. ``python -m worker
job check`` tells a person whether a job will train.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from wire.messages import ProbeReport, TensorSpec
from worker.arena import Arena, ArenaError, model_layout
from worker.data import fetch
from worker.fingerprint import dataset_signature, dataset_size
from worker.job import Job, JobError, blamed, describe, file_hash, find_job_file, load_job, sources_hash
from worker.lifeline import receive_orders
from worker.seeding import seed_everything
from worker.specs import ProbeSpec
from worker.trainer import Trainer

SEED = 0
"""Every host probes under one seed, so that a random split or an augmentation looks the same on all of
them."""


def probe_main() -> int:
    """Read a ``ProbeSpec`` from stdin, write a ``ProbeReport`` as JSON to stdout; 0 whatever the report says.

    Whatever the job prints goes to stderr, so that stdout holds the report and nothing else.
    """
    spec = msgspec.json.decode(receive_orders(), type=ProbeSpec)
    answer = os.dup(1)
    os.dup2(2, 1)
    report = probe(spec.job, Path(spec.job_dir), spec.params)
    with os.fdopen(answer, "wb") as stdout:
        stdout.write(msgspec.json.encode(report))
    return 0


def probe(job_name: str, job_dir: Path, params: dict[str, Any]) -> ProbeReport:
    """Load and build the job on the CPU. What is wrong with it stands in ``error``; nothing is raised for
    it."""
    try:
        path, _ = find_job_file(job_name, job_dir)
        seed_everything(SEED)
        job = load_job(job_name, job_dir, params)
        signature, size = _examine_dataset(job, job_dir)
        trainer = Trainer(job, job_dir, torch.device("cpu"), seed=SEED, total_steps=size)
        return ProbeReport(
            job_hash=file_hash(path),
            sources_hash=sources_hash(job, job_dir),
            layout=model_layout(trainer.model),
            dataset_signature=signature,
            dataset_size=size,
        )
    except (JobError, ArenaError) as error:
        return ProbeReport(error=str(error))
    except Exception as error:  # a fault of ours, or a kind of job that nobody thought of: the operator must see it too
        return ProbeReport(error=f"probing the job failed: {describe(error, job_dir)}")


def check(job_name: str, job_dir: Path, params: dict[str, Any], say: Callable[[str], None]) -> bool:
    """Build the job, train it on two samples, evaluate it on two; ``say`` gets each finding. Whether it
    will train."""
    try:
        for finding in _findings(job_name, job_dir, params):
            say(finding)
    except (JobError, ArenaError) as error:
        say(f"wrong      {error}")
        return False
    say("ok         the job will train")
    return True


def _findings(job_name: str, job_dir: Path, params: dict[str, Any]) -> Iterator[str]:
    path, attribute = find_job_file(job_name, job_dir)
    seed_everything(SEED)
    job = load_job(job_name, job_dir, params)
    yield f"job        {attribute} in {path.name}, sha256 {file_hash(path)[:16]}"
    yield f"params     {_params(job.params)}"
    signature, size = _examine_dataset(job, job_dir)
    yield f"dataset    {size} samples, signature {signature[:16]}"
    trainer = Trainer(job, job_dir, torch.device("cpu"), seed=SEED, total_steps=size)
    yield f"model      {_model(trainer.model)}"
    _compare_builds(job, job_dir, trainer.model)
    yield from _try_step(job, job_dir, trainer)
    yield from _try_evaluation(job, job_dir, trainer)
    yield f"sources    sha256 {sources_hash(job, job_dir)[:16]}"


def _examine_dataset(job: Job, job_dir: Path) -> tuple[str, int]:
    seed_everything(SEED)
    with blamed("build_failed", "train_dataset", job_dir):
        dataset = job.train_dataset()
    return dataset_signature(dataset, job_dir)


def _compare_builds(job: Job, job_dir: Path, model: nn.Module) -> None:
    with blamed("build_failed", "build_model, called again,", job_dir):
        again = job.build_model()
    if Arena.for_model(again).layout_hash != Arena.for_model(model).layout_hash:
        raise JobError(
            "build_failed",
            "build_model gave another model the second time; every rank must build the same one",
        )


def _try_step(job: Job, job_dir: Path, trainer: Trainer) -> Iterator[str]:
    dataset = job.train_dataset()
    indices = [0, dataset_size(dataset, job_dir) - 1]
    with blamed("step_failed", "one training step on two samples", job_dir):
        batch = job.collate(fetch(dataset, indices))
        started = time.perf_counter()
        loss = trainer.step(batch)
    if loss is None:
        raise JobError("loss_invalid", "the loss of two samples is not finite")
    yield f"step       loss {loss:.4g} in {(time.perf_counter() - started) * 1000:.0f} ms"
    idle = [
        name
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad and parameter.grad is None
    ]
    if idle:
        yield f"note       no gradient reached {', '.join(idle[:5])}{' and more' if len(idle) > 5 else ''}"


def _try_evaluation(job: Job, job_dir: Path, trainer: Trainer) -> Iterator[str]:
    with blamed("build_failed", "eval_dataset", job_dir):
        dataset = job.eval_dataset()
    if dataset is None:
        yield "eval       none: the job has no eval_dataset"
        return
    size = len(dataset)
    with blamed("eval_failed", "one evaluation step on two samples", job_dir):
        metrics = trainer.evaluate([dataset[0], dataset[size - 1]], batch_size=2)
    shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    yield f"eval       {size} samples; {shown} on two of them"


def _params(params: Any) -> str:
    values = [f"{field.name}={getattr(params, field.name)!r}" for field in fields(params)]
    return ", ".join(values) or "none"


def _model(model: nn.Module) -> str:
    layout = model_layout(model)
    counts = {section: _elements(layout, section) for section in ("params", "buffers")}
    local = sum(spec.section == "local" for spec in layout)
    megabytes = 4 * sum(counts.values()) / 1e6
    return (
        f"{type(model).__name__}: {counts['params']} parameters and {counts['buffers']} buffer elements "
        f"are averaged ({megabytes:.3g} MB a round each way), {local} tensors stay local"
    )


def _elements(layout: list[TensorSpec], section: str) -> int:
    return sum(math.prod(spec.shape) for spec in layout if spec.section == section and not spec.alias_of)


def print_line(text: str) -> None:
    """One finding on stdout, at once."""
    print(text, file=sys.stdout, flush=True)
