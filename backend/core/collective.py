"""The collective plane: ranks sum among themselves, in a session that is made anew when the world changes (section 7).

    none -> naming      a generator is asked for the session's identity (behaviour H1, H7)
    naming -> naming    it died or kept silent: the next candidate is asked, under another generation (H8)
    naming -> joining   it answered: every rank that lives now is told where to meet
    joining -> live     every one of them has joined
    joining -> naming   one came too late
    any -> broken       a rank could not join, or a collective failed: most likely since another one died, of which its
                        host is about to tell; until then, and for a moment at most, nothing is begun
    any -> none         one of its ranks is out: whatever is in flight in it is aborted

A session is made when somebody needs it: before the initial broadcast, and when a round is opened. A round is asked for
in a live session (``SyncNow``); it is complete when every rank has reported the same sum, and only then adopted. So an
attempt that fails costs nobody anything, and the same round is asked for again, in the same session or the next.

While a rank scores, which may take it minutes, no session is made and no round is asked for: the others would lose
patience in the middle of something, and the one that scores would count as hanging.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from backend.core.cycle import INITIAL_ROUND, OpenedRound
from backend.core.deaths import Casualty
from backend.core.join_admission import MAX_ERROR_TEXT, clipped
from backend.core.liveness import SaveReason
from backend.core.session import Session, disagreement, on_the_controllers_host, outcome
from backend.core.vocabulary import Effect, NonFiniteValue, RoundBroken, SendRank
from wire.collectives import MAX_ID_BYTES
from wire.messages import (
    AbortSession,
    Message,
    NewSession,
    RequestSessionId,
    SessionIdGenerated,
    SessionJoined,
    SessionLost,
    SyncCommitted,
    Synced,
    SyncNow,
    SyncRefused,
)

if TYPE_CHECKING:
    from backend.core.march import March

GENERATOR_SECONDS = 5.0
"""a candidate may take for the identity"""
BROKEN_SECONDS = 1.0
"""from the news that a session broke until another is made though nobody is known to be dead"""
JOIN_SECONDS = 50.0
"""from one rank's joining to the next one's. Under the 60 s after which ranks give up by themselves: they can only say
that somebody did not come, the controller sees who does not even try."""
MAX_BROKEN = 3
"""sessions in which one round may fail with nobody dead"""
MAX_TRANSPORT, MAX_VALUE = 120, 16
"""characters of a rank's own words, for its transport and for a value, that are shown"""
BUSY = ("reducing", "evaluating", "saving")
"""what the shared counter of a rank says that takes part, or cannot yet"""


