"""What closed rounds and epochs amount to: throughput and loss."""

from __future__ import annotations

from dataclasses import dataclass

CALIBRATION_ROUNDS = 3
"""Rounds left out of the efficiency: ElChe has not seen the ranks yet."""


@dataclass(slots=True)
class Rates:
    """Throughput, from closed rounds only."""

    batches: int = 0
    samples: int = 0
    seconds: float = 0.0
    last_batches_per_second: float | None = None
    last_samples_per_second: float | None = None

    def add(self, round_number: int, batches: int, samples: int, seconds: float) -> None:
        """Count a closed round; the first ones set the display but not the average."""
        if seconds <= 0:
            return
        self.last_batches_per_second = batches / seconds
        self.last_samples_per_second = samples / seconds
        if round_number >= CALIBRATION_ROUNDS:
            self.batches += batches
            self.samples += samples
            self.seconds += seconds

    @property
    def batches_per_second(self) -> float | None:
        """Mean since calibration, none before it."""
        return self.batches / self.seconds if self.seconds > 0 else None


@dataclass(slots=True)
class EpochTally:
    """What one epoch amounts to so far."""

    opened_at: float
    batches: int = 0
    loss_sum: float = 0.0
    loss_batches: int = 0

    @property
    def loss(self) -> float | None:
        return self.loss_sum / self.loss_batches if self.loss_batches else None
