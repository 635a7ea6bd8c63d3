"""Frame layouts: fixed little-endian headers, caps, and nothing about keys (design section 5; reliability 5.3).

Every websocket binary message is exactly one frame. All frames begin with the same eight bytes: magic, wire version,
kind. That prefix, the client hello and the refusal keep their layout in every wire version, so that two versions can
still tell each other apart and say so.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from wire.errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from wire.messages import WIRE_VERSION
from wire.sealing import GCM_TAG_BYTES, MAC_BYTES, NONCE_BYTES

MAGIC = b"MLIN"
MAX_PAYLOAD = 1 << 20
"""bytes of one encoded message"""
MAX_FIRST_PAYLOAD = 64 << 10
"""bytes of the client's first message: all that a peer may make us hold before it has authenticated"""
MAX_CHUNK_ELEMENTS = 1 << 18
"""f32 elements of one chunk: 1 MiB"""
MAX_REFUSAL_TEXT = 512
MAX_U32 = 0xFFFFFFFF
MAX_OFFSET = (1 << 63) - 1
MAX_SEQUENCE = (1 << 64) - 1

PREFIX = struct.Struct("<4sHH")
CLIENT_HELLO = struct.Struct("<4sHHII")
SERVER_HELLO = struct.Struct("<4sHH32s")
MESSAGE = struct.Struct("<4sHHIIQ")
CHUNK = struct.Struct("<4sHHQQIIIHH")

MAX_FRAME = MESSAGE.size + MAX_PAYLOAD + MAC_BYTES
"""bytes of the longest legal frame; the websocket's own limit may be this or larger"""


class Channel(IntEnum):
    """Which of the controller's websockets a connection is."""

    JOIN = 1
    CONTROL = 2
    DATA = 3


class Kind(IntEnum):
    """Kind of frame."""

    CLIENT_HELLO = 1
    SERVER_HELLO = 2
    MESSAGE = 3
    CHUNK = 4
    REFUSAL = 5


class Section(IntEnum):
    """Which part of the arena a chunk belongs to."""

    PARAMS = 0
    BUFFERS = 1


