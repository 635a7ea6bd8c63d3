"""The job of ``benchmarks.chaos``: an odometer of any size that keeps a ledger.

Every batch moves each parameter and each buffer by exactly 1, so that any consensus tells whose work it is made of, and
leaves one line in a file: who, which epoch, what all elements were before (smallest and largest, of the parameters and
of the buffers), and which samples it held. Sample i is the number i.
"""

import os
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from worker import Job

BUFFER_SHARE = 64
"""parameters for each element of the buffer"""


class Load(nn.Module):
    """Elements that are all equal."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(elements))
        self.b: Tensor
        self.register_buffer("b", torch.zeros(max(1, elements // BUFFER_SHARE)))


class Witness(Job):
    """Odometer and ledger."""

    @dataclass
    class Params:
        samples: int = 600
        elements: int = 1000
        sleep_ms: float = 10.0
        """of rank 0, 3, 6; half as much again of the next, twice that of the one after"""
        path: str = ""
        """where the lines go; none are kept without"""

    def build_model(self) -> nn.Module:
        return Load(self.params.elements)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=1.0)

    def train_dataset(self) -> range:
        return range(self.params.samples)

    def training_step(self, model: nn.Module, batch: Tensor) -> Tensor:
        assert isinstance(model, Load)
        rank = os.environ.get("RANK", "0")
        if self.params.path and "RANK" in os.environ:
            spread = [*torch.aminmax(model.w.detach()), *torch.aminmax(model.b)]
            words = [rank, str(self.epoch), *(repr(float(value)) for value in spread), *map(str, batch.tolist())]
            with open(self.params.path, "ab", buffering=0) as ledger:  # one appending write: ranks share the file
                ledger.write((" ".join(words) + "\n").encode())
        time.sleep(self.params.sleep_ms * (1 + int(rank) % 3 / 2) / 1000)
        model.b += 1
        return -model.w.sum()
