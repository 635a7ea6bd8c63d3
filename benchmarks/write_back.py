"""Which write-back policy of ``cpu_async`` trains best: the digits job, really trained, on the simulator's clock.

The real core deals and closes rounds, the worker's own trainer, feed and policies do what ranks do; only time is
virtual, so that a loaded machine changes nothing and a round may be as slow as one likes. ``cpu_cadence`` is the
yardstick: nobody works ahead there.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from backend.core.config import WRITE_BACKS, RunConfig
from backend.core.vocabulary import Effect, SendRank
from simulation.played import Batch, Packed, PlayedRank
from simulation.rounds import Sum
from simulation.theatre import Theatre
from simulation.watch import Watcher
from wire.messages import RequestParams, StartChunk, Update
from worker.data import SampleFeed
from worker.job import load_job
from worker.trainer import Trainer
from worker.write_back import WriteBack

JOB, JOB_DIR = "digits.py:Digits", Path(__file__).parent.parent / "examples"
SPEEDS_MS = (20.0, 40.0, 80.0)


class Classroom(Theatre):
    """A play whose ranks hold real models. All start alike and end alike."""

    def __init__(self, config: RunConfig, reduce_seconds: float) -> None:
        job = load_job(config.job, JOB_DIR, {})
        data = job.train_dataset()
        super().__init__(config, samples=len(data), check=False)
        self.plane.fixed_seconds = reduce_seconds
        steps = config.epochs * -(-len(data) // config.batch_size)
        self.trainers = [
            Trainer(
                load_job(config.job, JOB_DIR, {}), JOB_DIR, torch.device("cpu"), seed=config.seed, total_steps=steps
            )
            for _ in SPEEDS_MS
        ]
        self.feeds = [SampleFeed(data, job.collate, config.seed, config.batch_size) for _ in SPEEDS_MS]
        self.eval_data = job.eval_dataset()
        self.clocks = [0] * len(SPEEDS_MS)
        self.ahead = 0
        """batches done between a snapshot and the adoption of its round"""
        self._snapshots: dict[int, list[torch.Tensor]] = {}
        self._packed_at = [0] * len(SPEEDS_MS)
        self._held: list[dict[int, list[torch.Tensor]]] = [{} for _ in SPEEDS_MS]
        """by rank and its steps: what it held; the news of a snapshot comes some batches after it"""
        self._consensus: list[torch.Tensor] = []
        self._write_back = WriteBack(config.write_back, config.blend_alpha)
        self.watchers.append(Teacher(self))
        for rank, ms in enumerate(SPEEDS_MS):
            self.join(f"host-{rank}", ms)

    def trained(self, played: PlayedRank, batch: Batch) -> None:
        super().trained(played, batch)
        trainer = self.trainers[played.rank]
        for samples, _ in self.feeds[played.rank].batches(*batch):
            trainer.step(samples)
        self._hold(played)
        self.tell(played.rank, self.clocks[played.rank] + 1)

    def tell(self, rank: int, global_step: int) -> None:
        """The cohort's step count as this rank knows it; it never goes back."""
        self.clocks[rank] = max(self.clocks[rank], global_step)
        self.trainers[rank].advance(self.clocks[rank])

    def contribute(self, played: PlayedRank, request: RequestParams, packed: Packed) -> None:
        if not request.initial:
            self._packed_at[played.rank] += packed.steps
            self._snapshots[played.rank] = self._held[played.rank][self._packed_at[played.rank]]
        super().contribute(played, request, packed)

    def agree(self, steps: dict[int, int]) -> None:
        """The consensus of a round, weighed by work."""
        total = sum(steps.values())
        each = zip(*(self._snapshots[rank] for rank in steps), strict=True)
        self._consensus = [
            torch.stack([n / total * part for n, part in zip(steps.values(), parts, strict=True)]).sum(0)
            for parts in each
        ]

    def acknowledge(self, played: PlayedRank, packed: Packed, when: float) -> None:
        ahead = played.steps - self._packed_at[played.rank]
        if packed.round >= 0 and played.adopted is not None:
            held = zip(self._parameters(played.rank), self._snapshots[played.rank], self._consensus, strict=True)
            for now, snapshot, consensus in held:
                if ahead:
                    self._write_back.merge(now, snapshot, consensus)
                else:
                    now.copy_(consensus)
            self.ahead += ahead
            self._held[played.rank].clear()
            self._hold(played)
        super().acknowledge(played, packed, when)

    def score(self) -> dict[str, float]:
        """On the evaluation set, once the run is over and all replicas are equal."""
        return self.trainers[0].evaluate(self.eval_data, 256)

    def _hold(self, played: PlayedRank) -> None:
        self._held[played.rank][played.steps] = [parameter.clone() for parameter in self._parameters(played.rank)]

    def _parameters(self, rank: int) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.trainers[rank].model.parameters()]


