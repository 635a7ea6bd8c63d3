"""What one played rank does in sessions with the others (the worker's half of the collective plane).

It makes identities, joins, sums, and gives up what it is told to; what it packed stays until the round is committed.
Whatever it waits for has an end of its own, too: it says ``SessionLost`` when joining or a sum takes too long.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from simulation.network import Meeting, Part
from simulation.rounds import F32_BYTES, Sum
from wire.messages import (
    AbortSession,
    Message,
    NewSession,
    RequestSessionId,
    SessionIdGenerated,
    SessionJoined,
    SessionLost,
    Shutdown,
    SyncCommitted,
    Synced,
    SyncNow,
    SyncRefused,
)

if TYPE_CHECKING:
    from simulation.packed import Packed
    from simulation.played import PlayedRank

JOIN_SECONDS, SUM_SECONDS = 60.0, 600.0
"""after which a rank gives up by itself"""
TRANSPORT = "played on lo"


class Syncing:
    """The part of a rank that needs the others."""

    def __init__(self, played: PlayedRank) -> None:
        self.mute = 0
        """so many identities that it is asked for and does not make"""
        self.outcast = 0
        """so many sessions that it cannot join"""
        self.broken = 0
        """so many of its sums that fail, though nobody is dead"""
        self.crooked = 0
        """so many of its reports that have another total than the others'"""
        self.echo = 0
        """how often more than once it says everything"""
        self.inside: tuple[bytes, Hashable] | None = None
        """the collective that it is in"""
        self.summed: tuple[tuple[int, int], Sum] | None = None
        self._played = played
        self._session: NewSession | None = None
        self._joined = False
        self._void = -1
        """the controller ended this session and all older ones, and needs not hear that they failed"""

    def hears(self, message: Message) -> bool:
        """Inside of a collective a rank hears only what ends it; all else waits for that."""
        return self.inside is None or isinstance(message, AbortSession | NewSession | RequestSessionId | Shutdown)

    def receive(self, message: Message) -> None:
        """Do what the controller says."""
        match message:
            case RequestSessionId(generation=generation):
                self._void = max(self._void, generation - 1)
                if self._session is not None and self._session.generation < generation:
                    self.drop()
                if self.mute:
                    self.mute -= 1
                    return
                identity = self._played.setting.network.identity(self._played.rank)
                self._say(SessionIdGenerated(generation, identity))
            case NewSession(generation=generation):
                self._void = max(self._void, generation - 1)
                self._join(message)
            case AbortSession(generation=generation):
                self._void = max(self._void, generation)
                if self._session is not None and self._session.generation <= generation:
                    self.drop()
            case SyncNow():
                self._played.request(message)
            case SyncCommitted(round=number, attempt=attempt):
                assert self.summed is not None and self.summed[0] == (number, attempt), (
                    f"rank {self._played.rank} is told to adopt {number}/{attempt} and has {self.summed}"
                )
                self._played.adopt(self.summed[1].value)

    def drop(self) -> None:
        """Leave the session, and whatever is in flight in it."""
        if self.inside is not None:
            self._played.setting.network.leave(self.inside, self._played.rank)
        self.inside = self._session = None
        self._joined = False
        self._played.catch_up()

    def sum(self, order: SyncNow, packed: Packed) -> None:
        """Average with the others what was packed."""
        session = self._session
        if session is None or not self._joined or session.generation != order.generation:
            self._say_lost(order.generation, f"this rank is not in session {order.generation}")
        elif self.broken:
            self.broken -= 1
            self._lose("ncclRemoteError: a peer closed its connection")
        else:
            self.summed = None
            where = (order.round, order.attempt)
            self._enter(session, where, SUM_SECONDS, partial(self._has_sum, order), packed)

    def _join(self, order: NewSession) -> None:
        self.drop()
        self._session = order
        if self.outcast:
            self.outcast -= 1
            self._lose("no route to host")
        else:
            self._enter(order, "join", JOIN_SECONDS, self._has_joined, None)

    def _enter(
        self,
        session: NewSession,
        what: Hashable,
        patience: float,
        done: Callable[[Meeting], None],
        packed: Packed | None,
    ) -> None:
        played, where = self._played, (session.id, what)
        self.inside = where
        played.setting.stage.after(patience, self._give_up, where, patience, order=played.rank)
        lost = partial(self._lose_in, where)
        played.setting.network.enter(where, tuple(session.ranks), Part(played, done, lost), packed)

    def _give_up(self, where: tuple[bytes, Hashable], patience: float) -> None:
        if self.inside == where:
            self._played.when_running(partial(self._lose_in, where, f"nothing within {patience:g} s"))

    def _lose_in(self, where: tuple[bytes, Hashable], reason: str) -> None:
        if self.inside == where:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        session = self._session
        assert session is not None
        self.drop()
        self._say_lost(session.generation, reason)

    def _say_lost(self, generation: int, reason: str) -> None:
        if generation > self._void:
            self._say(SessionLost(generation, reason))

    def _has_joined(self, meeting: Meeting) -> None:
        assert self._session is not None
        self.inside, self._joined = None, True
        self._say(SessionJoined(self._session.generation, TRANSPORT))
        self._played.catch_up()

    def _has_sum(self, order: SyncNow, meeting: Meeting) -> None:
        rank, key = self._played.rank, (order.round, order.attempt)
        self.inside = None
        if meeting.spoilt:
            if rank in meeting.spoilt:
                self._say(SyncRefused(*key, element=0, value="nan"))
            self._played.catch_up()
            return
        assert meeting.result is not None
        self.summed = key, meeting.result
        steps = meeting.result.steps
        report = Synced(*key, steps[rank], sum(steps.values()), meeting.mass, F32_BYTES, meeting.seconds * 1000)
        if self.crooked:
            self.crooked -= 1
            report = replace(report, total_steps=report.total_steps + 1)
        self._say(report)
        self._played.catch_up()

    def _say(self, message: Message) -> None:
        played = self._played
        when = played.setting.stage.now + played.host.line.latency_seconds
        for _ in range(1 + self.echo):
            played.setting.say(played, message, when)
