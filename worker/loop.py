"""The training loop, top to bottom: hear what the controller said, do it, train a batch, tell.

Torch runs here, on the process's main thread; the link has a thread of its own (``rank_link``), and what
the protocol asks for is decided in ``control``, which is pure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from wire.messages import BatchDone, EvalResult, Exiting, Message, RankReady, SavedState, StartChunk
from worker.actions import (
    Action,
    Adopt,
    AdoptSync,
    Back,
    DropSession,
    JoinSession,
    Leave,
    LookAhead,
    MakeSessionId,
    Pack,
    Resend,
    Score,
    SendLocal,
    SetClock,
    Sync,
    Train,
)
from worker.arena import Arena
from worker.collective import Collective
from worker.collective_plane import CollectivePlane
from worker.control import Control, State
from worker.data import SampleFeed
from worker.desk import Desk, Link, LoopOptions
from worker.flat import FlatModel
from worker.handover import Fetching, Handover
from worker.job import describe
from worker.local_state import capture, restore
from worker.progress import ProgressBlock
from worker.rank_link import LinkLost
from worker.sessions import Sessions
from worker.stream_plane import StreamPlane
from worker.trainer import Trainer
from worker.window import Window

__all__ = ["Link", "LoopOptions", "TrainingLoop", "Workload"]


@dataclass(frozen=True, slots=True)
class Workload:
    """The job, built on this rank's device."""

    trainer: Trainer
    feed: SampleFeed
    arena: Arena
    eval_dataset: Any
    """none when the job has no evaluation"""
    flat: FlatModel | None = None
    """where ranks sum among themselves: what they sum"""


class TrainingLoop:
    """One rank's life between ``RankReady`` and the order to leave. ``sessions`` are for the collective modes."""

    def __init__(
        self,
        control: Control,
        link: Link,
        workload: Workload,
        progress: ProgressBlock,
        options: LoopOptions,
        sessions: Sessions | None = None,
    ) -> None:
        self.control = control
        self.link = link
        self.trainer = workload.trainer
        self.feed = workload.feed
        self.arena = workload.arena
        self.eval_dataset = workload.eval_dataset
        self.options = options
        self.clock = options.clock
        self.window = Window(progress, options.clock, overlap=control.overlap)
        desk = Desk(control, link, self.trainer, self.window, options)
        self._streams = StreamPlane(desk, self.arena)
        self._collective: CollectivePlane | None = None
        if sessions is not None:
            assert workload.flat is not None, "who sums among ranks has a flat model"
            self._collective = CollectivePlane(desk, sessions, Collective(workload.flat, gamma=control.gamma))
        self._batches: Iterator[tuple[Any, int]] = iter(())
        self._samples_left = 0
        self._global_step = 0
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
        self.window.enter(State.IDLE)

    # ------------------------------------------------------------------------------------------- training

    def _train_one_batch(self) -> None:
        self.window.enter(State.WORKING)
        started = self.clock()
        batch, samples = next(self._batches)
        batch = self.trainer.move(batch)
        loaded = self.clock()
        loss = self.trainer.step(batch)
        self._pad(loaded)
        done = self.clock()

        self._samples_left -= samples
        self.window.worked_until = done
        self.control.step_done()
        self.window.count(self.control.steps)
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
        self.window.note_device_peak(self.trainer.peak_bytes())
        self.link.send(done)
        self.window.enter(State.IDLE)
        self._obey(actions)

    # -------------------------------------------------------------------------------------------- obeying

    def _messages(self) -> list[Message]:
        if self.control.state is State.WORKING:
            return self.link.poll()
        return [self.link.wait()]

    def _obey(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SetClock(global_step):
                    self._set_clock(global_step)
                case Train(chunk):
                    self._begin_chunk(chunk)
                case Pack() | Resend() | LookAhead() | Adopt():
                    self._stream(action)
                case MakeSessionId() | JoinSession() | DropSession() | Sync() | AdoptSync():
                    assert self._collective is not None, "control lets them pass in collective modes only"
                    self._collective.obey(action)
                case Score(epoch):
                    self._evaluate(epoch)
                case SendLocal():
                    self._send_local(action)
                case Back():
                    self._go_back(action)
                case Leave():
                    self._say_goodbye(action)

    def _stream(self, action: Pack | Resend | LookAhead | Adopt) -> None:
        self._streams.obey(action)
        if self._collective is not None and isinstance(action, Adopt):
            self._collective.collective.begin()  # the initial broadcast is the last that comes this way

    def _begin_chunk(self, chunk: StartChunk) -> None:
        self.window.count_idle(self.clock())
        self.trainer.job.epoch = chunk.epoch
        self._batches = self.feed.batches(chunk.epoch, chunk.offset, chunk.size)
        self._samples_left = chunk.size

    def _set_clock(self, global_step: int) -> None:
        """The schedule's clock only moves forward: to what the cohort did, and by one with each batch of
        our own."""
        self._global_step = max(self._global_step, global_step)
        self.trainer.advance(self._global_step)

    # ------------------------------------------------------------------------------------ errands and the end

    def _go_back(self, order: Back) -> None:
        """The controller was lost: hold what the last round left, and wait for whoever takes the cohort up again. What
        the optimizer has learned since stays with it."""
        self._batches, self._samples_left = iter(()), 0
        self._handover.drop()
        consensus_hash = self.arena.rewind()
        if order.restart:
            self.trainer.restart()
        self.window.reset()
        self._ready([], order.round, consensus_hash)

    def _evaluate(self, epoch: int) -> None:
        self.window.enter("evaluating")
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
        self.window.rest()
        self.link.send(EvalResult(epoch=epoch, metrics=metrics, elapsed_ms=elapsed_ms, error=error))

    def _send_local(self, order: SendLocal) -> None:
        self.window.enter("saving")
        started = self.clock()
        consensus = self._collective.collective.consensus() if order.consensus and self._collective else None
        snapshot, error = capture(self.trainer, self.arena.local_state(), consensus)
        elapsed_ms = (self.clock() - started) * 1000
        self._handover.begin(order.checkpoint, snapshot, elapsed_ms=elapsed_ms, error=error)
        self.window.rest()

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
        if self._collective is not None:
            self._collective.close()
        if order.fenced:
            return
        with contextlib.suppress(LinkLost):  # told to leave: it does not matter who is still there to hear it
            self.link.send(Exiting(steps=self.control.steps))
        self.window.enter("exited")
