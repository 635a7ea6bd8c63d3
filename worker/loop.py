"""The training loop, top to bottom: hear what the controller said, do it, train a batch, tell.

Torch runs here, on the process's main thread; the link has a thread of its own (``rank_link``), and what
the protocol asks for is decided in ``control``, which is pure.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from wire import failpoints
from wire.messages import (
    BatchDone,
    EvalResult,
    Exiting,
    Message,
    RankReady,
    SavedState,
    SnapshotReady,
    StartChunk,
    StateTaken,
    SyncAck,
)
from wire.ranges import Ranges
from worker.arena import Arena
from worker.arena_file import ConsensusGone
from worker.control import (
    Action,
    Adopt,
    Back,
    Control,
    Leave,
    LookAhead,
    Pack,
    Resend,
    Score,
    SendLocal,
    SetClock,
    State,
    Train,
)
from worker.data import SampleFeed
from worker.handover import Fetching, Handover
from worker.job import describe
from worker.local_state import capture, restore
from worker.progress import ProgressBlock
from worker.rank_link import LinkLost
from worker.trainer import Trainer
from worker.write_back import WriteBack


class Link(Protocol):
    """What the loop needs of its link."""

    taken: queue.SimpleQueue[StateTaken | LinkLost]

    def send(self, message: Message) -> None: ...

    def poll(self) -> list[Message]: ...

    def wait(self) -> Message: ...


@dataclass(frozen=True, slots=True)
class Workload:
    """The job, built on this rank's device."""

    trainer: Trainer
    feed: SampleFeed
    arena: Arena
    eval_dataset: Any
    """none when the job has no evaluation"""


@dataclass(slots=True)
class WindowTimes:
    """Moments of the open window, in seconds of the loop's clock."""

    worked_until: float
    """end of the last batch, evaluation or round: from here on the rank waits"""
    requested_at: float = 0.0
    idle_ms: float = 0.0
    """where rounds and work overlap: waited for work since the arena was packed last"""
    wait_ms: float = 0.0
    pack_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """How this rank runs the loop. ``clock`` gives seconds, ``sleep`` waits as many."""

    job_dir: Path
    verify_consensus: bool = True
    write_back: WriteBack = field(default_factory=WriteBack)
    """for the progress that was made while a round was open"""
    emulate_ms_per_batch: float | None = None
    resumed: bool = False
    """this rank's saved state is fetched before anything else"""
    clock: Callable[[], float] = field(default=time.perf_counter)
    sleep: Callable[[float], None] = field(default=time.sleep)