class Teacher(Watcher):
    """Passes on what ranks hear beside their batches."""

    def __init__(self, room: Classroom) -> None:
        self.room = room

    def effect(self, now: float, effect: Effect) -> None:
        if isinstance(effect, SendRank) and isinstance(effect.message, StartChunk | Update):
            self.room.tell(effect.rank, effect.message.global_step)

    def committed(self, number: int, result: Sum, batches: dict[int, list[Batch]]) -> None:
        if number >= 0 and result.value is not None:
            self.room.agree(result.steps)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this measurement."""
    parser.add_argument("--seeds", type=int, default=5, help="runs of each policy (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-anchor", type=int, default=4, help="batches of the slowest rank in a window")
    parser.add_argument("--reduce", default="0.05,0.3,1.0", help="seconds that a sum takes (default: %(default)s)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train once for every policy, duration of the round and seed."""
    rows = [
        _row(options, reduce_seconds, mode, policy)
        for reduce_seconds in map(float, options.reduce.split(","))
        for mode, policy in [("cpu_cadence", "delta"), *(("cpu_async", policy) for policy in WRITE_BACKS)]
    ]
    return {"speeds_ms": SPEEDS_MS, "rows": rows, "lines": list(_lines(rows))}


def _row(options: argparse.Namespace, reduce_seconds: float, mode: str, policy: str) -> dict[str, Any]:
    runs = []
    for seed in range(options.seeds):
        config = RunConfig(
            job=JOB,
            mode=mode,
            write_back=policy,
            batch_size=options.batch_size,
            epochs=options.epochs,
            seed=seed,
            quorum=len(SPEEDS_MS),
            target=len(SPEEDS_MS),
            initial_anchor=options.max_anchor,
            max_anchor=options.max_anchor,
        )
        room = Classroom(config, reduce_seconds)
        room.run(1e6)
        if room.end is None or room.end.phase != "done":
            raise RuntimeError(f"{mode} with {policy} ended otherwise: {room.end}")
        batches = sum(rank.steps for rank in room.ranks.values())
        runs.append(room.score() | {"seconds": room.now, "ahead": room.ahead / batches})
    mean = {name: statistics.fmean(run[name] for run in runs) for name in runs[0]}
    spread = statistics.stdev([run["accuracy"] for run in runs]) if len(runs) > 1 else 0.0
    return {"reduce_seconds": reduce_seconds, "mode": mode, "policy": policy, "spread": spread, "runs": runs} | mean


def _lines(rows: Iterable[dict[str, Any]]) -> Iterable[str]:
    head = ("round s", "mode", "policy", "accuracy", "+-", "loss", "ahead", "seconds")
    yield "{:>7} {:<12} {:<10} {:>8} {:>6} {:>7} {:>6} {:>8}".format(*head)
    for row in rows:
        policy = row["policy"] if row["mode"] == "cpu_async" else "-"
        yield (
            f"{row['reduce_seconds']:>7g} {row['mode']:<12} {policy:<10} {row['accuracy']:>8.4f} {row['spread']:>6.4f} "
            f"{row['loss']:>7.4f} {row['ahead']:>6.1%} {row['seconds']:>8.1f}"
        )
