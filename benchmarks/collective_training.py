"""The training part of ``benchmarks.collective``: one job in several modes through the whole product."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.demo import WARM_UP_ROUNDS
from benchmarks.collective_ranks import Layout
from benchmarks.entries import ROOT, Host, Played, Show, play
from benchmarks.figures import EntryFailed, figures, solo_rates, window_of_work

JOB = "examples/tiny_gpt.py:TinyGPT"
MODES = ("nccl_cadence", "nccl_sync", "cpu_cadence")
SLOWER = (1.0, 2.0)
"""how much slower each rank is than the first"""
SIZES = {
    "cuda": {"layers": 4, "heads": 6, "width": 384, "context": 256},
    "cpu": {"layers": 1, "heads": 2, "width": 32, "context": 64},
}
"""steps of some 25 ms on an H200"""
BATCH_SIZE = {"cuda": 64, "cpu": 32}
BASE_MS = {"cuda": 70.0, "cpu": 40.0}
"""room for both ranks' steps on one GPU"""
STEP_SECONDS = 120.0


def add_course_options(parser: argparse.ArgumentParser) -> None:
    """Options of the training."""
    parser.add_argument("--modes", default=",".join(MODES), help="of training (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each mode (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="of training (default: %(default)s)")
    parser.add_argument("--base-ms", type=float, help=f"of the fast rank's batch (default: {BASE_MS['cuda']:g})")
    parser.add_argument("--batch-size", type=int, help=f"(default: {BATCH_SIZE['cuda']})")
    parser.add_argument("--params", default="{}", help="JSON, beyond the job's size here (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds that a run may take (default: %(default)s)")


@dataclass(frozen=True, slots=True)
class Course:
    """What every run trains."""

    place: Layout
    modes: tuple[str, ...]
    seeds: tuple[int, ...]
    epochs: int
    ms: tuple[float, ...]
    batch_size: int
    params: dict[str, Any]
    limit: float

    @classmethod
    def of(cls, options: argparse.Namespace, place: Layout) -> Course:
        """From the command line."""
        base = options.base_ms or BASE_MS[place.device]
        return cls(
            place=place,
            modes=tuple(options.modes.split(",")),
            seeds=tuple(range(1, options.seeds + 1)),
            epochs=options.epochs,
            ms=tuple(base * slower for slower in SLOWER),
            batch_size=options.batch_size or BATCH_SIZE[place.device],
            params=SIZES[place.device] | json.loads(options.params),
            limit=options.limit,
        )


def train(course: Course, say: Callable[[str], None]) -> dict[str, Any]:
    """Every mode with every seed, in turns."""
    alone = _step_alone(course)
    modes: dict[str, list[dict[str, Any]]] = {mode: [] for mode in course.modes}
    samples = 0
    for seed in course.seeds:
        for mode in course.modes:
            say(f"training, {mode}, seed {seed}")
            try:
                run = _one_run(course, mode, seed)
                samples = run["samples"]
            except EntryFailed as error:
                run = {"failed": str(error)}
                say(f"  it did not come to figures: {error}")
            modes[mode].append(run | {"seed": seed})
    if not samples:
        raise EntryFailed(next(run["failed"] for runs in modes.values() for run in runs))
    return {
        "job": JOB,
        "params": course.params,
        "parameters": alone["parameters"],
        "step_ms": alone["ms"],
        "ms": course.ms,
        "batch_size": course.batch_size,
        "ideal": course.batch_size * solo_rates(course.ms),
        "samples": samples,
        "seeds": len(course.seeds),
        "modes": modes,
    }


def _one_run(course: Course, mode: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        played = play(_show(course, mode, seed, Path(name)))
    return run_figures(played, course.ms, course.batch_size)


def run_figures(played: Played, ms: tuple[float, ...], batch_size: int) -> dict[str, Any]:
    """What a run came to. Raises ``EntryFailed`` when it was not evaluated, or too short."""
    if not played.view["eval"]:
        raise EntryFailed("its model was not evaluated")
    window = played.by_speed(window_of_work(played.rounds, len(ms), WARM_UP_ROUNDS))
    counted = played.rounds[WARM_UP_ROUNDS:]
    return figures(window, ms, batch_size).as_dict() | {
        "rounds": len(played.rounds),
        "round_ms": statistics.median(row["reduce_seconds"] for row in counted) * 1000,
        "loss": played.view["eval"]["metrics"]["loss"],
        "samples": sum(row["samples"] for row in played.rounds),
        "last_allotments": played.rounds[-1]["planned"] or played.rounds[-2]["planned"],
    }


def _show(course: Course, mode: str, seed: int, place: Path) -> Show:
    world = len(course.ms)
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | course.place.agent_environment(world)
    hosts = [
        Host(
            name=f"host{rank}",
            devices=str(rank % course.place.gpus) if course.place.gpus else "cpu:1",
            emulate_ms=ms,
            environment=environment,
        )
        for rank, ms in enumerate(course.ms)
    ]
    settings = {
        "params": course.params,
        "batch_size": course.batch_size,
        "epochs": course.epochs,
        "seed": seed,
        "mode": mode,
    }
    return Show(place, JOB, ROOT, settings, tuple(hosts), time.monotonic() + course.limit)


def _step_alone(course: Course) -> dict[str, Any]:
    program = [sys.executable, "-m", "benchmarks.peers.step", "--job", JOB, "--job-dir", str(ROOT)]
    program += ["--params", json.dumps(course.params), "--batch-size", str(course.batch_size)]
    program += ["--device", course.place.device_of(0)]
    own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(program, env=own, capture_output=True, text=True, timeout=STEP_SECONDS, check=True)
    except subprocess.TimeoutExpired as error:
        raise EntryFailed(f"steps alone took longer than {STEP_SECONDS:g} s") from error
    except subprocess.CalledProcessError as error:
        raise EntryFailed(f"the job did not make a step: {error.stderr.strip()[-300:]}") from error
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
