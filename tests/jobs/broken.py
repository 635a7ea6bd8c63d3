"""Jobs that cannot be used, each for one reason; hosts must say which before anybody trains."""

from dataclasses import dataclass

import torch
from torch import nn

from worker import Job


class Base(Job):
    """The part of these jobs that is in order."""

    def build_model(self):
        return nn.Linear(1, 1)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def train_dataset(self):
        return range(8)

    def training_step(self, model, batch):
        return model(batch.float().unsqueeze(1)).mean()


class NoStep(Job):
    def build_model(self):
        return nn.Linear(1, 1)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def train_dataset(self):
        return range(8)


class NotAJob:
    pass


class Empty(Base):
    def train_dataset(self):
        return []


class Stream(Base):
    def train_dataset(self):
        return iter(range(8))


class Frozen(Base):
    def build_model(self):
        return nn.Linear(1, 1).requires_grad_(False)


class MissingData(Base):
    def train_dataset(self):
        return open("/nowhere/samples.bin", "rb")


class VectorLoss(Base):
    def training_step(self, model, batch):
        return model(batch.float().unsqueeze(1))


class DetachedLoss(Base):
    def training_step(self, model, batch):
        return model(batch.float().unsqueeze(1)).mean().detach()


class NumberLoss(Base):
    def training_step(self, model, batch):
        return 1.0


class NoLossKey(Base):
    def training_step(self, model, batch):
        return {"accuracy": torch.tensor(1.0)}


class TwoModels(Base):
    builds = 0

    def build_model(self):
        TwoModels.builds += 1
        return nn.Linear(1, TwoModels.builds)


class PlainParams(Base):
    class Params:
        hidden = 3


@dataclass
class TypedParams:
    hidden: int = 3
    rate: float = 0.1


class Typed(Base):
    Params = TypedParams
