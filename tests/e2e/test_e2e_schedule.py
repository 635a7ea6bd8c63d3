"""Real processes: the learning rate goes by the cohort's batches, and an outer optimizer leaves its momentum behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_the_rate_by_the_cohorts_clock_on_ranks_of_unequal_speed(marchline: Stage, tmp_path: Path) -> None:
    """Case J13: every batch at 1 - (global step of its window + own batches) / 100, whoever did how many."""
    path = tmp_path / "rates.txt"
    run = marchline.create(
        "scheduled.py:Scheduled", initial_anchor=2, max_anchor=2, params={"samples": 100, "path": str(path)}
    )
    for number, ms in enumerate((3, 9)):
        marchline.worker(f"host-{number}", "cpu:1", "--emulate-ms-per-batch", str(ms))
        marchline.joined(run, number + 1)
    marchline.started(run, 2)
    assert marchline.ended(run)["phase"] == "done", marchline.story(run)
    told: dict[str, list[float]] = {"0": [], "1": []}
    for line in path.read_text().splitlines():
        rank, rate = line.split()
        told[rank].append(float(rate))
    expected: dict[str, list[float]] = {"0": [], "1": []}
    before = 0
    for row in marchline.items(run, "rounds"):
        for rank, count in row["realized"].items():
            expected[rank] += [1 - (before + own) / 100 for own in range(count)]
        before = row["global_step"]
    assert before == 100
    assert told == {rank: pytest.approx(rates) for rank, rates in expected.items()}


def test_the_outer_step_is_exact_on_every_rank_and_its_momentum_is_saved(marchline: Stage) -> None:
    """ODO at 3:1 moves 2.5 a window: v <- 0.8 v + 2.5, w <- w + lr (2.5 + 0.8 v)."""
    run = marchline.create(
        "odometer.py:Odometer",
        fixed_counts=[3, 1],
        params={"samples": 8},
        outer_optimizer="nesterov",
        outer_lr=0.5,
        outer_momentum=0.8,
    )
    for number in range(2):
        marchline.worker(f"host-{number}", "cpu:1")
        marchline.joined(run, number + 1)
    marchline.started(run, 2)
    assert marchline.ended(run)["phase"] == "done", marchline.story(run)
    v, w = 0.0, 0.0
    for _ in range(2):
        v = 0.8 * v + 2.5
        w += 0.5 * (2.5 + 0.8 * v)
    rounds = marchline.items(run, "rounds")
    assert [row["realized"] for row in rounds] == [{"0": 3, "1": 1}] * 2
    assert all(row["params_hash"] for row in rounds), "every rank reported one and the same hash"
    directory = (marchline.data_dir / marchline.items(run, "checkpoints")[-1]["path"]).parent
    assert float(load_file(directory / "model.safetensors")["w"]) == pytest.approx(w, rel=1e-6)
    assert load_file(directory / "outer.safetensors")["momentum"] == pytest.approx([-v], rel=1e-6)
    manifest = json.loads((directory / "manifest.json").read_text())
    assert "outer.safetensors" in manifest["files"]
    assert manifest["config"]["outer_optimizer"] == "nesterov"
