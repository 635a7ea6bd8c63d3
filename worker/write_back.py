"""What a rank that worked on while a round was open does with its own progress when it adopts the consensus.

    overwrite  consensus                                  the batches since the snapshot are undone
    blend      (1 - alpha) * now + alpha * consensus      elastic averaging: a part of everybody's progress
    delta      (now - snapshot) + consensus               no finished batch is undone

Element by element, in f32, for parameters only; buffers are always overwritten (behaviour C22).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

POLICIES = ("overwrite", "blend", "delta")


@dataclass(frozen=True, slots=True)
class WriteBack:
    """A policy of ``POLICIES``; ``alpha``, above 0 and at most 1, is the consensus' share in a blend."""

    policy: str = "delta"
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"{self.policy!r} is no write-back policy; use one of {', '.join(POLICIES)}")

    def merge(self, now: Tensor, snapshot: Tensor, consensus: Tensor) -> Tensor:
        """What a parameter becomes, in f32; none of the three is changed. ``snapshot`` is what the rank contributed."""
        if self.policy == "overwrite":
            return consensus
        held = now.to(torch.float32)
        if self.policy == "blend":
            return torch.lerp(held, consensus, self.alpha)
        return (held - snapshot).add_(consensus)
