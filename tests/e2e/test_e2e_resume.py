"""Real processes: a resumed run ends where the uninterrupted one does, and trains what was left (N06, F09, D07)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from stage import THOROUGH, Stage, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def model(marchline: Stage, run: int, number: int | None = None) -> dict[str, np.ndarray]:
    """A checkpoint's model, the newest one unless another is named."""
    number = marchline.items(run, "checkpoints")[-1]["checkpoint"] if number is None else number
    return dict(load_file(marchline.data_dir / "runs" / str(run) / "checkpoints" / str(number) / "model.safetensors"))


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def to_the_end(marchline: Stage, run: int, *devices: str) -> dict[str, Any]:
    """Bring hosts, start, and wait."""
    ranks = 0
    for number, device in enumerate(devices):
        marchline.worker(f"host-{number}", device)
        ranks += int(device.partition(":")[2])
        marchline.joined(run, ranks)
    marchline.post(f"runs/{run}/start")
    view = marchline.ended(run)
    assert view["phase"] == "done", marchline.story(run)
    return view


def resume(marchline: Stage, source: str, **changes: Any) -> int:
    return marchline.post("runs", {"resume_from": source} | changes, expect=201)["id"]


def warnings(marchline: Stage, run: int) -> list[str]:
    kinds = ("resumed_changed", "state_not_restored", "state_missing")
    return [row["text"] for row in marchline.items(run, "events") if row["kind"] in kinds]


@pytest.mark.parametrize(
    ("saves", "outer"),
    [
        ({"checkpoint_rounds": 5, "checkpoint_epochs": None}, {}),
        pytest.param({"checkpoint_epochs": 1}, {}, marks=THOROUGH),
        ({"checkpoint_rounds": 7}, {"outer_optimizer": "nesterov"}),
    ],
)
def test_the_same_world_goes_on_to_the_bit(marchline: Stage, saves: dict[str, Any], outer: dict[str, Any]) -> None:
    """Dropout, two moments, a schedule, batch norm and its counter: from the middle of an epoch, and from its end."""
    settings = {"mode": "cpu_sync", "batch_size": 4, "epochs": 3, "keep_checkpoints": -1}
    run = marchline.create("dropout.py:Dropout", **settings, **saves, **outer)
    to_the_end(marchline, run, "cpu:2")
    final = model(marchline, run)
    rows = marchline.items(run, "checkpoints")[:-1]
    assert rows, marchline.story(run)
    for row in {row["checkpoint"]: row for row in (rows[0], rows[-1])}.values():
        again = resume(marchline, f"{run}:{row['checkpoint']}")
        view = to_the_end(marchline, again, "cpu:2")
        assert warnings(marchline, again) == []
        assert same(model(marchline, again), final), f"from {row['reason']}"
        assert not same(model(marchline, run, row["checkpoint"]), final)
        assert view["resumed_from"]["run"] == run
        # D07: one line, each round and epoch once, the count going on.
        rounds = marchline.items(again, "rounds")
        assert [each["round"] for each in rounds] == list(range(len(rounds)))
        assert [each["run_id"] for each in rounds] == [run if n <= row["round"] else again for n in range(len(rounds))]
        steps = [each["global_step"] for each in rounds]
        assert steps == [each["global_step"] for each in marchline.items(run, "rounds")]
        assert [each["epoch"] for each in marchline.items(again, "epochs")] == [0, 1, 2]
        assert view["samples_accepted"] == [96] * 3


def ledger(path: Path) -> dict[int, Counter[int]]:
    seen: dict[int, Counter[int]] = {}
    for line in path.read_text().splitlines():
        epoch, _, sample = map(int, line.split())
        seen.setdefault(epoch, Counter())[sample] += 1
    return seen


