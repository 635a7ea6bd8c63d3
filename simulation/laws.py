"""The laws of an ordeal: what must hold after every event, and at the end, whatever struck (reliability study, 3.0).

The oracle follows the samples, symbolically: a contribution is the set of batches behind it, so that sum and divisor
(L1) and the samples (L2) are equations of sets. Here is the rest: deaths have a cause and are recorded once (L3), what
zombies say changes nothing (L8), every wait has a deadline (L6), phases keep to their table, nobody adopts before the
commit, the database knows what others were told (L13), and the run ends once, with its work saved (L5, L14).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from backend.core.vocabulary import (
    AbortRound,
    CloseLink,
    Effect,
    Event,
    HostSaid,
    LinkLost,
    OpenRound,
    RankSaid,
    Record,
    RelayAttached,
    RelayHeard,
    RelayLost,
    RoundBroken,
    SendHost,
    SendRank,
    SendRelay,
    Tick,
    WriteCheckpoint,
)
from simulation.oracle import COMMITTED, LOST, Oracle
from simulation.ordeal import Ordeal
from simulation.played import Batch
from simulation.rounds import Sum
from simulation.session_laws import SessionLaws
from wire.messages import (
    Accept,
    BatchDone,
    DeclareDead,
    Leaving,
    RankExited,
    RelayExited,
    RoundCommitted,
    RunEnded,
    Shutdown,
    StartChunk,
    SyncAck,
    SyncRefused,
)

PHASES = {
    ("waiting", "staging"),
    ("staging", "waiting"),
    *((phase, to) for phase in ("waiting", "staging") for to in ("forming", "failed")),
    *(("forming", to) for to in ("training", "failed")),
    *(("training", to) for to in ("done", "failed")),
}
SAVED = (
    "MaxFailureExceeded",
    "AllRanksLost",
    "TrainStall",
    "ReduceStall",
    "SingleSurvivor",
    "RendezvousExhausted",
    "RepeatedFailure",
    "All",
    "The epoch",
    "Stopped by",
    "NonFinite",
    "Not one sample",
)
"""how the reasons of ends begin that leave a checkpoint"""
BATCHED_SECONDS = 0.5
"""rows that are not durable may be so old before they are in the database"""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the samples stood when a round was committed."""

    epochs: int
    """closed before"""
    samples: dict[int, bytes]
    """by epoch and sample, as the oracle keeps them"""


