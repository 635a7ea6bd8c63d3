"""Real processes in cpu_async: ranks work ahead while rounds are summed, and yet nothing is lost or counted twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_ledger(marchline: Stage, tmp_path: Path) -> None:
    """Every sample id exactly once an epoch, with a partial last batch, and some of it ahead of its round."""
    samples, epochs, ledger = 401, 2, tmp_path / "ledger.txt"
    run = marchline.create(
        "ledger.py:Ledger",
        mode="cpu_async",
        batch_size=4,
        epochs=epochs,
        initial_anchor=2,
        params={"samples": samples, "path": str(ledger)},
    )
    for number, ms in enumerate((4, 10)):
        marchline.worker(f"host-{number}", "cpu:1", "--emulate-ms-per-batch", str(ms))
    marchline.started(run, 2)
    view = marchline.ended(run)
    assert view["phase"] == "done", marchline.story(run)
    lines = [tuple(map(int, line.split())) for line in ledger.read_text().splitlines()]
    for epoch in range(epochs):
        seen = Counter(sample for e, _, sample in lines if e == epoch)
        assert seen == Counter(range(samples)), f"epoch {epoch}"
    assert view["samples_accepted"] == [samples] * epochs
    rounds = marchline.items(run, "rounds")
    assert all(row["params_hash"] for row in rounds), "every rank reported one and the same hash"
    assert sum(row["samples"] for row in rounds) == samples * epochs
    ahead = [row for row in rounds if any(n > row["planned"][rank] for rank, n in row["realized"].items())]
    assert ahead, "somebody worked ahead of its allotment"


def test_odometer(marchline: Stage, tmp_path: Path) -> None:
    """With delta no finished batch is undone: each round adds sum(n^2)/sum(n) of what its snapshots held, exactly."""
    run = marchline.create(
        "odometer.py:Odometer", mode="cpu_async", fixed_counts=[6, 2], max_overshoot=3, params={"samples": 160}
    )
    for number, ms in enumerate((4, 12)):
        marchline.worker(f"host-{number}", "cpu:1", "--emulate-ms-per-batch", str(ms))
        marchline.joined(run, number + 1)
    marchline.started(run, 2)
    view = marchline.ended(run)
    assert view["phase"] == "done", marchline.story(run)
    rounds = [list(row["realized"].values()) for row in marchline.items(run, "rounds")]
    assert sum(map(sum, rounds)) == 160
    exact = sum(sum(n * n for n in realized) / sum(realized) for realized in rounds)
    number = marchline.items(run, "checkpoints")[-1]["checkpoint"]
    path = tmp_path / "model.safetensors"
    path.write_bytes(marchline.client.get(f"/api/v1/runs/{run}/checkpoints/{number}/model").content)
    assert float(load_file(path)["w"]) == pytest.approx(exact, rel=1e-5)


def test_a_rank_that_is_killed_ahead_of_its_round_costs_no_sample(marchline: Stage, tmp_path: Path) -> None:
    samples, ledger = 2000, tmp_path / "ledger.txt"
    run = marchline.create(
        "ledger.py:Ledger",
        mode="cpu_async",
        batch_size=4,
        initial_anchor=4,
        max_anchor=8,
        quorum=3,
        params={"samples": samples, "path": str(ledger)},
    )
    workers = [
        marchline.worker(f"host-{number}", "cpu:1", "--emulate-ms-per-batch", str(ms))
        for number, ms in enumerate((10, 20, 40))
    ]
    marchline.started(run, 3)
    marchline.until(run, lambda view: view["global_step"] >= 60, "some rounds to close")
    workers[0].child("worker.rank").kill()
    view = marchline.ended(run)
    assert view["phase"] == "done", marchline.story(run)
    (death,) = marchline.items(run, "deaths")
    assert death["signal"] == "SIGKILL"
    assert view["samples_accepted"] == [samples]
    rounds = marchline.items(run, "rounds")
    assert sum(row["samples"] for row in rounds) == samples
    lines = [tuple(map(int, line.split())) for line in ledger.read_text().splitlines()]
    assert {sample for _, _, sample in lines} == set(range(samples))
    again = sum(count - 1 for count in Counter(sample for _, _, sample in lines).values())
    assert again <= death["returned_samples"], "only what no round held was trained again"
