"""The life of a frozen world: forming, training window by window, losing ranks, and ending.

The march never looks at links or operators; the cohort tells it what its hosts and ranks said. Each verb appends to
``out`` the effects in the order they must be performed.
"""

from __future__ import annotations

from typing import Any

from backend.core.bounds import Bounds
from backend.core.collective import Collectives
from backend.core.config import RunConfig
from backend.core.cycle import INITIAL_ROUND, Cycle, Plane, Streams
from backend.core.desks import EvaluationDesk
from backend.core.ending import Ending, farewell, outcome, step_ending
from backend.core.errands import Errands
from backend.core.forming import Forming
from backend.core.join_phases import END_PHASES
from backend.core.liveness import Liveness, SaveReason
from backend.core.lookahead import training_for
from backend.core.losses import Losses
from backend.core.model import sizes
from backend.core.priors import slowest_device
from backend.core.progress import checkpoint_manifest, progress_row
from backend.core.recovery import Recovery
from backend.core.refusals import Refusals, refuse
from backend.core.resume import Resume
from backend.core.returning import keep
from backend.core.saving import CheckpointDesk
from backend.core.scheduling import scheduler_for
from backend.core.vocabulary import (
    CheckpointWritten,
    Effect,
    End,
    Record,
    Refused,
    RoundBroken,
    RoundFinished,
    SendRank,
)
from backend.core.world import World
from wire.messages import EvalResult, Shutdown, TensorSpec

MAX_FAILED_ROUNDS = 3
"""attempts of one round that may fail with nobody to blame"""


