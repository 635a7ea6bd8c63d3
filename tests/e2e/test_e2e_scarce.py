"""A controller that lacks what it needs: open files (F95), time on a processor (F96). The run goes on, nobody dies."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from stage import THOROUGH, Stage, stage, wait_for

from backend.runtime.limits import OTHER_DESCRIPTORS

pytestmark = [pytest.mark.slow, THOROUGH, pytest.mark.timeout(300)]
DESCRIPTORS = OTHER_DESCRIPTORS + 40
LONG: dict[str, Any] = {"job": "odometer.py:Odometer", "params": {"samples": 100_000, "sleep_ms": 10.0}}


def training(marchline: Stage, **config: Any) -> int:
    run = marchline.create(**(LONG | {"initial_anchor": 5} | config))
    marchline.worker("first", "cpu:2")
    marchline.started(run, 2)
    marchline.until(run, lambda view: view["round"] >= 2, "two rounds")
    return run


def rounds_go_on(marchline: Stage, run: int, count: int = 3) -> None:
    target = marchline.view(run)["round"] + count
    marchline.until(run, lambda view: view["round"] >= target, f"{count} more rounds")


def watch(marchline: Stage, taken: ExitStack) -> tuple[int, dict[str, Any]]:
    """One more page that looks at the overview: the status of its handshake, and the problem if it is refused."""
    port = int(marchline.url.rpartition(":")[2])
    token = (marchline.data_dir / "operator.token").read_text().strip()
    connection = taken.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
    lines = (
        "GET /api/v1/stream HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
        f"Authorization: Bearer {token}",
    )
    connection.sendall("\r\n".join([*lines, "", ""]).encode())
    answer = taken.enter_context(connection.makefile("rb"))
    status = int(answer.readline().split()[1])
    length = 0
    while (line := answer.readline().strip()) != b"":
        name, _, value = line.partition(b":")
        length = int(value) if name.lower() == b"content-length" else length
    return status, json.loads(answer.read(length)) if status != 101 else {}


def test_connections_leave_files_to_the_run_and_who_comes_too_late_is_told(tmp_path: Path) -> None:
    few = ("sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "sh")
    with stage(tmp_path, inside=few) as marchline, ExitStack() as taken:
        run = training(marchline)
        opened = 0
        while (answer := watch(marchline, taken))[0] == 101:
            opened += 1
            assert opened <= DESCRIPTORS
        status, problem = answer
        assert (status, problem["code"]) == (503, "connections_full")
        assert "The controller holds 40 connections in all, and takes no more" in problem["detail"]
        assert "ulimit -n" in problem["detail"]
        waiting = marchline.create("odometer.py:Odometer")
        late = marchline.worker("late", "cpu:2", "--run", str(waiting))
        # The test's own connection must not idle meanwhile: it would be closed, and find no room again.
        marchline.until(run, lambda _: "holds 40 connections in all" in late.output(), "the host to be told why")
        rounds_go_on(marchline, run)
        saved = len(marchline.items(run, "checkpoints"))
        marchline.post(f"runs/{run}/checkpoints")
        wait_for(lambda: len(marchline.items(run, "checkpoints")) > saved, "a checkpoint all the same")
        assert not marchline.view(run)["deaths"]
        taken.close()
        marchline.joined(waiting, 2)
        print(f"{opened} pages, then a refusal by name")


def test_when_no_file_can_be_opened_the_run_goes_on_and_hosts_come_in_afterwards(marchline: Stage) -> None:
    """EMFILE for whatever is opened: connections, checkpoints, reads of the database."""
    run = training(marchline)
    waiting = marchline.create("odometer.py:Odometer")
    pid = marchline.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = set(map(int, os.listdir(f"/proc/{pid}/fd")))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(set(range(len(taken) + 1)) - taken), before[1]))
    marchline.post(f"runs/{run}/checkpoints")
    view = marchline.until(run, lambda view: view["checkpoint_trouble"], "the save to fail")
    assert "Too many open files" in view["checkpoint_trouble"]
    late = marchline.worker("late", "cpu:2", "--run", str(waiting))
    marchline.until(run, lambda _: "trying again" in late.output(), "a host to be kept out")
    rounds_go_on(marchline, run)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    marchline.joined(waiting, 2)
    marchline.post(f"runs/{run}/checkpoints")
    view = marchline.until(run, lambda view: not view["checkpoint_trouble"] and view["checkpoints"], "a save")
    assert not view["deaths"]


class Throttle:
    """A process gets a tenth of a core: it runs for 10 ms, then is stopped for 90."""

    def __init__(self, pid: int) -> None:
        self.cycles = 0
        self._pid = pid
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.01):
            os.kill(self._pid, signal.SIGSTOP)
            self._over.wait(0.09)
            os.kill(self._pid, signal.SIGCONT)
            self.cycles += 1

    def end(self) -> None:
        self._over.set()


@contextmanager
def throttled(pid: int) -> Iterator[Throttle]:
    throttle = Throttle(pid)
    thread = threading.Thread(target=throttle.run)
    thread.start()
    try:
        yield throttle
    finally:
        throttle.end()
        thread.join()


def test_a_controller_with_a_tenth_of_a_core_buries_nobody(marchline: Stage) -> None:
    """For four heartbeat timeouts. The page comes, rounds close, hosts hear and are heard."""
    timeout = 3.0
    run = training(marchline, heartbeat_timeout_seconds=timeout, stall_seconds=60)
    controller = psutil.Process(marchline.process.pid)
    used, began = sum(controller.cpu_times()[:2]), time.monotonic()
    with throttled(controller.pid) as throttle:
        rounds_go_on(marchline, run)
        wait_for(lambda: time.monotonic() - began > 4 * timeout, "four timeouts to pass")
        rounds_go_on(marchline, run)
        share = (sum(controller.cpu_times()[:2]) - used) / (time.monotonic() - began)
    assert throttle.cycles > 30
    assert share < 0.2, "it was not starved"
    view = marchline.view(run)
    print(f"{throttle.cycles} stops, {share:.0%} of a core, {view['round']} rounds")
    assert (view["phase"], view["deaths"]) == ("training", []), marchline.story(run)
    marchline.post(f"runs/{run}/stop")
    assert marchline.ended(run)["phase"] == "done", marchline.story(run)
