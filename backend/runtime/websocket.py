"""uvicorn's websocket as we need it: counted by source, bulk data past the library, broken upgrades ended quietly."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request
from websockets.protocol import State

from backend.runtime.census import UNKNOWN_SOURCE, Census
from backend.runtime.limits import source_of
from wire.bulk import BulkFrame, PatientSocket, Splitter

BULK = "marchline.bulk"
"""the ASGI extension of a websocket that takes framed bytes and gives ``BulkFrame``"""
BULK_PATH = "/ws/data"
_BAD_UPGRADE = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class GuardedWebSocket(WebSocketsSansIOProtocol):
    """A websocket that is counted by source, and takes bulk data past the library. ``census`` is set by ``guarded``.

    A scope with the extension ``BULK`` may be sent ``framed`` bytes instead of ``bytes``, and receives large binary
    messages as ``BulkFrame``.
    """

    census: Census

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection. It was let in as HTTP just now, so it isn't dropped here."""
        super().connection_made(transport)
        self._source = source_of(self.client[0]) if self.client else UNKNOWN_SOURCE
        self._counted = self.census.enter(self._source)
        self._splitter: Splitter | None = None
        self._patient = PatientSocket(transport)

    def handle_connect(self, event: Request) -> None:
        """Offer bulk data on the data links' endpoint."""
        super().handle_connect(event)
        if event.path.partition("?")[0].endswith(BULK_PATH) and self.handshake_initiated and not self.close_sent:
            self.scope["extensions"][BULK] = {}
            self._splitter = Splitter(masked=True, largest=self.config.ws_max_size)

    def data_received(self, data: bytes) -> None:
        """Take large frames out; the rest is the library's. Between two wakings, wait for the frame that has begun."""
        if self._splitter is None or not self.handshake_complete:
            super().data_received(data)
            if self.conn.handshake_exc is not None and not self.handshake_complete:
                self._refuse(b"".join(self.conn.data_to_send()))
            return
        for part in self._splitter.feed(data):
            if not isinstance(part, BulkFrame):
                super().data_received(bytes(part))
            elif self.conn.state is State.OPEN:
                self.frames = [part]  # type: ignore[list-item]
                self.curr_msg_data_type = "bytes"
                self.send_receive_event_to_app()
        self._patient.wait_for(self._splitter.missing)

    def handle_parser_exception(self) -> None:
        """End a connection whose bytes break the protocol. Before the upgrade is answered there is no close frame to
        say so in, and nothing that the application could still be told by."""
        if self.conn.close_sent is not None:
            super().handle_parser_exception()
            return
        self.queue.put_nowait({"type": "websocket.disconnect", "code": 1006})
        self._refuse(_BAD_UPGRADE)

    def send_receive_event_to_app(self) -> None:
        """A message is whole. Text that is none is a stranger's doing, and no error of ours to be logged as one."""
        if self.curr_msg_data_type == "text" and not self.close_sent and not _is_utf8(b"".join(self.frames)):
            self.frames = []
            self.conn.send_close(1007)
            self.handle_parser_exception()
            return
        super().send_receive_event_to_app()

    async def send(self, message: Any) -> None:
        """Write what is framed as it is, under the same flow control; the rest is the library's."""
        if self.transport.is_closing() and not self.handshake_complete:
            self._give_up()
        framed = message.get("framed")
        if framed is None:
            await super().send(message)
            # A refused upgrade is answered once its body is written; the library would log it as an error of ours.
            self.handshake_complete |= message["type"] == "websocket.http.response.body" and self.close_sent
            return
        await self.writable.wait()
        if self.disconnected or self.conn.state is not State.OPEN:
            raise ClientDisconnected
        self.transport.write(framed)

    def _refuse(self, answer: bytes) -> None:
        """An upgrade that cannot be: the library prepares an answer, or none, and leaves the connection open."""
        self._give_up()
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()

    def _give_up(self) -> None:
        """The peer went away, or broke the protocol, before its upgrade was answered: whatever is sent fails now."""
        self.handshake_complete = self.disconnected = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Let the connection go."""
        if self._counted:
            self._counted = False
            self.census.leave(self._source)
        super().connection_lost(exc)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
