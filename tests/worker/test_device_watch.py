"""What the agent sees of its GPUs: figures while NVIDIA's library gives them, nothing at all when it does not."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from wire.messages import Device
from worker.device_watch import STALE_SECONDS, UNKNOWN, DeviceReading, DeviceWatch
from worker.devices import LocalDevice

PATIENCE = 20.0
GPUS = [LocalDevice(Device(id=f"cuda:{n}", type="cuda"), visible=f"GPU-{n}") for n in (0, 3)]
CPU = LocalDevice(Device(id="cpu:0", type="cpu"), visible="")


class Library:
    """NVIDIA's library, whose answers the test sets; the real one is met on a GPU host."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.rates: dict[str, Any] = {"GPU-0": 87, "GPU-3": 0}
        self.used: dict[str, Any] = {"GPU-0": 41 << 30, "GPU-3": 1 << 20}
        self.looks = 0
        self.looked = threading.Condition()
        self.shut = threading.Event()

    def nvmlInit(self) -> None:
        return None

    def nvmlShutdown(self) -> None:
        self.shut.set()

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.used:
            raise self.NVMLError("no such GPU")
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        if self.rates[handle] is None:
            raise self.NVMLError("not supported")
        return SimpleNamespace(gpu=self.rates[handle])

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        with self.looked:
            self.looks += 1
            self.looked.notify_all()
        if isinstance(self.used[handle], Exception):
            raise self.used[handle]
        return SimpleNamespace(used=self.used[handle])

    def seen_again(self) -> bool:
        """Wait until everything was looked at after now."""
        with self.looked:
            wanted = self.looks + 2 * len(GPUS)
            return self.looked.wait_for(lambda: self.looks >= wanted, PATIENCE)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


def test_figures_come_by_device_and_follow_the_library(library: Library) -> None:
    watch = DeviceWatch([*GPUS, CPU], seconds=0.001)
    assert library.seen_again()
    assert watch.reading("cuda:0") == DeviceReading(87, 41 << 30)
    assert watch.reading("cuda:3") == DeviceReading(0, 1 << 20), "idle is a figure too"
    assert watch.reading("cpu:0") == watch.reading("") == UNKNOWN
    library.rates["GPU-0"] = None  # a part of a GPU
    library.used["GPU-3"] = OSError("the driver was unloaded")
    assert library.seen_again()
    assert watch.reading("cuda:0") == DeviceReading(None, 41 << 30)
    assert watch.reading("cuda:3").used_bytes is None
    watch.close()
    assert library.shut.wait(PATIENCE)


def test_a_gpu_that_is_gone_has_no_figures_and_the_others_do(library: Library) -> None:
    del library.used["GPU-0"]
    watch = DeviceWatch(GPUS, seconds=0.001)
    assert library.seen_again()
    assert watch.reading("cuda:0") == UNKNOWN
    assert watch.reading("cuda:3") == DeviceReading(0, 1 << 20)
    watch.close()


def test_figures_of_a_driver_that_hangs_get_old_and_are_told_no_more(library: Library) -> None:
    now = [100.0]
    watch = DeviceWatch(GPUS, seconds=PATIENCE, clock=lambda: now[0])
    with library.looked:
        assert library.looked.wait_for(lambda: library.looks >= 2, PATIENCE)
    while watch.reading("cuda:3") == UNKNOWN:  # the look is over, its figures are a moment behind
        pass
    now[0] += STALE_SECONDS
    assert watch.reading("cuda:0") == DeviceReading(87, 41 << 30)
    now[0] += 0.1
    assert watch.reading("cuda:0") == UNKNOWN
    watch.close()
    assert library.shut.wait(PATIENCE), "at once, and not after the rest of its pause"


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "device watch"}


@pytest.mark.parametrize("error", [Library.NVMLError("driver not loaded"), OSError("no library"), None])
def test_without_the_library_or_a_driver_there_are_no_figures(
    library: Library, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    def refuse() -> None:
        assert error is not None
        raise error

    if error is None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    else:
        monkeypatch.setattr(library, "nvmlInit", refuse)
    others = threads()  # of tests before this one
    watch = DeviceWatch(GPUS, seconds=0.001)
    for thread in threads() - others:
        thread.join(PATIENCE)
    assert threads() <= others
    assert watch.reading("cuda:0") == UNKNOWN
    watch.close()


def test_a_host_of_cpus_has_no_such_thread() -> None:
    before = threads()
    watch = DeviceWatch([CPU])
    assert threads() <= before
    watch.close()
