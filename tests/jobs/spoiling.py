"""Odometers in which one element turns NaN on chosen ranks, from one of their batches on: nothing else goes wrong."""

import math
import os
from dataclasses import dataclass

import torch
from torch import nn

from worker import Job


class Car(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Parameter(torch.zeros(4))
        self.body = nn.Parameter(torch.zeros(2, 3))

    def forward(self):
        return self.head.sum() + self.body.sum()


class Spoiling(Job):
    @dataclass
    class Params:
        samples: int = 16
        ranks: str = "1"  # who is spoilt
        at: int = 3  # at which of their batches, from 0
        times: int = 1  # and how many batches in a row

    def __init__(self, params):
        super().__init__(params)
        self.batches = 0

    def build_model(self):
        return Car()

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def train_dataset(self):
        return range(self.params.samples)

    def eval_dataset(self):
        return range(1)

    def eval_step(self, model, batch):
        return {"odometer": float(model.body[1, 2])}

    def training_step(self, model, batch):
        spoilt = os.environ.get("RANK") in self.params.ranks.split()
        if spoilt and self.params.at <= self.batches < self.params.at + self.params.times:
            with torch.no_grad():
                model.body[1, 2] = math.nan
        self.batches += 1
        return -model()