class March:
    """``phase`` is forming, training, done or failed; ``End`` is emitted exactly once."""

    def __init__(
        self,
        run_id: int,
        config: RunConfig,
        world: World,
        liveness: Liveness,
        *,
        dataset_size: int,
        layout: list[TensorSpec],
        now: float,
    ) -> None:
        self.run_id = run_id
        self.config = config
        self.world = world
        self.liveness = liveness
        self.relays = Liveness(config.heartbeat_timeout_seconds + config.heartbeat_seconds)
        """the same for relays, since agents are heard while their relay stands still; longer by a heartbeat, so that a
        host that stands still as a whole is lost by that name"""
        self.layout = layout
        self.phase = "forming"
        self.stopping = ""
        """who asked to stop, once somebody did"""
        self.out: list[Effect] = []
        self.forming = Forming(world, now + config.forming_seconds, layout)
        scheduler = scheduler_for(config, world.ranks, slowest_device=slowest_device(world))
        self.training = training_for(config, world, dataset_size, scheduler)
        streams = Streams(*sizes(layout), int(config.bf16_wire))
        self.plane: Plane = Collectives(self) if config.collective else streams
        self.cycle = Cycle(streams, self.plane)
        self.refusals = Refusals(config)
        self.errands = Errands(world, scheduler.smoothed)
        self.evaluations = EvaluationDesk(self.errands)
        self.checkpoints = CheckpointDesk(config, world, self.errands)
        self.bounds = Bounds(self)
        self.losses = Losses(self)
        self.resume: Resume | None = None
        self.ending: Ending | None = None
        self.end: End | None = None
        self.deaths: list[dict[str, Any]] = []
        self.recovery = Recovery()
        self.started_at: float | None = None
        self.ended_at: float | None = None

    # ------------------------------------------------------------------------------------------ what happens

    def relay_attached(self, host: int, via: int | None, now: float) -> None:
        """Both links of a host's relay are up; it is to be heard from now on."""
        self.forming.relay_attached(host, via)
        if self.world.hosts[host].state not in ("left", "lost"):
            self.relays.add(host, now)

    def deadlines(self) -> tuple[float | None, float | None]:
        """When something must have happened, silence of agents apart."""
        return self.relays.next_deadline(), self.bounds.deadline()

    def round_finished(self, event: RoundFinished, now: float) -> None:
        """The sum is complete: the samples behind it are accepted, and everybody adopts."""
        initial = event.round == INITIAL_ROUND
        claim = self.cycle.overclaim(event) or (None if initial else self.training.overclaim(self.cycle.claims(event)))
        if claim is not None:
            rank, reason = claim
            self.round_broken(RoundBroken(event.round, event.attempt, reason, self.world.ranks[rank].host), now)
            return
        commits = self.cycle.finished(event)
        if commits and not initial:
            self.training.accept({rank: steps for rank, steps in event.steps.items() if steps > 0})
            self.refusals.accepted(event.steps)
            self.out += keep(self, event, now)
        self.out += commits

    def round_broken(self, event: RoundBroken, now: float) -> None:
        """A contribution was refused: its host is lost, unless only its values are at fault (refusals.py). Without a
        culprit the same ranks try again, a few times."""
        current = self.cycle.open
        if current is None or current.finished or (event.round, event.attempt) != (current.round, current.attempt):
            return
        if refuse(self, event, current, now):
            return
        if event.host is not None:
            self.losses.host(self.world.hosts[event.host], f"its contribution was refused: {event.reason}", now)
            return
        current.failures += 1
        what = f"round {event.round} cannot be summed: {event.reason}"
        self.event("round_failed", f"Attempt {event.attempt} of {what}", "error")
        if current.failures < MAX_FAILED_ROUNDS:
            self.out += self.cycle.retry(current.hosts, event.reason, now)
        elif self.phase == "forming":
            self.forming.over(self, what, now)
        else:
            what = f"{what}, {current.failures} times in a row"
            self.save_and_stop(SaveReason.REPEATED_FAILURE, what, now)

    def checkpoint_written(self, event: CheckpointWritten) -> None:
        """The file is on disk, or the end gets worse."""
        self.out += self.checkpoints.done(event)
        if event.error and self.ending is not None:
            self.ending.worsen(f"its checkpoint could not be written: {event.error}")

    def evaluated(self, rank: int, message: EvalResult, now: float) -> None:
        """A rank scored the consensus, and is free for its batches again."""
        self.out += self.evaluations.result(rank, message)
        self.training.watch.back(rank, now)

    def excuse_to_score(self, rank: int) -> None:
        """A rank is sent to score: that may keep it from its batches for a while."""
        self.training.watch.excuse(rank, self.errands.patience("evaluation", self.config.stall_seconds))

    def stop(self, by: str) -> bool:
        """Finish the window, save, end. False when the run is ending already."""
        if self.ending is not None or self.stopping:
            return False
        self.stopping = by
        when = "its cohort is back and has saved" if self.phase == "forming" else "the round at hand is closed"
        text = f"{by} asked the run to stop: it ends when {when}"
        self.event("stop_requested", text, "warning")
        return True

    def save_soon(self, by: str) -> list[Effect]:
        """Save when the round at hand, or the first of a cohort that comes back, is closed, and go on."""
        if self.phase == "forming" and not self.forming.holds_work:
            return [Refused("nothing_to_save", "Nothing has been trained yet.")]
        if self.ending is not None or self.stopping:
            return [Refused("already_ending", "The run is ending, and saves before it does.")]
        return self.checkpoints.ask(by)

    def save_and_stop(self, why: SaveReason, what: str, now: float) -> None:
        """End as failed, with the last consensus saved (behaviour J7). A round that is not summed is dropped; one that
        is committed settles first or, when it is that which stalls, counts, whoever has not adopted it. Who hangs is
        not waited for: nobody is scored any more."""
        reason = f"{why.label}: {what}"
        if self.ending is not None:
            self.ending.worsen(reason)
        else:
            self.end_after("failed", reason, why, now)
        if self.cycle.phase == "pending":
            self.out += self.cycle.abandon(reason)
        elif self.cycle.open is not None and why is SaveReason.REDUCE_STALL:
            self._close_round(now)
        if self.ending is not None and self.cycle.open is None:
            self.ending.deadline = now

    def fail(self, reason: str, now: float, level: str = "error") -> None:
        """End now, without another round; whoever lives is told why."""
        self.out += self.cycle.abandon(reason)
        self.event("run_failed", reason, level)
        self.finish("failed", reason, now)

    # -------------------------------------------------------------------------------------------- moving on

    def advance(self, now: float) -> None:
        """Move on as far as the state allows; each step may enable the next."""
        self.bounds.watch(now)
        while self.end is None and self._step(now):
            pass
        self.out += self.recovery.observe(self, now)

    @property
    def leaving(self) -> bool:
        """Whether ranks and hosts may go without that being a loss."""
        return self.end is not None or (self.ending is not None and self.ending.step == "leaving")

    def check(self) -> None:
        """Assert the invariants of the formed world."""
        self.world.check()
        self.cycle.check(self.world.alive())
        self.training.check()
        self.checkpoints.check()
        self.plane.check()
        assert (self.end is not None) == (self.phase in END_PHASES), f"end {self.end} in phase {self.phase}"
        assert len(self.deaths) == len(self.world.dead()), "a death without its record"
        waited = {rank for rank in self.evaluations.pending.values() if not self.world.lives(rank)}
        assert not waited or self.end is not None, f"evaluations wait for the dead {waited}"

    def event(self, kind: str, text: str, level: str = "info", **data: Any) -> None:
        """Write down what an operator should be able to read later."""
        self.out.append(Record("events", {"kind": kind, "level": level, "text": text, "data": data}, durable=True))

    def _step(self, now: float) -> bool:
        """One step; whether it changed anything."""
        if self.cycle.settled(self.world.lives):
            return self._close_round(now)
        if self.cycle.open is not None:
            return False
        if self.ending is not None:
            return step_ending(self, now)
        if self.phase == "forming":
            return self._step_forming(now)
        return self._step_window(now)

    def _step_forming(self, now: float) -> bool:
        if not self.forming.complete or not self.forming.begin(self, now) or not self.plane.prepare(now):
            return False
        forming = self.forming
        source, first = "rank 0 hands out its parameters", forming.first_round
        if self.resume is not None:
            source, first = f"they start from {self.resume.where}", max(first, self.resume.round + 1)
        self.cycle.streams.start = (forming.root, forming.brings)
        self.cycle.first_round = first
        self.event("cohort_formed", f"All {len(self.world.alive())} ranks are ready; {source}")
        self.out += self.cycle.start(self.world.alive_by_host(), now)
        return True

    def _step_window(self, now: float) -> bool:
        if not self.training.window_finished():
            return False
        if self.training.worked():
            self.out += self.cycle.start(self.world.alive_by_host(), now)
        elif self.stopping:
            self.end_after("done", f"Stopped by {self.stopping}", SaveReason.GRACEFUL_SHUTDOWN, now)
        else:
            self.out += self.training.deal(now)
        return True

    def _close_round(self, now: float) -> bool:
        opened = self.cycle.close()
        assert opened.finished is not None
        hashes = {rank: ack.params_hash for rank, ack in opened.acks.items() if ack.params_hash}
        if len(set(hashes.values())) > 1:
            self.fail(f"Replicas differ after round {opened.round}: {hashes}. The consensus cannot be trusted.", now)
        elif opened.round == INITIAL_ROUND:
            self._begin_training(now)
        else:
            self.out += self.training.close_round(opened, self._slack_ahead(opened.round), now)
            self._after_round(opened.round, now)
        return True

    def _begin_training(self, now: float) -> None:
        self.started_at = now
        self._move("training", "every rank holds the same parameters")
        for seat in self.world.hosts.values():
            seat.state = "training" if seat.state == "forming" else seat.state
        if self.forming.last_words:
            self.end_after("interrupted", self.forming.last_words, SaveReason.MAX_FAILURE_EXCEEDED, now)
            return
        if self.stopping and self.forming.brings is not None and not self.training.epoch_done:
            why = f"Stopped by {self.stopping} after round {self.forming.brings}"
            self.end_after("done", why, SaveReason.GRACEFUL_SHUTDOWN, now)
            return
        if self.training.pool is None:
            self.training.open_epoch(now)
        if self.training.epoch_done:  # its last round was committed, and the controller killed before it was closed
            assert self.resume is not None, "an epoch is over before a round was"
            self._after_round(self.resume.round, now)
            return
        self.out += self.training.deal(now)

    def _after_round(self, round_number: int, now: float) -> None:
        training = self.training
        due = self._save_due(round_number)
        if training.epoch_done:
            self._close_epoch(round_number, now)
        if self.ending is not None:
            # It began between the commit and the last acknowledgement: nothing is dealt, and its clock starts here.
            self.ending.deadline = now + self.config.stall_seconds
            return
        if training.all_epochs_done:
            self.end_after(*outcome(training, self.refusals.latest), SaveReason.GRACEFUL_SHUTDOWN, now)
        elif self.stopping and training.may_stop():
            why = f"Stopped by {self.stopping} after round {round_number}"
            self.end_after("done", why, SaveReason.GRACEFUL_SHUTDOWN, now)
        else:
            if training.pool is None:
                training.open_epoch(now)
            if due:
                self.save(due, now)
            self.out += training.deal(now, draining=bool(self.stopping))

    def _close_epoch(self, round_number: int, now: float) -> None:
        training = self.training
        epoch = training.epoch
        self.out.append(training.close_epoch(now))
        self.out.append(Record("runs", progress_row(self, round_number), durable=True))
        rank = self.errands.rank()
        if rank is not None:
            self.excuse_to_score(rank)
            self.out += self.evaluations.ask(epoch, rank)

    def _save_due(self, round_number: int) -> str:
        """Why a checkpoint is due at this round's close. The epoch that it completes is still to be closed."""
        closes = self.training.epoch_done
        return self.checkpoints.due(round_number, len(self.training.samples_accepted) + closes, closes)

    def _slack_ahead(self, round_number: int) -> dict[int, float]:
        """ms that the next window will miss of ranks: one that opens an epoch begins with an evaluation, one that
        follows a save with handing over."""
        evaluates = self.training.epoch_done and self.training.epoch_follows and not self.stopping
        saves = bool(self._save_due(round_number)) and not self.stopping
        return self.errands.slack_ms(("evaluation",) * evaluates, everybody=("checkpoint",) * saves)

    # ------------------------------------------------------------------------------------------------ ending

    def end_after(self, phase: str, reason: str, save: SaveReason, now: float) -> None:
        """Begin to end: score, save, leave."""
        self.ending = Ending(phase=phase, reason=reason, save=save, deadline=now + self.config.stall_seconds)
        text = f"{reason.removesuffix('.')}: scoring and saving the last consensus"
        self.event("run_ending", text, save_reason=save.label)

    def save(self, reason: str, now: float) -> None:
        """Begin a checkpoint of what every replica holds now."""
        scoring = self.evaluations.pending.values()
        self.out += self.checkpoints.begin(reason, checkpoint_manifest(self, reason, now), now, busy=scoring)

    def finish(self, phase: str, reason: str, now: float) -> None:
        """The one place where a run ends."""
        self.phase, self.ended_at = phase, now
        self.end = End(phase, reason)
        self.out += self.recovery.conclude(self)
        row = progress_row(self, self.cycle.next_round - 1) if phase != "interrupted" else {}
        row |= {"phase": phase, "reason": reason, "stopped_by": self.stopping}
        self.event("run_ended", f"The run is {phase}: {reason}", "info" if phase == "done" else "error")
        self.out.append(Record("runs", row, durable=True))
        if phase == "failed":
            self.out += [SendRank(rank, Shutdown(reason=reason)) for rank in self.world.alive()]
        for seat in self.world.hosts.values():
            if seat.state != "lost":
                self.out += farewell(seat, phase, reason)
        self.out.append(self.end)

    # ------------------------------------------------------------------------------------------------- parts

    def _move(self, phase: str, reason: str) -> None:
        self.phase = phase
        self.out.append(Record("runs", {"phase": phase, "reason": ""}, durable=True))
        self.event(f"phase_{phase}", f"The run is now {phase}: {reason}")
