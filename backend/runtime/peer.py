"""One websocket with its session: frames in and out, and every way of ending as one exception.

The session does no I/O and this does no deciding. Large frames are opened and sealed in a pool of threads, which
release the GIL, so that bulk data never delays a heartbeat (design section 6).
"""

from __future__ import annotations

import asyncio
import ipaddress
from concurrent.futures import Executor
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from backend.runtime.errors import LinkEnded
from backend.runtime.websocket import BULK
from wire.bulk import HEADROOM, BulkFrame, framed
from wire.chunks import ReservedChunk
from wire.codes import CloseCode
from wire.messages import NO_RANK, Message
from wire.session import ChunkHeader, Incoming, Session

INLINE_BYTES = 32 << 10
"""A frame up to this size is sealed on the event loop: about 20 microseconds, less than a trip to a thread."""
MAX_REASON_BYTES = 123
"""what a websocket close frame can carry"""
UNKNOWN_ADDRESS = "unknown"


class Peer:
    """The far end of one websocket. Reading and writing may overlap; each has one task at most."""

    def __init__(self, socket: WebSocket, session: Session, pool: Executor) -> None:
        self.address = socket.client.host if socket.client else UNKNOWN_ADDRESS
        self.may_be_local = bool(socket.client) and _may_be_local(self.address, socket.scope.get("server"))
        """whether both ends of the connection have one address; a tunnel looks like that too"""
        self.session = session
        self.bytes_in = 0
        self.bytes_out = 0
        self._socket = socket
        self._takes_framed = BULK in (socket.scope.get("extensions") or {})
        self._pool = pool

    async def accept(self) -> None:
        """Answer the upgrade. Raises ``LinkEnded``."""
        try:
            await self._socket.accept()
        except (WebSocketDisconnect, OSError, RuntimeError) as error:
            raise LinkEnded("the peer left during the upgrade") from error

    async def read(self) -> list[Incoming]:
        """The next frame's meaning; handshake replies are written on the way.

        Raises ``LinkEnded`` when the peer is gone, ``RemoteProtocolError`` for illegal bytes.
        """
        try:
            message = await self._socket.receive()
        except (WebSocketDisconnect, OSError, RuntimeError) as error:
            raise LinkEnded("the connection was closed") from error
        if message["type"] == "websocket.disconnect":
            raise LinkEnded(_ending(message.get("code", 1006), message.get("reason") or ""))
        data: bytes | str | BulkFrame = message.get("bytes") or message.get("text") or b""
        self.bytes_in += len(data)
        if isinstance(data, BulkFrame) or len(data) > INLINE_BYTES:
            incoming = await asyncio.get_running_loop().run_in_executor(self._pool, self._open, data)
        else:
            incoming = self.session.receive(data)
        for reply in self.session.pending():
            await self._write(reply)
        return incoming

    async def send(self, message: Message, rank: int = NO_RANK) -> None:
        """Seal and write one message. Raises ``LinkEnded``, and ``LocalProtocolError`` for what can't be sent."""
        await self._write(self.session.seal(message, rank))

    async def send_chunk(self, header: ChunkHeader, payload: memoryview) -> None:
        """Seal and write one chunk; the sealing happens in the pool. Raises as ``send``."""
        reserved = self.session.reserve_chunk(header)
        loop = asyncio.get_running_loop()
        if not self._takes_framed:
            await self._write(await loop.run_in_executor(self._pool, reserved.seal, payload))
            return
        await self._write_framed(await loop.run_in_executor(self._pool, _seal_framed, reserved, payload))

    async def send_plain(self, frame: bytes) -> None:
        """Write a frame that needs no session: a refusal. Raises ``LinkEnded``."""
        await self._write(frame)

    async def close(self, code: CloseCode | int, reason: str) -> None:
        """Close the websocket; nothing happens when it's closed already."""
        try:
            await self._socket.close(int(code), _fitting(reason))
        except (WebSocketDisconnect, OSError, RuntimeError):
            return

    def _open(self, data: bytes | str | BulkFrame) -> list[Incoming]:
        return self.session.receive(data.plain() if isinstance(data, BulkFrame) else data)

    async def _write(self, frame: bytes | bytearray) -> None:
        await self._send({"type": "websocket.send", "bytes": frame}, len(frame))

    async def _write_framed(self, framed: memoryview) -> None:
        await self._send({"type": "websocket.send", "framed": framed}, len(framed))

    async def _send(self, event: dict[str, Any], size: int) -> None:
        try:
            await self._socket.send(event)
        except (WebSocketDisconnect, OSError, RuntimeError) as error:
            raise LinkEnded("the connection was lost while writing") from error
        self.bytes_out += size


def _seal_framed(reserved: ReservedChunk, payload: memoryview) -> memoryview:
    return framed(reserved.seal(payload, HEADROOM), masked=False)


def _may_be_local(address: str, server: tuple[str, int | None] | None) -> bool:
    if server is not None and address == server[0]:
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _ending(code: int, reason: str) -> str:
    if reason:
        return f"the peer closed the link: {reason} ({code})"
    return "the connection was lost" if code in (1005, 1006) else f"the peer closed the link ({code})"


def _fitting(reason: str) -> str:
    return reason.encode("utf-8", "replace")[:MAX_REASON_BYTES].decode("utf-8", "ignore")
