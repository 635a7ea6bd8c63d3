"""LEDGER: sample i is the number i, and each trained sample leaves the line ``epoch rank id`` in a file."""

import os
from dataclasses import dataclass

import torch
from torch import nn

from worker import Job


class Ledger(Job):
    @dataclass
    class Params:
        samples: int = 64
        path: str = ""  # where to write; MARCHLINE_LEDGER when empty

    def build_model(self):
        return nn.Linear(1, 1, bias=False)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.0)

    def train_dataset(self):
        return range(self.params.samples)

    def training_step(self, model, batch):
        rank = os.environ.get("RANK", "-")
        lines = "".join(f"{self.epoch} {rank} {sample}\n" for sample in batch.tolist())
        path = self.params.path or os.environ["MARCHLINE_LEDGER"]
        with open(path, "ab", buffering=0) as file:  # one appending write a batch: ranks may share the file
            file.write(lines.encode())
        return model(batch.float().unsqueeze(1)).square().mean()
