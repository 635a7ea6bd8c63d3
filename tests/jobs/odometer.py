"""ODO: one float that every local batch moves by exactly 1, so that a window's average tells whose work
counted, and how often."""

import time
from dataclasses import dataclass

import torch
from torch import nn

from worker import Job


def spend(seconds):
    time.sleep(seconds)


class Car(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))


class Odometer(Job):
    @dataclass
    class Params:
        samples: int = 64
        sleep_ms: float = 0.0  # sleeping costs no processor, so slow ranks fit beside fast ones
        momentum: float = 0.0
        save_seconds: float = 0.0  # how long a rank takes to hand over its state

    def build_model(self):
        return Car()

    def build_optimizer(self, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=self.params.momentum)
        if self.params.save_seconds:
            optimizer.register_state_dict_pre_hook(lambda _: spend(self.params.save_seconds))
        return optimizer

    def train_dataset(self):
        return range(self.params.samples)

    def training_step(self, model, batch):
        spend(self.params.sleep_ms / 1000)
        return -model.w
