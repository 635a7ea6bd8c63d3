"""The laws of the collective plane: what must hold of sessions and of rounds inside of them (design section 7).

a session        has a generation of its own, an identity that its generator made, and every rank that lives; it
                 counts once all of them have joined; with a dead rank, or after one failed in it, it is over, and
                 whoever is in it is told so at once
a round          is asked for in a session that counts, of all that are in it; it is committed when every one of
                 them has the same sum, and of an attempt that was dropped nothing is adopted
a refused rank   is left out of the same round from then on, and nobody else is
every wait       for an identity, for ranks that join, or for a sum, has an end
"""

from __future__ import annotations

from backend.core.collective import GENERATOR_SECONDS, JOIN_SECONDS, Collectives
from backend.core.vocabulary import Effect, Event, RankSaid, SendRank, Tick
from simulation.ordeal import Ordeal
from wire.messages import (
    AbortSession,
    LocalState,
    NewSession,
    RequestSessionId,
    SessionIdGenerated,
    SessionJoined,
    SessionLost,
    Shutdown,
    SyncAck,
    SyncCommitted,
    Synced,
    SyncNow,
    SyncRefused,
)

LONGEST_WAIT = 400.0
"""seconds: more than any bound of an ordeal"""

Attempt = tuple[int, int]


class SessionLaws:
    """Follows what is said; raises ``AssertionError`` where a law is broken."""

    def __init__(self, play: Ordeal) -> None:
        self.play = play
        self._dead: set[int] = set()
        self._depth = 0
        self._ticks = False
        self._since = (0.0, 0.0)
        """when the state at hand began, and how long the controller had been away by then"""
        self._generation = -1
        self._state = "none"
        self._generator = -1
        self._identity = b""
        self.members: set[int] = set()
        """of the session at hand"""
        self._told: set[int] = set()
        """members that were told of the session"""
        self._joined: set[int] = set()
        self._aborted: set[int] = set()
        self._broken = False
        """a rank that lives said that it failed"""
        self._order: Attempt = (-1, 0)
        self._asked: set[int] = set()
        self._synced: dict[int, Synced] = {}
        self._committed: set[int] = set()
        """ranks that were told to adopt the attempt at hand"""
        self._acked: set[int] = set()
        self._refused: tuple[int, set[int]] = (-1, set())
        """ranks whose values were not finite in this round"""
        self.handed_over: dict[int | None, int] = {}
        """by rank: the round whose consensus it handed over last"""

    # ------------------------------------------------------------------------------------------- what goes by

    def event(self, event: Event, dead: set[int]) -> None:
        """The core is about to be told; ``dead`` is who has died so far, kept up to date by its owner."""
        self._dead, self._ticks = dead, isinstance(event, Tick)
        self._depth += 1
        if not isinstance(event, RankSaid) or event.rank in dead:
            return
        rank, current = event.rank, self._generation
        match event.message:
            case SessionIdGenerated(generation=generation, id=identity) if generation == current:
                if self._state == "naming" and rank == self._generator:
                    self._identity = identity
            case SessionJoined(generation=generation) if generation == current and rank in self.members:
                self._joined.add(rank)
                self._since = (self.play.now, self.play.time_away)
            case SessionLost(generation=generation) if generation == current and rank in self.members:
                self._broken = True
            case Synced() as report if (report.round, report.attempt) == self._order and rank in self._asked:
                self._synced[rank] = report
            case SyncRefused(round=number, attempt=attempt) if (number, attempt) == self._order:
                self._refuse(number, rank)
            case SyncAck(round=number) if number == self._order[0]:
                self._acked.add(rank)
            case LocalState(data=data) if data != b"local":
                self.handed_over[rank] = int(data.split()[0])

    def effect(self, effect: Effect) -> Attempt | None:
        """The core said so; a round and attempt when it is the first word of it."""
        if not isinstance(effect, SendRank):
            return None
        rank = effect.rank
        match effect.message:
            case RequestSessionId(generation=generation):
                self._names(rank, generation)
            case NewSession() as order:
                self._gathers(rank, order)
            case AbortSession(generation=generation):
                assert generation == self._generation and rank in self.members, f"rank {rank} is not in {generation}"
                assert rank not in self._aborted, f"session {generation} ends twice for rank {rank}"
                self._aborted.add(rank)
            case SyncNow() as order:
                return self._asks(rank, order)
            case SyncCommitted(round=number, attempt=attempt):
                self._commits(rank, (number, attempt))
            case Shutdown():
                self._aborted.add(rank)  # whoever leaves waits for nobody
        return None

    def justify(self, rank: int) -> None:
        """A rank is dead because it did not join: did it hang?"""
        played = self.play.ranks[rank]
        assert self._state == "joining" and rank in self.members - self._joined, f"L3: rank {rank} is in no rendezvous"
        self._was_patient(JOIN_SECONDS, f"rank {rank} did not join")
        barred = self.play.ways[played.host.name].barred
        assert played.held or not played.alive or barred or played.syncing.inside is None, f"L3: rank {rank} tries"

    def unadopted(self) -> set[int]:
        """Who lives, was told to adopt a round, and did not say that it has."""
        return self._committed - self._acked - self._dead

    def handled(self) -> None:
        """All that the core said is performed; an event that came meanwhile is in the middle of another one's."""
        self._depth -= 1
        if self._depth:
            return
        play, dead = self.play, self._dead
        living = self.members - dead
        if self._state in ("joining", "live"):
            assert self._told == self.members, f"{self.members - self._told} were not told of the session"
            march = play.cohort.march
            given_up = march is not None and march.phase == "training" and march.cycle.open is None
            summing = self._state == "live" and self._asked == self.members and not self._committed
            in_flight = summing or self._joined < self.members
            over = self._broken or self.members & dead or (given_up and in_flight)
            if over and not play.cohort.ended and not self._leaving():
                left = living - self._aborted
                assert not left, f"session {self._generation} is over, and {sorted(left)} were not told"
        if self._asked and self._state == "live":
            assert self._asked == self.members, f"{self.members - self._asked} were not asked for {self._order}"
        if self._committed:
            missing = self._asked - self._committed - dead
            assert not missing, f"{sorted(missing)} have the sum of {self._order} and were not told to adopt it"
        if not play.cohort.ended:
            self._bounded()

    # --------------------------------------------------------------------------------------------------- laws

    def _names(self, rank: int, generation: int) -> None:
        assert generation == self._generation + 1, f"session {generation} follows {self._generation}"
        assert rank not in self._dead, f"the dead rank {rank} is to name session {generation}"
        self._over("another one is made")
        if self._state == "naming" and self._generator not in self._dead and self._ticks:
            self._was_patient(GENERATOR_SECONDS, f"rank {self._generator} named no session")
        assert not self._scoring(), "a session is made while a rank scores"
        self._generation, self._generator, self._state = generation, rank, "naming"
        self._since = (self.play.now, self.play.time_away)
        self._identity, self._broken = b"", False
        for ranks in (self.members, self._told, self._joined, self._aborted):
            ranks.clear()

    def _gathers(self, rank: int, order: NewSession) -> None:
        march = self.play.cohort.march
        assert march is not None and not self._scoring(), "a session is made while a rank scores"
        assert order.generation == self._generation, f"session {order.generation}, but {self._generation} was named"
        assert self._identity and order.id == self._identity, "an identity that nobody made for this session"
        assert order.ranks == sorted(order.ranks) and not set(order.ranks) & self._dead, f"{order.ranks}, {self._dead}"
        assert order.ranks == list(march.world.alive()) and len(order.ranks) >= 2, (
            f"{order.ranks} are not all that live"
        )
        assert rank in order.ranks and rank not in self._told, f"rank {rank} is told twice of {order.generation}"
        self._state, self._since = "joining", (self.play.now, self.play.time_away)
        self.members |= set(order.ranks)
        self._told.add(rank)

    def _asks(self, rank: int, order: SyncNow) -> Attempt | None:
        key = (order.round, order.attempt)
        assert order.generation == self._generation, f"{order} in session {self._generation}"
        assert self._joined >= self.members and rank in self.members, (
            f"{order}: session {self._generation} is not live, only {self._joined} of {self.members} have joined"
        )
        assert not self._aborted and not self._broken, f"{order}: session {self._generation} is over"
        assert not self.members & self._dead, f"{order}: {self.members & self._dead} are dead"
        self._state = "live"
        refused = self._refused[1] if self._refused[0] == order.round else set()
        assert order.excluded == (rank in refused), f"rank {rank}, {order}: refused are {refused}"
        if key == self._order and not self._committed:
            assert rank not in self._asked, f"rank {rank} is asked twice: {order}"
            self._asked.add(rank)
            return None
        assert key > self._order, f"{order} follows {self._order}"
        assert not self._committed or order.round > self._order[0], f"{order}, which is committed"
        self._order, self._asked = key, {rank}
        for reports in (self._synced, self._committed, self._acked):
            reports.clear()
        return key

    def _commits(self, rank: int, key: Attempt) -> None:
        assert key == self._order, f"{key} is committed, {self._order} was asked for"
        assert rank in self._asked and rank not in self._committed, f"rank {rank} was not asked for {key}"
        missing = self._asked - self._synced.keys()
        assert not missing, f"L1: {key} is committed, and {sorted(missing)} did not say that they have it"
        total = sum(report.steps for report in self._synced.values())
        crooked = [each for each, report in self._synced.items() if report.total_steps != total]
        assert not crooked, f"L1: {key} is committed, and ranks {crooked} counted something else than {total}"
        truth = self.play.network.sums.get(key)
        assert truth is not None, f"L1: {key} is committed, and nobody summed it"
        assert truth.steps == {each: report.steps for each, report in self._synced.items()}, "L1: another divisor"
        self._committed.add(rank)

    def _refuse(self, number: int, rank: int) -> None:
        if self._refused[0] != number:
            self._refused = (number, set())
        over = self._state != "live" or self._aborted  # then another attempt follows, which it will be asked for
        if not self._committed and not over:
            self._refused[1].add(rank)

    def _over(self, why: str) -> None:
        if self._state in ("joining", "live"):
            left = self.members - self._dead - self._aborted
            assert not left, f"session {self._generation} is over ({why}), and {sorted(left)} were not told"

    def _was_patient(self, seconds: float, what: str) -> None:
        at, away = self._since
        waited = self.play.now - at - (self.play.time_away - away)
        assert waited >= seconds - 1e-6, f"{what}, and had {waited:g} s for it"

    def _scoring(self) -> bool:
        march = self.play.cohort.march
        return march is not None and any(map(march.world.lives, march.evaluations.pending.values()))

    def _leaving(self) -> bool:
        march = self.play.cohort.march
        return march is not None and march.leaving

    def _bounded(self) -> None:
        march = self.play.cohort.march
        if march is None:
            return
        waits = march.phase == "forming" or march.cycle.open is not None
        deadline = march.bounds.deadline()
        assert deadline is not None or not waits, "L6: nothing bounds the wait for the others"
        longest = LONGEST_WAIT
        if isinstance(march.plane, Collectives):
            longest = {"naming": GENERATOR_SECONDS, "joining": JOIN_SECONDS}.get(march.plane.session.state, longest)
        if waits and deadline is not None:
            assert deadline - self.play.now < longest + 1e-6, f"L6: {deadline - self.play.now:.0f} s are waited for"
