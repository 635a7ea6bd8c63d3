"""The data links of a relay-only host: what one still has to send, and who is at the other end of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from wire.codes import CloseCode
from wire.messages import Message
from wire.session import ChunkHeader, Incoming, Session
from worker.pulse import Pulse

WINDOW_CHUNKS = 8
"""chunks that wait for one link, sealed: at most 8 MiB"""

Frame = bytes | bytearray


class ChildGone(Exception):
    """A child's link is over; the text says why."""


class Outgoing:
    """Writes to one link. Posting takes the sequence number, so that frames leave in the order in which they were
    posted; chunks are sealed in a pool of threads meanwhile."""

    def __init__(
        self, session: Session, send: Callable[[Frame], Awaitable[None]], pool: Executor, stall_seconds: float | None
    ) -> None:
        self._session = session
        self._send = send
        self._pool = pool
        self._stall_seconds = stall_seconds
        self._frames: deque[Frame | asyncio.Future[bytearray]] = deque()
        self._chunks = 0
        self._moved = Pulse()
        self._over = False

    def post(self, message: Message) -> None:
        """Queue a message; nothing happens once the link is over."""
        if not self._over:
            self._frames.append(self._session.seal(message))
            self._moved.fire()

    async def room(self) -> None:
        """Return once another chunk may wait, or once the link is over."""
        await self._moved.until(lambda: self._over or self._chunks < WINDOW_CHUNKS)

    def post_chunk(self, header: ChunkHeader, payload: memoryview) -> None:
        """Queue a chunk; ``payload`` must stay as it is until it's written."""
        if self._over:
            return
        reserved = self._session.reserve_chunk(header)
        self._frames.append(asyncio.get_running_loop().run_in_executor(self._pool, reserved.seal, payload))
        self._chunks += 1
        self._moved.fire()

    async def run(self) -> None:
        """Write until a write fails with whatever ``send`` raises. Raises ``ChildGone`` when one takes too long."""
        try:
            while True:
                await self._moved.until(lambda: bool(self._frames))
                item = self._frames.popleft()
                frame = await item if isinstance(item, asyncio.Future) else item
                try:
                    async with asyncio.timeout(self._stall_seconds):
                        await self._send(frame)
                except TimeoutError as error:
                    raise ChildGone(f"it took nothing for {self._stall_seconds:g} s") from error
                self._chunks -= isinstance(item, asyncio.Future)
                self._moved.fire()
        finally:
            self._over = True
            for item in self._frames:
                if isinstance(item, asyncio.Future):
                    item.cancel()
            self._frames.clear()
            self._moved.fire()


class Child:
    """A host whose data link ends here: one with ranks, or another relay-only host and all hosts behind it."""

    def __init__(
        self, host: int, ranks: list[int], socket: ServerConnection, session: Session, pool: Executor, stall: float
    ) -> None:
        self.host = host
        self.ranks = ranks
        self.carries: dict[int, list[int]] = {host: ranks}
        """every host whose data comes over this link, itself included, with its ranks"""
        self.out = Outgoing(session, self._write, pool, stall)
        self.dropped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """why this link must end, once somebody said so"""
        self._socket = socket
        self._session = session
        self._pool = pool

    @property
    def relay_only(self) -> bool:
        return not self.ranks

    def drop(self, reason: str) -> None:
        """Have the link end."""
        if not self.dropped.done():
            self.dropped.set_result(reason)

    async def read(self) -> list[Incoming]:
        """The next frame's meaning; opened in a thread. Raises ``ChildGone``, ``RemoteProtocolError``."""
        try:
            frame = await self._socket.recv()
        except ConnectionClosed as closed:
            raise ChildGone(ending(closed)) from closed
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._session.receive, frame)

    async def _write(self, frame: Frame) -> None:
        try:
            await self._socket.send(frame)
        except ConnectionClosed as closed:
            raise ChildGone(ending(closed)) from closed


def ending(closed: ConnectionClosed) -> str:
    """How a websocket ended, in words."""
    frame = closed.rcvd
    if frame is None:
        return "the connection was lost"
    return f"it closed the link{f': {frame.reason}' if frame.reason else ''} ({frame.code})"


async def close(socket: ServerConnection, code: CloseCode | int, reason: str) -> None:
    """Close with a code and as much of the reason as a close frame holds."""
    await socket.close(int(code), reason.encode("utf-8", "replace")[:123].decode("utf-8", "ignore"))
