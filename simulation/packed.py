"""What a played rank packs for a round."""

from __future__ import annotations

from dataclasses import dataclass

Batch = tuple[int, int, int]
"""epoch, offset and samples of one batch"""


@dataclass(slots=True)
class Packed:
    """What lies in a rank's arena."""

    round: int
    steps: int
    w: float
    batches: list[Batch]
    asked_at: float
    holds: int
    """the round that a rank holds once it adopted this"""
