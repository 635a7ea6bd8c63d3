"""A relay's heartbeat, and how late a peer's come. Pure: the time is an argument, monotonic seconds."""

from __future__ import annotations

from wire.errands import Message


class RelayHeartbeat(Message, frozen=True):
    """relay -> controller on the control link, every ``heartbeat_seconds``: this process runs. Its agent's heartbeats
    cannot say that: they go on while the relay stands still."""


class Beats:
    """The gaps between the signs of life on one link, against their period in seconds."""

    def __init__(self, period: float) -> None:
        self.period = period
        self.heard_count = 0
        self.late_count = 0
        """came more than one whole period late: the gap was above two periods"""
        self.worst_late_seconds = 0.0
        """the longest gap, less the period"""
        self._heard_at: float | None = None

    def heard(self, now: float) -> float:
        """A sign of life came. By how many seconds it was late; negative when it was early, 0 for the first."""
        late = 0.0 if self._heard_at is None else now - self._heard_at - self.period
        self._heard_at = now
        self.heard_count += 1
        self.late_count += late > self.period
        self.worst_late_seconds = max(self.worst_late_seconds, late)
        return late

    def paused(self) -> None:
        """The link is another one from here on: the gap until its first sign of life is nobody's lateness."""
        self._heard_at = None
