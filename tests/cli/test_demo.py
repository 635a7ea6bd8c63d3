"""The demo as a newcomer calls it: to the end, or stopped by every means, it leaves a summary and no process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from cli_harness import REPOSITORY, alive, clean_environment, cli, descendants, wait_for

from backend.demo import summarize

FIELDS = {
    "run_id", "phase", "reason", "world_size", "epochs", "rounds", "accuracy", "loss", "allotments",
    "batches_per_second", "ideal_batches_per_second", "efficiency", "samples_accepted", "deaths", "checkpoint",
    "seconds",
}  # fmt: skip
JOIN_SECONDS = 90.0


class Demo:
    """A demo that runs, and every process that it was ever seen to have."""

    def __init__(self, process: subprocess.Popen[str], data_dir: Path) -> None:
        assert process.stdout is not None
        self.process = process
        self.data_dir = data_dir
        self.pids: set[int] = {process.pid}
        self.url, _, self.ticket = process.stdout.readline().strip().partition("/#ticket=")
        self.look()

    def look(self) -> set[int]:
        """Note the processes there are now, and give them."""
        now = descendants(self.process.pid)
        self.pids |= now
        return now

    def view(self) -> dict[str, Any]:
        self.look()
        token = (self.data_dir / "operator.token").read_text().strip()
        with httpx2.Client(base_url=self.url, trust_env=False, headers={"Authorization": f"Bearer {token}"}) as client:
            view: dict[str, Any] = client.get("/api/v1/runs/1").json()
        return view

    def wait_until(self, phase: str) -> None:
        wait_for(lambda: self.view()["phase"] == phase, JOIN_SECONDS, f"the demo's run is {phase}")

    def end(self, number: signal.Signals | None = None) -> tuple[int, str]:
        """Signal it, if asked to, and wait: its exit code and what it said on stderr."""
        self.look()
        if number is not None:
            self.process.send_signal(number)
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said

    def left(self) -> list[int]:
        return [pid for pid in self.pids if alive(pid)]


@contextmanager
def demo(folder: Path, *options: str) -> Iterator[Demo]:
    data_dir = folder / "var"
    arguments = ["--port", "0", "--data-dir", str(data_dir), "--job-dir", str(REPOSITORY), *options]
    with subprocess.Popen(
        [sys.executable, "-m", "backend", "demo", *arguments],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        running = Demo(process, data_dir)
        try:
            yield running
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)


@pytest.mark.slow
def test_the_headless_demo_runs_to_a_summary_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "summary.json"
    options = ["--auto", "--exit", "--json", str(out), "--epochs", "3", "--speeds", "4,8"]
    with demo(tmp_path, *options) as running:
        running.wait_until("training")
        code, said = running.end()

    assert code == 0, said
    summary = json.loads(out.read_text())
    assert set(summary) == FIELDS
    assert (summary["phase"], summary["world_size"], summary["epochs"], summary["deaths"]) == ("done", 2, 3, 0)
    assert summary["samples_accepted"] == [1437] * 3
    assert sorted(summary["allotments"]) == ["0", "1"]
    assert summary["ideal_batches_per_second"] == pytest.approx(375)
    assert 0 < summary["accuracy"] <= 1
    assert (running.data_dir / summary["checkpoint"]).is_file()
    wait_for(lambda: not running.left(), 10, "all processes of the demo ended")
    assert len(running.pids) >= 6, "controller, two agents, their relays and ranks"
    join_token = (running.data_dir / "join.token").read_text().strip()
    assert f"MARCHLINE_JOIN_TOKEN={join_token} python -m worker --join {running.url}" in said
    for log in (running.data_dir / "demo").iterdir():
        assert join_token not in log.read_text(), log


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_however_it_is_stopped_it_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    with demo(tmp_path, "--auto", "--epochs", "200") as running:
        running.wait_until("training")
        assert len(running.look()) >= 10, "controller, three agents, their relays and ranks"
        code, said = running.end(number)

    wait_for(lambda: not running.left(), 30, "all processes of the demo ended")
    if number is not signal.SIGKILL:
        assert code == 0
        assert "Stopped" in said
        assert "Traceback" not in said


@pytest.mark.slow
def test_a_person_opens_the_page_and_stops_it_while_hosts_arrive(tmp_path: Path) -> None:
    with demo(tmp_path) as running:
        with httpx2.Client(base_url=running.url, trust_env=False) as browser:
            answer = browser.post("/api/v1/session", json={"ticket": running.ticket})
            assert answer.status_code == 201
            assert browser.get("/api/v1/runs/1").json()["window"]["start_mode"] == "manual"
        code, said = running.end(signal.SIGTERM)

    assert code == 0, said
    assert not running.left()


@pytest.mark.slow
def test_a_run_that_is_not_done_is_no_success(tmp_path: Path) -> None:
    out = tmp_path / "summary.json"
    with demo(tmp_path, "--exit", "--json", str(out)) as running:
        token = running.data_dir / "operator.token"
        aborted = cli("abort", "1", "--url", running.url, "--token-file", str(token), cwd=tmp_path)
        assert aborted.returncode == 0, aborted.stderr
        code, said = running.end()

    assert code == 1, said
    assert json.loads(out.read_text())["phase"] == "failed"
    assert not running.left()


@pytest.mark.slow
def test_an_agent_that_cannot_join_is_named(tmp_path: Path) -> None:
    job = tmp_path / "jobs/broken.py"
    job.parent.mkdir()
    steps = "".join(
        f"    def {name}(self, *args): ...\n"
        for name in ("build_model", "build_optimizer", "train_dataset", "training_step")
    )
    job.write_text(f"import module_that_is_not_there\nfrom worker import Job\nclass Mine(Job):\n{steps}")
    arguments = ["--job", "broken.py:Mine", "--job-dir", str(job.parent), "--data-dir", str(tmp_path / "var")]

    done = cli("demo", "--auto", "--exit", "--port", "0", *arguments, cwd=tmp_path)

    assert done.returncode == 1
    assert "module_that_is_not_there" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_taken_port_is_named_with_the_cure(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = cli("demo", "--port", port, "--data-dir", str(tmp_path / "var"), cwd=tmp_path)

    assert done.returncode == 1
    assert f"Port {port}" in done.stderr
    assert "--port" in done.stderr


# ------------------------------------------------------------------------------------------------- the summary


def closed(number: int, second: float, realized: dict[str, int]) -> dict[str, Any]:
    at = f"2026-11-29T12:00:{second:06.3f}Z"
    return {"round": number, "at": at, "realized": realized, "planned": {"0": 4, "1": 2, "2": 1}}


def ended(**more: Any) -> dict[str, Any]:
    view: dict[str, Any] = {
        "id": 7, "phase": "done", "reason": "", "world_size": 3, "samples_accepted": [1437, 1437], "loss": 0.25,
        "eval": {"epoch": 1, "metrics": {"accuracy": 0.96, "loss": 0.2}}, "deaths": [], "seconds": 12.5,
        "ranks": [{"emulated_ms": ms} for ms in (20.0, 40.0, 80.0)], "checkpoints": [{"path": "a"}, {"path": "b"}],
    }  # fmt: skip
    return view | more


def test_efficiency_is_that_of_the_rounds_after_the_third_by_the_wall_clock() -> None:
    work = {"0": 40, "1": 20, "2": 10}
    rounds = [closed(number, second, work) for number, second in enumerate([1.0, 2.0, 3.0, 4.0, 5.5])]

    summary = summarize(ended(), rounds)

    assert set(summary) == FIELDS
    assert summary["ideal_batches_per_second"] == 87.5
    assert summary["batches_per_second"] == pytest.approx(140 / 2.5)
    assert summary["efficiency"] == pytest.approx(140 / 2.5 / 87.5)
    assert summary["allotments"] == {"0": 4, "1": 2, "2": 1}
    assert (summary["accuracy"], summary["loss"], summary["checkpoint"]) == (0.96, 0.25, "b")
    assert (summary["epochs"], summary["rounds"], summary["deaths"]) == (2, 5, 0)


def test_what_was_not_measured_is_none() -> None:
    summary = summarize(ended(eval=None, checkpoints=[], ranks=[], samples_accepted=[]), [closed(0, 1.0, {"0": 1})])

    for name in ("batches_per_second", "ideal_batches_per_second", "efficiency", "accuracy", "checkpoint"):
        assert summary[name] is None
    assert summarize(ended(), [])["allotments"] == {}
    one_is_real = ended(ranks=[{"emulated_ms": 20.0}, {"emulated_ms": None}])
    assert summarize(one_is_real, [])["ideal_batches_per_second"] is None
