"""Which devices a host offers, found without CUDA: NVIDIA's management library for GPUs, and as many CPU ranks as
asked for."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from platform import processor
from typing import Any

import msgspec

from wire.messages import Device

SHARED_GPU_VARIABLE = "MARCHLINE_NCCL_HOSTID_PER_RANK"
"""1: several ranks may share a GPU, which NCCL refuses otherwise; for tests, since they get slower by it"""
_CPU = re.compile(r"cpu(?::(\d+))?")


class DeviceError(Exception):
    """The devices that were asked for are not there; names what is."""


@dataclass(frozen=True, slots=True)
class LocalDevice:
    """A device to offer, and how a child process is confined to it."""

    device: Device
    visible: str
    """value of CUDA_VISIBLE_DEVICES: the GPU's UUID, or empty for a CPU rank"""

    @property
    def torch_name(self) -> str:
        """The device's name inside a process that sees only this one."""
        return "cuda:0" if self.device.type == "cuda" else "cpu"


def find_devices(wanted: str) -> list[LocalDevice]:
    """The devices for ``all``, ``cuda``, ``cpu``, ``cpu:N``, or a list of GPU numbers and UUIDs like ``0,2``.

    ``all`` means every visible GPU, and one CPU rank on a host without any. GPU numbers are NVML's, in PCI bus order;
    a GPU that is named twice has two ranks, where that is allowed. Raises ``DeviceError``.
    """
    if match := _CPU.fullmatch(wanted):
        count = int(match.group(1) or 1)
        if not 1 <= count <= 256:
            raise DeviceError(f"--devices {wanted}: offer 1 to 256 CPU ranks")
        return [_cpu(index) for index in range(count)]
    gpus = visible_gpus(list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if wanted == "all":
        return gpus or [_cpu(0)]
    if wanted == "cuda":
        return gpus or [_pick(gpus, "0")]
    return _numbered([_pick(gpus, name.strip().removeprefix("cuda:")) for name in wanted.split(",")])


def visible_gpus(gpus: list[LocalDevice], visible: str | None) -> list[LocalDevice]:
    """Those that ``CUDA_VISIBLE_DEVICES`` lets through, as CUDA reads it: in its order, ending at the first unknown
    name."""
    if visible is None:
        return gpus
    chosen: list[LocalDevice] = []
    for name in visible.split(","):
        found = _matching(gpus, name.strip())
        if found is None:
            break
        chosen.append(found)
    return chosen


def list_gpus() -> list[LocalDevice]:
    """Every NVIDIA GPU of the host, or none where driver or library is missing. Touches no CUDA context."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu(index: int) -> LocalDevice:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return LocalDevice(Device(id=f"cpu:{index}", type="cpu", name=_processor_name(), memory_bytes=memory), visible="")


def _gpu(nvml: Any, index: int) -> LocalDevice:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    device = Device(
        id=f"cuda:{index}",
        type="cuda",
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
    )
    return LocalDevice(device, visible=_text(nvml.nvmlDeviceGetUUID(handle)))


def _pick(gpus: list[LocalDevice], name: str) -> LocalDevice:
    found = _matching(gpus, name)
    if found is None:
        there = ", ".join(gpu.device.id.removeprefix("cuda:") for gpu in gpus) or "none (is the NVIDIA driver loaded?)"
        raise DeviceError(f"--devices: no GPU {name!r} on this host; visible GPUs: {there}; or offer cpu, cpu:N")
    return found


def _numbered(picked: list[LocalDevice]) -> list[LocalDevice]:
    """Devices that were named again get names of their own. Raises ``DeviceError`` where no GPU can be shared."""
    devices: list[LocalDevice] = []
    for one in picked:
        again = sum(earlier.visible == one.visible for earlier in devices)
        if again and os.environ.get(SHARED_GPU_VARIABLE) != "1":
            raise DeviceError(
                f"--devices: GPU {one.device.id.removeprefix('cuda:')} is named twice, but NCCL gives each rank a GPU "
                f"of its own; for tests, {SHARED_GPU_VARIABLE}=1 lets ranks share one"
            )
        other = msgspec.structs.replace(one.device, id=f"{one.device.id}.{again}")
        devices.append(replace(one, device=other) if again else one)
    return devices


def _matching(gpus: list[LocalDevice], name: str) -> LocalDevice | None:
    """By number, or by a UUID or the beginning of one, as CUDA allows."""
    for gpu in gpus:
        if gpu.device.id == f"cuda:{name}" or (name.startswith("GPU-") and gpu.visible.startswith(name)):
            return gpu
    return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
            return next(names, "") or processor()
    except OSError:
        return processor()
