"""What is between ranks that sum among themselves: communicators, as the simulator plays them (design section 7).

A collective needs every member of its communicator. It begins once all of them are in; whoever is dead, stopped or gone
by then holds up all that have not finished, for ever: only an abort, or their own patience, gets them out; or, where
that is to be so (``notice_seconds``), the news that a process at the other end is gone. Ranks finish one after the
other, so that some may have a sum that others never get.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING

from simulation.rounds import PlayedPlane, Sum, summed
from simulation.stage import Stage

if TYPE_CHECKING:
    from simulation.packed import Packed
    from simulation.played import PlayedRank

SECONDS = 0.002
"""that a collective takes at least, from when the last one is in"""
SKEW = 0.1
"""of a collective's duration, from one rank's end to the next one's"""


@dataclass(frozen=True, slots=True)
class Part:
    """One rank in a collective, and what it does when it has the result, or there will be none."""

    played: PlayedRank
    done: Callable[[Meeting], None]
    lost: Callable[[str], None]


@dataclass(eq=False, slots=True)
class Meeting:
    """One collective of one communicator."""

    ranks: tuple[int, ...]
    seconds: float
    inside: dict[int, Part] = field(default_factory=dict)
    """who is in"""
    finished: set[int] = field(default_factory=set)
    brought: dict[int, Packed] = field(default_factory=dict)
    begun: bool = False
    result: Sum | None = None
    mass: float = 0.0
    spoilt: frozenset[int] = frozenset()
    """whose values are not finite: nothing is summed"""

    def holds(self, rank: int) -> bool:
        """Whether this rank does its part or has done it."""
        if rank in self.finished:
            return True
        part = self.inside.get(rank)
        return part is not None and part.played.alive and not part.played.held


class Network:
    """All communicators of a play. Their identities are opaque bytes; who has one finds the others."""

    def __init__(self, stage: Stage, plane: PlayedPlane) -> None:
        """Sums weigh, and take as long, as those of the ``plane``."""
        self.sums: dict[tuple[int, int], Sum] = {}
        """by round and attempt: what was summed, whoever has it"""
        self.notice_seconds: float | None = None
        """after which ranks in a collective find out that a member's process is gone; none: never"""
        self._gone: set[int] = set()
        self._stage = stage
        self._plane = plane
        self._made = 0
        self._meetings: dict[tuple[bytes, Hashable], Meeting] = {}

    def identity(self, rank: int) -> bytes:
        """Of a communicator that nobody is in yet."""
        self._made += 1
        return f"{rank}:{self._made}".encode()

    def enter(
        self,
        where: tuple[bytes, Hashable],
        ranks: tuple[int, ...],
        part: Part,
        packed: Packed | None = None,
    ) -> None:
        """Take part in a collective: a communicator's identity, and which of its collectives."""
        played = part.played
        meeting = self._meetings.setdefault(where, Meeting(ranks, max(SECONDS, self._plane.fixed_seconds or 0.0)))
        meeting.inside[played.rank] = part
        if self._gone & set(ranks):
            self._notice(meeting, played.rank)
        if packed is not None:
            meeting.brought[played.rank] = packed
        if len(meeting.inside) == len(ranks):
            self._begin(where, meeting)

    def leave(self, where: tuple[bytes, Hashable], rank: int) -> None:
        """Give up a collective; those that have not finished it never will."""
        meeting = self._meetings.get(where)
        if meeting is not None and rank not in meeting.finished:
            meeting.inside.pop(rank, None)

    def gone(self, rank: int) -> None:
        """The process of a rank has ended."""
        self._gone.add(rank)
        for meeting in self._meetings.values():
            if rank in meeting.ranks:
                for other in sorted(meeting.inside.keys() - meeting.finished - {rank}):
                    self._notice(meeting, other)

    def poke(self) -> None:
        """Somebody runs again who was stopped."""
        for meeting in self._meetings.values():
            if meeting.begun and len(meeting.finished) < len(meeting.ranks):
                for rank in sorted(meeting.inside.keys() - meeting.finished):
                    self._stage.after(meeting.seconds, self._finish, meeting, rank, order=rank)

    def _begin(self, where: tuple[bytes, Hashable], meeting: Meeting) -> None:
        meeting.begun = True
        if meeting.brought:
            brought = meeting.brought
            meeting.spoilt = frozenset(
                rank for rank, packed in brought.items() if packed.steps and not isfinite(packed.w)
            )
            if not meeting.spoilt:
                meeting.mass, value = summed(brought, self._plane.gamma)
                steps = {rank: packed.steps for rank, packed in sorted(brought.items())}
                meeting.result = Sum(value, steps, {rank: packed.batches for rank, packed in brought.items()})
                assert isinstance(where[1], tuple)
                self.sums[where[1]] = meeting.result
        for place, rank in enumerate(meeting.ranks):
            seconds = meeting.seconds * (1.0 + SKEW * place)
            self._stage.after(seconds, self._finish, meeting, rank, order=rank)

    @staticmethod
    def _finish(meeting: Meeting, rank: int) -> None:
        if rank in meeting.finished or not all(map(meeting.holds, meeting.ranks)):
            return
        meeting.finished.add(rank)
        meeting.inside[rank].done(meeting)

    def _notice(self, meeting: Meeting, rank: int) -> None:
        if self.notice_seconds is not None:
            self._stage.after(self.notice_seconds, self._fail, meeting, rank, order=rank)

    @staticmethod
    def _fail(meeting: Meeting, rank: int) -> None:
        part = meeting.inside.get(rank)
        if part is not None and rank not in meeting.finished:
            part.played.when_running(partial(part.lost, "a peer closed its connection"))
