"""BULK: one large parameter of random normal numbers that nobody moves: whatever a round does to its bits shows."""

import os
from dataclasses import dataclass

import torch
import xxhash
from torch import nn

from worker import Job


class Heap(nn.Module):
    def __init__(self, elements):
        super().__init__()
        self.w = nn.Parameter(torch.randn(elements, generator=torch.Generator().manual_seed(7)))


class Bulk(Job):
    @dataclass
    class Params:
        path: str = ""  # where the ranks write: rank, hash of w
        samples: int = 8
        elements: int = 1024

    def build_model(self):
        return Heap(self.params.elements)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.0)

    def train_dataset(self):
        return range(self.params.samples)

    def training_step(self, model, batch):
        rank = os.environ.get("RANK")
        if rank is not None and self.params.path:
            values = model.w.detach().numpy()
            with open(self.params.path, "a") as ledger:
                ledger.write(f"{rank} {xxhash.xxh3_64_hexdigest(values)}\n")
        return model.w[:8].sum()
