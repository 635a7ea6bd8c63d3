"""What the loop shares with the planes that carry its rounds out: the link, the options, and one rank's desk."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from wire.messages import Message, StateTaken, SyncAck
from worker.adoption import AdoptResult
from worker.control import Control
from worker.rank_link import LinkLost
from worker.trainer import Trainer
from worker.window import Window
from worker.write_back import WriteBack


class Link(Protocol):
    """What the loop needs of its link."""

    taken: queue.SimpleQueue[StateTaken | LinkLost]

    def send(self, message: Message) -> None: ...

    def poll(self) -> list[Message]: ...

    def wait(self) -> Message: ...


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


@dataclass(frozen=True, slots=True)
class Desk:
    """What a round needs of the rest of the rank."""

    control: Control
    link: Link
    trainer: Trainer
    window: Window
    options: LoopOptions

    def acknowledge(self, round_number: int, moved: AdoptResult, started: float) -> SyncAck:
        """The report of a round whose adoption began at ``started``."""
        window, now = self.window, self.window.clock()
        load_ms = (now - started) * 1000
        since_request_ms = (now - window.requested_at) * 1000
        return SyncAck(
            round=round_number,
            divergence=moved.divergence,
            pre_norm=moved.pre_norm,
            post_norm=moved.post_norm,
            params_hash=moved.consensus_hash,
            pack_ms=window.pack_ms,
            load_ms=load_ms,
            wait_ms=window.wait_ms,
            reduce_ms=window.pack_ms + load_ms if self.control.overlap else since_request_ms,
            lr=self.trainer.learning_rate(),
        )
