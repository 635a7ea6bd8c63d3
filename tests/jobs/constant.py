"""CONST: the loss is a chosen number and moves nothing; for tests of metrics and of what is not finite."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from worker import Job


class Constant(Job):
    @dataclass
    class Params:
        samples: int = 64
        loss: float = 1.5
        nan_at: int = -1  # the batch on this rank whose loss is not a number, from 0; -1 for none
        size: int = 4  # parameters

    def __init__(self, params):
        super().__init__(params)
        self.batches = 0

    def build_model(self):
        return nn.Linear(self.params.size, 1, bias=False)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.0)

    def train_dataset(self):
        return range(self.params.samples)

    def eval_dataset(self):
        return range(10)

    def training_step(self, model, batch):
        loss = math.nan if self.batches == self.params.nan_at else self.params.loss
        self.batches += 1
        return model.weight.sum() * 0 + loss

    def eval_step(self, model, batch):
        return {"loss": torch.tensor(self.params.loss), "mean": batch.double().mean()}
