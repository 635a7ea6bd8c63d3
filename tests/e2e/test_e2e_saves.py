"""kill -9 of the controller in the middle of saves, with real ranks: each resume loads, and is a saved step to the bit.

tests/runtime/test_runtime_kills.py has more kills, and scripted ranks."""

from __future__ import annotations

import json
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from odometers import Reading, armed, injected, readings
from safetensors.numpy import load_file
from stage import PATIENCE, THOROUGH, Stage, stage

pytestmark = pytest.mark.slow

SITES = ("save.manifest", "save.begun", "save.kept", "save.model", "save.named", "save.pruned")
"""in the order in which they are taken up; in between, any moment"""
COUNTS = (3, 1)
A_ROUND = Reading(params=2.5, buffers=2.0)
"""by how much a round of 3 and 1 batches moves the consensus"""
ELEMENTS = 400_000
KEPT = 2


def after(rounds: int) -> Reading:
    return Reading(A_ROUND.params * rounds, A_ROUND.buffers * rounds)


def train_and_save(marchline: Stage, run: int) -> None:
    """Two ranks, and a save after every round for as long as the controller lives."""
    marchline.worker("host", "cpu:2")
    marchline.started(run, 2)


def killed(marchline: Stage, run: int, seconds: float | None) -> None:
    """Wait for the failpoint, or kill so many seconds after the run's first save of its own."""
    if seconds is not None:
        first = len(marchline.items(run, "checkpoints"))
        marchline.until(run, lambda view: len(view["checkpoints"]) > first, "a save")
        try:
            marchline.process.wait(seconds)
        except subprocess.TimeoutExpired:
            marchline.process.kill()
    assert marchline.process.wait(PATIENCE) == -signal.SIGKILL
    for worker in marchline.workers:
        worker.wait()


def half_written(data_dir: Path, run: int) -> bool:
    return any((data_dir / "runs" / str(run) / "checkpoints").glob(".*"))


def saved(marchline: Stage, run: int) -> int:
    """The newest checkpoint's round, once all that is listed is whole and exactly its round's consensus."""
    assert marchline.view(run)["phase"] == "interrupted"
    root = marchline.data_dir / "runs" / str(run) / "checkpoints"
    assert not half_written(marchline.data_dir, run), "what was half-written is swept"
    listed = [row for row in marchline.items(run, "checkpoints") if not row["pruned"]]
    assert {str(row["checkpoint"]) for row in listed} == {path.parent.name for path in root.glob("*/manifest.json")}
    assert 1 <= len(listed) <= KEPT + 1
    for row in listed:
        manifest = json.loads((root / str(row["checkpoint"]) / "manifest.json").read_text())
        model = load_file(marchline.data_dir / row["path"])
        assert row["round"] == manifest["round"]
        wanted = after(row["round"] + 1)
        assert {(float(model["w"].min()), float(model["w"].max()))} == {(wanted.params, wanted.params)}
        assert {(float(model["b"].min()), float(model["b"].max()))} == {(wanted.buffers, wanted.buffers)}
        assert manifest["states"] == [0, 1]
    return int(listed[-1]["round"])


def plan(kills: int) -> list[tuple[str, float | None]]:
    """Failpoints, each at a seeded one of its hits, and plain moments by turns."""
    dice = random.Random(20)
    failpoints = [f"{site}@{dice.randint(2, 5)}=kill" for site in SITES * kills]
    return [(failpoints[n // 2], None) if n % 2 == 0 else ("", dice.uniform(0.0, 0.8)) for n in range(kills)]


@pytest.mark.timeout(3000)
@THOROUGH
@pytest.mark.parametrize("kills", [4])
def test_killed_while_it_saves_the_controller_resumes_from_a_saved_step(tmp_path: Path, kills: int) -> None:
    journal, run, torn, random_kills = tmp_path / "injections", 0, 0, 0
    planned = plan(kills)
    for number, (points, seconds) in enumerate([*planned, ("", None)]):
        ledger = tmp_path / f"ledger-{number}"
        params: dict[str, Any] = {"samples": 100_000, "elements": ELEMENTS, "path": str(ledger)}
        with stage(tmp_path, env=armed(points, journal) if points else None) as marchline:
            if run:
                rounds = saved(marchline, run) + 1
                run = marchline.post("runs", {"resume_from": f"{run}:last", "params": params}, expect=201)["id"]
            else:
                rounds = 0
                config = {"checkpoint_rounds": 1, "checkpoint_epochs": None, "keep_checkpoints": KEPT}
                config["reattach_seconds"] = 0  # what the next controller goes on from is to be the checkpoint
                run = marchline.create("freight.py:Freight", fixed_counts=list(COUNTS), params=params, **config)
            train_and_save(marchline, run)
            if number < len(planned):
                killed(marchline, run, seconds)
                torn += half_written(marchline.data_dir, run)
                random_kills += seconds is not None
            else:
                marchline.until(run, lambda view, rounds=rounds: view["round"] > rounds, "one more round")
                marchline.post(f"runs/{run}/abort")
                marchline.ended(run)
        for rank, seen in readings(ledger).items():
            assert seen[0] == after(rounds), f"kill {number}: rank {rank} did not begin where the save was made"
    by_failpoint = [points.partition("@")[0] for points, _ in planned if points]
    assert injected(journal) == sorted(by_failpoint)
    assert len(by_failpoint) + random_kills == kills
    assert torn >= kills // 4, "too few kills met a save"
