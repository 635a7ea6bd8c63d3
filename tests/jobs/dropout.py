"""A job whose next batch depends on all that a checkpoint must keep: moments, schedule, dice, counters."""

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from worker import Job


class Dropout(Job):
    @dataclass
    class Params:
        samples: int = 96
        path: str = ""  # a ledger of (epoch, id), when named

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))

    def build_optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=0.02)

    def build_scheduler(self, optimizer, total_steps):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=total_steps)

    def train_dataset(self):
        values = torch.linspace(-1, 1, self.params.samples * 8).reshape(-1, 8)
        return [(i, values[i], values[i].sum().sin().reshape(1)) for i in range(self.params.samples)]

    def training_step(self, model, batch):
        ids, inputs, wanted = batch
        if self.params.path:
            with open(self.params.path, "ab", buffering=0) as file:
                file.write("".join(f"{self.epoch} 0 {i}\n" for i in ids.tolist()).encode())
        noise = 0.01 * (random.random() + float(np.random.rand()))
        return (model(inputs + noise) - wanted).square().mean()
