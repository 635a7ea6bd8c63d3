"""What a rank that worked on while a round was open does with its own progress when it adopts the consensus.

    overwrite  consensus                                  the batches since the snapshot are undone
    blend      (1 - alpha) * now + alpha * consensus      elastic averaging: a part of everybody's progress
    delta      (now - snapshot) + consensus               no finished batch is undone

Element by element, in f32, for parameters only; buffers are always overwritten (behaviour C22).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

POLICIES = ("overwrite", "blend", "delta")


@dataclass(frozen=True, slots=True)
class WriteBack:
    """A policy of ``POLICIES``; ``alpha``, above 0 and at most 1, is the consensus' share in a blend."""

    policy: str = "delta"
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"{self.policy!r} is no write-back policy; use one of {', '.join(POLICIES)}")

    def merge(self, now: Any, snapshot: Any, consensus: Any) -> None:
        """Turn ``now`` into what the parameter becomes, in place; ``snapshot`` is what the rank contributed.

        All three are f32 arrays or tensors of one shape.
        """
        if self.policy == "overwrite":
            now[...] = consensus
        elif self.policy == "delta":
            now -= snapshot
            now += consensus
        elif self.alpha < 0.5:
            now += self.alpha * (consensus - now)
        else:  # from the nearer end, so that a whole share is the consensus to the bit
            now[...] = consensus - (1.0 - self.alpha) * (consensus - now)
