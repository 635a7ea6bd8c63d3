"""Real processes that die, hosts that are refused, operators that stop: each ends in a named, recorded outcome."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from odometers import armed, injected
from stage import JOBS, THOROUGH, Stage, Worker, wait_for

from wire.failpoints import injections

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
SLOW_ODOMETER: dict[str, Any] = {
    "job": "odometer.py:Odometer",
    "params": {"samples": 4000, "sleep_ms": 10.0},
    "epochs": 1,
}


def training(marchline: Stage, *names: str, rounds: int = 2, **config: Any) -> int:
    """A long run with one rank on each host, some rounds in."""
    run = marchline.create(**(SLOW_ODOMETER | {"initial_anchor": 5, "quorum": len(names)} | config))
    for name in names:
        marchline.worker(name)
    marchline.started(run, len(names))
    marchline.until(run, lambda view: view["round"] >= rounds, f"{rounds} rounds to close")
    return run


def assert_gone(worker: Worker, processes: list[psutil.Process]) -> None:
    """Neither the agent nor any process that it started is left."""
    wait_for(
        lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes),
        f"{worker.name}'s processes to end",
        20,
    )


def test_a_killed_rank_leaves_a_death_record_and_the_others_go_on(marchline: Stage) -> None:
    run = training(marchline, "left", "right", params={"samples": 600, "sleep_ms": 10.0})
    view = marchline.view(run)
    (victim,) = [rank for rank in view["ranks"] if rank["host_name"] == "right"]
    marchline.workers[1].child("worker.rank").send_signal(signal.SIGKILL)
    view = marchline.until(run, lambda view: view["deaths"], "the death to be recorded", 35)
    (death,) = marchline.items(run, "deaths")
    assert (death["rank"], death["host_name"], death["signal"]) == (victim["rank"], "right", "SIGKILL")
    assert death["last_step"] > 0
    assert death["device"] == "cpu:0"
    view = marchline.ended(run)
    assert view["phase"] == "done", marchline.story(run)
    assert view["samples_accepted"] == [600]
    assert view["deaths"][0]["signal"] == "SIGKILL"
    (death,) = marchline.items(run, "deaths")
    assert death["recovery"].keys() == {"detect", "decide", "resume", "first_step"}
    assert death["memory_kills"] == 0, "SIGKILL alone is no evidence of a memory limit"
    told = json.loads((marchline.data_dir / f"runs/{run}/checkpoints/model.rank{death['rank']}.death.json").read_text())
    assert told["schema_version"] == 1
    kept = ("rank", "host_name", "device", "signal", "last_step", "recovery", "waited", "peak_rss_bytes", "reason")
    assert {name: told[name] for name in kept} == {name: death[name] for name in kept}


def test_a_killed_agent_takes_its_ranks_along_and_the_others_go_on(marchline: Stage) -> None:
    run = training(marchline, "left", "right")
    agent = marchline.workers[1]
    children = agent.children()
    agent.process.send_signal(signal.SIGKILL)
    view = marchline.until(run, lambda view: view["deaths"], "the host's death to be recorded", 35)
    assert {death["host_name"] for death in view["deaths"]} == {"right"}
    assert_gone(agent, children)
    before = view["round"]
    marchline.until(run, lambda view: view["round"] > before + 1, "the survivor to go on")
    marchline.post(f"runs/{run}/stop")
    view = marchline.ended(run)
    assert view["phase"] == "done"
    assert view["reason"].startswith("Stopped by")
    assert view["checkpoints"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("raise", {"exception": "ValueError", "exit_code": 1}),
        ("exit0", {"exception": "SystemExit"}),
        pytest.param("segfault", {"signal": "SIGSEGV"}, marks=THOROUGH),
    ],
)
def test_a_rank_that_goes_wrong_by_itself(marchline: Stage, kind: str, expected: dict[str, Any]) -> None:
    """A job that raises, leaves early or crashes: the record says which, and nobody hangs."""
    params = {"samples": 60, "kind": kind, "rank": 1, "at": 7}
    run = marchline.create("faulty.py:Faulty", quorum=2, params=params, max_failure=1)
    marchline.worker("pair", "cpu:2")
    marchline.started(run, 2)
    view = marchline.ended(run)
    assert view["phase"] == "failed", marchline.story(run)
    (death,) = marchline.items(run, "deaths")
    assert {key: death[key] for key in expected} == expected
    assert death["last_step"] == 7
    if kind == "raise":
        assert death["message"] == "grün ist kaputt ☃"
        assert "faulty.py" in death["last_lines"]
    assert marchline.workers[0].wait() != 0


def test_all_ranks_dead_is_a_failure_with_its_reason(marchline: Stage) -> None:
    run = training(marchline, "left", "right")
    for worker in marchline.workers:
        worker.child("worker.rank").send_signal(signal.SIGKILL)
    view = marchline.ended(run, 40)
    assert view["phase"] == "failed"
    assert "All 2 ranks are dead" in view["reason"]
    assert len(view["deaths"]) == 2


def test_a_frozen_host_is_lost_at_its_timeout(marchline: Stage) -> None:
    run = training(marchline, "left", "right", heartbeat_timeout_seconds=4, stall_seconds=40)
    agent = marchline.workers[1]
    frozen = [agent.process.pid, *(child.pid for child in agent.children())]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        view = marchline.until(run, lambda view: view["deaths"], "the silent host to be declared lost", 15)
        assert "no sign of life for 4 s" in view["deaths"][0]["reason"]
        before = view["round"]
        marchline.until(run, lambda view: view["round"] > before, "the survivor to go on")
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
    assert agent.wait(40) != 0, "the zombie leaves"
    marchline.post(f"runs/{run}/abort")


def test_a_relay_that_is_stopped_in_a_fold_costs_its_host_alone(marchline: Stage, tmp_path: Path) -> None:
    """Its agent beats on, so that the host is not silent: that of the relay itself ends the wait (F11)."""
    journal = tmp_path / "injections"
    run = marchline.create(**(SLOW_ODOMETER | {"initial_anchor": 5, "heartbeat_timeout_seconds": 4}))
    marchline.worker("left", "cpu:1", "--stream-data")
    right = marchline.worker("right", "cpu:1", "--stream-data", env=armed("relay.chunk.up?round=2=stop", journal))
    marchline.started(run, 2)
    wait_for(lambda: injections(journal), "the relay to stop itself")
    relay = right.child("worker.relay")
    assert relay.pid == injections(journal)[0]["pid"]
    assert relay.status() == psutil.STATUS_STOPPED
    processes = right.children()
    view = marchline.until(run, lambda view: view["deaths"], "its host to be declared lost", 15)
    (death,) = view["deaths"]
    assert (death["host_name"], death["reason"]) == ("right", "its relay was not heard for 5 s")
    assert injected(journal, "stop") == ["relay.chunk.up"]
    marchline.until(run, lambda view: view["round"] > 3, "the other one to go on")
    rounds = partial(marchline.items, run, "rounds")
    (retried,) = wait_for(lambda: [row for row in rounds() if row["round"] == 2], "the round to be on record")
    (left,) = [rank["rank"] for rank in view["ranks"] if rank["host_name"] == "left"]
    assert (retried["attempt"], list(retried["realized"])) == (1, [str(left)])
    assert_gone(right, processes)
    marchline.post(f"runs/{run}/abort")


def test_two_runs_in_a_row_with_hosts_that_persist(marchline: Stage) -> None:
    first = marchline.create("odometer.py:Odometer", params={"samples": 24})
    for name in ("left", "right"):
        marchline.worker(name, "cpu:1", "--persist")
    marchline.started(first, 2)
    assert marchline.ended(first)["phase"] == "done"
    second = marchline.create("odometer.py:Odometer", params={"samples": 36})
    marchline.started(second, 2)
    assert marchline.ended(second)["phase"] == "done", marchline.story(second)
    assert marchline.view(first)["samples_accepted"] == [24]
    assert marchline.view(second)["samples_accepted"] == [36]


def test_two_runs_at_once_do_not_disturb_each_other(marchline: Stage) -> None:
    runs = [
        marchline.create("odometer.py:Odometer", fixed_counts=[3, 1], params={"samples": 40, "sleep_ms": 20.0}),
        marchline.create(
            "ledger.py:Ledger", params={"samples": 50, "path": str(marchline.tmp / "ledger.txt")}, epochs=4
        ),
    ]
    for run in runs:
        marchline.worker(f"pair-{run}", "cpu:2", "--run", str(run))
    for run in runs:
        marchline.joined(run, 2)
    for run in runs:
        marchline.post(f"runs/{run}/start")
    views = [marchline.ended(run) for run in runs]
    assert [view["phase"] for view in views] == ["done", "done"], marchline.story(runs[0]) + marchline.story(runs[1])
    assert views[0]["samples_accepted"] == [40]
    assert views[1]["samples_accepted"] == [50] * 4
    assert [row["realized"] for row in marchline.items(runs[0], "rounds")] == [{"0": 3, "1": 1}] * 10


class TestTheDoor:
    def test_refusals_are_named_on_the_roster_and_in_the_worker(self, marchline: Stage, tmp_path: Path) -> None:
        other = tmp_path / "other"
        other.mkdir()
        text = (JOBS / "odometer.py").read_text()
        (other / "odometer.py").write_text(text + "\n# another version\n")
        run = marchline.create("odometer.py:Odometer", quorum=2)
        marchline.worker("first")
        marchline.joined(run, 1)
        stale = marchline.worker("stale", job_dir=other)
        twin = marchline.worker("first")
        assert stale.wait() == 3
        assert twin.wait() == 3
        refusals = {entry["code"]: entry for entry in marchline.view(run)["window"]["refusals"]}
        assert refusals["job_source_mismatch"]["host"] == "stale"
        assert "duplicate_host" in refusals
        assert "differs" in stale.output()
        problem = marchline.post(f"runs/{run}/start", expect=409)
        assert problem["code"] == "quorum_not_met"
        marchline.worker("second")
        marchline.started(run, 2)
        assert marchline.ended(run)["phase"] == "done"

    def test_a_wrong_token_is_told_so_and_ends_nothing(self, marchline: Stage, tmp_path: Path) -> None:
        run = marchline.create("odometer.py:Odometer", quorum=2)
        wrong = tmp_path / "wrong.token"
        wrong.write_text("0123456789abcdef0123456789abcdef")
        stranger = marchline.worker("stranger", "cpu:1", "--token-file", str(wrong))
        assert stranger.wait() == 4
        view = marchline.until(
            run, lambda view: view["window"]["strangers"]["count"] >= 1, "the stranger to be counted"
        )
        assert view["phase"] == "waiting"

    @pytest.mark.parametrize(
        ("job", "params", "code"),
        [
            ("missing.py:Nothing", {}, "job_not_found"),
            ("broken.py:NoSuchClass", {}, "job_class_missing"),
            ("../conftest.py:Job", {}, "job_outside_dir"),
            ("odometer.py:Odometer", {"smaples": 3}, "param_unknown"),
        ],
    )
    def test_a_bad_job_is_refused_when_the_run_is_created(
        self, marchline: Stage, job: str, params: dict[str, Any], code: str
    ) -> None:
        problem = marchline.create(job, expect=422, params=params)
        assert code in {problem["code"], *(error["code"] for error in problem.get("errors", []))}, problem

    @pytest.mark.parametrize(
        ("config", "code"),
        [
            ({"quorum": 1}, "quorum_below_two"),
            ({"start_mode": "hybrid", "quorum": 3, "target": 2}, "target_below_quorum"),
            ({"window_seconds": 100, "cap_seconds": 50}, "cap_below_window"),
            ({"target": 4}, "manual_with_target"),
            ({"mode": "nccl_async"}, "async_needs_cpu"),
        ],
    )
    def test_a_bad_window_is_refused_when_the_run_is_created(
        self, marchline: Stage, config: dict[str, Any], code: str
    ) -> None:
        problem = marchline.create("odometer.py:Odometer", expect=422, **config)
        assert code in {error["code"] for error in problem["errors"]}, problem

    @pytest.mark.parametrize(("samples", "code"), [(0, "empty_dataset"), (2, "dataset_too_small")])
    def test_a_dataset_that_is_too_small_is_refused_with_the_numbers(
        self, marchline: Stage, samples: int, code: str
    ) -> None:
        run = marchline.create("odometer.py:Odometer", params={"samples": samples})
        worker = marchline.worker("many", "cpu:3")
        assert worker.wait() == 3
        (refusal,) = marchline.view(run)["window"]["refusals"]
        assert refusal["code"] in {code, "job_broken"}
        assert "sample" in refusal["reason"]
