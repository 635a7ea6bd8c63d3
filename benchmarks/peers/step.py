"""How long one step of a job takes on a device that it has to itself: for ``benchmarks.collective``.

The last line is JSON: ``ms`` (median), ``parameters``.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from worker.data import SampleFeed
from worker.job import load_job
from worker.trainer import Trainer

WARM_UP, STEPS = 5, 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--job-dir", type=Path, required=True)
    parser.add_argument("--params", required=True, help="JSON")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--device", required=True)
    options = parser.parse_args()
    job = load_job(options.job, options.job_dir, json.loads(options.params))
    trainer = Trainer(job, options.job_dir, torch.device(options.device), seed=1, total_steps=WARM_UP + STEPS)
    feed = SampleFeed(job.train_dataset(), job.collate, 1, options.batch_size)
    batch, _ = next(feed.batches(0, 0, options.batch_size))
    batch = trainer.move(batch)
    taken = []
    for _ in range(WARM_UP + STEPS):
        started = time.perf_counter()
        trainer.step(batch)
        taken.append((time.perf_counter() - started) * 1000)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(json.dumps({"ms": statistics.median(taken[WARM_UP:]), "parameters": parameters}), flush=True)


if __name__ == "__main__":
    main()
