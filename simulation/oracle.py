"""An account of its own: what ranks really trained and rounds really summed, against what the core says and asks for.

The core checks itself (``Cohort.check``); the oracle knows nothing of its state and follows the samples from outside.
Its laws are named as in the reliability study: L1 sum and divisor, L2 samples, L3 deaths, L4 finite parameters, L6
bounds, L14 one end.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

from backend.core.vocabulary import (
    Effect,
    End,
    Event,
    OpenRound,
    RankSaid,
    Record,
    Refused,
    RoundFinished,
    SendRank,
    SendRelay,
)
from simulation.played import Batch
from simulation.rounds import Sum
from simulation.theatre import Theatre
from simulation.watch import Watcher
from wire.messages import ChunkDone, RequestParams, RoundCommitted, StartChunk, SyncNow

POOL, DEALT, COMMITTED, LOST = 0, 1, 2, 3


class Oracle(Watcher):
    """Raises ``AssertionError`` at the effect that breaks a law. Ask ``finish`` once the play is over."""

    def __init__(self, play: Theatre) -> None:
        self.play = play
        self.dead: set[int] = set()
        self.ended = False
        self._trained: dict[int, bytearray] = {}
        """by epoch and sample: whether a committed round holds it"""
        self._dealt: dict[int, bytearray] = {}
        """by epoch and sample: where the core says that it is"""
        self._given: dict[int, list[Batch]] = {}
        """by rank: batches whose round is not committed, in the order in which they were dealt"""
        self._held: dict[int, set[Batch]] = {}
        """by rank: chunks that it was given and did not report as done"""
        self._losing: dict[int, list[Batch]] = {}
        """by rank that was left out of the open round: batches that the core says are lost"""
        self._in_vain: dict[int, list[Batch]] = {}
        """by rank that started anew: batches that it really did since the round before"""
        self._finished: RoundFinished | None = None
        self._opened = (-2, 0)
        self._first = 0
        """the round after the initial broadcast"""
        self._committed = 0
        """samples of the last committed round"""
        self._rounds = 0
        self._divisor: dict[int, int] = {}
        """steps by rank, of the sum that was committed last"""
        self._epochs: list[int] = []
        play.watchers.append(self)

    # ------------------------------------------------------------------------------------------- what goes by

    def event(self, now: float, event: Event) -> None:
        if isinstance(event, RoundFinished):
            self._finished = event
        elif isinstance(event, RankSaid) and isinstance(event.message, ChunkDone) and event.rank not in self.dead:
            self._held.get(event.rank, set()).discard(_range(event.message))

    def effect(self, now: float, effect: Effect) -> None:
        assert not self.ended or isinstance(effect, Refused), f"L14: {type(effect).__name__} after the end"
        match effect:
            case SendRank(rank=rank, message=message):
                assert rank not in self.dead, f"L3: {type(message).__name__} for rank {rank}, which is dead"
                if isinstance(message, StartChunk):
                    self._chunk(rank, message)
                elif isinstance(message, RequestParams | SyncNow):
                    assert not self._held.get(rank) or self.play.overlap, (
                        f"rank {rank} is asked in the middle of a chunk"
                    )
            case SendRelay(message=RoundCommitted(round=number, attempt=attempt)):
                assert self._finished is not None, f"L1: round {number} is committed before it was summed"
                assert (self._finished.round, self._finished.attempt) == (number, attempt), "L1: another sum"
            case OpenRound(round=number, attempt=attempt, hosts=hosts):
                self._open(number, attempt, {rank for ranks in hosts.values() for rank in ranks})
            case Record(table=table, row=row):
                self._record(table, row)
            case End(reason=reason):
                assert reason, "L12: an end without a reason"
                self.ended = True

    def committed(self, number: int, result: Sum, batches: dict[int, list[Batch]]) -> None:
        if number < 0:
            return  # the initial parameters: nobody has worked
        assert result.value is None or isfinite(result.value), f"L4: the consensus of round {number} is {result.value}"
        self._committed, self._divisor = 0, result.steps
        for rank, steps in result.steps.items():
            assert steps == len(batches[rank]), f"L1: rank {rank} declared {steps} steps, did {len(batches[rank])}"
            given = self._given.get(rank, [])
            assert given[:steps] == batches[rank], f"L1: rank {rank} contributed what it was not dealt"
            assert self.play.overlap or len(given) == steps, f"L1: rank {rank} is asked before its chunk is done"
            self._given[rank] = given[steps:]
            for batch in batches[rank]:
                self._move(batch, DEALT, COMMITTED)
                epoch, offset, size = batch
                where = self._trained.setdefault(epoch, bytearray(self.play.samples))
                assert not where.count(1, offset, offset + size), f"L2: {epoch}/{offset} is committed twice"
                where[offset : offset + size] = b"\1" * size
                self._committed += size

    def restarted(self, rank: int, batches: list[Batch]) -> None:
        self._in_vain[rank] = batches

    # ------------------------------------------------------------------------------------------------- laws

    def finish(self) -> None:
        """The play is over: it ended once, everything it promised was done, and every death is on record."""
        play = self.play
        assert play.end is not None, f"L6: nothing ended the run by {play.now:.0f} s; phase {play.cohort.phase}"
        ends = [row for row in play.rows("runs") if row.get("phase") in ("done", "failed", "interrupted")]
        assert len(ends) == 1, f"L14: the run ended {len(ends)} times"
        assert ends[0]["phase"] == play.end.phase, f"L14: {ends[0]['phase']} on record, {play.end.phase} in fact"
        march = play.cohort.march
        dead = set(march.world.dead()) if march else set()
        assert dead == self.dead, f"L3: {sorted(self.dead)} on record, {sorted(dead)} dead"
        if play.end.phase == "done" and not play.end.reason.startswith("Stopped"):
            assert self._epochs == list(range(play.config.epochs)), f"L2: epochs {self._epochs} are accepted"

    def _chunk(self, rank: int, chunk: StartChunk) -> None:
        samples, size = self.play.samples, self.play.batch_size
        assert 0 <= chunk.offset < chunk.offset + chunk.size <= samples, f"L2: {chunk} is not in the epoch"
        assert chunk.batches == -(-chunk.size // size), f"{chunk} in batches of {size}"
        assert chunk.epoch == len(self._epochs), f"L2: {chunk} while {len(self._epochs)} is open"
        held = self._held.setdefault(rank, set())
        if _range(chunk) in held:
            return  # a plan that may have got lost, issued again
        assert not held or self.play.overlap, f"rank {rank} gets {chunk} while it holds {held}"
        held.add(_range(chunk))
        end = chunk.offset + chunk.size
        given = self._given.setdefault(rank, [])
        for offset in range(chunk.offset, end, size):
            batch = (chunk.epoch, offset, min(size, end - offset))
            self._move(batch, POOL, DEALT)
            given.append(batch)

    def _move(self, batch: Batch, before: int, after: int) -> None:
        epoch, offset, size = batch
        where = self._dealt.setdefault(epoch, bytearray(self.play.samples))
        assert where.count(before, offset, offset + size) == size, f"L2: {batch} is not in state {before}"
        where[offset : offset + size] = bytes([after]) * size

    def _open(self, number: int, attempt: int, ranks: set[int]) -> None:
        before, last = self._opened
        following = self._first if before == -1 else before + 1
        if self.play.config.collective:  # an attempt may be over before there is a session to ask for it in
            follows = number == following or (number == before and attempt > last)
        else:
            follows = (number, attempt) in ((before, last + 1), (following, 0))
        assert follows, f"round {number}/{attempt} follows {before}/{last}"
        self._opened = (number, attempt)
        assert ranks and not ranks & self.dead, f"L1: round {number} expects the dead {sorted(ranks & self.dead)}"

    def _record(self, table: str, row: dict[str, Any]) -> None:
        if table == "deaths":
            rank = row["rank"]
            assert rank not in self.dead, f"L3: rank {rank} dies twice"
            self.dead.add(rank)
            self._held.pop(rank, None)
            self._losing.pop(rank, None)
            for batch in self._given.pop(rank, []):
                self._move(batch, DEALT, POOL)
        elif table == "events":
            self._event(row)
        elif table == "rounds":
            assert row["round"] == self._rounds, f"round {row['round']} follows {self._rounds} rounds"
            self._rounds += 1
            assert row["realized"] == self._divisor, "L1: another divisor"
            assert row["samples"] == self._committed, f"L2: {row['samples']} on record, {self._committed} trained"
        elif table == "epochs" and "samples_accepted" in row:
            self._epoch(row["epoch"], row["samples_accepted"], row["samples_lost"])

    def _event(self, row: dict[str, Any]) -> None:
        data = row.get("data", {})
        if row["kind"] == "non_finite":
            for rank, samples in data["samples"].items():
                self._lose(rank, samples)
        elif row["kind"] == "rank_restarted":
            rank = data["rank"]
            self._lose(rank, data["samples"])
            lost, done = self._losing.pop(rank), self._in_vain.pop(rank)
            assert lost == done, f"L2: rank {rank} did {done} in vain, and {lost} are lost"

    def _lose(self, rank: int, samples: int) -> None:
        """The oldest so many samples that the rank was given."""
        given, losing = self._given.setdefault(rank, []), self._losing.setdefault(rank, [])
        while samples > 0:
            batch = given.pop(0)
            self._move(batch, DEALT, LOST)
            losing.append(batch)
            samples -= batch[2]
        assert samples == 0, f"L2: rank {rank} loses a part of {losing[-1]}"

    def _epoch(self, epoch: int, accepted: int, lost: list[dict[str, Any]]) -> None:
        assert epoch == len(self._epochs), f"epoch {epoch} follows {len(self._epochs)} epochs"
        self._epochs.append(epoch)
        trained = self._trained.get(epoch, bytearray()).count(1)
        assert trained == accepted, f"L2: epoch {epoch} is closed with {trained} samples trained, {accepted} accepted"
        where = self._dealt.pop(epoch, bytearray())
        for piece in lost:
            start, end = piece["offset"], piece["offset"] + piece["size"]
            assert where.count(LOST, start, end) == piece["size"], f"L2: {piece} is listed as lost and is not"
            accepted += piece["size"]
        assert accepted == self.play.samples, f"L2: {accepted} of {self.play.samples} samples are accepted or lost"


def _range(chunk: StartChunk | ChunkDone) -> Batch:
    return chunk.epoch, chunk.offset, chunk.size
