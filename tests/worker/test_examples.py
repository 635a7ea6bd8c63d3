"""The examples learn under work-weighted averaging of unequal ranks: they are the first thing that anybody runs."""

import math
from pathlib import Path

import pytest
from rank_rig import Cohort, plan, start_rank

from wire.messages import EvalResult, Evaluate, StartChunk

EXAMPLES = Path(__file__).parents[2] / "examples"
SHARES = (4, 2, 1)
"""batches that each rank does in a window: unequal devices"""


def train_epoch(cohort: Cohort, epoch: int, samples: int, batch_size: int, number: int, step: int) -> tuple[int, int]:
    """Deal an epoch in windows of seven batches; the next round's number and the cohort's step."""
    offset = 0
    while offset < samples:
        chunks = {}
        for rank, share in enumerate(SHARES):
            size = min(share * batch_size, samples - offset)
            if size > 0:
                batches = math.ceil(size / batch_size)
                chunks[rank] = StartChunk(epoch=epoch, offset=offset, size=size, batches=batches, global_step=step)
                offset += size
        cohort.window(chunks, number)
        step += sum(chunk.batches for chunk in chunks.values())
        number += 1
    return number, step


@pytest.mark.parametrize("batch_size", [16, 32])
def test_digits_reaches_its_accuracy_on_three_unequal_ranks(tmp_path: Path, batch_size: int) -> None:
    epochs, samples = 8, 1437
    plans = plan(
        "digits.py:Digits", total_samples=samples, batch_size=batch_size, epochs=epochs, verify_consensus=False
    )
    cohort = Cohort([start_rank(tmp_path, plans, rank, job_dir=EXAMPLES) for rank in range(3)])
    cohort.reduce(-1, initial=True)
    number = step = 0
    for epoch in range(epochs):
        number, step = train_epoch(cohort, epoch, samples, batch_size, number, step)
    cohort.ranks[2].send(Evaluate(epoch=epochs - 1))
    metrics = cohort.ranks[2].expect(EvalResult).metrics
    cohort.leave()
    assert metrics["accuracy"] >= 0.95


def test_tiny_gpt_learns_more_than_letter_frequencies(tmp_path: Path) -> None:
    params = {"layers": 1, "heads": 2, "width": 32, "context": 16}
    plans = plan("tiny_gpt.py:TinyGPT", total_samples=129_506, params=params, batch_size=64, verify_consensus=False)
    cohort = Cohort([start_rank(tmp_path, plans, rank, job_dir=EXAMPLES) for rank in range(3)])
    cohort.reduce(-1, initial=True)
    number, _ = train_epoch(cohort, 0, 210 * 64, 64, 0, 0)
    assert number == 30
    trainer = cohort.ranks[0].workload.trainer
    held_out = [cohort.ranks[0].workload.eval_dataset[index] for index in range(0, 14_000, 14)]
    cohort.leave()
    assert trainer.evaluate(held_out, 100)["bits_per_byte"] < 4.5, "a byte of this text has 4.6 bits on its own"
