"""What a served run does about checkpoints: states in, bundles to the disk, states out to the ranks of a resumed run.

The disk has a thread of its own; a rank may send its next part when the last one is written.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from backend.core.vocabulary import CheckpointWritten, KeepState, OpenCheckpoint, SendState, WriteCheckpoint
from backend.runtime.bundle import read_part, state_file
from backend.runtime.checkpoint import CheckpointWriter, Committed
from wire.errands import PART_BYTES, PARTS_AHEAD
from wire.messages import Message, SavedState, StateTaken

MAX_UNTAKEN = 2 * PARTS_AHEAD
"""parts of one rank that wait for the disk: twice what it may have under way"""

SaveEffect = OpenCheckpoint | KeepState | WriteCheckpoint | SendState

log = logging.getLogger(__name__)


class Saver:
    """Performs the core's save effects. Every method is called on the event loop's thread and returns at once."""

    def __init__(
        self,
        writer: CheckpointWriter,
        committed: Callable[[], Committed],
        send: Callable[[int, Message], None],
        written: Callable[[CheckpointWritten], None],
        flooded: Callable[[int], None],
        recorded: Callable[[], None],
    ) -> None:
        """``send`` takes a rank and a message; ``written`` is called on the loop's thread. ``flooded`` hears of a
        rank that goes on sending parts that nobody granted it: they would wait in memory for the disk. ``recorded``
        waits, in the disk's thread, until what the checkpoint rests on is in the database: the bundle may be found
        without it."""
        self._writer = writer
        self._committed = committed
        self._send = send
        self._written = written
        self._flooded = flooded
        self._untaken: Counter[int] = Counter()
        """parts that wait for the disk, by rank"""
        self._recorded = recorded
        self._loop = asyncio.get_running_loop()
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def perform(self, effect: SaveEffect, number: int = 0) -> None:
        """Do one. ``number`` is the checkpoint that a resumed run started from."""
        match effect:
            case OpenCheckpoint(checkpoint=checkpoint):
                self._submit(self._writer.open, checkpoint, self._committed())
            case KeepState():
                self._keep(effect)
            case WriteCheckpoint():
                self._submit(self._recorded)
                future = self._submit(self._writer.write, effect)
                future.add_done_callback(lambda done: self._later(self._written, done.result()))
            case SendState():
                self._send_state(effect, number)

    def _keep(self, effect: KeepState) -> None:
        rank = effect.rank
        if self._untaken[rank] >= MAX_UNTAKEN:
            self._flooded(rank)
            return
        self._untaken[rank] += 1
        kept = self._submit(self._writer.keep, effect.checkpoint, rank, effect.data)
        kept.add_done_callback(lambda _: self._later(self._taken, effect))

    def _taken(self, effect: KeepState) -> None:
        self._untaken[effect.rank] -= 1
        self._send(effect.rank, StateTaken(checkpoint=effect.checkpoint, part=effect.part))

    def close(self) -> None:
        """The run is over: what was begun and not written is removed."""
        self._submit(self._writer.drop)
        self._disk.shutdown(wait=False)

    def _send_state(self, effect: SendState, number: int) -> None:
        path = self._writer.place.bundle(number) / state_file(effect.saved_rank)

        def send(done: Future[tuple[int, bytes]]) -> None:
            error = done.exception()
            if error is not None:
                # Without it the optimizer begins anew, which the rank says; a run that waits for ever would be worse.
                log.error("the state saved of rank %d cannot be read: %s", effect.saved_rank, error)
            parts, data = done.result() if error is None else (0, b"")
            saved = SavedState(part=effect.part, parts=parts, data=data, own=effect.own)
            self._later(self._send, effect.rank, saved)

        self._submit(read_part, path, effect.part, PART_BYTES).add_done_callback(send)

    def _submit(self, act: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._disk.submit(act, *arguments)

    def _later(self, act: Callable[..., None], *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(act, *arguments)
