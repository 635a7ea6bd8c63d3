"""Saved state in parts: up beside the training, in a thread; down before it, in the rank's own.

Never more than ``PARTS_AHEAD`` parts are under way, so that a rank's other news is not stuck behind a large state.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Protocol

from wire.errands import PARTS_AHEAD
from wire.messages import FetchState, LocalState, Message, SavedState, StateTaken
from worker.local_state import Snapshot
from worker.rank_link import LinkLost


class Upward(Protocol):
    """What handing over needs of the rank's link."""

    taken: queue.SimpleQueue[StateTaken | LinkLost]
    """grants, as they come in: nobody else reads them"""

    def send(self, message: Message) -> None: ...


class Handover:
    """Sends one state after the other. A new one takes the place of one that is still being sent."""

    def __init__(self, link: Upward) -> None:
        self._link = link
        self._current = 0

    def begin(self, checkpoint: int, snapshot: Snapshot, *, elapsed_ms: float, error: str) -> None:
        """Send a state; returns at once."""
        self._current = checkpoint
        arguments = (checkpoint, snapshot, elapsed_ms, error)
        threading.Thread(target=self._send, args=arguments, name="hand over", daemon=True).start()

    def drop(self) -> None:
        """Nobody waits for the state any more."""
        self._current = 0
        self._link.taken.put(StateTaken(checkpoint=0, part=0))

    def _send(self, checkpoint: int, snapshot: Snapshot, elapsed_ms: float, error: str) -> None:
        parts, taken = snapshot.parts, 0
        with contextlib.suppress(LinkLost):  # the training thread finds out by itself, and says so
            for part, data in enumerate(snapshot.cut()):
                while part - taken >= PARTS_AHEAD:
                    granted = self._link.taken.get()
                    if isinstance(granted, LinkLost):
                        return
                    taken += granted.checkpoint == checkpoint
                    if self._current != checkpoint:
                        return
                if self._current != checkpoint:
                    return
                message = LocalState(checkpoint=checkpoint, part=part, parts=parts, data=data)
                if part == 0:
                    message = LocalState(checkpoint, part, parts, data, elapsed_ms=elapsed_ms, error=error)
                self._link.send(message)


class Fetching:
    """A saved state on its way down: what to ask for, and what came. Pure."""

    def __init__(self) -> None:
        self.own = True
        self.body: bytearray | None = None
        """whole once ``done``; none when nothing was saved"""
        self.done = False
        self._parts: dict[int, bytes] = {}
        self._asked = 0

    def first(self) -> list[FetchState]:
        """What to ask for to begin with."""
        self._asked = 1
        return [FetchState(part=0)]

    def take(self, saved: SavedState) -> list[FetchState]:
        """A part came; answers what to ask for next."""
        if saved.parts == 0:
            self.done = True
            return []
        self.own = saved.own
        self._parts.setdefault(saved.part, saved.data)
        if len(self._parts) == saved.parts:
            self.body = bytearray()
            for part in range(saved.parts):
                self.body += self._parts.pop(part)
            self.done = True
            return []
        upto = min(saved.parts, len(self._parts) + PARTS_AHEAD)
        wanted = [FetchState(part=part) for part in range(self._asked, upto)]
        self._asked = max(self._asked, upto)
        return wanted
