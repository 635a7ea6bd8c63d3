"""How much is missing of the websocket frame that is arriving: so long, nobody needs to be woken.

A chunk of a megabyte comes over a gigabit line in a hundred pieces or more. Woken for each, an event loop spends
several times what copying, opening and adding the chunk costs. ``PatientSocket`` has the kernel report the socket as
readable when the frame is whole, or a read's worth of it is there (SO_RCVLOWAT). The rest of a frame always comes, or
the connection ends, which wakes too.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any

READ_BYTES = 1 << 18
"""what an event loop takes from a socket at once"""
WORTH_WAITING = 1 << 14
"""shorter remainders are not waited for"""


class FrameMeter:
    """Follows one direction of a websocket from frame to frame (RFC 6455, section 5.2), headers only."""

    def __init__(self) -> None:
        self.missing = 0
        """bytes of the payload that has begun; 0 between frames and within a header"""
        self._head = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> int:
        """Count bytes as they came; answers what is ``missing`` now."""
        at, size = 0, len(data)
        while at < size:
            if self.missing:
                taken = min(self.missing, size - at)
                self.missing -= taken
                at += taken
                continue
            self._head.append(data[at])
            at += 1
            self._read_head()
        return self.missing

    def _read_head(self) -> None:
        head = self._head
        if len(head) < 2:
            return
        short = head[1] & 0x7F
        length_bytes = {126: 2, 127: 8}.get(short, 0)
        if len(head) < 2 + length_bytes + (4 if head[1] & 0x80 else 0):
            return
        self.missing = int.from_bytes(head[2 : 2 + length_bytes], "big") if length_bytes else short
        head.clear()


class PatientSocket:
    """A transport's socket that wakes its event loop when a frame is whole. Does nothing where that can't be: over TLS,
    where a part of the frame may be in the hands of the TLS layer already, or without a socket."""

    def __init__(self, transport: Any) -> None:
        over_tls = transport.get_extra_info("ssl_object") is not None
        self._socket = None if over_tls else transport.get_extra_info("socket")
        self._meter = FrameMeter()
        self._low_water = 1

    def received(self, data: bytes | bytearray | memoryview) -> None:
        """Count what was read, and wait for what is missing."""
        if self._socket is None:
            return
        missing = self._meter.feed(data)
        wanted = min(missing, READ_BYTES) if missing >= WORTH_WAITING else 1
        if wanted != self._low_water:
            self._low_water = wanted
            with contextlib.suppress(OSError):  # it may be closed already
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
