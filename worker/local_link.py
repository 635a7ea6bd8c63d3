"""The unix stream socket between a host's relay and its ranks: u32 little-endian length, then one message.

Both ends are processes of one user and the directory is closed to others (mode 0700), so frames carry no
tag. A rank's first message is ``RankHello``. :class:`Unpacker` holds the format; the rest are the two
shells, asyncio for the relay and blocking for a rank's threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import deque
from pathlib import Path

import msgspec

from wire.messages import Message, decode, encode

MAX_MESSAGE = 1 << 20
"""bytes of one encoded message, the wire's own cap for control payloads"""
_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 16


class LocalLinkError(Exception):
    """The peer on the unix socket sent something illegal, or ended inside a message; the text names what."""


def pack(message: Message) -> bytes:
    """The bytes of one message on the socket. Raises ``LocalLinkError`` when it is over 1 MiB."""
    payload = encode(message)
    if len(payload) > MAX_MESSAGE:
        raise LocalLinkError(f"{type(message).__name__} takes {len(payload)} bytes, the cap is {MAX_MESSAGE}")
    return _LENGTH.pack(len(payload)) + payload


class Unpacker:
    """Bytes in, messages out; keeps what is incomplete. No I/O."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    @property
    def incomplete(self) -> bool:
        """Whether a message has begun and not ended: an end of stream now has cut it."""
        return bool(self._bytes)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Message]:
        """Take bytes as they came, return the messages that they complete.

        Raises ``LocalLinkError`` for a length over the cap, an unknown message or a field of the wrong type.
        """
        self._bytes += data
        messages: list[Message] = []
        start = 0
        while (end := self._end_of_message(start)) is not None:
            messages.append(_decoded(bytes(self._bytes[start + _LENGTH.size : end])))
            start = end
        del self._bytes[:start]
        return messages

    def _end_of_message(self, start: int) -> int | None:
        if len(self._bytes) - start < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes, start)
        if length > MAX_MESSAGE:
            raise LocalLinkError(f"a message of {length} bytes was announced, the cap is {MAX_MESSAGE}")
        end = start + _LENGTH.size + int(length)
        return end if len(self._bytes) >= end else None

    def check_ended(self) -> None:
        """The stream ended. Raises ``LocalLinkError`` when that cut a message."""
        if self.incomplete:
            raise LocalLinkError(f"the stream ended inside a message, {len(self._bytes)} bytes into it")


class AsyncLink:
    """One end of the socket in asyncio; the relay's. ``reader`` and ``writer`` come from asyncio's stream
    functions."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._unpacker = Unpacker()
        self._ready: deque[Message] = deque()

    async def receive(self) -> Message | None:
        """The next message, or None when the peer closed between messages. Raises ``LocalLinkError``,
        ``OSError``."""
        while not self._ready:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                self._unpacker.check_ended()
                return None
            self._ready.extend(self._unpacker.feed(data))
        return self._ready.popleft()

    async def send(self, message: Message) -> None:
        """Write one message and wait until the socket takes it. Raises ``LocalLinkError``, ``OSError``."""
        self._writer.write(pack(message))
        await self._writer.drain()

    def close(self) -> None:
        """Close the socket once what was sent is written; idempotent."""
        self._writer.close()

    def abort(self) -> None:
        """Close the socket at once, whatever still waits to be written; idempotent."""
        self._writer.transport.abort()


class BlockingLink:
    """One end of the socket for threads; a rank's. Any thread may send, one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._unpacker = Unpacker()
        self._ready: deque[Message] = deque()
        self._sending = threading.Lock()

    @classmethod
    def connect(cls, path: Path, timeout: float | None = None) -> BlockingLink:
        """Connect to the relay's socket. ``timeout`` (seconds) bounds the connection and each later wait.

        Raises ``OSError``: the relay is not listening.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout)
            connection.connect(str(path))
        except OSError:
            connection.close()
            raise
        return cls(connection)

    def send(self, message: Message) -> None:
        """Write one message, whole. Raises ``LocalLinkError``, ``OSError`` (``TimeoutError`` included)."""
        data = pack(message)
        with self._sending:
            self._socket.sendall(data)

    def receive(self) -> Message | None:
        """Wait for the next message; None when the relay closed between messages.

        Raises ``TimeoutError`` after the connection's timeout (call again to keep waiting),
        ``LocalLinkError``, ``OSError``.
        """
        while not self._ready:
            data = self._socket.recv(_READ_BYTES)
            if not data:
                self._unpacker.check_ended()
                return None
            self._ready.extend(self._unpacker.feed(data))
        return self._ready.popleft()

    def close(self) -> None:
        """Wake a thread that waits in ``receive`` and close the socket; idempotent."""
        with contextlib.suppress(OSError):  # it may not be connected any more
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _decoded(payload: bytes) -> Message:
    try:
        return decode(payload)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise LocalLinkError(f"a message cannot be read: {error}") from error
