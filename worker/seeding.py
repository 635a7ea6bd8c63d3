"""One seed for every generator that user code may draw from."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's global generators, CUDA's included."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
