"""Ctrl-C, SIGTERM and SIGHUP to every process in every phase: a bounded end that the record names, and nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from odometers import armed
from stage import PATIENCE, THOROUGH, Stage, stage, wait_for
from websockets.sync.client import connect

from wire.failpoints import injections

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
PHASES = ("window", "training", "round", "saving")
QUIET = bool(os.environ.get("MARCHLINE_TEST_THOROUGH"))
WITHIN = 5.0
"""seconds until ports, shared memory and processes are free again, as docs/operating.md says"""
WITHIN_AMONG_OTHERS = 4 * WITHIN
"""the same where tests run beside one another on few cores: what takes a process 1 s then takes it several"""
LONG = 600.0
"""seconds that something takes which is not waited for"""


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
def nothing_left(cell: str, family: list[psutil.Process]) -> Iterator[None]:
    """What is inside ends these processes, and what memory they share is free, in time. The thorough run has the
    machine to itself."""
    seconds = WITHIN if QUIET else WITHIN_AMONG_OTHERS
    shared = shared_directories(family)
    began = time.monotonic()
    yield
    wait_for(lambda: not any(map(alive, family)), f"{[each.pid for each in family]} to end", 2 * seconds)
    gone = time.monotonic() - began
    wait_for(lambda: not holders(shared), f"{shared} to be free", 2 * seconds)
    freed = time.monotonic() - began
    print(f"{cell}: processes gone after {gone:.2f} s, memory free after {freed:.2f} s", flush=True)
    assert freed < seconds


def family_of(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


# ------------------------------------------------------------------------------------------------ how it comes there


def texts(marchline: Stage, run: int) -> str:
    return "\n".join(row["text"] for row in marchline.items(run, "events"))


def bring_to(marchline: Stage, phase: str, hosts: dict[str, int]) -> int:
    """A run of these hosts, with as many ranks each, in this phase. The last one's last rank holds the others up where
    a round is to stay open."""
    journal, world = marchline.tmp / "injections", sum(hosts.values())
    params: dict[str, Any] = {"samples": 20_000, "sleep_ms": 10.0}
    if phase == "saving":
        params = {"samples": 4 * world, "save_seconds": LONG}
    run = marchline.create("odometer.py:Odometer", fixed_counts=[4] * world, params=params)
    held_up = armed(f"rank.snapshot.before@1?rank={world - 1}&round=1=delay:{LONG * 1000:.0f}", journal)
    for name, ranks in hosts.items():
        marchline.worker(name, f"cpu:{ranks}", env=held_up if phase == "round" else None)
        marchline.until(run, lambda view, name=name: name in _joined(view), f"{name} to join")
    if phase == "window":
        return run
    marchline.post(f"runs/{run}/start")
    match phase:
        case "training":
            marchline.until(run, lambda view: view["round"] >= 1, "a round")
        case "round":
            wait_for(lambda: journal.exists() and injections(journal), "a round to be held up")
        case "saving":
            wait_for(lambda: "scoring and saving" in texts(marchline, run), "the end to begin")
    return run


def _joined(view: dict[str, Any]) -> set[str]:
    return {member["name"] for member in view["members"] if member["state"] == "admitted"}


def tab(marchline: Stage, run: int) -> connect:
    """A browser's tab that follows the run."""
    url = marchline.url.replace("http", "ws", 1) + f"/api/v1/stream?run={run}"
    token = {"Authorization": marchline.client.headers["Authorization"]}
    return connect(url, additional_headers=token, proxy=None)


