"""Ctrl-C, SIGTERM and SIGHUP to every process in every phase: a bounded end that the record names, and nothing left."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from stage import Stage, Worker, stage, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
WITHIN = 5.0
"""seconds until ports, shared memory and processes are free again; the machine's slowness comes on top"""
SLOW: dict[str, Any] = {"job": "odometer.py:Odometer", "params": {"samples": 20_000, "sleep_ms": 10.0}}


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("marchline-*")}


@contextmanager
def nothing_left(*processes: psutil.Process) -> Iterator[None]:
    """What is inside ends these processes, and all that they started, in time."""
    family = [each for process in processes for each in (process, *process.children(recursive=True))]
    owned = [Path(file.path) for each in family for file in each.open_files() if file.path.endswith("/owner.lock")]
    shared = {path.parent.name for path in owned}
    began = time.monotonic()
    yield
    wait_for(lambda: not any(map(_alive, family)), f"{[each.pid for each in family]} to end", 4 * WITHIN)
    wait_for(lambda: not shared & shared_memory(), f"{shared} to be removed", WITHIN)
    assert time.monotonic() - began < 4 * WITHIN


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def of(worker: Worker) -> psutil.Process:
    return psutil.Process(worker.process.pid)


def texts(marchline: Stage, run: int) -> str:
    return "\n".join(row["text"] for row in marchline.items(run, "events"))


def test_a_host_that_waits_leaves_at_each_signal(marchline: Stage) -> None:
    run = marchline.create(**SLOW)
    hosts = [marchline.worker(f"host-{number.name}") for number in SIGNALS]
    marchline.joined(run, len(hosts))
    for number, host in zip(SIGNALS, hosts, strict=True):
        with nothing_left(of(host)):
            host.process.send_signal(number)
        assert host.wait() == 0
    marchline.until(run, lambda view: view["window"]["joined_ranks"] == 0, "all to have left")
    for number in SIGNALS:
        why = f"the operator of host-{number.name} ended its agent ({number.name})"
        wait_for(lambda why=why: why in texts(marchline, run), why)


def test_an_agent_a_relay_and_ranks_that_train_end_by_name_and_the_others_go_on(marchline: Stage) -> None:
    """Agents hear every signal alike, see above; a rank has no handler, so each kills it and is its death's signal."""
    run = marchline.create(**SLOW, fixed_counts=[2] * 6)
    many, host, relayed = marchline.worker("many", "cpu:4"), marchline.worker("hup"), marchline.worker("relayed")
    marchline.started(run, 6)
    marchline.until(run, lambda view: view["round"] >= 1, "a round")
    ranks = [many.child("worker.rank", index) for index in range(3)]
    relay = relayed.child("worker.relay")
    with nothing_left(of(host), relay, *ranks):
        host.process.send_signal(signal.SIGHUP)
        relay.send_signal(signal.SIGHUP)
        for number, rank in zip(SIGNALS, ranks, strict=True):
            rank.send_signal(number)
    assert host.wait() == 0
    view = marchline.until(run, lambda view: len(view["deaths"]) == 5, "five deaths to be recorded")
    reasons = "\n".join(death["reason"] for death in view["deaths"])
    assert "the operator of hup ended its agent (SIGHUP)" in reasons
    assert "relay" in reasons
    assert {death["signal"] for death in marchline.items(run, "deaths")} >= {number.name for number in SIGNALS}, reasons
    before = view["round"]
    marchline.until(run, lambda view: view["round"] > before, "the last rank to go on")
    marchline.post(f"runs/{run}/stop")
    assert marchline.ended(run)["phase"] == "done", marchline.story(run)


@pytest.mark.parametrize(
    ("number", "phase"),
    [(signal.SIGINT, "waiting"), (signal.SIGTERM, "forming"), (signal.SIGHUP, "training")],
)
def test_a_controller_ends_its_runs_and_frees_its_port(tmp_path: Path, number: signal.Signals, phase: str) -> None:
    with stage(tmp_path) as marchline:
        run = marchline.create(**SLOW)
        host = marchline.worker("pair", "cpu:2")
        marchline.joined(run, 2)
        if phase != "waiting":
            marchline.post(f"runs/{run}/start")
            marchline.until(run, lambda view: view["phase"] == phase, phase)
        with nothing_left(psutil.Process(marchline.process.pid), of(host)):
            marchline.process.send_signal(number)
            assert marchline.process.wait(4 * WITHIN) == 0
        assert host.wait() == 1, "the run was not done"
        assert f"the run is interrupted: controller stopped by {number.name}" in host.output()
        with socket.create_server(("127.0.0.1", urlsplit(marchline.url).port or 0)):
            pass
        with stage(tmp_path) as again:
            view = again.view(run)
            assert (view["phase"], view["reason"]) == ("interrupted", f"controller stopped by {number.name}")
            assert view["stopped_by"] == "controller"
