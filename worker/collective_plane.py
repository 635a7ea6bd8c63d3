"""Rounds among the ranks themselves: sessions come and go as the controller says, syncs go through them (section 7).

Every wait in here ends when the link's thread hears that it should (``interrupt``). A sync that was interrupted stays
open, with everything as it was; the controller, which ended it, asks again.
"""

from __future__ import annotations

from wire import failpoints
from wire.messages import NewSession, SessionIdGenerated, SessionJoined, SessionLost, Synced, SyncRefused
from worker.actions import AdoptSync, DropSession, JoinSession, MakeSessionId, Sync
from worker.collective import Collective, Spoilt, Summed, SyncName
from worker.communicator import Aborted, SessionError
from worker.control import State
from worker.desk import Desk
from worker.sessions import Sessions


class CollectivePlane:
    """One rank's side."""

    def __init__(self, desk: Desk, sessions: Sessions, collective: Collective) -> None:
        self.collective = collective
        self._desk = desk
        self._sessions = sessions

    def obey(self, order: MakeSessionId | JoinSession | DropSession | Sync | AdoptSync) -> None:
        """Do what the controller said. Raises ``AbortStuck``: this process can take part in nothing any more."""
        match order:
            case MakeSessionId(generation):
                self._make_id(generation)
            case JoinSession(session):
                self._join(session)
            case DropSession(generation):
                self._sessions.drop(generation)
            case Sync():
                self._sync(order)
            case AdoptSync():
                self._adopt(order)

    def close(self) -> None:
        """Leave for good. Raises ``AbortStuck``."""
        self._sessions.close()

    def _make_id(self, generation: int) -> None:
        try:
            identity = self._sessions.make_id(generation)
        except SessionError as error:
            self._lost(generation, error)
            return
        self._desk.link.send(SessionIdGenerated(generation=generation, id=identity))

    def _join(self, session: NewSession) -> None:
        self._desk.window.enter(State.REDUCING)
        try:
            transport = self._sessions.join(session)
            self._desk.link.send(SessionJoined(generation=session.generation, transport=transport))
        except Aborted:
            pass  # whoever ended it knows
        except SessionError as error:
            self._lost(session.generation, error)
        finally:
            if self._desk.control.state is not State.REDUCING:
                self._desk.window.enter(State.IDLE)

    def _sync(self, order: Sync) -> None:
        failpoints.identify(round=order.round, attempt=order.attempt)
        window = self._desk.window
        if order.first:
            window.requested()
        started = window.clock()
        failpoints.hit("rank.pack")
        try:
            result = self._sum(order)
        except Aborted:
            self._sessions.drop(order.generation)
        except SessionError as error:
            self._sessions.drop(order.generation)
            self._lost(order.generation, error)
        else:
            self._report(order, result, (window.clock() - started) * 1000)

    def _sum(self, order: Sync) -> Summed | Spoilt:
        session, place = self._sessions.of(order.generation)
        self.collective.prepare(order.steps)
        if order.first:
            self._desk.window.packed()
        name = SyncName(order.round, order.attempt, order.generation)
        return self.collective.sum(session, place, order.steps, name)

    def _report(self, order: Sync, result: Summed | Spoilt, elapsed_ms: float) -> None:
        failpoints.hit("rank.snapshot.before")
        if isinstance(result, Summed):
            self._desk.link.send(
                Synced(
                    round=order.round,
                    attempt=order.attempt,
                    steps=order.steps,
                    total_steps=result.total_steps,
                    mass=result.mass,
                    moved_bytes=result.moved_bytes,
                    elapsed_ms=elapsed_ms,
                )
            )
        elif result.element is not None:
            self._desk.link.send(SyncRefused(order.round, order.attempt, result.element, result.value))
        failpoints.hit("rank.snapshot.after")

    def _adopt(self, order: AdoptSync) -> None:
        desk = self._desk
        failpoints.hit("rank.adopt", round=order.round)
        started = desk.window.clock()
        moved = self.collective.adopt(restart=order.restart, hashed=desk.options.verify_consensus)
        if order.restart:
            desk.trainer.restart()
        ack = desk.acknowledge(order.round, moved, started)
        desk.window.rest()
        desk.link.send(ack)
        failpoints.hit("rank.ack.after", round=order.round)

    def _lost(self, generation: int, error: SessionError) -> None:
        if not self._sessions.void(generation):  # the controller knows better
            self._desk.link.send(SessionLost(generation=generation, reason=str(error)))
