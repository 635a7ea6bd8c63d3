"""A websocket connection of the websockets library that takes bulk data past it (``wire.bulk``)."""

from __future__ import annotations

from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.connection import Connection
from websockets.frames import Frame, Opcode
from websockets.protocol import CLIENT, State

from wire.bulk import BulkFrame, PatientSocket, Splitter, framed

LARGEST = 2 << 20
"""bytes of a payload that is taken out"""


class BulkConnection(Connection):
    """Either side's; large binary messages are received as any other, only cheaper."""

    _splitter: Splitter | None = None
    _patient: PatientSocket

    def data_received(self, data: bytes) -> None:
        """Take large frames out; the rest is the library's. Between two wakings, wait for the frame that has begun."""
        if self._splitter is None:
            if self.protocol.state is State.CONNECTING:
                super().data_received(data)
                return
            self._splitter = Splitter(masked=self.protocol.side is not CLIENT, largest=LARGEST)
            self._patient = PatientSocket(self.transport)
        for part in self._splitter.feed(data):
            if not isinstance(part, BulkFrame):
                super().data_received(bytes(part))
            elif self.protocol.state is State.OPEN:
                self.process_event(Frame(Opcode.BINARY, part.plain()))
        self._patient.wait_for(self._splitter.missing)

    async def send_framed(self, frame: memoryview) -> None:
        """Write what ``framed`` made, under the library's flow control. Raises ``ConnectionClosed``."""
        async with self.send_context():
            self.protocol.writes.append(frame)  # type: ignore[arg-type]

    def frame(self, buffer: bytearray) -> memoryview:
        """``wire.bulk.framed`` for this side; runs in any thread."""
        return framed(buffer, masked=self.protocol.side is CLIENT)


class BulkClient(BulkConnection, ClientConnection):
    """The dialling side."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
