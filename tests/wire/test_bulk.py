"""Large frames are taken out of a websocket's bytes, everything else passes as it came; what is written is a frame."""

from __future__ import annotations

import os
import random
import socket

import pytest
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import CLIENT, OPEN, SERVER, Protocol

from wire.bulk import BULK_BYTES, HEADROOM, READ_BYTES, BulkFrame, PatientSocket, Splitter, framed, mask

LARGEST = 2 << 20


def split(splitter: Splitter, data: bytes, cuts: list[int]) -> tuple[bytes, list[bytes], list[object]]:
    """What passes, what is taken out, and both in order, for these bytes cut there."""
    passed, bulk, order = b"", [], []
    ends = [*cuts, len(data)]
    start = 0
    for end in ends:
        for part in splitter.feed(data[start:end]):
            if isinstance(part, BulkFrame):
                assert len(part) == len(part.plain())
                bulk.append(bytes(part.plain()))
                order.append("bulk")
            else:
                passed += bytes(part)
                order.append("passed")
        start = end
    return passed, bulk, order


def frame(opcode: Opcode, data: bytes, *, masked: bool, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=masked)


@pytest.mark.parametrize("masked", [True, False])
def test_any_cutting_gives_the_same_frames(masked: bool) -> None:
    rng = random.Random(7)
    large, larger = rng.randbytes(BULK_BYTES), rng.randbytes(BULK_BYTES + 12345)
    small = [
        frame(Opcode.BINARY, b"a" * 125, masked=masked),
        frame(Opcode.PING, b"ping", masked=masked),
        frame(Opcode.BINARY, b"b" * 126, masked=masked),
        frame(Opcode.BINARY, b"", masked=masked),
        frame(Opcode.TEXT, b"c" * (1 << 16), masked=masked),
    ]
    data = b"".join(
        [
            small[0],
            frame(Opcode.BINARY, large, masked=masked),
            small[1],
            small[2],
            frame(Opcode.BINARY, larger, masked=masked),
            small[3],
            small[4],
        ]
    )
    for _ in range(50):
        cuts = sorted(rng.randrange(len(data)) for _ in range(rng.randrange(40)))
        if rng.random() < 0.5:
            cuts = sorted({*cuts, *range(0, 300), *range(len(data) - 80, len(data))})
        passed, bulk, _ = split(Splitter(masked=masked, largest=LARGEST), data, cuts)
        assert bulk == [large, larger]
        assert passed == b"".join(small)


def test_order_is_kept() -> None:
    ping, bulk = frame(Opcode.PING, b"", masked=False), frame(Opcode.BINARY, b"x" * BULK_BYTES, masked=False)
    _, _, order = split(Splitter(masked=False, largest=LARGEST), ping + bulk + ping + bulk, [])
    assert order == ["passed", "bulk", "passed", "bulk"]


@pytest.mark.parametrize(
    "data",
    [
        frame(Opcode.BINARY, b"x" * (LARGEST + 1), masked=True),
        frame(Opcode.BINARY, b"x" * BULK_BYTES, masked=False),
        frame(Opcode.BINARY, b"x" * BULK_BYTES, masked=True, fin=False)
        + frame(Opcode.PING, b"", masked=True)
        + frame(Opcode.BINARY, b"y" * BULK_BYTES, masked=True),
        bytes([0xC2]) + frame(Opcode.BINARY, b"x" * BULK_BYTES, masked=True)[1:],
        frame(Opcode.TEXT, b"x" * BULK_BYTES, masked=True),
    ],
    ids=["too large", "not masked", "within a fragmented message", "reserved bit", "text"],
)
def test_what_is_not_a_plain_large_binary_frame_is_left_to_the_library(data: bytes) -> None:
    passed, bulk, _ = split(Splitter(masked=True, largest=LARGEST), data, [1, 5, 1000])
    assert (passed, bulk) == (data, [])


def test_a_fragmented_message_ends_and_bulk_goes_on() -> None:
    first = frame(Opcode.BINARY, b"x", masked=True, fin=False) + frame(Opcode.CONT, b"y", masked=True)
    passed, bulk, _ = split(
        Splitter(masked=True, largest=LARGEST), first + frame(Opcode.BINARY, b"z" * BULK_BYTES, masked=True), []
    )
    assert (passed, bulk) == (first, [b"z" * BULK_BYTES])


def test_what_is_missing_is_known_at_every_moment() -> None:
    data = frame(Opcode.BINARY, b"x" * 100_000, masked=True)
    splitter = Splitter(masked=True, largest=LARGEST)
    list(splitter.feed(data[:9]))
    assert splitter.missing == 0  # the header is not whole
    list(splitter.feed(data[9:50_014]))
    assert splitter.missing == 50_000
    list(splitter.feed(data[50_014:]))
    assert splitter.missing == 0


@pytest.mark.parametrize("size", [0, 1, 7, 8, 125, 126, 1000, 65535, 65536, 300_001])
@pytest.mark.parametrize("masked", [True, False])
def test_a_library_reads_what_is_framed(size: int, masked: bool) -> None:
    payload = os.urandom(size)
    written = bytes(framed(bytearray(HEADROOM) + payload, masked=masked))
    reader = Protocol(SERVER if masked else CLIENT, state=OPEN)
    reader.receive_data(written)
    (event,) = reader.events_received()
    assert isinstance(event, Frame)
    assert (event.opcode, event.fin, bytes(event.data)) == (Opcode.BINARY, True, payload)
    if masked and size:
        assert payload not in written
    assert isinstance(ClientProtocol, type)


def test_masking_twice_is_nothing() -> None:
    import numpy as np

    octets = np.frombuffer(bytearray(os.urandom(1003)), np.uint8)
    before = octets.copy()
    mask(octets, b"abcd")
    assert octets[:4].tobytes() == bytes(a ^ b for a, b in zip(before[:4].tobytes(), b"abcd", strict=True))
    assert octets[1000:].tobytes() == bytes(a ^ b for a, b in zip(before[1000:].tobytes(), b"abc", strict=True))
    mask(octets, b"abcd")
    assert np.array_equal(octets, before)


class Transport:
    """As much of a transport as says which socket it has."""

    def __init__(self, **extra: object) -> None:
        self._extra = extra

    def get_extra_info(self, name: str) -> object:
        return self._extra.get(name)


def low_water(link: socket.socket) -> int:
    return link.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


def test_a_socket_waits_for_the_frame_and_then_for_anything() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as link:
        patient = PatientSocket(Transport(socket=link))
        for missing, wanted in ((0, 1), (100_000, 100_000), (READ_BYTES * 3, READ_BYTES), (10, 1), (0, 1)):
            patient.wait_for(missing)
            assert low_water(link) == wanted
        over_tls = PatientSocket(Transport(socket=link, ssl_object=object()))
        over_tls.wait_for(100_000)
        assert low_water(link) == 1
    patient.wait_for(100_000)  # the socket is closed: nothing to wait for, and no error
