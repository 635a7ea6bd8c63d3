"""Handwritten digits (8x8 pixels, inside scikit-learn) and a small network: the job to try first. Seconds
on a CPU."""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from worker import Job


class Digits(Job):
    """A two-layer network on 8x8 handwritten digits."""

    @dataclass
    class Params:
        hidden: int = 128  # width of the hidden layer
        learning_rate: float = 1e-2  # of AdamW, at the start

    def build_model(self):
        hidden = self.params.hidden
        return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def build_optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.params.learning_rate)

    def build_scheduler(self, optimizer, total_steps):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps)

    def train_dataset(self):
        return split(train=True)

    def eval_dataset(self):
        return split(train=False)

    def training_step(self, model, batch):
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def eval_step(self, model, batch):
        images, labels = batch
        scores = model(images)
        return {
            "loss": F.cross_entropy(scores, labels),
            "accuracy": (scores.argmax(dim=1) == labels).float().mean(),
        }


def split(train):
    """Every fifth image is kept for evaluation."""
    pixels, labels = load_digits(return_X_y=True)
    kept_out = torch.arange(len(labels)) % 5 == 0
    chosen = ~kept_out if train else kept_out
    return TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32)[chosen], torch.tensor(labels)[chosen])
