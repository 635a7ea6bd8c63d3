"""Real processes, real sockets: the average is exact, every sample is trained once, replicas are the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from stage import THOROUGH, Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def final_model(marchline: Stage, run: int, into: Path) -> dict[str, object]:
    """The newest checkpoint, downloaded as an operator would."""
    number = marchline.items(run, "checkpoints")[-1]["checkpoint"]
    response = marchline.client.get(f"/api/v1/runs/{run}/checkpoints/{number}/model")
    assert response.status_code == 200, response.text
    path = into / "model.safetensors"
    path.write_bytes(response.content)
    return dict(load_file(path))


@pytest.mark.parametrize(
    ("hosts", "counts", "expected"),
    [
        pytest.param(("cpu:2",), (3, 1), 2.5, marks=THOROUGH),
        (("cpu:1", "cpu:1"), (3, 1), 2.5),
        (("cpu:2",), (4, 1), 3.4),
        pytest.param(("cpu:1", "cpu:1"), (4, 1), 3.4, marks=THOROUGH),
        pytest.param(("cpu:3",), (6, 2, 1), 41 / 9, marks=THOROUGH),
        (("cpu:2", "cpu:1"), (6, 2, 1), 41 / 9),
        (("cpu:2",), (4, 4), 4.0),
        pytest.param(("cpu:1", "cpu:1"), (4, 4), 4.0, marks=THOROUGH),
    ],
)
def test_odometer(
    marchline: Stage, tmp_path: Path, hosts: tuple[str, ...], counts: tuple[int, ...], expected: float
) -> None:
    """Two windows with forced counts: each adds sum(n^2)/sum(n), exactly."""
    windows = 2
    run = marchline.create(
        "odometer.py:Odometer", fixed_counts=list(counts), quorum=len(counts), params={"samples": windows * sum(counts)}
    )
    for number, devices in enumerate(hosts):
        marchline.worker(f"host-{number}", devices)
        marchline.joined(run, sum(int(d.split(":")[1]) for d in hosts[: number + 1]))
    marchline.started(run, len(counts))
    view = marchline.ended(run)
    assert view["phase"] == "done", marchline.story(run)
    rounds = marchline.items(run, "rounds")
    assert [row["realized"] for row in rounds] == [{str(rank): n for rank, n in enumerate(counts)}] * windows
    assert all(row["params_hash"] for row in rounds), "every rank reported one and the same hash"
    assert float(final_model(marchline, run, tmp_path)["w"]) == pytest.approx(windows * expected, rel=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("speeds", [(2, 6), pytest.param((2, 4, 8), marks=THOROUGH), (1, 2, 3, 6, 12)])
def test_ledger(marchline: Stage, tmp_path: Path, speeds: tuple[int, ...]) -> None:
    """Every sample id exactly once an epoch, with a partial last batch and ranks of unequal speed."""
    samples, epochs, ledger = 101, 3, tmp_path / "ledger.txt"
    run = marchline.create(
        "ledger.py:Ledger",
        batch_size=4,
        epochs=epochs,
        initial_anchor=2,
        quorum=len(speeds),
        params={"samples": samples, "path": str(ledger)},
    )
    for number, ms in enumerate(speeds):
        marchline.worker(f"host-{number}", "cpu:1", "--emulate-ms-per-batch", str(ms))
    marchline.started(run, len(speeds))
    assert marchline.ended(run)["phase"] == "done", marchline.story(run)
    lines = [tuple(map(int, line.split())) for line in ledger.read_text().splitlines()]
    for epoch in range(epochs):
        seen = Counter(sample for e, _, sample in lines if e == epoch)
        assert seen == Counter(range(samples)), f"epoch {epoch}"
    assert len({rank for _, rank, _ in lines}) == len(speeds), "every rank had work"
    assert marchline.view(run)["samples_accepted"] == [samples] * epochs
