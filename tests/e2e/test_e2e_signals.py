"""Ctrl-C, SIGTERM and SIGHUP to every process in every phase: a bounded end that the record names, and nothing left."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from odometers import armed
from stage import PATIENCE, THOROUGH, Stage, Worker, stage, wait_for
from websockets.sync.client import ClientConnection, connect

from wire.failpoints import injections

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
PHASES = ("window", "training", "round", "saving")
ROLES = ("controller", "agent", "relay", "rank")
WITHIN = 5.0
"""seconds until ports, shared memory and processes are free again"""
LONG = 600.0
"""seconds that something takes which is not waited for"""
Report = Callable[[str, object], None]


# ------------------------------------------------------------------------------------------------ what is left


def shared_directories(family: list[psutil.Process]) -> set[str]:
    """The directories in which these agents' processes meet."""
    owned = [Path(file.path) for each in family for file in each.open_files() if file.path.endswith("/owner.lock")]
    return {path.parent.name for path in owned}


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def holders(directories: set[str]) -> set[str]:
    """Who has a name for these directories, or holds their memory: the file system, and processes that still map it."""
    found = {str(path) for path in Path("/dev/shm").glob("marchline-*") if path.name in directories}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            held = Path(f"/proc/{process.pid}/maps").read_text()
            if any(name in held for name in directories):
                found.add(f"process {process.pid}")
    return found


@contextmanager
def nothing_left(family: list[psutil.Process], report: Report, seconds: float = 4 * WITHIN) -> Iterator[None]:
    """What is inside ends these processes, and what memory they share is free, in time."""
    shared = shared_directories(family)
    began = time.monotonic()
    yield
    wait_for(lambda: not any(map(alive, family)), f"{[each.pid for each in family if alive(each)]} to end", 2 * seconds)
    gone = time.monotonic() - began
    wait_for(lambda: not holders(shared), f"{shared} to be free, held by {holders(shared)}", 2 * seconds)
    freed = time.monotonic() - began
    report("seconds", f"{gone:.2f} {freed:.2f}")
    print(f"processes gone after {gone:.2f} s, memory free after {freed:.2f} s")
    assert freed < seconds


