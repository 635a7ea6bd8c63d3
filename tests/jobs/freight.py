"""FREIGHT: a car of any size. Every local batch moves each of its elements by exactly 1, and each rank writes down what
all of them are before a batch, so that a consensus that is partial or not that of its contributions shows by name."""

import os
from dataclasses import dataclass

import torch
from torch import nn

from worker import Job


class Load(nn.Module):
    def __init__(self, elements):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(elements))
        self.register_buffer("b", torch.zeros(max(1, elements // 64)))


class Freight(Job):
    @dataclass
    class Params:
        path: str = ""  # where the ranks write: rank, their batch from 0, smallest and largest element, of w and of b
        samples: int = 64
        elements: int = 4

    def __init__(self, params):
        super().__init__(params)
        self.batches = 0

    def build_model(self):
        return Load(self.params.elements)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def train_dataset(self):
        return range(self.params.samples)

    def training_step(self, model, batch):
        rank = os.environ.get("RANK")
        if rank is not None and self.params.path:
            spread = [*torch.aminmax(model.w.detach()), *torch.aminmax(model.b)]
            line = " ".join([rank, str(self.batches), *(repr(float(value)) for value in spread)])
            with open(self.params.path, "a") as ledger:
                ledger.write(line + "\n")
        self.batches += 1
        model.b += 1
        return -model.w.sum()
