"""Windows of work: deal each rank its allotment, watch it being done, and account for it when its round closes.

A window's chunk is the rank's allotment for one round (behaviour E4 rule 3), so the reduce opens when no living rank
has a chunk in flight and somebody worked (F2). Nothing here knows of links, phases or tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backend.core.allotments import chunk_batches, window_plan
from backend.core.config import RunConfig
from backend.core.cycle import OpenedRound
from backend.core.resume import Resume
from backend.core.review import Outcome, Review
from backend.core.scheduling import Scheduler
from backend.core.stages import stages
from backend.core.stalls import ProgressWatch
from backend.core.tally import EpochTally, Rates
from backend.core.timing import WindowLedger, WindowReport, delivered_capable
from backend.core.vocabulary import Effect, Record, SendRank
from backend.core.work import EpochPool, Range, WorkError
from backend.core.world import World
from wire.messages import BatchDone, ChunkDone, StartChunk, SyncAck, Update


@dataclass(slots=True)
class Window:
    """The allotments that are being worked on."""

    opened_at: float
    planned: dict[int, int]
    dealt: dict[int, int] = field(default_factory=dict)
    """batches handed out so far: a returned range can be shorter than the allotment, and is then followed by another"""


class Training:
    """Epoch by epoch, window by window. The caller opens and closes rounds and hands their outcome in."""

    overlaps = False
    """whether ranks work on while a round is open"""

    def __init__(self, config: RunConfig, world: World, dataset_size: int, scheduler: Scheduler) -> None:
        self.config = config
        self.world = world
        self.dataset_size = dataset_size
        self.scheduler = scheduler
        self.ledger = WindowLedger()
        self.watch = ProgressWatch(config.stall_seconds)
        self._handed = dict.fromkeys(world.ranks, 0)
        """batches given to each rank so far, in all"""
        self.rates = Rates()
        self.pool: EpochPool | None = None
        self.window: Window | None = None
        self.tally = EpochTally(opened_at=0.0)
        self.global_step = 0
        self.samples_done = 0
        self.samples_accepted: list[int] = []
        self.samples_lost = 0
        """of the epochs that are over"""
        self.loss: float | None = None
        self.review = Review(config)
        self.decision = scheduler.opening
        self._last_sync_ms = 0.0
        self.round_stages: dict[str, float] = {}
        """seconds of the last round by stage; none before the first"""
        self._round_samples = 0

    @property
    def epoch(self) -> int:
        """The epoch being trained, from 0; the last one after the end."""
        return self.pool.epoch if self.pool else max(0, len(self.samples_accepted) - 1)

    @property
    def epoch_done(self) -> bool:
        """Every sample of the epoch is in an accepted round."""
        return self.pool is not None and self.pool.is_done

    @property
    def epoch_follows(self) -> bool:
        """Another epoch comes after the present one."""
        return len(self.samples_accepted) + 1 < self.config.epochs

    @property
    def all_epochs_done(self) -> bool:
        return len(self.samples_accepted) >= self.config.epochs

    def restore(self, resume: Resume, now: float) -> None:
        """Go on from a checkpoint: finished epochs, the clock, and the epoch that was in progress (E12)."""
        self.samples_accepted = list(resume.samples_accepted)
        self.global_step = resume.step(self.config.batch_size)
        self.samples_lost = resume.samples_lost
        self.samples_done = sum(resume.samples_accepted) + sum(piece.size for piece in resume.accepted)
        self.loss = resume.loss
        self.open_epoch(now, resume)

    def open_epoch(self, now: float, resume: Resume | None = None) -> None:
        """Put the next epoch's samples into the pool; a window never exceeds an epoch (behaviour C15)."""
        epoch = len(self.samples_accepted)
        closed = (resume.accepted, resume.lost) if resume else ()
        self.pool = EpochPool(epoch, self.dataset_size, self.config.batch_size, *closed)
        self.scheduler.set_max_total(self.pool.remaining_batches)
        self.tally = EpochTally(opened_at=now)
        if resume is not None and resume.trained:
            self.tally = EpochTally(now - resume.seconds, resume.batches, resume.loss_sum, resume.loss_batches)

    def deal(self, now: float, *, draining: bool = False) -> list[Effect]:
        """Open a window: one chunk to each living rank that has an allotment. ``draining`` is for ranks that work
        ahead: they are to come to rest."""
        assert self.pool is not None
        alive = self.world.alive()
        plan = window_plan(self.pool, self.scheduler.counts, alive, forced=self.scheduler.forced)
        self.window = Window(opened_at=now, planned=plan)
        chunks = [effect for rank in alive for effect in self._hand_out(rank, now)]
        assert chunks, f"epoch {self.pool.epoch} is not done, but there is nothing to deal"
        return chunks

    def batch_done(self, rank: int, message: BatchDone, now: float) -> None:
        """Fold one batch into the ledger and the rank's seat. Raises ``WorkError`` for one that cannot be."""
        seat = self.world.ranks[rank]
        self._record(rank, message)
        seat.steps += 1
        seat.samples += message.samples
        seat.loss = message.loss
        self.watch.moved(rank, now)

    def chunk_done(self, rank: int, message: ChunkDone, now: float) -> list[Effect]:
        """The rank trained on all of its chunk; it gets another while its allotment is not used up. Raises
        ``WorkError`` when it had no such chunk."""
        if self.pool is None or message.epoch != self.pool.epoch:
            raise WorkError(f"epoch {message.epoch} is not being trained")
        self.pool.deliver(rank, message.offset, message.size)
        return self._hand_out(rank, now)

    def issue_again(self, rank: int) -> list[Effect]:
        """Send the rank what it holds once more. It knows a chunk that it has, so that nothing is trained twice."""
        return [SendRank(rank, self._start(chunk)) for chunk in self._outstanding(rank)]

    def window_finished(self) -> bool:
        """Nobody alive has a chunk in flight: the window is over, and its round may open if somebody worked."""
        if self.pool is None or self.window is None:
            return False
        return not self.pool.anything_in_flight  # the dead hold nothing: theirs is forfeited as they are buried

    def steps(self, rank: int) -> int:
        """Batches that the rank did since the last round."""
        return self.ledger.steps(rank)

    def holds_work(self, rank: int) -> bool:
        """Whether the rank has a chunk that it did not report as done."""
        return self.pool is not None and self.pool.in_flight(rank)

    def worked(self) -> bool:
        """Whether a living rank did a batch since the last round."""
        return any(self.steps(rank) > 0 for rank in self.world.alive())

    def overclaim(self, steps: Mapping[int, int]) -> tuple[int, str] | None:
        """A contribution that cannot be what the rank did: whose, and why; none when all are plausible. One that holds
        less would leave samples behind that no round accepts and nobody may be dealt."""
        for rank, batches in steps.items():
            if batches != self.steps(rank):
                return rank, f"it holds {batches} batches of rank {rank}, which reported {self.steps(rank)}"
        return None

    def may_stop(self) -> bool:
        """Whether the closed round holds all that the ranks did, so that a run asked to stop may end now."""
        return True

    def accept(self, steps: dict[int, int]) -> None:
        """A round committed with these contributions: their delivered samples are accepted, once and for all."""
        assert self.pool is not None
        before = self.pool.accepted_samples
        self.pool.accept(list(steps))
        self._round_samples = self.pool.accepted_samples - before
        self.samples_done += self._round_samples

    def void(self, rank: int, reason: str) -> int:
        """What the rank did since the last round counts no more: its samples are lost. Returns how many."""
        assert self.pool is not None
        return self.pool.lose(rank, self.pool.held_batches(rank), reason)

    def rank_died(self, rank: int) -> list[Range]:
        """Return the rank's unaccepted samples to the pool and forget its timing. Call it once no open attempt holds
        its work."""
        self.ledger.drop(rank)
        self.scheduler.drop(rank)
        self.watch.forget(rank)
        return self.pool.forfeit(rank) if self.pool else []

    def close_round(self, opened: OpenedRound, slack_ms: Mapping[int, float], now: float) -> list[Effect]:
        """Account for a settled round: times to ElChe, the round's review, the row to the store, the clock to the ranks
        (behaviour F9, F10). ``slack_ms`` is what errands will take of ranks' next window."""
        assert opened.finished is not None and self.pool is not None and self.window is not None
        window = self.window
        alive = self.world.alive()
        report = self.ledger.report(
            alive, coherent_capable=delivered_capable(self.config.mode), sync_ms=self._last_sync_ms
        )
        outcome = self.review.close(opened, report, self.scheduler, slack_ms)
        self.decision = outcome.decision.reason
        self._last_sync_ms = self._sync_ms(opened, now)
        self.round_stages = stages(opened, now)
        loss = self.ledger.mean_loss(rank for rank in alive if opened.finished.steps.get(rank))
        self._tally(opened, loss, now)
        row = self._round_row(opened, report, outcome, now) | {"samples": self._round_samples, "loss": loss}
        self._remember_split(opened, report, window)
        self.ledger.reset_steps()
        self.ledger.reset_timing()
        self.window = None
        update = Update(round=opened.round, global_step=self.global_step)
        return [Record("rounds", row), *(SendRank(rank, update) for rank in alive)]

    def close_epoch(self, now: float) -> Record:
        """Every sample of the epoch is accepted or lost: write it down and drop the pool."""
        assert self.pool is not None and self.pool.is_done
        row = {
            "epoch": self.pool.epoch,
            "seconds": now - self.tally.opened_at,
            "samples_accepted": self.pool.accepted_samples,
            "samples_lost": [lost.row() for lost in self.pool.lost],
            "batches": self.tally.batches,
            "loss": self.tally.loss,
        }
        self.samples_accepted.append(self.pool.accepted_samples)
        self.samples_lost += self.pool.lost_samples
        self.pool = None
        return Record("epochs", row, durable=True)

    def ideal_batches_per_second(self) -> float | None:
        """Sum of what the ranks that did not die can do alone: from the declared emulation, else from their measured
        pace."""
        total = 0.0
        for rank, seat in self.world.ranks.items():
            if seat.state == "dead":
                continue
            ms = self.world.emulated_ms(rank) or self.scheduler.smoothed(rank)
            if ms <= 0:
                return None
            total += 1000.0 / ms
        return total or None

    @property
    def last_round_seconds(self) -> float | None:
        """From the last round's request for parameters to its last acknowledgement; none before the first, or where it
        says nothing of the next."""
        return self._last_sync_ms / 1000.0 or None

    def check(self) -> None:
        """The pool's law, and one chunk in flight for living ranks only."""
        if self.pool is None:
            return
        self.pool.check()
        for rank in self.world.dead():
            assert not self.pool.in_flight(rank), f"dead rank {rank} still holds a chunk"
        for rank in self.world.alive():
            assert self.watch.working(rank) == self.holds_work(rank), f"rank {rank} has unwatched work"
        self.scheduler.check()

    def _record(self, rank: int, message: BatchDone) -> None:
        self.ledger.record_batch(rank, message.batch_ms, message.data_ms, message.loss, message.samples)

    def at_work_on(self, rank: int, steps: int) -> tuple[int, int] | None:
        """Epoch and first sample of the batch that a rank with so many steps behind it is in; none when it rests."""
        left = self._handed[rank] - steps
        starts = [
            offset
            for chunk in self._outstanding(rank)
            for offset in range(chunk.offset, chunk.end, self.config.batch_size)
        ]
        if self.pool is None or not 0 < left <= len(starts):
            return None
        return self.pool.epoch, starts[len(starts) - left]

    def _outstanding(self, rank: int) -> list[Range]:
        return self.pool.in_flight_ranges(rank) if self.pool else []

    def _hand_out(self, rank: int, now: float) -> list[Effect]:
        assert self.pool is not None and self.window is not None
        window = self.window
        taken = window.dealt.get(rank, 0)
        batches = chunk_batches(self.pool, rank, window.planned, (rank,), window.planned, taken)
        chunk = self.pool.take(batches, rank)
        self.world.ranks[rank].state = "working" if chunk else "idle"
        if chunk is None:
            self.watch.rests(rank)
            return []
        window.dealt[rank] = taken + self._batches(chunk)
        self._handed[rank] += self._batches(chunk)
        self.watch.begins(rank, now, self._expected_seconds(rank, self._batches(chunk)))
        return [SendRank(rank, self._start(chunk))]

    def _expected_seconds(self, rank: int, batches: int) -> float:
        return batches * self.scheduler.smoothed(rank) / 1000.0

    def _batches(self, chunk: Range) -> int:
        return -(-chunk.size // self.config.batch_size)

    def _start(self, chunk: Range) -> StartChunk:
        assert self.pool is not None
        return StartChunk(
            epoch=self.pool.epoch,
            offset=chunk.offset,
            size=chunk.size,
            batches=self._batches(chunk),
            global_step=self.global_step,
        )

    def _sync_ms(self, opened: OpenedRound, now: float) -> float:
        """What the round cost, for the next report (D13). A round in which somebody died lasted as long as it took to
        find out, and one after a death as long as its new session: that is no reason for longer windows, so it counts
        as unknown."""
        undisturbed = opened.attempt == 0 and not opened.regrouped and opened.ranks <= set(self.world.alive())
        return (now - opened.opened_at) * 1000.0 if undisturbed else 0.0

    def _tally(self, opened: OpenedRound, loss: float | None, now: float) -> None:
        assert opened.finished is not None and self.window is not None
        batches = sum(opened.finished.steps.values())
        self.global_step += batches
        self.rates.add(opened.round, batches, self._round_samples, now - self.window.opened_at)
        self.tally.batches += batches
        if loss is not None:
            self.loss = loss
            self.tally.loss_sum += loss * batches
            self.tally.loss_batches += batches

    def _round_row(self, opened: OpenedRound, report: WindowReport, outcome: Outcome, now: float) -> dict[str, Any]:
        assert opened.finished is not None and self.pool is not None and self.window is not None
        finished, acks = opened.finished, opened.acks
        hashes = {ack.params_hash for ack in acks.values() if ack.params_hash}
        return {
            "round": opened.round,
            "epoch": self.pool.epoch,
            "attempt": opened.attempt,
            "global_step": self.global_step,
            "seconds": now - self.window.opened_at,
            "reduce_seconds": now - opened.opened_at,
            "planned": dict(self.window.planned),
            "realized": dict(finished.steps),
            "mass": finished.mass,
            "ms_per_batch": {rank: self.scheduler.smoothed(rank) for rank in self.world.alive()},
            "compute_seconds": dict(report.compute_seconds),
            "data_seconds": dict(report.data_seconds),
            "wait_seconds": {rank: ack.wait_ms / 1000 for rank, ack in acks.items()},
            "load_seconds": {rank: (ack.pack_ms + ack.load_ms) / 1000 for rank, ack in acks.items()},
            "divergence": outcome.divergence,
            "verdict": outcome.verdict,
            "verdict_reason": outcome.reason,
            "anchor": outcome.decision.anchor,
            "anchor_rank": outcome.decision.anchor_rank,
            "decision": outcome.decision.reason,
            "bytes_up": finished.bytes_up,
            "bytes_down": finished.bytes_down,
            "params_hash": hashes.pop() if len(hashes) == 1 else "",
        }

    def _remember_split(self, opened: OpenedRound, report: WindowReport, window: Window) -> None:
        assert opened.finished is not None
        for rank, seat in self.world.ranks.items():
            ack: SyncAck | None = opened.acks.get(rank)
            seat.last_planned = window.planned.get(rank, 0)
            seat.last_realized = opened.finished.steps.get(rank, 0)
            seat.last_split = {
                "compute_seconds": report.compute_seconds.get(rank, 0.0),
                "data_seconds": report.data_seconds.get(rank, 0.0),
                "wait_seconds": ack.wait_ms / 1000 if ack else 0.0,
                "reduce_seconds": ack.reduce_ms / 1000 if ack else 0.0,
            }
