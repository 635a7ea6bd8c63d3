"""Real processes, and both ways for their data: through the controller's memory, and as a stream."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from stage import THOROUGH, Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WINDOWS = int(os.environ.get("MARCHLINE_TEST_WINDOWS", "15"))
"""case N08 asks for 500"""
SHARED, STREAM = (), ("--stream-data",)
SAYS = {SHARED: "sharing memory with the controller", STREAM: "streaming to the controller: it was told to stream"}


@pytest.mark.parametrize(
    ("paths", "mode", "bf16"),
    [
        pytest.param((SHARED, SHARED), "cpu_cadence", False, id="shared memory", marks=THOROUGH),
        pytest.param((STREAM, STREAM), "cpu_cadence", True, id="stream in bf16", marks=THOROUGH),
        pytest.param((SHARED, STREAM), "cpu_cadence", True, id="both in bf16"),
        pytest.param((SHARED, STREAM), "cpu_async", False, id="both while training goes on"),
    ],
)
def test_equal_elements_stay_equal(marchline: Stage, paths: tuple[tuple[str, ...], ...], mode: str, bf16: bool) -> None:
    """Case N08: the job looks at its million equal elements before every batch, and ends the run if two differ."""
    run = marchline.create(
        "even.py:Even", mode=mode, fixed_counts=[2, 1], bf16_wire=bf16, params={"samples": 3 * WINDOWS}
    )
    workers = []
    for number, ms in enumerate((1, 2)):
        workers.append(marchline.worker(f"host-{number}", "cpu:1", "--emulate-ms-per-batch", str(ms), *paths[number]))
        marchline.joined(run, number + 1)
    marchline.started(run, 2)
    view = marchline.ended(run, 500)
    assert view["phase"] == "done", marchline.story(run)
    rounds = marchline.items(run, "rounds")
    assert all(row["params_hash"] for row in rounds), "every rank reported one and the same hash"
    assert sum(sum(row["realized"].values()) for row in rounds) == 3 * WINDOWS
    assert [SAYS[path] in worker.output() for worker, path in zip(workers, paths, strict=True)] == [True, True]


@pytest.mark.parametrize("victim", ["worker.rank", "worker.relay", "agent"])
def test_whatever_is_killed_the_next_agent_finds_the_memory_free(marchline: Stage, victim: str) -> None:
    run = marchline.create("even.py:Even", params={"samples": 100_000})
    worker = marchline.worker("host-0", "cpu:2")
    marchline.started(run, 2)
    marchline.until(run, lambda view: view["global_step"] >= 4, "some rounds to close")
    directory = shared_directory(worker.child("worker.rank").pid)
    assert directory.exists()
    children = worker.children()
    if victim == "agent":
        worker.process.send_signal(signal.SIGKILL)
        for child in children:
            child.wait(60)
    else:
        worker.child(victim).kill()
        if victim == "worker.rank":  # the other one goes on
            marchline.post(f"runs/{run}/stop")
        worker.wait()
    marchline.ended(run)
    if victim != "agent":
        assert not directory.exists()
    after = marchline.create("odometer.py:Odometer")
    marchline.worker("host-1", "cpu:2")
    marchline.joined(after, 2)
    assert not directory.exists(), "this agent removed it, or that of another test beside this one"


def shared_directory(pid: int) -> Path:
    """Where a process has an arena mapped."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if ".out" in line and "marchline-" in line:
            return Path(line.split(maxsplit=5)[-1]).parent
    raise AssertionError("no arena is mapped")
