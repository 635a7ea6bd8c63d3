"""LinearLR from 1 to 0 over the run; each batch leaves the rate that it was trained at in ``rates``, and as the line
``rank rate`` in a file."""

import os
from dataclasses import dataclass

import torch
from torch import nn

from worker import Job


class Scheduled(Job):
    @dataclass
    class Params:
        samples: int = 100
        path: str = ""  # where to write; nowhere when empty

    def __init__(self, params):
        super().__init__(params)
        self.rates = []

    def build_model(self):
        return nn.Linear(1, 1, bias=False)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def build_scheduler(self, optimizer, total_steps):
        self.optimizer = optimizer
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_steps)

    def train_dataset(self):
        return range(self.params.samples)

    def training_step(self, model, batch):
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        if self.params.path:
            line = f"{os.environ['RANK']} {self.rates[-1]!r}\n"
            with open(self.params.path, "ab", buffering=0) as file:  # one appending write a batch: ranks share the file
                file.write(line.encode())
        return model.weight.sum() * 0