class Laws(Oracle):
    """Raises ``AssertionError`` where a law is broken."""

    play: Ordeal
    phases = frozenset(PHASES)

    def __init__(self, play: Ordeal) -> None:
        super().__init__(play)
        self._now = 0.0
        self.sessions = SessionLaws(play)
        self._cause: Event = Tick()
        self._before: object = None
        self._phase = play.cohort.phase
        self._open_attempt: tuple[int, int] | None = None
        self._asked_round = self._open_round = -2
        self._opened_at = (0.0, 0.0)
        self._stop_taken = False
        self._after_stop = 0
        """rounds opened since the operator asked the run to stop"""
        self._contributors: set[int] = set()
        self._acked: set[int] = set()
        self._heard: dict[int, tuple[float, float]] = {}
        """by link: when a host was heard last, and how long the controller had been away until then"""
        self._relay_heard: dict[int, tuple[float, float]] = {}
        """by host: the same of its relay"""
        self._moved: dict[int, tuple[float, float]] = {}
        """by rank: when it did a batch or was given a chunk last, and the same"""
        self._admitted: set[int] = set()
        self.standing: dict[int, Standing] = {}
        """by committed round"""
        self._exited: int | None = None
        """a rank that the event at hand says is gone, and that nobody told to go"""

    # ------------------------------------------------------------------------------------------- what goes by

    def event(self, now: float, event: Event) -> None:
        super().event(now, event)
        play = self.play
        self.sessions.event(event, self.dead)
        self._now, self._cause, self._before, self._exited = now, event, None, None
        march = play.cohort.march
        if isinstance(event, RankSaid):
            self._heard_rank(event)
            if event.rank in self.dead:
                self._before = self._state()
        elif isinstance(event, RelayAttached | RelayHeard):
            self._relay_heard[event.host] = (now, play.time_away)
        elif isinstance(event, LinkLost):
            self._admitted.discard(event.link)
        elif isinstance(event, HostSaid):
            self._heard[event.link] = (now, play.time_away)
            if isinstance(event.message, RankExited) and march is not None and not march.leaving:
                rank = event.message.rank
                seat = march.world.hosts.get(march.world.ranks[rank].host)
                here = march.world.lives(rank) and seat is not None and seat.state not in ("left", "lost")
                self._exited = rank if here and not self._had_left(event.message) else None

    def _had_left(self, exited: RankExited) -> bool:
        """Whether it was told to by a controller before this one."""
        return False

    def _heard_rank(self, event: RankSaid) -> None:
        if event.rank in self.dead:
            return
        moment = (self._now, self.play.time_away)
        host = self.play.ranks[event.rank].host
        self._heard[host.link] = moment
        if host.host in self._relay_heard:  # once it has attached
            self._relay_heard[host.host] = moment
        if isinstance(event.message, BatchDone):
            self._moved[event.rank] = moment
        elif isinstance(event.message, SyncAck):
            self._acked.add(event.rank)

    def effect(self, now: float, effect: Effect) -> None:
        super().effect(now, effect)
        match effect:
            case OpenRound(round=number, attempt=attempt):
                assert self._open_attempt is None, f"round {number} is opened while {self._open_attempt} is open"
                self._open_attempt = (number, attempt)
                self._asked_for(number, {rank for ranks in effect.hosts.values() for rank in ranks})
            case AbortRound():
                assert self._open_attempt == (effect.round, effect.attempt), (
                    f"{effect}, but {self._open_attempt} is open"
                )
                self._open_attempt = None
            case SendRelay(message=RoundCommitted()) if self._open_attempt is not None:
                self._open_attempt = None
            case SendRelay(message=DeclareDead(rank=rank)):
                assert rank in self.dead, f"L13: rank {rank} is declared dead before its death is on record"
            case SendHost(link=link, message=Accept()):
                self._admitted.add(link)
            case CloseLink(link=link):
                self._admitted.discard(link)
            case Record(table="events", row={"kind": "stop_requested"}):
                self._stop_taken = True
            case SendRank() if self.play.config.collective:
                self._to_member(effect)
            case WriteCheckpoint(consensus_of=bearer, manifest=manifest) if self.play.config.collective:
                held = self.sessions.handed_over.get(bearer)
                assert held == manifest["round"], f"L5: rank {bearer} handed over round {held}, not {manifest['round']}"

    def handled(self, now: float, event: Event, effects: list[Effect]) -> None:
        play = self.play
        if play.crashed:
            return
        cohort = play.cohort
        if play.config.collective:
            if cohort.march is not None and cohort.march.cycle.open is not None:
                self._opens(cohort.march.cycle.open.round)
            self.sessions.handled()
        if cohort.phase != self._phase:
            assert (self._phase, cohort.phase) in self.phases, f"{self._phase} may not become {cohort.phase}"
            self._phase = cohort.phase
        if self._before is not None:
            assert not effects, f"L8: rank {event} is dead, and still it causes {effects}"
            assert self._before == self._state(), f"L8: {event} of a dead rank changes the state"
        if self._exited is not None and not cohort.ended:
            assert self._exited in self.dead, f"L3: rank {self._exited} is gone, and no death is on record"
        if not cohort.ended:
            deadline = cohort.next_deadline()
            assert deadline is not None, "L6: nothing bounds the wait"
            assert deadline > now or not isinstance(event, Tick), "L6: a deadline that passed is still due"
            if isinstance(event, HostSaid):
                self._check_relays()

    def committed(self, number: int, result: Sum, batches: dict[int, list[Batch]]) -> None:
        super().committed(number, result, batches)
        samples = {epoch: bytes(where) for epoch, where in self._dealt.items()}
        self.standing[number] = Standing(len(self._epochs), samples)

    # --------------------------------------------------------------------------------------------------- laws

    def _asked_for(self, number: int, ranks: set[int]) -> None:
        """These are to contribute to the round."""
        if number != self._asked_round:
            self._asked_round = number
            self._opens(number)
            self._after_stop += self._stop_taken
            assert self._after_stop <= 1 or self.play.overlap, "the operator's stop is not obeyed"
        self._contributors = ranks
        self._acked.clear()
        self._check_counts()

    def _opens(self, number: int) -> None:
        if number != self._open_round:
            self._open_round, self._opened_at = number, (self._now, self.play.time_away)

    def _to_member(self, effect: SendRank) -> None:
        march = self.play.cohort.march
        asked_for = self.sessions.effect(effect)
        if asked_for is not None:
            self._open(*asked_for, self.sessions.members)
            self._asked_for(asked_for[0], self.sessions.members.copy())
        if isinstance(effect.message, Shutdown) and march is not None and march.ending is not None:
            missing = self.sessions.unadopted() if march.ending.step == "leaving" else set()
            assert not missing or "ReduceStall" in march.ending.reason, f"all leave before {sorted(missing)} adopted"

    def _chunk(self, rank: int, chunk: StartChunk) -> None:
        if not self._held.get(rank):  # with work in hand it is waited for since before
            self._moved[rank] = (self._now, self.play.time_away)
        super()._chunk(rank, chunk)

    def _record(self, table: str, row: dict[str, Any]) -> None:
        super()._record(table, row)
        if table == "deaths":
            self._justify(row["rank"], row["reason"])
        elif table == "rounds":
            missing = self._contributors - self._acked - self.dead
            late = self._waited(self._opened_at) >= self.play.config.stall_seconds - 1e-6
            assert not missing or late, f"round {row['round']} closed before {sorted(missing)} adopted it"
            _finite(row)

    def _justify(self, rank: int, reason: str) -> None:
        """A death needs a cause that was really there."""
        play, event, march = self.play, self._cause, self.play.cohort.march
        assert march is not None
        host = march.world.hosts[march.world.ranks[rank].host]
        timeout = play.config.heartbeat_timeout_seconds
        match event:
            case HostSaid(link=link, message=RankExited(rank=gone)) if gone == rank:
                assert rank in play.struck, f"L3: rank {rank} left as it was told to, and counts as dead"
                return
            case HostSaid(link=link, message=RelayExited() | Leaving()) | LinkLost(link=link) if link == host.link:
                return
            case RelayLost(host=number) | RoundBroken(host=number) if number == host.host:
                return
            case RankSaid(rank=refused, message=SyncRefused()) if refused == rank and "were not finite" in reason:
                return
        if "RendezvousStall" in reason:
            self.sessions.justify(rank)
            return
        if "TrainStall" in reason:
            silent = self._waited(self._moved[rank])
            assert silent >= play.config.stall_seconds - 1e-6, f"L3: rank {rank} stalls after {silent} s"
            played = play.ranks[rank]
            hangs = not played.alive or played.stopped or played.deaf or played.state != "idle"
            # One that woke up this very moment did its plan, and its word is on the way.
            did = played.steps > march.world.ranks[rank].steps
            barred = play.ways[host.name].barred
            assert hangs or did or barred, f"H1: rank {rank} counts as hanging, but never had its plan"
            return
        relay = "its relay was not heard" in reason
        silent = self._waited(self._relay_heard[host.host] if relay else self._heard[host.link])
        assert silent >= timeout - 1e-6, f"L3: rank {rank} dies by {event} ({reason}), heard {silent} s ago"

    def _waited(self, since: tuple[float, float]) -> float:
        """Seconds since then, without those in which the controller could not hear."""
        at, away = since
        return self._now - at - (self.play.time_away - away)

    def _check_relays(self) -> None:
        """Whose relay stands still is lost: a moment after the timeout, for what is on its way must be heard first."""
        config, march = self.play.config, self.play.cohort.march
        bound = config.heartbeat_timeout_seconds + 2 * config.heartbeat_seconds + 1e-6
        for seat in march.world.hosts.values() if march is not None else ():
            if seat.host in self._relay_heard and seat.state not in ("left", "lost"):
                silent = self._waited(self._relay_heard[seat.host])
                assert silent <= bound, f"L6: the relay of {seat.name} was not heard for {silent} s"

    def _check_counts(self) -> None:
        march = self.play.cohort.march
        assert march is not None
        counts = march.training.scheduler.counts
        for rank in march.world.alive():
            assert counts[rank] >= 1, f"rank {rank} lives and has an allotment of {counts[rank]}"

    def _state(self) -> object:
        """All that a zombie must not change."""
        march = self.play.cohort.march
        assert march is not None
        training, opened = march.training, march.cycle.open
        pool = training.pool
        return (
            march.phase,
            None if pool is None else (pool.uncovered(), pool.remaining_batches),
            [pool and (pool.in_flight_ranges(rank), pool.delivered_samples(rank)) for rank in march.world.ranks],
            None if opened is None else (opened.round, opened.attempt, sorted(opened.acks), sorted(opened.waiting)),
            [(seat.state, seat.steps, seat.samples) for seat in march.world.ranks.values()],
            len(march.deaths),
            dict(march.evaluations.pending),
        )

    # ----------------------------------------------------------------------------------------------- the end

    def finish(self) -> None:
        play = self.play
        if play.crashed:
            self._after_a_crash()
            return
        super().finish()
        assert play.end is not None
        reason = play.end.reason
        assert not self._admitted, f"L9: the hosts on links {sorted(self._admitted)} were not told that the run is over"
        assert not reason.startswith("Replicas differ"), f"L4: {reason}"
        march = play.cohort.march
        if march is None:
            return
        trained = march.cycle.next_round > march.cycle.first_round or march.forming.brings is not None
        if reason.startswith(SAVED) and trained and not play.disk_trouble:
            assert play.rows("checkpoints") or self._in_vain_asked(), f"L5: nothing is saved at the end: {reason}"
        if play.config.collective and play.end.phase == "done" and trained and not play.disk_trouble:
            last, saved = march.cycle.next_round - 1, [row["round"] for row in play.rows("checkpoints")]
            assert saved and saved[-1] == last, f"L5: done with round {last}, and saved are {saved}"
        pool = march.training.pool
        if pool is not None:
            where = self._dealt.get(pool.epoch, bytearray(play.samples))
            lost = {at for piece in pool.uncovered() for at in range(piece.offset, piece.end)}
            kept = {at for at in range(play.samples) if where[at] in (COMMITTED, LOST)}
            assert lost == set(range(play.samples)) - kept, "L2: what is accepted and what is lost is not the epoch"

    def _in_vain_asked(self) -> bool:
        """Whether everybody who did not die was asked for the consensus, and handed nothing over."""
        march = self.play.cohort.march
        assert march is not None
        failed = [row["text"] for row in self.play.rows("events") if row["kind"] == "checkpoint_failed"]
        left = [march.world.where(rank) for rank, seat in march.world.ranks.items() if seat.state != "dead"]
        return self.play.config.collective and all(any(who in text for text in failed) for who in left)

    def _after_a_crash(self) -> None:
        """A new controller knows what is in the database only: is that what others were told?"""
        play = self.play
        known = [record for at, record in play.recorded if record.durable or at <= play.now - BATCHED_SECONDS]
        phases = [record.row["phase"] for record in known if record.table == "runs" and "phase" in record.row]
        ended = [phase for phase in phases if phase in ("done", "failed", "interrupted")]
        assert len(ended) <= 1, f"L14: the database has the ends {ended}"
        for host in play.hosts.values():
            for message in host.told:
                if isinstance(message, RunEnded) and "declared lost" not in message.reason:
                    assert ended == [message.phase], f"L13: {host.name} was told {message}, on record is {ended}"
        dead = self._dead_on_record(known)
        assert dead == self.dead, f"L13: {sorted(self.dead)} died, {sorted(dead)} are on record"

    def _dead_on_record(self, known: list[Record]) -> set[int]:
        return {record.row["rank"] for record in known if record.table == "deaths"}


def _finite(row: dict[str, Any]) -> None:
    for name, value in row.items():
        for number in value.values() if isinstance(value, dict) else (value,):
            assert not isinstance(number, float) or math.isfinite(number), f"{name} of a round is {value}"
