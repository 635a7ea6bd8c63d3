"""All that one websocket still has to send, in order and bounded; one task writes it.

Posting never waits, so a peer that doesn't read can't hold up the scheduler: its link ends instead (behaviour M7, M31).
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from backend.runtime.errors import LinkEnded
from backend.runtime.peer import Peer
from wire.codes import CloseCode
from wire.errors import LocalProtocolError
from wire.messages import NO_RANK, Accept, ControllerHeartbeat, Message, Reject, RunEnded
from wire.session import ChunkHeader


@dataclass(frozen=True, slots=True)
class _Note:
    message: Message
    rank: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    header: ChunkHeader
    payload: memoryview


@dataclass(frozen=True, slots=True)
class _Close:
    code: CloseCode
    reason: str


class Outbox:
    """Writes to one peer. ``run`` is the writing task; all else is for the event loop's thread and never waits."""

    def __init__(self, peer: Peer, *, messages: int, stall_seconds: float) -> None:
        self.peer = peer
        self.closed = asyncio.Event()
        """set once nothing more will be written"""
        self._capacity = messages
        self._stall_seconds = stall_seconds
        self._items: deque[_Note | _Chunk | _Close] = deque()
        self._notes = 0
        """messages among the items: chunks that wait cost no memory of their own, and say nothing of a slow peer"""
        self._wake = asyncio.Event()
        self._beat_seconds: float | None = None
        self._close_code = CloseCode.REFUSED
        self._finishing = False
        self._over = ""
        self._write_limit: asyncio.Timeout | None = None

    @property
    def waiting(self) -> int:
        """Frames not yet written."""
        return len(self._items)

    def post(self, message: Message, rank: int = NO_RANK) -> None:
        """Queue a message. When the queue is full, or the link is closing, the link ends and the reason says so."""
        if self._finishing or self._over:
            return
        if self._notes >= self._capacity:
            self.fail(f"the peer does not read: {self._notes} messages wait to be written")
            return
        if isinstance(message, Accept):
            # From here on the peer counts our silence against us.
            self._beat_seconds = message.heartbeat_seconds
        elif isinstance(message, RunEnded):
            self._close_code = CloseCode.GONE
        elif isinstance(message, Reject):
            self._close_code = CloseCode.REFUSED
        self._put(_Note(message, rank))

    def post_chunk(self, header: ChunkHeader, payload: memoryview) -> None:
        """Queue a chunk, sealed when it's written.

        ``payload`` is the same memory for every host that it's sent to, so that what waits here is held once, and a
        round can't open before the last one is adopted: at most one round's update waits.
        """
        if not (self._finishing or self._over):
            self._put(_Chunk(header, payload))

    def drop_chunks(self) -> None:
        """Forget the chunks that wait: their attempt was aborted."""
        self._items = deque(item for item in self._items if not isinstance(item, _Chunk))

    def finish(self, reason: str, code: CloseCode | None = None) -> None:
        """Close the link once all that was posted before is written."""
        if not self._finishing:
            self._finishing = True
            self._put(_Close(code or self._close_code, reason))

    def fail(self, reason: str) -> None:
        """End the link now; ``run`` raises the reason."""
        self._over = self._over or reason
        self._wake.set()
        if self._write_limit is not None:
            self._write_limit.reschedule(asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Write until ``finish`` is reached.

        Raises ``LinkEnded`` when a write fails, when the peer takes nothing for the stall time, or after ``fail``.
        """
        try:
            while True:
                item = await self._next()
                if isinstance(item, _Close):
                    await self.peer.close(item.code, item.reason)
                    return
                await self._write(item)
                del item  # a chunk's memory is the round's: not held until the next one comes
        finally:
            self._over = self._over or "the link is over"
            self._items.clear()
            self.closed.set()

    async def _next(self) -> _Note | _Chunk | _Close:
        while True:
            if self._over:
                raise LinkEnded(self._over)
            if self._items:
                item = self._items.popleft()
                self._notes -= isinstance(item, _Note)
                return item
            self._wake.clear()
            try:
                async with asyncio.timeout(self._beat_seconds):
                    await self._wake.wait()
            except TimeoutError:
                return _Note(ControllerHeartbeat(), NO_RANK)

    async def _write(self, item: _Note | _Chunk) -> None:
        try:
            async with asyncio.timeout(self._stall_seconds) as self._write_limit:
                if isinstance(item, _Chunk):
                    await self.peer.send_chunk(item.header, item.payload)
                else:
                    await self.peer.send(item.message, item.rank)
        except TimeoutError as error:
            raise LinkEnded(self._over or f"a write stalled for {self._stall_seconds:g} s") from error
        except LocalProtocolError as error:
            raise LinkEnded(f"a frame could not be sent: {error}") from error
        finally:
            self._write_limit = None

    def _put(self, item: _Note | _Chunk | _Close) -> None:
        self._items.append(item)
        self._notes += isinstance(item, _Note)
        self._wake.set()
