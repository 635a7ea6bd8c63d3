"""States on their way to a slow disk: what waits in memory is bounded, and the grants are the bound."""

from __future__ import annotations

import threading
from pathlib import Path

from bundles import noon
from runtime_site import eventually

from backend.core.vocabulary import KeepState
from backend.runtime.bundle import CheckpointPlace
from backend.runtime.checkpoint import CheckpointWriter, Committed
from backend.runtime.saver import MAX_UNTAKEN, Saver
from wire.messages import Message


class SlowDisk(CheckpointWriter):
    """Keeps nothing before it is told to."""

    release = threading.Event()

    def keep(self, checkpoint: int, rank: int, data: bytes) -> None:
        assert self.release.wait(20)


async def test_a_rank_that_sends_what_nobody_granted_it_is_lost_before_it_fills_memory(tmp_path: Path) -> None:
    sent: list[tuple[int, Message]] = []
    lost: list[int] = []
    SlowDisk.release.clear()
    disk = SlowDisk(CheckpointPlace(tmp_path, 1), noon)
    saver = Saver(
        disk, lambda: Committed(None), lambda *what: sent.append(what), lambda _: None, lost.append, lambda: None
    )
    for part in range(MAX_UNTAKEN + 5):
        saver.perform(KeepState(1, 0, part, b"x"))
    saver.perform(KeepState(1, 1, 0, b"x"))
    assert lost == [0] * 5, "and nobody else"
    SlowDisk.release.set()
    await eventually(lambda: len(sent) == MAX_UNTAKEN + 1, "every part that was taken to be granted")
    saver.perform(KeepState(1, 0, MAX_UNTAKEN, b"x"))
    await eventually(lambda: len(sent) == MAX_UNTAKEN + 2, "a part that was granted to be taken")
    assert lost == [0] * 5
    saver.close()
