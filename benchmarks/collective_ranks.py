"""The processes that ``benchmarks.collective`` measures: one a rank, on GPUs or CPUs, waiting for orders."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Self

from benchmarks.entries import INTERFACES, ROOT, free_port
from benchmarks.waiting import Waiting, durations
from worker.devices import list_gpus

BUFFER_SHARE = 1000
"""parameters for each element of a buffer"""
HOSTID_VARIABLE = "MARCHLINE_NCCL_HOSTID_PER_RANK"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where ranks are. ``device``: cuda or cpu; ``gpus`` of this machine, 0 on CPUs."""

    device: str
    gpus: int

    @property
    def backend(self) -> str:
        """The library that sums."""
        return "nccl" if self.device == "cuda" else "gloo"

    def shared(self, world: int) -> bool:
        """Whether so many ranks must share GPUs."""
        return self.device == "cuda" and world > self.gpus

    def device_of(self, rank: int) -> str:
        """As torch names it."""
        return f"cuda:{rank % self.gpus}" if self.device == "cuda" else "cpu"

    def environment(self, rank: int, world: int) -> dict[str, str]:
        """Of a process that sums by itself. NCCL takes ranks that share a GPU only from hosts of their own."""
        if not self.shared(world):
            return INTERFACES
        apart = {"NCCL_HOSTID": f"bench-{rank}", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
        return INTERFACES | apart

    def agent_environment(self, world: int) -> dict[str, str]:
        """Of an agent, whose ranks get the same by its own doing."""
        return INTERFACES | ({HOSTID_VARIABLE: "1"} if self.shared(world) else {})


def layout(wanted: str, most: int | None = None) -> Layout:
    """``auto`` takes the GPUs where there are any, at most so many. Raises ``SystemExit`` where GPUs are wanted and
    missing."""
    gpus = 0 if wanted == "cpu" else len(list_gpus()[:most])
    if wanted == "cuda" and not gpus:
        raise SystemExit("--device cuda: this machine has no GPU that its driver shows")
    return Layout("cuda" if gpus else "cpu", gpus)


class Ranks(Waiting):
    """A world of ranks that are in one session, and in a process group of torch's own. Raises ``EntryFailed``."""

    def __init__(self, place: Layout, world: int) -> None:
        super().__init__(place.backend)
        self.layout = place
        self.world = world
        self.elements = 0

    def __enter__(self) -> Self:
        meet = f"127.0.0.1:{free_port()}"
        self.start([self._program(rank, meet) for rank in range(self.world)])
        return self

    def lay_out(self, params: int) -> str:
        """Have a model of so many parameters, and buffers; how the session's ranks talk."""
        buffers = max(1, params // BUFFER_SHARE)
        self.elements = params + buffers
        return str(self.ask({"act": "model", "params": params, "buffers": buffers})[0]["transport"])

    def go(self, act: str, times: int) -> tuple[list[float], list[dict[str, float]]]:
        """Seconds of each repetition, and how the first rank's time was split, in ms, where it says so."""
        answers = self.ask({"act": act, "times": times})
        return durations(answers), answers[0].get("splits", [])

    def remember(self, rounds: int) -> list[list[dict[str, float]]]:
        """Do so many rounds; what each rank noted of memory on its way, first to last."""
        return [answer["notes"] for answer in self.ask({"act": "memory", "rounds": rounds})]

    def _program(self, rank: int, meet: str) -> tuple[list[str], dict[str, str]]:
        program = [sys.executable, "-m", "benchmarks.peers.collective", "--rank", str(rank)]
        program += ["--world", str(self.world), "--meet", meet, "--device", self.layout.device_of(rank)]
        own: dict[str, Any] = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return program, own | self.layout.environment(rank, self.world)
