"""BatchNorm at learning rate 0: only the running statistics move, to figures that can be worked out by hand
(cases J04, J05)."""

import os
from dataclasses import dataclass

import torch
from torch import nn

from worker import Job


class BatchNorm(Job):
    @dataclass
    class Params:
        samples: int = 64

    def build_model(self):
        return nn.BatchNorm1d(1, momentum=0.1)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.0)

    def train_dataset(self):
        return range(self.params.samples)

    def training_step(self, model, batch):
        centre = 0.0 if os.environ.get("RANK", "0") == "0" else 10.0
        return model(torch.tensor([[centre - 1.0], [centre + 1.0]])).sum()