class TrainingLoop:
    """One rank's life between ``RankReady`` and the order to leave."""

    def __init__(
        self, control: Control, link: Link, workload: Workload, progress: ProgressBlock, options: LoopOptions
    ) -> None:
        self.control = control
        self.link = link
        self.trainer = workload.trainer
        self.feed = workload.feed
        self.arena = workload.arena
        self.eval_dataset = workload.eval_dataset
        self.progress = progress
        self.options = options
        self.clock = options.clock
        self._times = WindowTimes(worked_until=self.clock())
        self._batches: Iterator[tuple[Any, int]] = iter(())
        self._samples_left = 0
        self._global_step = 0
        self._still: Ranges = []
        self._leave: Leave | None = None
        self._handover = Handover(link)

    def run(self) -> Leave:
        """Serve until told to leave, and return that order. Raises what the job raises, ``LinkLost``,
        ``IllegalMessage``."""
        notes = self._take_up() if self.options.resumed else []
        if notes is None:
            assert self._leave is not None
            return self._leave
        self._ready(notes)
        while self._leave is None:
            # What did the controller say? With a chunk in work nobody waits for an answer.
            for message in self._messages():
                self._obey(self.control.receive(message))

            # One batch of the chunk, and the news of it.
            if self.control.state is State.WORKING:
                self._train_one_batch()

                # The chunk is worked off: report it, and wait for the round.
                if self._samples_left == 0:
                    self._finish_chunk()
        return self._leave

    def _ready(self, notes: list[str], held_round: int | None = None, held_hash: str = "") -> None:
        ready = RankReady(
            layout_hash=self.arena.layout_hash,
            params_elements=self.arena.params_elements,
            buffers_elements=self.arena.buffers_elements,
            notes=notes,
            held_round=held_round,
            held_hash=held_hash,
        )
        self.link.send(ready)
        self._enter(State.IDLE)

    # ------------------------------------------------------------------------------------------- training

    def _train_one_batch(self) -> None:
        self._enter(State.WORKING)
        started = self.clock()
        batch, samples = next(self._batches)
        batch = self.trainer.move(batch)
        loaded = self.clock()
        loss = self.trainer.step(batch)
        self._pad(loaded)
        done = self.clock()

        self._samples_left -= samples
        self._times.worked_until = done
        self.control.step_done()
        self.progress.count(self.control.steps)
        self._set_clock(self._global_step + 1)
        self.link.send(
            BatchDone(
                batch_ms=(done - loaded) * 1000,
                data_ms=(loaded - started) * 1000,
                steps=self.control.steps,
                samples=samples,
                loss=loss,
            )
        )

    def _pad(self, loaded: float) -> None:
        """Make the step last at least as long as the device that this rank plays would take."""
        wanted = self.options.emulate_ms_per_batch
        if wanted is None:
            return
        while (missing := wanted / 1000 - (self.clock() - loaded)) > 0:
            self.options.sleep(missing)

    def _finish_chunk(self) -> None:
        done, actions = self.control.chunk_done()
        self.progress.note_device_peak(self.trainer.peak_bytes())
        self.link.send(done)
        self._enter(State.IDLE)
        self._obey(actions)

    # -------------------------------------------------------------------------------------------- obeying

    def _messages(self) -> list[Message]:
        if self.control.state is State.WORKING:
            return self.link.poll()
        return [self.link.wait()]

    def _obey(self, actions: list[Action]) -> None:  # noqa: C901 one match, a line a case
        for action in actions:
            match action:
                case SetClock(global_step):
                    self._set_clock(global_step)
                case Train(chunk):
                    self._begin_chunk(chunk)
                case Pack(ready):
                    failpoints.identify(round=ready.round, attempt=ready.attempt)
                    self._pack()
                    self._declare(ready)
                case Resend(ready):
                    self._declare(ready)
                case LookAhead() | Adopt():
                    self._look_ahead(action) if isinstance(action, LookAhead) else self._adopt(action)
                case Score(epoch):
                    self._evaluate(epoch)
                case SendLocal(checkpoint):
                    self._send_local(checkpoint)
                case Back():
                    self._go_back(action)
                case Leave():
                    self._say_goodbye(action)

    def _begin_chunk(self, chunk: StartChunk) -> None:
        self._count_idle(self.clock())
        self.trainer.job.epoch = chunk.epoch
        self._batches = self.feed.batches(chunk.epoch, chunk.offset, chunk.size)
        self._samples_left = chunk.size

    def _set_clock(self, global_step: int) -> None:
        """The schedule's clock only moves forward: to what the cohort did, and by one with each batch of
        our own."""
        self._global_step = max(self._global_step, global_step)
        self.trainer.advance(self._global_step)

    # ------------------------------------------------------------------------------------------ the round

    def _pack(self) -> None:
        failpoints.hit("rank.pack")
        self._enter(State.REDUCING)
        now = self.clock()
        self._count_idle(now)
        self._times.requested_at = now
        self._times.wait_ms = self._times.idle_ms + (now - self._times.worked_until) * 1000
        self._times.idle_ms = 0.0
        self._still = self.arena.pack()
        packed = self._times.worked_until = self.clock()
        self._times.pack_ms = (packed - now) * 1000

    def _declare(self, ready: SnapshotReady) -> None:
        failpoints.identify(round=ready.round, attempt=ready.attempt)
        failpoints.hit("rank.snapshot.before")
        self.link.send(msgspec.structs.replace(ready, still=self._still))
        failpoints.hit("rank.snapshot.after")

    def _look_ahead(self, order: LookAhead) -> None:
        """While the others' work streams in, so that less is left to do once it is committed."""
        hashed = self.options.verify_consensus
        with contextlib.suppress(ConsensusGone):  # the commit will not come either
            self.arena.look_ahead(order.consensus, order.stop, fresh=order.fresh, hashed=hashed)

    def _adopt(self, order: Adopt) -> None:
        failpoints.hit("rank.adopt", round=order.round)
        started = self.clock()
        self._count_idle(started)
        ahead = self.options.write_back if order.ahead else None
        try:
            moved = self.arena.adopt(
                order.consensus,
                params=order.params,
                buffers=order.buffers,
                ahead=ahead,
                hashed=self.options.verify_consensus,
                looked=order.looked,
            )
        except ConsensusGone as gone:  # Rewind is on its way; were it not, the round's ceiling would end the run
            print(f"round {order.round} is not adopted: {gone}", file=sys.stderr, flush=True)
            self.control.not_adopted()
            self._rest()
            return
        if order.restart:
            self.trainer.restart()
        now = self.clock()
        load_ms = (now - started) * 1000
        since_request_ms = (now - self._times.requested_at) * 1000
        ack = SyncAck(
            round=order.round,
            divergence=moved.divergence,
            pre_norm=moved.pre_norm,
            post_norm=moved.post_norm,
            params_hash=moved.consensus_hash,
            pack_ms=self._times.pack_ms,
            load_ms=load_ms,
            wait_ms=self._times.wait_ms,
            reduce_ms=self._times.pack_ms + load_ms if self.control.overlap else since_request_ms,
            lr=self.trainer.learning_rate(),
        )
        self._rest()
        self.link.send(ack)
        failpoints.hit("rank.ack.after", round=order.round)

    def _count_idle(self, now: float) -> None:
        """Where rounds and work overlap, waiting for work is spread over the window; elsewhere it ends in the round."""
        if self.control.overlap:
            self._times.idle_ms += (now - self._times.worked_until) * 1000
            self._times.worked_until = now

    def _rest(self) -> None:
        """Whatever was in the way of training is over; from here on the rank works or waits."""
        self._times.worked_until = self.clock()
        self._enter(State.IDLE)

    # ------------------------------------------------------------------------------------ errands and the end

    def _go_back(self, order: Back) -> None:
        """The controller was lost: hold what the last round left, and wait for whoever takes the cohort up again. What
        the optimizer has learned since stays with it."""
        self._batches, self._samples_left = iter(()), 0
        self._handover.drop()
        consensus_hash = self.arena.rewind()
        if order.restart:
            self.trainer.restart()
        self._times = WindowTimes(worked_until=self.clock())
        self._ready([], order.round, consensus_hash)

    def _evaluate(self, epoch: int) -> None:
        self._enter("evaluating")
        started = self.clock()
        metrics: dict[str, float] = {}
        error = ""
        try:
            if self.eval_dataset is None:
                error = "the job has no eval_dataset"
            else:
                metrics = self.trainer.evaluate(self.eval_dataset, self.feed.batch_size)
        except Exception as failure:  # an evaluation that fails must not cost the cohort a rank
            error = describe(failure, self.options.job_dir)
        elapsed_ms = (self.clock() - started) * 1000
        self._rest()
        self.link.send(EvalResult(epoch=epoch, metrics=metrics, elapsed_ms=elapsed_ms, error=error))

    def _send_local(self, checkpoint: int) -> None:
        self._enter("saving")
        started = self.clock()
        snapshot, error = capture(self.trainer, self.arena.local_state())
        elapsed_ms = (self.clock() - started) * 1000
        self._handover.begin(checkpoint, snapshot, elapsed_ms=elapsed_ms, error=error)
        self._rest()

    def _take_up(self) -> list[str] | None:
        """Fetch the saved state and go on from it; what could not be taken up, in sentences. None when told to leave
        meanwhile."""
        fetching = Fetching()
        wanted = fetching.first()
        while not fetching.done:
            for request in wanted:
                self.link.send(request)
            message = self.link.wait()
            wanted = fetching.take(message) if isinstance(message, SavedState) else []
            if not isinstance(message, SavedState):
                self._obey(self.control.receive(message))
            if self._leave is not None:
                return None
        if fetching.body is None:
            return ["nothing of it was saved, so its optimizer begins anew"]
        return restore(fetching.body, self.trainer, own=fetching.own)

    def _say_goodbye(self, order: Leave) -> None:
        self._leave = order
        if order.fenced:
            return
        with contextlib.suppress(LinkLost):  # told to leave: it does not matter who is still there to hear it
            self.link.send(Exiting(steps=self.control.steps))
        self._enter("exited")

    def _enter(self, state: str) -> None:
        self.progress.enter(state, time.monotonic_ns())
