"""Real processes: the controller is killed and started again, and its cohort goes on, or its run can be resumed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from safetensors.numpy import load_file
from stage import ROOT, THOROUGH, Stage, environment, stage, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WINDOWS = 36


@contextmanager
def restarted(killed: Stage) -> Iterator[Stage]:
    """The same controller on the same port and data, with the workers of the one that was killed."""
    with stage(killed.tmp, "--port", str(urlsplit(killed.url).port)) as again:
        again.workers = [*killed.workers]
        yield again
        if again.process.poll() is not None:
            again.workers.clear()  # they outlive this one, too


def kill(marchline: Stage) -> None:
    marchline.process.kill()
    marchline.process.wait()


def odometer(marchline: Stage, run: int) -> float:
    number = marchline.items(run, "checkpoints")[-1]["checkpoint"]
    path = marchline.data_dir / "runs" / str(run) / "checkpoints" / str(number) / "model.safetensors"
    return float(load_file(path)["w"])


@pytest.mark.parametrize(
    ("mode", "counts", "step"),
    [("cpu_cadence", [3, 1], 2.5), pytest.param("cpu_async", [2, 2], 2.0, marks=THOROUGH)],
)
def test_a_cohort_goes_on_under_controllers_that_are_killed_in_training_and_while_they_wait(
    marchline: Stage, mode: str, counts: list[int], step: float
) -> None:
    """One host shares memory, the other streams. The odometer is exact: no accepted batch is lost or counted twice."""
    samples = WINDOWS * sum(counts)
    overshoot = {"max_overshoot": 0} if mode == "cpu_async" else {}
    run = marchline.create(
        "odometer.py:Odometer",
        mode=mode,
        fixed_counts=counts,
        params={"samples": samples, "sleep_ms": 30.0},
        **overshoot,
    )
    marchline.worker("left")
    marchline.joined(run, 1)
    marchline.worker("right", "cpu:1", "--stream-data")
    marchline.started(run, 2)
    marchline.until(run, lambda view: view["round"] >= 3, "three rounds")
    kill(marchline)
    with restarted(marchline) as second:
        assert second.view(run)["phase"] in ("forming", "training"), second.story(run)
        kill(second)
    with restarted(marchline) as third:
        refused = third.post("runs", {"resume_from": str(run)}, expect=409)
        assert refused["code"] in ("run_live", "no_checkpoint"), "no double start"
        before = third.until(run, lambda view: view["phase"] == "training", "the cohort to come back")["round"]
        assert before >= 3
        third.until(run, lambda view: view["round"] >= before + 3, "three more rounds")
        kill(third)
    with restarted(marchline) as fourth:
        view = fourth.ended(run)
        assert view["phase"] == "done", fourth.story(run)
        assert view["samples_accepted"] == [samples]
        assert view["deaths"] == []
        assert odometer(fourth, run) == WINDOWS * step
        numbers = [row["round"] for row in fourth.items(run, "rounds")]
        assert numbers == sorted(set(numbers))
        assert WINDOWS - 3 <= len(numbers) <= WINDOWS, "a kill may cost the row of the round before it"
        assert [worker.wait() for worker in fourth.workers] == [0, 0]
        kinds = Counter(row["kind"] for row in fourth.items(run, "events"))
        assert kinds["controller_returned"] == 3
        assert kinds["host_returned"] >= 4


@THOROUGH
def test_a_controller_that_stays_away_ends_the_ranks_and_the_run_is_resumed(marchline: Stage, tmp_path: Path) -> None:
    """kill -9, nobody comes back in time; then one click, on another pair of hosts: every id exactly once."""
    ledger, samples = tmp_path / "ledger.txt", 203
    run = marchline.create(
        "ledger.py:Ledger",
        batch_size=4,
        max_anchor=2,
        initial_anchor=2,
        checkpoint_rounds=1,
        reattach_seconds=2,
        params={"samples": samples, "path": str(ledger)},
    )
    marchline.worker("one", "cpu:2", "--emulate-ms-per-batch", "30")
    persisting = marchline.worker("two", "cpu:1", "--persist", "--emulate-ms-per-batch", "30")
    marchline.started(run, 3)
    wait_for(lambda: len(marchline.items(run, "checkpoints")) >= 2, "two checkpoints")
    kill(marchline)
    assert marchline.workers[0].wait(30) == 5
    assert "did not come back within 2 s" in marchline.workers[0].output()
    wait_for(lambda: "did not come back within 2 s" in persisting.output(), "the other one to give up")
    trained = ledger.read_text().splitlines()
    with restarted(marchline) as again:
        view = again.ended(run)
        assert view["phase"] == "interrupted", again.story(run)
        assert "The controller was restarted" in view["reason"]
        assert "two" in view["reason"]
        bundle = again.items(run, "checkpoints")[-1]
        accepted = 8 * 3 * (bundle["round"] + 1)
        assert 0 < accepted < samples
        number = again.post("runs", {"resume_from": str(run), "max_anchor": 1000}, expect=201)["id"]
        again.joined(number, 1)  # the one that persists dialled by itself
        again.worker("three", "cpu:1")
        again.started(number, 2)
        view = again.ended(number)
        assert view["phase"] == "done", again.story(number)
        assert view["samples_accepted"] == [samples]
        after = Counter(int(line.split()[2]) for line in ledger.read_text().splitlines()[len(trained) :])
        assert set(after.values()) == {1}, "the resumed run trains nothing twice"
        assert set(after) | {int(line.split()[2]) for line in trained} == set(range(samples))
        again.workers[1].process.send_signal(signal.SIGTERM)


@THOROUGH
def test_a_second_controller_on_the_same_data_is_refused(marchline: Stage) -> None:
    command = [sys.executable, "-m", "backend", "serve", "--port", "0", "--data-dir", str(marchline.data_dir)]
    second = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60)
    assert second.returncode == 2
    assert f"another controller serves this database (process {marchline.process.pid})" in second.stderr
