"""Frames, and the messages and chunks in them: what a session makes of them."""

from __future__ import annotations

import struct
from random import Random

import msgspec

from benchmarks.fuzzing import forging, mutation
from benchmarks.fuzzing.laws import Target, hold, hold_text
from wire import codec
from wire.errors import RemoteProtocolError
from wire.messages import encode
from wire.session import ChunkHeader, ChunkReceived, Received, Session

_STATES = list(forging.STATES)


def _frame(data: bytes) -> None:
    """First byte: the session's state. The rest is one frame of somebody without the keys."""
    if not data:
        return
    state = _STATES[data[0] % len(_STATES)]
    session = forging.STATES[state]()
    try:
        events = session.receive(data[1:])
    except RemoteProtocolError as error:
        hold_text(error.text)
        hold(session.failure is error, "a session that refused a frame must stay dead")
        refusal = session.refusal(error)
        hold(refusal is None or len(refusal) <= 600, "an answer longer than a question invites amplification")
        return
    if state == "new server":
        hold(events == [] and len(session.pending()) == 1, f"a client hello gave {events}")
        return
    hold(data[1:] in _TRUE, f"{state} accepted a frame that nobody with the keys has made: {events}")


_TRUE = frozenset(forging.true_frames())


def _frame_seeds() -> list[bytes]:
    return [bytes([state]) + frame for state in range(len(_STATES)) for frame in forging.true_frames()]


def _message(data: bytes) -> None:
    """First byte: to whom. The rest is the payload of an authentic message."""
    if not data:
        return
    way = data[0] & 1
    sender, receiver = _pairs.pop(way) if way in _pairs else _pair(way)
    try:
        [event] = receiver.receive(forging.sealed(sender, data[1:], data[0] >> 1))
    except RemoteProtocolError as error:
        hold(error.code in ("bad_message", "unknown_kind", "oversize"), f"refused as {error.code}")
        hold_text(error.text)
        return
    hold(isinstance(event, Received) and event.rank == data[0] >> 1, f"a message became {event}")
    assert isinstance(event, Received)
    _pairs[way] = sender, receiver
    message, again = event.message, encode(event.message)
    hold(encode(codec.unpack(memoryview(again))) == again, f"{message} does not survive being passed on")
    for name, value in _numbers(msgspec.to_builtins(message, builtin_types=(bytes,))):
        hold(-(1 << 63) <= value < 1 << 63, f"{type(message).__name__}.{name} is {value}, which no database holds")


_pairs: dict[int, tuple[Session, Session]] = {}
"""sender and receiver by way, while nothing was refused: a handshake takes longer than all the rest"""


def _pair(way: int) -> tuple[Session, Session]:
    client, server = forging.established()
    return (client, server) if way else (server, client)


def _numbers(value: object, name: str = "") -> list[tuple[str, int]]:
    match value:
        case bool():
            return []
        case int():
            return [(name, value)]
        case dict():
            # a job's parameters are the controller's own, checked before there is a run
            inner = ((key, item) for key, item in value.items() if key != "params")
            return [pair for key, item in inner for pair in _numbers(item, str(key)[:40])]
        case list() | tuple():
            return [pair for item in value for pair in _numbers(item, name)]
    return []


def _message_seeds() -> list[bytes]:
    return [bytes([way]) + payload for payload in forging.PAYLOADS for way in (0, 1)]


def _altered_message(data: bytes, random: Random) -> bytes:
    if random.random() < 0.3 or len(data) < 2:
        return mutation.mutated(data, random)
    return data[:1] + mutation.altered_payload(data[1:], random)


_HEADER = struct.Struct("<IIHHQI")


def _chunk(data: bytes) -> None:
    """An authentic chunk: header fields, then the payload."""
    if len(data) < _HEADER.size:
        return
    round_, attempt, section, encoding, offset, elements = _HEADER.unpack_from(data)
    header, payload = ChunkHeader(round_, attempt, section, offset, elements, encoding), data[_HEADER.size :]
    client, server = forging.established()
    try:
        events = server.receive(forging.sealed_chunk(client, header, payload))
    except RemoteProtocolError as error:
        hold(error.code in ("bad_message", "oversize"), f"refused as {error.code}")
        hold_text(error.text)
        return
    hold(section <= 1 and encoding <= 1 and offset < 1 << 63 and elements > 0, f"{header} was accepted")
    hold(events == [ChunkReceived(header, memoryview(payload))], f"{header} became {events}")
    hold(len(payload) == header.payload_bytes, f"{header} came with {len(payload)} bytes")


def _chunk_seeds() -> list[bytes]:
    made = []
    for section, offset, elements, encoding in ((0, 0, 6, 0), (1, 6, 2, 0), (0, 2, 4, 1), (0, 1 << 40, 1, 0)):
        head = _HEADER.pack(3, 1, section, encoding, offset, elements)
        made.append(head + bytes(elements * (2 if encoding else 4)))
    return made


TARGETS = (
    Target("frame", "one frame without the keys, in each state of a session", _frame, _frame_seeds),
    Target("message", "the payload of an authentic message", _message, _message_seeds, _altered_message),
    Target("chunk", "an authentic chunk under any header", _chunk, _chunk_seeds),
)
