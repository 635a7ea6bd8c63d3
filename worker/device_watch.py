"""How busy this host's GPUs are, as NVIDIA's management library says, without CUDA.

A thread of its own looks once a second: a driver that hangs must not silence the agent, and whatever goes wrong here
only leaves figures out.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

from worker.devices import LocalDevice

SECONDS = 1.0
"""between two looks"""
STALE_SECONDS = 5.0
"""after which a figure is not told any more"""

log = logging.getLogger("agent")


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One look at a GPU; none of what could not be read."""

    utilisation: int | None = None
    """percent of the last moment in which it was busy"""
    used_bytes: int | None = None


UNKNOWN = DeviceReading()


class DeviceWatch:
    """Watches the GPUs among ``devices`` until closed; without any there is no thread. ``clock`` gives seconds."""

    def __init__(
        self, devices: Iterable[LocalDevice], *, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._gpus = {one.device.id: one.visible for one in devices if one.device.type == "cuda"}
        self._seconds = seconds
        self._clock = clock
        self._seen: dict[str, tuple[float, DeviceReading]] = {}
        self._over = Event()
        if self._gpus:
            Thread(target=self._watch, name="device watch", daemon=True).start()

    def reading(self, device: str) -> DeviceReading:
        """The newest figures of a device, by its id; nothing that is older than ``STALE_SECONDS``."""
        at, reading = self._seen.get(device, (0.0, UNKNOWN))
        return reading if self._clock() - at <= STALE_SECONDS else UNKNOWN

    def close(self) -> None:
        """Have the thread end; it may be stuck in the driver, so nobody waits for it."""
        self._over.set()

    def _watch(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception as error:
            log.warning("how busy the GPUs are is not known: %s", error)
            return
        try:
            while not self._over.is_set():
                for device, uuid in self._gpus.items():
                    self._seen[device] = (self._clock(), _look(pynvml, uuid))
                self._over.wait(self._seconds)
        finally:
            with contextlib.suppress(Exception):
                pynvml.nvmlShutdown()


def _look(nvml: Any, uuid: str) -> DeviceReading:
    """What can be read of it: a part of a GPU (MIG) has memory and no utilisation, one off the bus nothing."""
    utilisation = used = None
    with contextlib.suppress(Exception):
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        with contextlib.suppress(nvml.NVMLError):
            utilisation = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        used = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
    return DeviceReading(utilisation, used)
