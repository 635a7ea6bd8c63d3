"""What a round takes, from the bytes of the model and the links of the hosts (design section 6).

A rank packs its arena and later loads the consensus at the speed of memory. In between the model streams in slices:
every host up and down at once, so that its link carries the model once, and the controller's link carries it once for
each host. The last slice still has to come down when it is up, which a large model does not notice.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

SLICE_BYTES = float(1 << 20)
"""most bytes of f32 that travel as one chunk"""
MEMORY_BYTES_PER_SECOND = 4e9
"""reading and writing an arena once, in one thread of an ordinary machine"""


def link_bytes_per_second(megabits: float) -> float:
    """A link's speed as its vendor gives it, in bytes."""
    return megabits * 1e6 / 8.0


@dataclass(frozen=True, slots=True)
class Line:
    """A host's way to the controller. ``latency_seconds`` is there and back."""

    bytes_per_second: float
    latency_seconds: float
    ranks: int = 1
    """contributions that the host's relay folds into one"""


@dataclass(frozen=True, slots=True)
class RoundCost:
    """``model_bytes`` are those of the f32 arena; speeds in bytes a second."""

    model_bytes: float
    controller_bytes_per_second: float
    memory_bytes_per_second: float = MEMORY_BYTES_PER_SECOND

    @property
    def pack_seconds(self) -> float:
        """A rank writes its scaled parameters into the arena."""
        return self.model_bytes / self.memory_bytes_per_second

    @property
    def load_seconds(self) -> float:
        """A rank copies the consensus in."""
        return self.model_bytes / self.memory_bytes_per_second

    def stream_seconds(self, lines: Collection[Line]) -> float:
        """From the last contribution to the last slice of the consensus; 0 among no hosts."""
        if not lines:
            return 0.0
        bytes_ = self.model_bytes
        slowest = min(line.bytes_per_second for line in lines)
        up_and_down = max(
            bytes_ / slowest,
            bytes_ * len(lines) / self.controller_bytes_per_second,
            *(bytes_ * line.ranks / self.memory_bytes_per_second for line in lines),
        )
        return up_and_down + min(bytes_, SLICE_BYTES) / slowest

    def seconds(self, lines: Collection[Line]) -> float:
        """From the request for parameters to the last acknowledgement."""
        ways = 2.0 * max((line.latency_seconds for line in lines), default=0.0)
        return ways + self.pack_seconds + self.stream_seconds(lines) + self.load_seconds
