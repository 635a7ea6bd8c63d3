"""The job of ``benchmarks.reduce``: parameters of a wanted size, and steps that cost nothing.

With ``gate``, a directory of named pipes, a rank says at each step that it is there (a byte into ``at``) and waits for
leave (a byte from ``go`` and its number), so that the measurement decides when a round may come.
"""

import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

from worker import Job

LEARNING_RATE = 1e-9


class Weights(nn.Module):
    """The bulk, which no step touches, and a scale that the steps are made with."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.bulk = nn.Parameter(torch.rand(elements))


class Hollow(Job):
    """Rounds back to back, or whenever the gate lets one through."""

    @dataclass
    class Params:
        elements: int = 250_000
        """f32 elements of the bulk"""
        samples: int = 1000
        gate: str = ""

    def build_model(self) -> nn.Module:
        self.pipes: tuple[int, int] | None = None
        return Weights(self.params.elements)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        assert isinstance(model, Weights)
        return SGD([model.scale], lr=LEARNING_RATE)

    def train_dataset(self) -> TensorDataset:
        return TensorDataset(torch.zeros(self.params.samples))

    def training_step(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        self._wait_for_leave()
        assert isinstance(model, Weights)
        return model.scale.sum() * batch[0].mean()

    def _wait_for_leave(self) -> None:
        gate = self.params.gate
        if not gate:
            return
        if self.pipes is None:
            at = os.open(f"{gate}/at", os.O_WRONLY)
            self.pipes = at, os.open(f"{gate}/go{os.environ['RANK']}", os.O_RDONLY)
        at, go = self.pipes
        os.write(at, b".")
        if not os.read(go, 1):
            raise RuntimeError("the measurement is over")
