"""The job of ``benchmarks.heterogeneous`` as Marchline runs it."""

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from benchmarks.jobs import images
from worker import Job


class Fashion(Job):
    """A perceptron on pictures; see ``images``. It has no evaluation: noted weights are scored afterwards."""

    def build_model(self) -> nn.Module:
        self.notebook = images.Notebook()
        return images.network()

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return images.optimizer(model.parameters())

    def train_dataset(self) -> TensorDataset:
        return images.dataset()

    def training_step(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        self.notebook.note(model)
        pixels, labels = batch
        return images.loss_of(model, pixels, labels)