def family_of(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


# ------------------------------------------------------------------------------------------------ how it comes there


def texts(marchline: Stage, run: int) -> str:
    return "\n".join(row["text"] for row in marchline.items(run, "events"))


def bring_to(marchline: Stage, phase: str) -> tuple[int, Worker]:
    """A run of two hosts in this phase, and the host that is to be struck."""
    journal = marchline.tmp / "injections"
    params: dict[str, Any] = {"samples": 20_000, "sleep_ms": 10.0}
    if phase == "saving":
        params = {"samples": 8, "save_seconds": LONG}
    run = marchline.create("odometer.py:Odometer", fixed_counts=[4, 4], params=params)
    struck = marchline.worker("struck")
    held_up = armed(f"rank.snapshot.before@1?round=1=delay:{LONG * 1000:.0f}", journal)
    marchline.worker("other", env=held_up if phase == "round" else None)
    marchline.joined(run, 2)
    if phase == "window":
        return run, struck
    marchline.post(f"runs/{run}/start")
    match phase:
        case "training":
            marchline.until(run, lambda view: view["round"] >= 1, "a round")
        case "round":
            wait_for(lambda: journal.exists() and injections(journal), "a round to be held up")
        case "saving":
            wait_for(lambda: "scoring and saving" in texts(marchline, run), "the end to begin")
    return run, struck


# ------------------------------------------------------------------------------------------------ whom it strikes


def tab(marchline: Stage, run: int) -> ClientConnection:
    """A browser's tab that follows the run, and does not read any more."""
    url = marchline.url.replace("http", "ws", 1) + f"/api/v1/stream?run={run}"
    token = {"Authorization": marchline.client.headers["Authorization"]}
    opened = connect(url, additional_headers=token, proxy=None)
    assert json.loads(opened.recv(PATIENCE))["type"] == "snapshot"
    return opened


def strike_controller(marchline: Stage, run: int, number: signal.Signals, report: Report, seconds: float) -> None:
    family = [each for process in (marchline, *marchline.workers) for each in family_of(process.process.pid)]
    with tab(marchline, run), nothing_left(family, report, seconds):
        marchline.process.send_signal(number)
        assert marchline.process.wait(PATIENCE) == 0
    assert {worker.wait() for worker in marchline.workers} == {1}, "the run was not done"
    why = f"controller stopped by {number.name}"
    assert all(f"the run is interrupted: {why}" in worker.output() for worker in marchline.workers)
    with socket.create_server(("127.0.0.1", urlsplit(marchline.url).port or 0)):
        pass
    with contextlib.closing(sqlite3.connect(marchline.data_dir / "marchline.sqlite3")) as database:
        row = database.execute("select phase, reason, stopped_by from runs where id = ?", (run,)).fetchone()
    assert row == ("interrupted", why, "controller")


def strike_host(marchline: Stage, run: int, role: str, struck: Worker, number: signal.Signals) -> str:
    """Strike a process of a host; what the record must say."""
    if role == "agent":
        struck.process.send_signal(number)
        assert struck.wait() == 0, struck.output()
        return f"the operator of struck ended its agent ({number.name})"
    struck.child(f"worker.{role}").send_signal(number)
    return f"its relay ended: ended by {number.name}" if role == "relay" else f"killed by {number.name}"


def cell(phase: str, role: str, number: signal.Signals) -> Any:
    """Without MARCHLINE_TEST_THOROUGH the controller is struck once; see below for the others."""
    always = (phase, role, number) == ("training", "controller", signal.SIGHUP)
    return pytest.param(phase, role, number, marks=[] if always else THOROUGH, id=f"{phase}-{role}-{number.name}")


@pytest.mark.parametrize(
    ("phase", "role", "number"),
    [
        cell(*each)
        for each in product(PHASES, ROLES, SIGNALS)
        if each[0] != "window" or each[1] in ("controller", "agent")
    ],
)
def test_a_signal(
    tmp_path: Path, phase: str, role: str, number: signal.Signals, record_property: Report, request: Any
) -> None:
    """To a process in a phase: it and what hangs on it is gone in time, and the record says who it was."""
    always = not request.node.get_closest_marker("skipif")
    seconds = 4 * WITHIN if always else WITHIN  # among other tests the machine may be slow
    with stage(tmp_path) as marchline:
        run, struck = bring_to(marchline, phase)
        if role == "controller":
            strike_controller(marchline, run, number, record_property, seconds)
            return
        family = [struck.child("worker.rank")] if role == "rank" else family_of(struck.process.pid)
        with nothing_left(family, record_property, seconds):
            why = strike_host(marchline, run, role, struck, number)
        if phase == "window":
            wait_for(lambda: why in texts(marchline, run), why)
            return
        view = marchline.until(run, lambda view: view["deaths"], "a death to be recorded")
        assert [death["host_name"] for death in view["deaths"]] == ["struck"]
        assert why in view["deaths"][0]["reason"]
        if role == "rank":
            assert marchline.items(run, "deaths")[0]["signal"] == number.name


def test_an_agent_a_relay_and_ranks_that_train_end_by_name_and_the_others_go_on(
    marchline: Stage, record_property: Report
) -> None:
    """All at once. A rank has no handler, so each signal kills it and is its death's."""
    params = {"samples": 20_000, "sleep_ms": 10.0}
    run = marchline.create("odometer.py:Odometer", fixed_counts=[2] * 6, params=params)
    many, host, relayed = marchline.worker("many", "cpu:4"), marchline.worker("hup"), marchline.worker("relayed")
    marchline.started(run, 6)
    marchline.until(run, lambda view: view["round"] >= 1, "a round")
    ranks = [many.child("worker.rank", index) for index in range(3)]
    relay = relayed.child("worker.relay")
    with nothing_left([*family_of(host.process.pid), *family_of(relayed.process.pid), *ranks], record_property):
        host.process.send_signal(signal.SIGHUP)
        relay.send_signal(signal.SIGHUP)
        for number, rank in zip(SIGNALS, ranks, strict=True):
            rank.send_signal(number)
    assert host.wait() == 0
    view = marchline.until(run, lambda view: len(view["deaths"]) == 5, "five deaths to be recorded")
    reasons = "\n".join(death["reason"] for death in view["deaths"])
    assert "the operator of hup ended its agent (SIGHUP)" in reasons
    assert "its relay ended: ended by SIGHUP" in reasons
    assert {death["signal"] for death in marchline.items(run, "deaths")} >= {number.name for number in SIGNALS}, reasons
    before = view["round"]
    marchline.until(run, lambda view: view["round"] > before, "the last rank to go on")
    marchline.post(f"runs/{run}/stop")
    assert marchline.ended(run)["phase"] == "done", marchline.story(run)