class Collectives:
    """The plane of one march."""

    collective = True

    def __init__(self, march: March) -> None:
        self._march = march
        self.session = Session()
        self._reports: dict[int, Synced] = {}
        """who has the whole sum of the attempt at hand"""
        self._asked = (INITIAL_ROUND, 0)
        """the newest attempt that ranks were asked for"""

    # ------------------------------------------------------------------------------------------------ the rounds

    def prepare(self, now: float) -> bool:
        """Have a session before anything is trained: hosts that cannot reach each other are better told now."""
        if self.session.state == "none" and not self.session.exhausted:
            self._march.out += self._begin("the cohort forms", now)
        return self.session.state == "live"

    def request(self, opened: OpenedRound, now: float) -> list[Effect]:
        """Ask for the round, at once or when there is a session for it."""
        self._reports = {}
        if self.session.state == "broken":
            self.session.close(self.session.reason)
        return self._proceed(now)

    def commit(self, opened: OpenedRound) -> list[Effect]:
        """Everybody who lives adopts the sum, which needs no other rank."""
        lives = self._march.world.lives
        committed = SyncCommitted(opened.round, opened.attempt)
        return [SendRank(rank, committed) for rank in sorted(opened.ranks) if lives(rank)]

    def retract(self, opened: OpenedRound, hosts: Iterable[int], reason: str) -> list[Effect]:
        """Nothing has been adopted. Without anybody to ask again, whoever is in a collective must be got out of it."""
        self._reports = {}
        return [] if list(hosts) else self._drop(reason)

    def bereaved(self, dead: set[int], now: float) -> list[Effect]:
        """A session with a dead rank is none; whoever asks for a round next makes another."""
        session = self.session
        session.tried.clear()  # what failed in another world may do in this one
        names = ", ".join(f"rank {rank}" for rank in sorted(dead))
        if session.state == "naming":
            return self._next(f"{names} died", now) if session.generator in dead else []
        if session.state != "broken" and not dead & set(session.ranks):
            return []
        return self._drop(f"{names} died")

    def waits(self) -> str:
        """What the rendezvous waits for."""
        session, where = self.session, self._march.world.where
        if session.state == "naming" and session.generator is not None:
            return (
                f"Every rank is ready; {where(session.generator)} makes the identity of session {session.generation}."
            )
        if session.state == "broken":
            return f"Session {session.generation} broke: {session.reason}."
        if session.state == "joining":
            late = ", ".join(where(rank) for rank in session.ranks if rank not in session.joined)
            return f"Every rank is ready; waiting for {late} to join session {session.generation}."
        return ""

    def view(self) -> dict[str, Any]:
        """The session, for the page."""
        return self.session.view()

    def check(self) -> None:
        """Every wait is bounded, and a round is asked for of exactly those who have joined."""
        self.session.check()
        march = self._march
        if self.session.state == "live" and not march.leaving:
            assert self.session.ranks == march.world.alive(), f"live among {self.session.ranks}"

    # ---------------------------------------------------------------------------------------------- what is heard

    def heard(self, rank: int, message: Message, now: float) -> bool:
        """A rank's word on the session or on the attempt at hand; what is of another one changes nothing."""
        match message:
            case SessionIdGenerated():
                self._named(rank, message, now)
            case SessionJoined():
                self._joined(rank, message, now)
            case SessionLost():
                self._lost(rank, message, now)
            case Synced():
                self._synced(rank, message, now)
            case SyncRefused():
                bad = NonFiniteValue(rank, message.element, clipped(message.value, MAX_VALUE))
                reason = f"what rank {rank} would contribute is not finite"
                self._march.round_broken(
                    RoundBroken(message.round, message.attempt, reason, self._host(rank), bad), now
                )
            case _:
                return False
        return True

    def deadline(self) -> float | None:
        """When whoever is waited for is late."""
        return self.session.deadline

    def lagged(self, seconds: float) -> None:
        """The controller was away for so long."""
        if self.session.deadline is not None:
            self.session.deadline += seconds

    def watch(self, now: float) -> None:
        """Act on what is late, and on a rendezvous that cannot succeed."""
        session, march = self.session, self._march
        if march.end is not None:
            return
        if session.deadline is not None and now >= session.deadline:
            match session.state:
                case "naming":
                    march.out += self._next(f"{self._maker()} named no session within {GENERATOR_SECONDS:g} s", now)
                case "broken":
                    self._again(now)
                case _:
                    self._join_late(now)
        if session.exhausted:
            why, session.exhausted = session.exhausted, ""
            if march.phase == "forming":
                march.forming.over(march, why, now)
            elif march.ending is None:
                march.save_and_stop(SaveReason.RENDEZVOUS_EXHAUSTED, why, now)
        elif march.end is None:
            march.out += self._proceed(now)

    # -------------------------------------------------------------------------------------------- the rendezvous

    def _proceed(self, now: float) -> list[Effect]:
        """What the open round needs next."""
        session, cycle = self.session, self._march.cycle
        opened = cycle.open
        if opened is None or opened.finished is not None or not cycle.collects or self._scoring():
            return []
        if session.state == "live":
            return [] if self._asked == (opened.round, opened.attempt) else self._sync(opened)
        if session.state == "none" and not session.exhausted:
            return self._begin(session.reason, now)
        return []

    def _scoring(self) -> bool:
        """Whether a rank is at it, or another one is about to be asked since that one died."""
        return bool(self._march.evaluations.pending)

    def _begin(self, reason: str, now: float) -> list[Effect]:
        """Ask a candidate for the identity of another session."""
        session = self.session
        session.close(reason)
        candidate = self._candidate()
        if candidate is None:
            asked = ", ".join(self._march.world.where(rank) for rank in session.tried) or "nobody"
            session.exhausted = f"no rank is left to make a session ({reason}); {asked} tried"
            return []
        if session.generation >= 0 and not session.tried:
            session.rebuilds += 1
        if (opened := self._march.cycle.open) is not None:
            opened.regrouped = True
        session.generation += 1
        session.state, session.generator, session.deadline = "naming", candidate, now + GENERATOR_SECONDS
        return [SendRank(candidate, RequestSessionId(session.generation))]

    def _candidate(self) -> int | None:
        """A rank on the controller's host, since it is lost least often without it; else the fastest (H7)."""
        world, pace = self._march.world, self._march.training.scheduler.smoothed
        able = (rank for rank in world.alive() if rank not in self.session.tried)

        def order(rank: int) -> tuple[bool, float, int]:
            address = world.hosts[world.ranks[rank].host].address
            return not on_the_controllers_host(address), pace(rank) or math.inf, rank

        return min(able, key=order, default=None)

    def _next(self, because: str, now: float) -> list[Effect]:
        """The generator at hand failed: the next candidate makes another session."""
        session = self.session
        assert session.generator is not None
        session.tried.append(session.generator)
        self._march.event("session_failed", f"Session {session.generation} failed: {because}", "warning")
        dropped = self._drop(because)
        return dropped + self._begin(because, now)

    def _maker(self) -> str:
        assert self.session.generator is not None
        return self._march.world.where(self.session.generator)

    def _drop(self, reason: str) -> list[Effect]:
        """Void the session: whoever is in it, or on the way to it, is got out."""
        session, lives = self.session, self._march.world.lives
        members = session.ranks if session.state in ("joining", "live") else ()
        session.close(reason)
        abort = AbortSession(session.generation, clipped(reason, MAX_ERROR_TEXT))
        return [SendRank(rank, abort) for rank in members if lives(rank)]

    def _named(self, rank: int, message: SessionIdGenerated, now: float) -> None:
        session, march = self.session, self._march
        if session.state != "naming" or (rank, message.generation) != (session.generator, session.generation):
            return
        if not 0 < len(message.id) <= MAX_ID_BYTES:
            what = f"{self._maker()} named it by {len(message.id)} bytes, which is no identity"
            march.out += self._next(what, now)
            return
        if self._scoring():  # since the generator was asked
            session.close(session.reason)
            return
        session.ranks = march.world.alive()
        session.state, session.deadline = "joining", now + JOIN_SECONDS
        order = NewSession(session.generation, message.id, list(session.ranks))
        march.out += [SendRank(member, order) for member in session.ranks]

    def _joined(self, rank: int, message: SessionJoined, now: float) -> None:
        session, march = self.session, self._march
        if session.state != "joining" or message.generation != session.generation or rank not in session.ranks:
            return
        session.joined[rank] = clipped(message.transport, MAX_TRANSPORT)
        session.deadline = now + JOIN_SECONDS
        if len(session.joined) < len(session.ranks):
            return
        session.state, session.deadline = "live", None
        session.tried.clear()
        transports = ", ".join(sorted(set(session.joined.values())))
        text = f"Session {session.generation} of {len(session.ranks)} ranks is live over {transports}: {session.reason}"
        march.event("session_live", text, generation=session.generation, ranks=list(session.ranks))
        march.out += self._proceed(now)

    def _lost(self, rank: int, message: SessionLost, now: float) -> None:
        session, march = self.session, self._march
        if message.generation != session.generation or session.state in ("none", "broken"):
            return
        because = f"{march.world.where(rank)}: {clipped(message.reason, MAX_ERROR_TEXT)}"
        if session.state != "naming":
            self._broken(because, now)
        elif rank == session.generator:
            march.out += self._next(because, now)

    def _broken(self, because: str, now: float) -> None:
        """Nobody is known to be dead yet; who it is will be heard in a moment, or it was something else."""
        session, march = self.session, self._march
        if session.state == "joining" and session.generator is not None:
            session.tried.append(session.generator)
        march.event("session_failed", f"Session {session.generation} broke: {because}", "warning")
        march.out += self._drop(because)
        session.state, session.deadline = "broken", now + BROKEN_SECONDS

    def _again(self, now: float) -> None:
        """Nobody died: the same again, in another session."""
        march, because = self._march, self.session.reason
        self.session.close(because)
        opened = march.cycle.open
        if opened is None or opened.finished is not None or not march.cycle.collects:
            return
        opened.failures += 1
        if opened.failures < MAX_BROKEN:
            march.out += march.cycle.retry(opened.hosts, because, now)
        else:
            what = f"round {opened.round} failed in {opened.failures} sessions; the last time {because}"
            march.save_and_stop(SaveReason.REPEATED_FAILURE, what, now)

    def _join_late(self, now: float) -> None:
        """Who does not even try to join hangs, and counts as dead; when nobody does better, the session is at fault."""
        session, march = self.session, self._march
        late = [rank for rank in session.ranks if rank not in session.joined]
        reason = f"it did not join session {session.generation} within {JOIN_SECONDS:g} s"
        hung = [rank for rank in late if self._hangs(rank)]
        if 0 < len(hung) < len(session.ranks):
            march.losses.ranks([Casualty(rank, f"RendezvousStall: {reason}") for rank in hung], now)
            return
        who = ", ".join(march.world.where(rank) for rank in late)
        march.out += self._next(f"{who} did not join within {JOIN_SECONDS:g} s", now)

    def _hangs(self, rank: int) -> bool:
        progress = self._march.world.ranks[rank].progress
        return progress is not None and progress.state not in BUSY

    # ------------------------------------------------------------------------------------------------- the sums

    def _sync(self, opened: OpenedRound) -> list[Effect]:
        generation, excluded = self.session.generation, opened.excluded
        assert opened.ranks == set(self.session.ranks), f"{opened.ranks} contribute, {self.session.ranks} have joined"
        self._asked = (opened.round, opened.attempt)
        return [
            SendRank(rank, SyncNow(opened.round, opened.attempt, generation, rank in excluded))
            for rank in sorted(opened.ranks)
        ]

    def _synced(self, rank: int, message: Synced, now: float) -> None:
        march, opened = self._march, self._march.cycle.open
        if opened is None or opened.finished is not None or self.session.state != "live":
            return
        if (message.round, message.attempt) != (opened.round, opened.attempt) or rank not in opened.ranks:
            return
        self._reports[rank] = message
        if len(self._reports) < len(opened.ranks):
            return
        reports, self._reports = self._reports, {}
        if problem := disagreement(reports, march.config.gamma):
            march.round_broken(RoundBroken(opened.round, opened.attempt, problem), now)
        else:
            march.round_finished(outcome(opened, reports, now), now)

    def _host(self, rank: int) -> int:
        return self._march.world.ranks[rank].host
