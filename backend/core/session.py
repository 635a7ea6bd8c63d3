"""A session of the collective plane, and what its ranks' reports of a round come to (design section 7)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backend.core.cycle import OpenedRound
from backend.core.vocabulary import RoundFinished
from wire.mass import gamma_mass
from wire.messages import Synced

MASS_ACCURACY = 1e-9
"""relative: how far the divisor of a rank may be from the controller's own"""


@dataclass(slots=True)
class Session:
    """One communicator over the ranks that lived when it was made."""

    generation: int = -1
    state: str = "none"
    generator: int | None = None
    ranks: tuple[int, ...] = ()
    joined: dict[int, str] = field(default_factory=dict)
    """transports by rank"""
    tried: list[int] = field(default_factory=list)
    """generators that failed in the rendezvous at hand"""
    deadline: float | None = None
    reason: str = ""
    """why it was made, or made anew"""
    rebuilds: int = 0
    exhausted: str = ""
    """why there is nobody left to ask"""

    def close(self, reason: str) -> None:
        """It is over; its generation stays."""
        self.state, self.ranks, self.joined, self.deadline, self.reason = "none", (), {}, None, reason

    def view(self) -> dict[str, Any]:
        """For the page, JSON-ready."""
        return {
            "generation": max(0, self.generation),
            "state": self.state,
            "generator": self.generator,
            "transports": {str(rank): text for rank, text in sorted(self.joined.items())},
            "rebuilds": self.rebuilds,
            "reason": self.reason,
        }

    def check(self) -> None:
        """It waits for nobody without a deadline, and counts only once everybody has joined."""
        assert self.state in ("none", "naming", "joining", "live", "broken"), self.state
        waits = self.state in ("naming", "joining", "broken")
        assert waits == (self.deadline is not None), f"a session that is {self.state} waits until {self.deadline}"
        assert self.joined.keys() <= set(self.ranks), f"{sorted(self.joined)} have joined a session of {self.ranks}"
        joined = len(self.joined) == len(self.ranks)
        assert self.state != "live" or joined, f"live with {sorted(self.joined)} of {self.ranks}"


def disagreement(reports: Mapping[int, Synced], gamma: float) -> str:
    """In what ranks that summed together differ, among themselves or from what their batches weigh (``gamma``); empty
    when in nothing."""
    total = sum(report.steps for report in reports.values())
    for rank, report in sorted(reports.items()):
        if report.total_steps != total:
            return f"rank {rank} counted {report.total_steps} batches where its session did {total}"
    expected = sum(gamma_mass(report.steps, gamma) for report in reports.values())
    for rank, report in sorted(reports.items()):
        if not math.isclose(report.mass, expected, rel_tol=MASS_ACCURACY):
            return f"rank {rank} divided by {report.mass:g} where the batches of its session weigh {expected:g}"
    return ""


def outcome(opened: OpenedRound, reports: Mapping[int, Synced], now: float) -> RoundFinished:
    """The sum that all of them have."""
    moved = sum(report.moved_bytes for report in reports.values())
    worked = any(report.steps for report in reports.values())
    return RoundFinished(
        round=opened.round,
        attempt=opened.attempt,
        realized=worked,
        buffers_realized=worked,
        steps={rank: report.steps for rank, report in sorted(reports.items())},
        mass=next(iter(reports.values())).mass,
        bytes_up=moved,
        bytes_down=moved,
        seconds=now - opened.opened_at,
    )


def on_the_controllers_host(address: str) -> bool:
    """Whether somebody who dials in from there came over the loopback."""
    return address.removeprefix("::ffff:").startswith("127.") or address in ("::1", "localhost")
