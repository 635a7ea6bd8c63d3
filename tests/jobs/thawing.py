"""A frozen trunk and a head that every batch moves by exactly 1; the trunk may thaw at some batch, on all ranks or on
one (cases J09, J10)."""

import os
from dataclasses import dataclass

import torch
from torch import nn

from worker import Job


class Layers(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.trunk = nn.Parameter(torch.linspace(-1, 1, wide), requires_grad=False)
        self.head = nn.Parameter(torch.zeros(10))


class Thawing(Job):
    @dataclass
    class Params:
        samples: int = 256
        wide: int = 8
        thaw_at: int = -1  # batches that the rank did before
        thaw_rank: int = -1  # all

    def build_model(self):
        self.batches = 0
        return Layers(self.params.wide)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def train_dataset(self):
        return range(self.params.samples)

    def training_step(self, model, batch):
        chosen = self.params.thaw_rank in (-1, int(os.environ.get("RANK", "0")))
        if self.batches == self.params.thaw_at and chosen:
            model.trunk.requires_grad_(True)
        self.batches += 1
        loss = -model.head.sum()
        return loss - model.trunk.sum() if model.trunk.requires_grad else loss
