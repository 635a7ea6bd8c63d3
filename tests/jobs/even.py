"""Many elements that are all equal, each moved by 1 a batch: a copy that was taken in the middle of a write shows in
the next batch (case N08)."""

from dataclasses import dataclass

import torch
from torch import nn

from worker import Job


class Plain(nn.Module):
    def __init__(self, elements: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(elements))
        self.register_buffer("seen", torch.zeros(1000))


class Even(Job):
    @dataclass
    class Params:
        samples: int = 500
        elements: int = 1_000_000

    def build_model(self):
        return Plain(self.params.elements)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def train_dataset(self):
        return range(self.params.samples)

    def training_step(self, model, batch):
        for tensor in (model.w.detach(), model.seen):
            low, high = torch.aminmax(tensor)
            if low != high:
                raise AssertionError(f"a torn consensus: {float(low)} to {float(high)}")
        model.seen += 1.0
        return -model.w.sum()
