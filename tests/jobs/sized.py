"""A model whose head depends on the host: on MARCHLINE_TEST_CLASSES (case J17)."""

import os

import torch
from torch import nn

from worker import Job


class Sized(Job):
    def build_model(self):
        return nn.Linear(2, int(os.environ.get("MARCHLINE_TEST_CLASSES", "3")))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_dataset(self):
        return range(32)

    def training_step(self, model, batch):
        return model(torch.ones(len(batch), 2)).mean()
