"""A rank goes wrong at one of its batches, in a chosen way; the others are odometers (cases F01, F05)."""

import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass

import torch
from torch import nn

from worker import Job


class Faulty(Job):
    @dataclass
    class Params:
        samples: int = 64
        kind: str = (
            "raise"  # raise, memory, exit0, exit3, hard_exit, hang, hold, kill, segfault; several by rank: "raise kill"
        )
        rank: int = 1  # the rank that fails; -1 for all
        at: int = 7  # batch on that rank, from 0
        seconds: int = 3600  # of a hold

    def __init__(self, params):
        super().__init__(params)
        self.batches = 0

    def build_model(self):
        return nn.Linear(1, 1, bias=False)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def train_dataset(self):
        return range(self.params.samples)

    def training_step(self, model, batch):
        rank = int(os.environ.get("RANK", "-2"))
        if self.params.rank in (rank, -1) and self.batches == self.params.at:
            kinds = self.params.kind.split()
            fail(kinds[rank % len(kinds)], self.params.seconds)
        self.batches += 1
        return -model.weight.sum()


ERRORS = {
    "raise": ValueError("grün ist kaputt ☃"),
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of"),
}


def fail(kind, seconds):
    """End this process, or not return, a hold for so many seconds."""
    if kind in ERRORS:
        raise ERRORS[kind]
    match kind:
        case "exit0":
            sys.exit(0)
        case "exit3":
            sys.exit(3)
        case "hard_exit":
            os._exit(1)
        case "hang":
            while True:
                time.sleep(3600)
        case "hold":
            ctypes.PyDLL(None).sleep(seconds)  # holds the interpreter: no other thread of this process runs
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case _:
            raise KeyError(kind)