class Encoding(IntEnum):
    """How a chunk's elements are written; sums are always f32."""

    F32 = 0
    BF16 = 1

    @property
    def element_bytes(self) -> int:
        return 2 if self is Encoding.BF16 else 4


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What a chunk carries: ``elements`` consecutive elements, ``offset`` f32 elements from the start of the arena."""

    round: int
    attempt: int
    section: int
    """a ``Section``: 0 params, 1 buffers"""
    offset: int
    elements: int
    encoding: int = Encoding.F32
    """an ``Encoding``: 0 f32, 1 bf16"""

    @property
    def payload_bytes(self) -> int:
        """Length of the plain payload."""
        return self.elements * Encoding(self.encoding).element_bytes

    def problem(self, payload_bytes: int | None) -> str:
        """What is illegal about this header, or about a payload of so many bytes under it; empty when nothing is."""
        if not 1 <= self.elements <= MAX_CHUNK_ELEMENTS:
            return f"a chunk has 1 to {MAX_CHUNK_ELEMENTS} elements, not {self.elements}"
        if self.section not in (Section.PARAMS, Section.BUFFERS):
            return f"no section {self.section}: 0 is params, 1 is buffers"
        if self.encoding not in (Encoding.F32, Encoding.BF16):
            return f"no encoding {self.encoding}: 0 is f32, 1 is bf16"
        if not (0 <= self.round <= MAX_U32 and 0 <= self.attempt <= MAX_U32 and 0 <= self.offset <= MAX_OFFSET):
            return f"round {self.round}, attempt {self.attempt} or offset {self.offset} is out of range"
        if payload_bytes not in (None, self.payload_bytes):
            return f"{self.elements} elements are {self.payload_bytes} bytes, not {payload_bytes}"
        return ""


@dataclass(frozen=True, slots=True)
class ClientHello:
    """First frame of a connection."""

    channel: Channel
    run_id: int
    nonce: bytes
    header: bytes
    """the bytes before the nonce, which go into the keys"""


def read_kind(frame: memoryview) -> Kind:
    """The frame's kind, once magic and version fit.

    A refusal is read whatever version wrote it. Raises ``RemoteProtocolError``: bad_magic, version_mismatch,
    unknown_kind.
    """
    if len(frame) < PREFIX.size or frame[:4] != MAGIC:
        raise RemoteProtocolError(ErrorCode.BAD_MAGIC, "these bytes are not a Marchline frame; is this the right port?")
    _, version, number = PREFIX.unpack_from(frame)
    if number == Kind.REFUSAL:
        return Kind.REFUSAL
    if version != WIRE_VERSION:
        text = (
            f"the peer speaks wire version {version}, this side speaks {WIRE_VERSION}; install the same release on both"
        )
        raise RemoteProtocolError(ErrorCode.VERSION_MISMATCH, text)
    try:
        return Kind(number)
    except ValueError:
        raise RemoteProtocolError(ErrorCode.UNKNOWN_KIND, f"there is no frame kind {number}") from None


# ---------------------------------------------------------------------------------------------- handshake


def client_hello(channel: Channel, run_id: int, nonce: bytes) -> bytes:
    """Magic, version, kind, channel u32, run u32, nonce (32 bytes). 48 bytes in all."""
    return CLIENT_HELLO.pack(MAGIC, WIRE_VERSION, Kind.CLIENT_HELLO, channel, run_id) + nonce


def read_client_hello(frame: memoryview) -> ClientHello:
    """Parse a client hello. Raises ``RemoteProtocolError``: bad_message, wrong_channel."""
    _check_length(frame, CLIENT_HELLO.size + NONCE_BYTES, "a client hello")
    _, _, _, number, run_id = CLIENT_HELLO.unpack_from(frame)
    try:
        channel = Channel(number)
    except ValueError:
        raise RemoteProtocolError(ErrorCode.WRONG_CHANNEL, f"there is no channel {number}") from None
    return ClientHello(channel, run_id, bytes(frame[CLIENT_HELLO.size :]), bytes(frame[: CLIENT_HELLO.size]))


def server_hello(nonce: bytes) -> bytes:
    """Magic, version, kind, nonce (32 bytes); the caller appends the 32-byte tag. 72 bytes in all."""
    return SERVER_HELLO.pack(MAGIC, WIRE_VERSION, Kind.SERVER_HELLO, nonce)


def read_server_hello(frame: memoryview) -> tuple[bytes, memoryview, memoryview]:
    """(nonce, what the tag covers, tag) of a server hello. Raises ``RemoteProtocolError``: bad_message."""
    _check_length(frame, SERVER_HELLO.size + MAC_BYTES, "a server hello")
    nonce: bytes = SERVER_HELLO.unpack_from(frame)[3]
    return nonce, frame[: SERVER_HELLO.size], frame[SERVER_HELLO.size :]


def refusal(code: ErrorCode, text: str) -> bytes:
    """Magic, version, kind, then ``code`` LF ``text`` in UTF-8. Plain: it is for peers that share no key with us."""
    body = f"{code}\n{text}".encode()[:MAX_REFUSAL_TEXT]
    return PREFIX.pack(MAGIC, WIRE_VERSION, Kind.REFUSAL) + body


def read_refusal(frame: memoryview) -> tuple[str, str]:
    """(code, text) of a refusal, made safe to print: anybody on the path can have written it.

    Raises ``RemoteProtocolError``: oversize.
    """
    body = frame[PREFIX.size :]
    if len(body) > MAX_REFUSAL_TEXT:
        raise RemoteProtocolError(
            ErrorCode.OVERSIZE, f"a refusal has at most {MAX_REFUSAL_TEXT} bytes, not {len(body)}"
        )
    code, _, text = bytes(body).decode(errors="replace").partition("\n")
    return printable(code, 32), printable(text, MAX_REFUSAL_TEXT)


# ------------------------------------------------------------------------------------- messages and chunks


def message_head(rank: int, sequence: int, payload: bytes) -> bytes:
    """Magic, version, kind, rank u32, length u32, sequence u64, payload; the caller appends the 32-byte tag."""
    return MESSAGE.pack(MAGIC, WIRE_VERSION, Kind.MESSAGE, rank, len(payload), sequence) + payload


def read_message(frame: memoryview, cap: int) -> tuple[int, int, memoryview, memoryview, memoryview]:
    """(rank, sequence, payload, what the tag covers, tag) of a message frame; nothing of it is authentic yet.

    ``cap`` bounds the payload. Raises ``RemoteProtocolError``: oversize, bad_message.
    """
    overhead = MESSAGE.size + MAC_BYTES
    if len(frame) > overhead + cap:
        raise RemoteProtocolError(
            ErrorCode.OVERSIZE, f"a message here has at most {cap} bytes, not {len(frame) - overhead}"
        )
    if len(frame) < overhead:
        raise RemoteProtocolError(
            ErrorCode.BAD_MESSAGE, f"a message frame has at least {overhead} bytes, not {len(frame)}"
        )
    _, _, _, rank, length, sequence = MESSAGE.unpack_from(frame)
    _check_length(frame, overhead + length, "this message frame")
    covered = frame[:-MAC_BYTES]
    return rank, sequence, covered[MESSAGE.size :], covered, frame[-MAC_BYTES:]


def write_chunk_header(header: ChunkHeader, sequence: int, frame: bytearray | memoryview) -> None:
    """Magic, version, kind, sequence u64, offset u64, round, attempt, elements u32, section, encoding u16. 40 bytes."""
    CHUNK.pack_into(
        frame, 0, MAGIC, WIRE_VERSION, Kind.CHUNK, sequence, header.offset, header.round, header.attempt,
        header.elements, header.section, header.encoding,
    )  # fmt: skip


def read_chunk(frame: memoryview) -> tuple[ChunkHeader, int, memoryview, memoryview]:
    """(header, sequence, header's bytes, sealed payload) of a chunk frame; nothing of it is authentic yet.

    The caller asks ``header.problem`` once it is.

    Raises ``RemoteProtocolError``: oversize, bad_message.
    """
    longest = CHUNK.size + MAX_CHUNK_ELEMENTS * Encoding.F32.element_bytes + GCM_TAG_BYTES
    if len(frame) > longest:
        raise RemoteProtocolError(ErrorCode.OVERSIZE, f"a chunk frame has at most {longest} bytes, not {len(frame)}")
    if len(frame) < CHUNK.size + GCM_TAG_BYTES:
        raise RemoteProtocolError(ErrorCode.BAD_MESSAGE, f"{len(frame)} bytes are too few for a chunk frame")
    _, _, _, sequence, offset, round_, attempt, elements, section, encoding = CHUNK.unpack_from(frame)
    header = ChunkHeader(round_, attempt, section, offset, elements, encoding)
    return header, sequence, frame[: CHUNK.size], frame[CHUNK.size :]


def check_chunk(header: ChunkHeader, payload: memoryview) -> None:
    """Refuse to send an illegal chunk. Raises ``LocalProtocolError``."""
    if problem := header.problem(payload.nbytes):
        raise LocalProtocolError(problem)
    if not payload.c_contiguous:
        raise LocalProtocolError("a chunk's payload must be contiguous")


def printable(text: str, limit: int) -> str:
    """A stranger's text on one line, without control characters, at most ``limit`` characters."""
    return "".join(character if character.isprintable() else "?" for character in text[:limit])


def _check_length(frame: memoryview, expected: int, what: str) -> None:
    if len(frame) != expected:
        raise RemoteProtocolError(ErrorCode.BAD_MESSAGE, f"{what} has {expected} bytes, not {len(frame)}")
