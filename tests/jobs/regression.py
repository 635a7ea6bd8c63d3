"""A small regression by SGD with momentum on data made from each sample's number: real gradients in little time."""

from dataclasses import dataclass

import torch
from torch import nn

from worker import Job


class Regression(Job):
    @dataclass
    class Params:
        samples: int = 256
        momentum: float = 0.9

    def build_model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=self.params.momentum)

    def train_dataset(self):
        return range(self.params.samples)

    def training_step(self, model, batch):
        x = torch.stack([torch.sin(batch * f) for f in (0.1, 0.3, 0.7, 1.3)], dim=1)
        y = x[:, :1] * x[:, 1:2] + 0.5 * x[:, 2:3]
        return (model(x) - y).square().mean()