@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        pytest.param(("cpu:2",), {}, marks=THOROUGH),
        (("cpu:2", "cpu:1"), {"batch_size": 3, "quorum": 3}),
        pytest.param(("cpu:1", "cpu:1"), {"batch_size": 8, "mode": "cpu_sync"}, marks=THOROUGH),
        (("cpu:3",), {"mode": "cpu_async"}),
    ],
)
def test_stopped_and_resumed_every_sample_is_trained_once(
    marchline: Stage, tmp_path: Path, devices: tuple[str, ...], changes: dict[str, Any]
) -> None:
    path, samples, epochs = tmp_path / "ledger.txt", 203, 2
    run = marchline.create(
        "ledger.py:Ledger",
        batch_size=4,
        epochs=epochs,
        initial_anchor=2,
        max_anchor=2,
        params={"samples": samples, "path": str(path)},
    )
    marchline.worker("first", "cpu:2", "--emulate-ms-per-batch", "20")
    marchline.started(run, 2)
    marchline.until(run, lambda view: view["round"] >= 2, "two rounds")
    marchline.post(f"runs/{run}/stop")
    view = marchline.ended(run)
    assert view["phase"] == "done", marchline.story(run)
    before = sum(sum(count.values()) for count in ledger(path).values())
    assert 0 < before < samples * epochs, "it was stopped in the middle"

    again = resume(marchline, str(run), max_anchor=1000, **changes)
    assert marchline.view(again)["config"]["params"]["samples"] == samples
    view = to_the_end(marchline, again, *devices)
    for epoch in range(epochs):
        assert ledger(path)[epoch] == Counter(range(samples)), f"epoch {epoch}"
    assert view["samples_accepted"] == [samples] * epochs
    told = warnings(marchline, again)
    assert any("Batches have" in text for text in told) == ("batch_size" in changes)
    assert any("another rank's optimizer" in text for text in told) == (sum(map(_ranks, devices)) > 2)


def _ranks(device: str) -> int:
    return int(device.partition(":")[2])


def test_a_save_on_demand_and_a_killed_controller_lose_at_most_what_came_after_it(
    marchline: Stage, tmp_path: Path
) -> None:
    """kill -9, restart on the same data: the run is interrupted, and one click goes on from what was saved."""
    from stage import stage as restarted

    params = {"samples": 4000, "sleep_ms": 5.0}
    run = marchline.create("odometer.py:Odometer", epochs=1, reattach_seconds=0, params=params)
    marchline.worker("one", "cpu:2")
    marchline.started(run, 2)
    marchline.until(run, lambda view: view["round"] >= 1, "a round")
    marchline.post(f"runs/{run}/checkpoints")
    wait_for(lambda: marchline.items(run, "checkpoints") or None, "the checkpoint")
    marchline.process.kill()
    marchline.process.wait()
    for worker in marchline.workers:
        worker.wait()
    with restarted(tmp_path) as again:
        assert again.view(run)["phase"] == "interrupted"
        row = again.items(run, "checkpoints")[-1]
        assert row["reason"] == "asked for by operator"
        number = resume(again, f"{run}:last", params={"samples": 4000})
        again.worker("two", "cpu:2")
        again.joined(number, 2)
        again.post(f"runs/{number}/start")
        view = again.until(number, lambda view: view["round"] > row["round"] + 1, "the next round")
        assert view["global_step"] > row["global_step"]
        again.post(f"runs/{number}/abort")
        again.ended(number)


def test_what_cannot_be_resumed_is_refused_with_the_reason(marchline: Stage) -> None:
    run = marchline.create("odometer.py:Odometer", epochs=1, params={"samples": 16})
    refused = marchline.post("runs", {"resume_from": f"{run}:last"}, expect=409)
    assert refused["code"] == "no_checkpoint"
    to_the_end(marchline, run, "cpu:2")
    for changes, status, code in (
        ({}, 422, "nothing_left"),
        ({"job": "ledger.py:Ledger", "epochs": 9}, 422, "checkpoint_foreign"),
    ):
        problem = marchline.post("runs", {"resume_from": str(run)} | changes, expect=status)
        assert code in [error["code"] for error in problem["errors"]], problem
    unknown = {f"{run}:99": "checkpoint_unknown", "999": "run_unknown", "a:b": "checkpoint_unreadable_name"}
    for source, code in unknown.items():
        assert marchline.post("runs", {"resume_from": source}, expect=409)["code"] == code
    bundle = marchline.data_dir / "runs" / str(run) / "checkpoints" / "1" / "rank1.safetensors"
    body = bytearray(bundle.read_bytes())
    body[-1] ^= 1
    bundle.write_bytes(body)
    problem = marchline.post("runs", {"resume_from": str(run), "epochs": 2}, expect=409)
    assert problem["code"] == "checkpoint_damaged"
    assert "rank1.safetensors" in problem["detail"]
