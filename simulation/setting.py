"""What a played rank needs of the theatre that it plays in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from backend.core.config import RunConfig
from backend.core.round_cost import RoundCost
from simulation.figures import Meter
from simulation.network import Network
from simulation.stage import Stage
from wire.messages import Message, RequestParams

if TYPE_CHECKING:
    from simulation.packed import Batch, Packed
    from simulation.played import PlayedRank


class Setting(Protocol):
    """The stage around a rank, and who hears it."""

    stage: Stage
    meter: Meter
    cost: RoundCost
    batch_size: int
    overlap: bool
    """a rank goes on training while a round is open"""
    config: RunConfig
    network: Network
    """between ranks that sum among themselves"""
    score_seconds: float
    """that scoring takes"""

    def say(self, played: PlayedRank, message: Message, when: float) -> None:
        """The controller hears it at that moment, if the rank still lives."""

    def contribute(self, played: PlayedRank, request: RequestParams, packed: Packed) -> None:
        """The arena holds the contribution."""

    def acknowledge(self, played: PlayedRank, packed: Packed, when: float) -> None:
        """The consensus is adopted; the controller hears of it at that moment."""

    def survives(self, played: PlayedRank, batch: Batch) -> bool:
        """Whether the rank comes through this batch."""

    def trained(self, played: PlayedRank, batch: Batch) -> None:
        """A batch is done."""

    def restarted(self, played: PlayedRank, batches: list[Batch]) -> None:
        """It starts anew from the consensus; these batches were done in vain."""

    def exited(self, played: PlayedRank) -> None:
        """The process ended as it was told to."""
