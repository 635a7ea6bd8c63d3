"""A controller that lacks time on a processor (F96): the run goes on, nobody dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
from stage import THOROUGH, Stage, wait_for

pytestmark = [pytest.mark.slow, THOROUGH, pytest.mark.timeout(590)]
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
