"""Large websocket frames past the websocket libraries: received into one buffer, masked in place, woken for once.

A general library copies a frame of a megabyte five times on the event loop's thread, and an event loop is woken for
each of the hundred pieces in which it comes over a gigabit line. Together that is most of what a chunk costs, sealing
and adding included. So whoever owns the transport passes what comes through a :class:`Splitter`: large binary frames
are taken out, everything else goes to the library as it came. Large frames are written by :func:`framed`. The bytes on
the wire are those of RFC 6455 (section 5.2) either way, and what the library decides (handshake, pings, closing) stays
with it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

BULK_BYTES = 1 << 15
"""payloads from here on are taken out"""
HEADROOM = 16
"""what ``framed`` needs in front of a payload: the longest header of a frame, and what keeps the payload aligned"""
READ_BYTES = 1 << 18
"""what an event loop takes from a socket at once"""
WORTH_WAITING = 1 << 14
"""shorter remainders are not waited for"""
_FINAL_BINARY, _CONTINUED, _FINAL = 0x82, 0x00, 0x80
_MASKED = 0x80

Data = bytes | bytearray | memoryview
Octets = npt.NDArray[np.uint8]


class BulkFrame:
    """A large binary frame's payload as it came; ``plain`` is for one thread, any one, once."""

    __slots__ = ("_key", "_octets")

    def __init__(self, octets: Octets, key: bytes) -> None:
        self._octets = octets
        self._key = key

    def __len__(self) -> int:
        return int(self._octets.size)

    def plain(self) -> memoryview:
        """The payload, unmasked in its place."""
        if self._key:
            mask(self._octets, self._key)
            self._key = b""
        return self._octets.data


class Splitter:
    """Follows one direction of a websocket from frame to frame. ``masked``: the frames of a client; ``largest`` bytes
    of payload are taken out at most. What breaks the protocol is left to the library, which knows what to do."""

    def __init__(self, *, masked: bool, largest: int) -> None:
        self.missing = 0
        """bytes of the payload that has begun; 0 between frames and within a header"""
        self._masked = masked
        self._largest = largest
        self._head = bytearray()
        self._octets: Octets | None = None
        self._key = b""
        self._fragmented = False

    def feed(self, data: Data) -> Iterator[Data | BulkFrame]:
        """Split what came, in order. Parts of a header are held back until it is whole."""
        view = memoryview(data)
        at = passed = 0
        while at < len(view):
            if self.missing:
                taken = min(self.missing, len(view) - at)
                if self._octets is not None:
                    start = self._octets.size - self.missing
                    self._octets.data[start : start + taken] = view[at : at + taken]
                    passed = at + taken
                at += taken
                self.missing -= taken
                if not self.missing and self._octets is not None:
                    yield BulkFrame(self._octets, self._key)
                    self._octets = None
                continue
            begun, at = at, self._read_head(view, at)
            if begun > passed:
                yield view[passed:begun]
            passed = at
            if not self._head_is_whole:
                return
            head = bytes(self._head)
            self._head.clear()
            if not self._begin(head):
                yield head
        if at > passed:
            yield view[passed:]

    @property
    def _head_is_whole(self) -> bool:
        head = self._head
        return len(head) >= 2 and len(head) == 2 + _length_bytes(head) + (4 if head[1] & _MASKED else 0)

    def _read_head(self, view: memoryview, at: int) -> int:
        while at < len(view) and not self._head_is_whole:
            self._head.append(view[at])
            at += 1
        return at

    def _begin(self, head: bytes) -> bool:
        """A frame begins; whether its payload is taken out."""
        extra = _length_bytes(head)
        size = int.from_bytes(head[2 : 2 + extra], "big") if extra else head[1] & 0x7F
        self.missing = size
        masked = bool(head[1] & _MASKED)
        bulk = (
            head[0] == _FINAL_BINARY
            and not self._fragmented
            and masked == self._masked
            and BULK_BYTES <= size <= self._largest
        )
        if bulk:
            self._octets, self._key = np.empty(size, np.uint8), head[2 + extra :]
        elif head[0] & 0x0F <= 0x02:  # data, not control
            self._fragmented = not head[0] & _FINAL
        return bulk


class PatientSocket:
    """A transport's socket that wakes its event loop for whole frames, or a read's worth of one (SO_RCVLOWAT).

    The rest of a frame always comes, or the connection ends, which wakes too. Does nothing where that can't be: over
    TLS, where a part of the frame may be in the hands of the TLS layer already, or without a socket.
    """

    def __init__(self, transport: Any) -> None:
        over_tls = transport.get_extra_info("ssl_object") is not None
        self._socket = None if over_tls else transport.get_extra_info("socket")
        self._low_water = 1

    def wait_for(self, missing: int) -> None:
        """So many bytes of the frame are to come."""
        wanted = min(missing, READ_BYTES) if missing >= WORTH_WAITING else 1
        if self._socket is not None and wanted != self._low_water:
            self._low_water = wanted
            with contextlib.suppress(OSError):  # it may be closed already
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)


def framed(buffer: bytearray, *, masked: bool) -> memoryview:
    """A final binary frame around the payload that begins ``HEADROOM`` bytes into ``buffer``, made in its place.

    ``masked`` is for clients. Runs in any thread.
    """
    payload = len(buffer) - HEADROOM
    if payload < 126:
        head = bytes((_FINAL_BINARY, payload))
    elif payload < 1 << 16:
        head = bytes((_FINAL_BINARY, 126)) + payload.to_bytes(2, "big")
    else:
        head = bytes((_FINAL_BINARY, 127)) + payload.to_bytes(8, "big")
    if masked:
        key = os.urandom(4)
        head = bytes((head[0], head[1] | _MASKED)) + head[2:] + key
        mask(np.frombuffer(buffer, np.uint8)[HEADROOM:], key)
    start = HEADROOM - len(head)
    buffer[start:HEADROOM] = head
    return memoryview(buffer)[start:]


def mask(octets: Octets, key: bytes) -> None:
    """XOR (n,) octets with the repeated 4-byte key, in place; twice is nothing."""
    whole = octets.size // 8 * 8
    words = octets[:whole].view(np.uint64)
    np.bitwise_xor(words, np.uint64(int.from_bytes(key * 2, "little")), out=words)
    rest = octets[whole:]
    np.bitwise_xor(rest, np.frombuffer(key * 2, np.uint8)[: rest.size], out=rest)


def _length_bytes(head: Data) -> int:
    return {126: 2, 127: 8}.get(head[1] & 0x7F, 0)
