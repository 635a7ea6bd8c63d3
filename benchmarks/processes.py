"""What processes use: processor time of ours and of everybody else, peak memory by what a process is."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

KINDS = {"backend": "controller", "worker": "agent", "worker.relay": "relay", "worker.rank": "rank"}
"""by the module that a process runs"""


@dataclass(frozen=True, slots=True)
class Use:
    """Processor seconds up to a moment: the whole machine's, and those of this process and all below it."""

    at: float
    machine: float
    ours: float


def use() -> Use:
    """Now."""
    fields = [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields[:8]
    machine = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    ours = 0.0
    for process in (own := psutil.Process(), *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        ours += times.user + times.system
    return Use(time.monotonic(), machine, ours)


def others(before: Use, after: Use) -> float:
    """Processor cores that were busy with what is not ours between two moments, interrupts and stolen time included."""
    seconds = max(after.at - before.at, 1e-9)
    return max(0.0, (after.machine - before.machine) - (after.ours - before.ours)) / seconds


@contextmanager
def undisturbed(wanted: bool) -> Iterator[None]:
    """Have every thread below this process go before all ordinary ones meanwhile, if that is wanted: real-time, in
    turns among themselves. It takes root, and what else the machine does stands still."""
    if not wanted:
        yield
        return
    _schedule(os.SCHED_RR, 1)
    try:
        yield
    finally:
        _schedule(os.SCHED_OTHER, 0)


def _schedule(policy: int, priority: int) -> None:
    for process in psutil.Process().children(recursive=True):
        for thread in Path(f"/proc/{process.pid}/task").glob("*"):
            with suppress(OSError):  # it may have ended
                os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))


@dataclass(frozen=True, slots=True)
class Peak:
    """A process's memory, in bytes."""

    resident: int
    """at most so far (VmHWM): anonymous, file and shared memory that it has mapped"""
    anonymous: int
    """now: nobody else's"""


def peaks() -> dict[str, list[Peak]]:
    """Of Marchline's processes below this one, by kind."""
    found: dict[str, list[Peak]] = {kind: [] for kind in KINDS.values()}
    for process in psutil.Process().children(recursive=True):
        try:
            kind = _kind(process.cmdline())
            status = Path(f"/proc/{process.pid}/status").read_text()
        except (psutil.NoSuchProcess, OSError):
            continue
        if kind is not None:
            found[kind].append(Peak(_kilobytes(status, "VmHWM") << 10, _kilobytes(status, "RssAnon") << 10))
    return found


def machine() -> dict[str, Any]:
    """What a figure depends on: cores, memory, load."""
    memory = psutil.virtual_memory()
    return {"cores": os.cpu_count(), "memory_gb": round(memory.total / 1e9, 1), "load": list(os.getloadavg())}


def _kind(command: list[str]) -> str | None:
    modules = [after for flag, after in itertools.pairwise(command) if flag == "-m"]
    return KINDS.get(modules[-1]) if modules else None


def _kilobytes(status: str, name: str) -> int:
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{name}:")), 0)
