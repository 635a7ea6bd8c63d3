"""The pictures and the network that every entry of ``benchmarks.heterogeneous`` trains, ours and theirs alike.

Plain torch and numpy, so that a peer's own Python can import it. The pictures are laid out once by the measurement
(``lay_out``) and mapped by each process.
"""

from __future__ import annotations

import gzip
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

FASHION = Path("/usr/share/datasets/fashion-mnist")
"""Debian's package dataset-fashion-mnist"""
DATA_VARIABLE = "BENCH_DATA"
"""directory that ``lay_out`` filled"""
WEIGHTS_VARIABLE = "BENCH_WEIGHTS"
"""directory for the weights that a process notes on its way; unset for all but one rank"""
NOTE_SECONDS = 0.25
ENOUGH = 60_000
"""pictures to train on: fewer are repeated, so that an epoch lasts"""
LEARNING_RATE = 0.01
MOMENTUM = 0.9
HIDDEN = 128
SEED = 42


def lay_out(place: Path, limit: int | None = None) -> str:
    """Write the pictures, at most ``limit`` to train on, as ``.npy`` files: the data's name.

    Pixels are (n, features) uint8, labels (n,) int64. Digits have pixels of 0 to 16, stored as 0 to 240, and those to
    train on are repeated. Raises ``ImportError`` when neither data set is there.
    """
    name, parts = ("fashion-mnist", _fashion()) if FASHION.is_dir() else ("digits, repeated", _digits())
    parts["train"] = (_repeated(parts["train"][0]), _repeated(parts["train"][1]))
    for part, (pixels, labels) in parts.items():
        kept = slice(limit if part == "train" else None)
        np.save(place / f"{part}-pixels.npy", pixels[kept])
        np.save(place / f"{part}-labels.npy", labels[kept])
    return name


def pictures(part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``train`` or ``held-out``: pixels (n, features) uint8 and labels (n,) int64."""
    place = Path(os.environ[DATA_VARIABLE])
    pixels = torch.from_numpy(np.load(place / f"{part}-pixels.npy"))
    return pixels, torch.from_numpy(np.load(place / f"{part}-labels.npy"))


def dataset() -> TensorDataset:
    """What is trained on."""
    return TensorDataset(*pictures("train"))


class Network(nn.Module):
    """A perceptron with one hidden layer; pixels in, scores of the ten classes out."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(pixels.float() / 255)
        return scores


def network() -> Network:
    """The network, with the same weights everywhere."""
    torch.manual_seed(SEED)
    return Network(pictures("held-out")[0].shape[1])


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of every entry."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


def loss_of(model: nn.Module, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of a batch."""
    return F.cross_entropy(model(pixels), labels)


class Notebook:
    """Notes a model's weights every ``NOTE_SECONDS``, as files named by the moment (Unix time, ns), to be scored when
    everything is over. It is opened inside a step, where emulation pads what it costs (well under a millisecond)."""

    def __init__(self) -> None:
        place = os.environ.get(WEIGHTS_VARIABLE)
        self._place = Path(place) if place else None
        self._next = time.monotonic()

    def note(self, model: nn.Module, *, now: bool = False) -> None:
        """Write the weights down if it is time, or in any case with ``now``."""
        if self._place is None or not (now or time.monotonic() >= self._next):
            return
        self._next = time.monotonic() + NOTE_SECONDS
        with torch.no_grad():
            weights = nn.utils.parameters_to_vector(model.parameters()).cpu().numpy()
        np.save(self._place / f"{time.time_ns()}.npy", weights)


class Score(NamedTuple):
    """Of the held-out pictures."""

    accuracy: float
    loss: float
    """mean cross entropy"""


def score(weights: npt.NDArray[np.float32]) -> Score:
    """How a network with these weights, in the order of its parameters, does on the held-out pictures."""
    model = network()
    nn.utils.vector_to_parameters(torch.from_numpy(weights), model.parameters())
    pixels, labels = pictures("held-out")
    with torch.no_grad():
        scores = model(pixels)
    accuracy = float((scores.argmax(dim=1) == labels).float().mean())
    return Score(accuracy, float(F.cross_entropy(scores, labels)))


def _fashion() -> dict[str, tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
    parts = {}
    for part, prefix in (("train", "train"), ("held-out", "t10k")):
        pixels = np.frombuffer(
            gzip.decompress((FASHION / f"{prefix}-images-idx3-ubyte.gz").read_bytes())[16:], np.uint8
        )
        labels = np.frombuffer(gzip.decompress((FASHION / f"{prefix}-labels-idx1-ubyte.gz").read_bytes())[8:], np.uint8)
        parts[part] = (pixels.reshape(len(labels), -1), labels.astype(np.int64))
    return parts


def _repeated(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    times = -(-ENOUGH // len(rows))
    return rows if times == 1 else np.concatenate([rows] * times)[:ENOUGH]


def _digits() -> dict[str, tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
    from sklearn.datasets import load_digits  # only where Debian's package is absent

    pixels, labels = load_digits(return_X_y=True)
    kept_out = np.arange(len(labels)) % 5 == 0
    chosen = {"train": ~kept_out, "held-out": kept_out}
    return {
        part: ((pixels[rows] * 15).astype(np.uint8), labels[rows].astype(np.int64)) for part, rows in chosen.items()
    }