# ------------------------------------------------------------------------------------------------ whom it strikes


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        pytest.param(
            *each, marks=[] if each == ("training", signal.SIGHUP) else THOROUGH, id=f"{each[0]}-{each[1].name}"
        )
        for each in product(PHASES, SIGNALS)
    ],
)
def test_a_controller_ends_its_runs_by_name(tmp_path: Path, phase: str, number: signal.Signals) -> None:
    """Its hosts end with it, its port is free, and a tab that does not read is no obstacle."""
    with stage(tmp_path) as marchline:
        run = bring_to(marchline, phase, {"pair": 2})
        (pair,) = marchline.workers
        family = [*family_of(marchline.process.pid), *family_of(pair.process.pid)]
        with tab(marchline, run) as follows:
            assert json.loads(follows.recv(PATIENCE))["type"] == "snapshot"
            with nothing_left(f"{phase} controller {number.name}", family):
                marchline.process.send_signal(number)
                assert marchline.process.wait(PATIENCE) == 0
        why = f"controller stopped by {number.name}"
        assert pair.wait() == 1, "the run was not done"
        assert f"the run is interrupted: {why}" in pair.output()
        with socket.create_server(("127.0.0.1", urlsplit(marchline.url).port or 0)):
            pass
        with contextlib.closing(sqlite3.connect(marchline.data_dir / "marchline.sqlite3")) as database:
            row = database.execute("select phase, reason, stopped_by from runs where id = ?", (run,)).fetchone()
        assert row == ("interrupted", why, "controller")


def strike(marchline: Stage, role: str, number: signal.Signals, phase: str) -> str:
    """Strike a process of a host, and wait until what hangs on it is gone; what the record must say."""
    workers = {worker.name: worker for worker in marchline.workers}
    cell = f"{phase} {role} {number.name}"
    if role == "rank":
        rank = workers["many"].child("worker.rank")
        with nothing_left(cell, [rank]):
            rank.send_signal(number)
        return f"killed by {number.name}"
    host = workers[f"{role}-{number.name}"]
    with nothing_left(cell, family_of(host.process.pid)):
        (psutil.Process(host.process.pid) if role == "agent" else host.child("worker.relay")).send_signal(number)
    assert host.wait() == (0 if role == "agent" else 1), host.output()
    if role == "relay":
        return "relay"  # its links may end before its agent says of which signal
    return f"the operator of {host.name} ended its agent ({number.name})"


@THOROUGH
@pytest.mark.parametrize("phase", PHASES)
def test_each_signal_to_each_process_of_a_host(marchline: Stage, phase: str) -> None:
    """One after the other, while the phase lasts; the others go on."""
    roles = ("agent",) if phase == "window" else ("agent", "relay")
    hosts = {f"{role}-{number.name}": 1 for role, number in product(roles, SIGNALS)}
    run = bring_to(marchline, phase, hosts if phase == "window" else {**hosts, "many": len(SIGNALS) + 1})
    reasons = [
        strike(marchline, role, number, phase)
        for role, number in product((*roles, *(["rank"] if phase != "window" else [])), SIGNALS)
    ]
    if phase == "window":
        for why in reasons:
            wait_for(lambda why=why: why in texts(marchline, run), why)
        return
    view = marchline.until(run, lambda view: len(view["deaths"]) >= len(reasons), "the deaths to be recorded")
    told = [death["reason"] for death in view["deaths"]]
    assert len(told) == len(reasons)
    assert all(any(why in reason for reason in told) for why in reasons), told
    by_signal = [death["signal"] for death in marchline.items(run, "deaths")]
    assert {number.name for number in SIGNALS} <= set(by_signal)


@THOROUGH
def test_an_agent_a_relay_and_ranks_that_train_end_by_name_and_the_others_go_on(
    marchline: Stage,
) -> None:
    """All at once. A rank has no handler, so each signal kills it and is its death's."""
    params = {"samples": 20_000, "sleep_ms": 10.0}
    run = marchline.create("odometer.py:Odometer", fixed_counts=[2] * 6, params=params)
    many, host, relayed = marchline.worker("many", "cpu:4"), marchline.worker("hup"), marchline.worker("relayed")
    marchline.started(run, 6)
    marchline.until(run, lambda view: view["round"] >= 1, "a round")
    ranks = [many.child("worker.rank", index) for index in range(3)]
    relay = relayed.child("worker.relay")
    family = [*family_of(host.process.pid), *family_of(relayed.process.pid), *ranks]
    with nothing_left("at once", family):
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
