"""Streams of chunks and streams of bytes: whatever order they come in, wherever they are cut."""

from __future__ import annotations

import struct
from itertools import pairwise
from random import Random

import numpy as np

from benchmarks.fuzzing import forging, mutation
from benchmarks.fuzzing.laws import Target, hold
from wire import bulk, codec, ranges
from wire.errors import RemoteProtocolError
from wire.frames import ChunkHeader
from wire.messages import Contribution, FoldOrder, RequestParams, RoundCommitted, UpdateComing, encode
from wire.streams import ContributionRefused, Streams
from worker.fold import Model
from worker.local_link import LocalLinkError, Unpacker
from worker.staging import Staging, StagingError


class _Take:
    """Small numbers off the front of an input; zeros when it is used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> bool:
        return self._at < len(self._data)

    def number(self, width: int = 1) -> int:
        piece = self._data[self._at : self._at + width]
        self._at += width
        return int.from_bytes(piece, "little")

    def rest_of(self, size: int) -> bytes:
        piece = self._data[self._at : self._at + size]
        self._at += size
        return piece.ljust(size, b"\0")


def _streams(data: bytes) -> None:
    """One attempt of a round: declarations as msgpack, then chunks of whatever header, from two hosts."""
    take = _Take(data)
    params, buffers, encoding = take.number() % 40, take.number() % 20, take.number() & 1
    streams = Streams(FoldOrder(0, 0, {1: [0], 2: [1, 2]}, params, buffers, encoding), longest=1 + take.number() % 9)
    for host in (1, 2):
        try:
            message = codec.unpack(memoryview(take.rest_of(take.number(2) % 600)))
            if isinstance(message, Contribution):
                streams.contribute(host, message)
        except (RemoteProtocolError, ContributionRefused):
            continue
    while take.left:
        host, section = 1 + take.number() % 2, take.number() % 3
        header = ChunkHeader(take.number() % 2, 0, section, take.number(2), 1 + take.number() % 40, take.number() % 3)
        try:
            payload = memoryview(take.rest_of(header.payload_bytes if header.encoding <= 1 else 4))
            streams.arrived(host, header, payload)
        except ContributionRefused:
            continue
    _hold_streams(streams)


def _hold_streams(streams: Streams) -> None:
    hold(streams.mass >= 0 and np.isfinite(streams.mass), f"a mass of {streams.mass} was accepted")
    hold(not ranges.problem(streams.still, streams.elements), f"{streams.still} is no range list")
    hold(all(0 <= streams.held(host) <= streams.elements for host in (1, 2)), "more is held than there is")
    hold(all(text for text in streams.waiting_for().values()), "what is waited for has no name")
    if not streams.declared:
        return
    cut = streams.slices()
    hold(all(one.stop <= other.offset for one, other in pairwise(cut)), "slices overlap")
    for piece in cut:
        if not streams.complete(piece):
            break
        taken = streams.take(piece)
        spare = np.empty(piece.elements, "<f4")
        for part in taken.values():
            hold(part.read(piece.offset, piece.stop, spare).size == piece.elements, "a slice of another length")
        streams.summed(taken)


def _streams_seeds() -> list[bytes]:
    first = encode(Contribution(0, 0, {0: 2}, {0: 2.0}, {0: 1.0}, 6, 2, [(1, 3)]))
    second = encode(Contribution(0, 0, {1: 1, 2: 0}, {1: 1.0, 2: 0.0}, {1: 1.0, 2: 0.0}, 6, 2))
    head = bytes([6, 2, 0, 4]) + b"".join(struct.pack("<H", len(one)) + one for one in (first, second))

    def chunk(host: int, section: int, offset: int, elements: int) -> bytes:
        return (
            bytes([host - 1, section, 0]) + struct.pack("<H", offset) + bytes([elements - 1, 0]) + bytes(4 * elements)
        )

    one = [chunk(1, 0, 0, 1), chunk(1, 0, 3, 3), chunk(1, 1, 6, 2)]
    other = [chunk(2, 0, 0, 6), chunk(2, 1, 6, 2)]
    return [head, head + b"".join(one + other), head + b"".join(other[:1])]


def _streams_mutated(data: bytes, random: Random) -> bytes:
    """Half of the time within a declaration, so that it stays one."""
    if len(data) < 6 or random.random() < 0.5:
        return mutation.mutated(data, random)
    (size,) = struct.unpack_from("<H", data, 4)
    payload = mutation.altered_payload(data[6 : 6 + size], random)[:590]
    return data[:4] + struct.pack("<H", len(payload)) + payload + data[6 + size :]


def _staging(data: bytes) -> None:
    """What comes down to a relay: any order of requests, announcements, chunks, commits and aborts."""
    take, staging, model = _Take(data), Staging(), Model(6, 2)
    while take.left:
        number = take.number() % 2, take.number() % 2
        try:
            match take.number() % 5:
                case 0:
                    staging.opened(RequestParams(*number, bool(take.number() & 1), take.number() & 1))
                case 1:
                    still = [(take.number(), take.number()) for _ in range(take.number() % 3)]
                    staging.coming(UpdateComing(*number, bool(take.number() & 1), still), model)
                case 2:
                    header = ChunkHeader(
                        *number, take.number() % 3, take.number(), 1 + take.number() % 8, take.number() & 1
                    )
                    if staging.accepts(header, model):
                        hold(header.offset + header.elements <= model.elements, f"{header} leaves the arena")
                        staging.staged(header)
                case 3:
                    staging.committed(RoundCommitted(*number, bool(take.number() & 1), True))
                case _:
                    staging.news()
        except StagingError:
            return


def _staging_seeds() -> list[bytes]:
    opened, coming = [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]
    chunks = [0, 0, 2, 0, 0, 5, 0, 0, 0, 2, 1, 6, 1, 0]
    committed = [0, 0, 3, 1]
    return [bytes(opened + coming + chunks + committed), bytes(opened + committed + coming + chunks)]


def _local_link(data: bytes) -> None:
    """The host's unix socket: the same bytes in one piece and in many must give the same messages or refusal."""
    if not data:
        return
    step, stream = 1 + data[0] % 61, data[1:]
    hold(
        _unpacked([stream]) == _unpacked([stream[at : at + step] for at in range(0, len(stream), step)]), "cuts matter"
    )


