"""Which paths of the collective plane an ordeal went: the part of ``probes`` that looks at sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from backend.core.collective import Collectives
from backend.core.vocabulary import Effect, Event, Lagged, Operator, RankSaid, Record, SendRank
from simulation.ordeal import Ordeal
from wire.messages import (
    AbortSession,
    NewSession,
    SessionIdGenerated,
    SessionJoined,
    SessionLost,
    Synced,
    SyncNow,
    SyncRefused,
)

if TYPE_CHECKING:
    from backend.core.march import March

STATES = ("naming", "joining", "summing", "adopting")
DEATHS = {
    ("naming", True): "generator dies",
    ("naming", False): "death while another rank names a session",
    ("joining", False): "death before it had joined",
    ("joining", True): "death after it had joined",
    ("summing", False): "death in a sum, before its report",
    ("summing", True): "death in a sum, after its report",
    ("adopting", False): "death after the commit, before it adopted",
    ("adopting", True): "death after it had adopted",
}
UNSAVED = {
    "had handed over": "bearer dies",
    "nothing more came": "bearer silent",
    "nobody is left": "nobody has the consensus",
}
NAMES = frozenset(
    {
        *(f"operator {act} while {state}" for act in ("stop", "save", "abort") for state in STATES),
        *(f"lag while {state}" for state in STATES),
        *DEATHS.values(),
        *UNSAVED.values(),
        *("session made anew", "session of the rest", "second death in a rendezvous", "generator silent"),
        *("rank does not join", "rank cannot join", "collective fails", "sum aborted at the stall ceiling"),
        *("reports that disagree", "refused in a session", "refused by two ranks", "asked again in the same session"),
        *("stale identity", "stale join", "stale loss", "stale report", "report twice", "scoring holds a session up"),
    }
)


class SessionProbes:
    """Counts by ``hit``."""

    def __init__(self, play: Ordeal, hit: Callable[[str], None]) -> None:
        self._play = play
        self._hit = hit
        self._event: Event | None = None
        self._state = ""
        self._generator: int | None = None
        self._ready: set[int] = set()
        """who has done its part of the state at hand"""
        self._generation = -1
        self._attempt: tuple[int, int, int] = (-1, 0, -1)
        """that ranks were asked for last, and the session"""
        self._deaths = 0
        """since a session was live"""

    def event(self, event: Event) -> None:
        """The core is about to be told."""
        self._event, march = event, self._play.cohort.march
        if march is None or march.end is not None or not isinstance(march.plane, Collectives):
            self._state = ""
            return
        self._look(march, march.plane)
        match event:
            case RankSaid(rank=rank, message=message) if march.world.lives(rank):
                self._said(march, march.plane, rank, message)
            case Operator(act=act) if self._state:
                self._hit(f"operator {act} while {self._state}")
            case Lagged() if self._state:
                self._hit(f"lag while {self._state}")

    def effect(self, effect: Effect) -> None:
        """The core said so."""
        match effect:
            case SendRank(message=NewSession(generation=generation, ranks=ranks)) if generation != self._generation:
                self._generation = generation
                if self._attempt[0] >= 0:
                    self._hit("session made anew")
                if len(ranks) < len(self._play.ranks):
                    self._hit("session of the rest")
            case SendRank(message=SyncNow(round=number, attempt=attempt, generation=generation)):
                self._asked((number, attempt, generation))
            case Record(table="deaths", row={"rank": rank, "reason": str(reason)}):
                self._death(rank, reason)
            case Record(table="events", row={"kind": kind, "text": str(text)}):
                self._noted(kind, text)
            case SendRank(message=AbortSession(reason=reason)) if reason.startswith("ReduceStall"):
                self._hit("sum aborted at the stall ceiling")

    def _look(self, march: March, plane: Collectives) -> None:
        session, opened = plane.session, march.cycle.open
        self._generator, self._state, self._ready = session.generator, "", set()
        if session.state in ("naming", "joining"):
            self._state = session.state
            self._ready = set(session.joined) if session.state == "joining" else {session.generator or 0}
        elif opened is not None and march.cycle.collects:
            self._state = "summing" if opened.finished is None else "adopting"
            self._ready = set(opened.acks) if opened.finished is not None else set(plane._reports)
            if session.state == "none" and opened.finished is None and march.evaluations.pending:
                self._hit("scoring holds a session up")
        else:
            self._deaths = 0

    def _said(self, march: March, plane: Collectives, rank: int, message: object) -> None:
        session, opened = plane.session, march.cycle.open
        match message:
            case SessionIdGenerated(generation=generation):
                self._stale((session.state, session.generation) != ("naming", generation), "identity")
            case SessionJoined(generation=generation):
                self._stale((session.state, session.generation) != ("joining", generation), "join")
            case SessionLost(generation=generation):
                if session.generation == generation and session.state != "none":
                    self._hit("rank cannot join" if session.state == "joining" else "collective fails")
                else:
                    self._hit("stale loss")
            case Synced(round=number, attempt=attempt):
                self._stale(opened is None or (opened.round, opened.attempt) != (number, attempt), "report")
                if rank in plane._reports:
                    self._hit("report twice")
            case SyncRefused(round=number) if opened is not None and number == opened.round:
                self._hit("refused by two ranks" if opened.excluded else "refused in a session")

    def _stale(self, is_stale: bool, what: str) -> None:
        if is_stale:
            self._hit(f"stale {what}")

    def _asked(self, attempt: tuple[int, int, int]) -> None:
        number, _, generation = self._attempt
        if attempt != self._attempt and attempt[0] == number and attempt[2] == generation:
            self._hit("asked again in the same session")
        self._attempt = attempt

    def _death(self, rank: int, reason: str) -> None:
        if "RendezvousStall" in reason:
            self._hit("rank does not join")
        if not self._state:
            return
        self._hit(DEATHS[self._state, rank in self._ready])
        self._deaths += 1
        if self._deaths > 1 and self._state in ("naming", "joining"):
            self._hit("second death in a rendezvous")

    def _noted(self, kind: str, text: str) -> None:
        if kind == "session_failed" and "named no session" in text:
            self._hit("generator silent")
        elif kind == "round_failed" and "where" in text and "batches" in text:
            self._hit("reports that disagree")
        elif kind == "checkpoint_failed":
            for words, name in UNSAVED.items():
                if words in text:
                    self._hit(name)