def _unpacked(pieces: list[bytes]) -> list[bytes]:
    unpacker, found = Unpacker(), []
    try:
        for piece in pieces:
            found += [encode(message) for message in unpacker.feed(piece)]
        unpacker.check_ended()
    except LocalLinkError:
        # What came in one piece with a bad message is lost with it; what came before it was given out.
        return []
    return found


def _local_link_seeds() -> list[bytes]:
    framed = [struct.pack("<I", len(payload)) + payload for payload in forging.PAYLOADS]
    return [b"\x05" + one for one in framed] + [b"\x00" + b"".join(framed[:6])]


def _splitter(data: bytes) -> None:
    """A websocket's bytes: whatever the cuts, the same frames come out, and no byte is lost or made up."""
    if not data:
        return
    step, stream = 1 + data[0], data[1:]
    whole, parts = _split([stream]), _split([stream[at : at + step] for at in range(0, len(stream), step)])
    hold(whole == parts, "cuts matter")


def _split(pieces: list[bytes]) -> tuple[bytes, list[bytes]]:
    splitter, passed, taken = bulk.Splitter(masked=True, largest=1 << 17), bytearray(), []
    for piece in pieces:
        for part in splitter.feed(piece):
            if isinstance(part, bulk.BulkFrame):
                hold(bulk.BULK_BYTES <= len(part) <= 1 << 17, f"a frame of {len(part)} bytes was taken out")
                taken.append(bytes(part.plain()))
            else:
                passed += part
        hold(splitter.missing >= 0, "less than nothing is missing")
    return bytes(passed), taken


def _splitter_seeds() -> list[bytes]:
    small = bytes(bulk.framed(bytearray(bulk.HEADROOM + 40), masked=True))
    large = bytes(bulk.framed(bytearray(bulk.HEADROOM + bulk.BULK_BYTES), masked=True))
    ping = bytes([0x89, 0x80, 1, 2, 3, 4])
    fragments = bytes([0x02, 0x83, 0, 0, 0, 0, 1, 2, 3, 0x80, 0x81, 0, 0, 0, 0, 9])
    return [b"\x07" + part for part in (small, ping + small, fragments + ping, ping + large + small)]


TARGETS = (
    Target("streams", "declarations and chunks of one round", _streams, _streams_seeds, _streams_mutated),
    Target("staging", "what comes down to a relay", _staging, _staging_seeds),
    Target("local_link", "the socket between ranks and their relay", _local_link, _local_link_seeds),
    Target("splitter", "a websocket's bytes, cut anywhere", _splitter, _splitter_seeds),
)
