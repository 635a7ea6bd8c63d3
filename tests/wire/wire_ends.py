"""Two sessions back to back, and a forger who holds the keys: what the tests of ``wire`` share."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from hypothesis import settings

from wire import frames
from wire.frames import Channel, ChunkHeader, Kind
from wire.messages import WIRE_VERSION, ControllerHeartbeat
from wire.sealing import ConnectionKeys, DirectionKeys, connection_keys, join_secret
from wire.session import Incoming, Session

UNHURRIED = settings(deadline=None)
"""for properties: a busy machine is no failure"""
SECRET = join_secret("a token of this test")
OTHER_SECRET = join_secret("another token")
RUN = 7
CLIENT_NONCE = bytes(range(32))
SERVER_NONCE = bytes(range(32, 64))
HEADER = ChunkHeader(round=3, attempt=1, section=0, offset=4096, elements=4, encoding=0)
PAYLOAD = bytes(range(16))
FIRST = ControllerHeartbeat()
"""the smallest message: stands for whatever a client says first"""


def new_client(channel: Channel = Channel.DATA, *, secret: bytes = SECRET, run_id: int = RUN) -> Session:
    return Session.client(channel, secret, run_id=run_id, nonce=CLIENT_NONCE)


def new_server(*, secret: bytes = SECRET, channel: Channel | None = None, nonce: bytes = SERVER_NONCE) -> Session:
    return Session.server(lambda _channel, _run: secret, channel=channel, nonce=nonce)


def deliver(to: Session, sent: Iterable[bytes | bytearray]) -> list[Incoming]:
    """Everything ``to`` makes of these frames, in order."""
    return [event for frame in sent for event in to.receive(frame)]


@dataclass
class Ends:
    """A connection, established on both ends, and the frames that made it so."""

    client: Session
    server: Session
    client_hello: bytes
    server_hello: bytes
    first: bytes


def connect(client: Session | None = None, server: Session | None = None) -> Ends:
    client, server = client or new_client(), server or new_server()
    client_hello = client.opening()
    deliver(server, [client_hello])
    [server_hello] = server.pending()
    deliver(client, [server_hello])
    first = client.seal(FIRST)
    deliver(server, [first])
    return Ends(client, server, client_hello, server_hello, first)


def keys(channel: Channel = Channel.DATA, *, secret: bytes = SECRET, run_id: int = RUN) -> ConnectionKeys:
    """The keys of a connection between ``new_client`` and ``new_server``."""
    header = struct.pack("<4sHHII", b"MLIN", WIRE_VERSION, Kind.CLIENT_HELLO, channel, run_id)
    return connection_keys(secret, header, CLIENT_NONCE, SERVER_NONCE)


def forge_message(sender: DirectionKeys, sequence: int, payload: bytes, rank: int = 0) -> bytes:
    """A message frame with a true tag over any payload."""
    head = frames.message_head(rank, sequence, payload)
    return head + sender.tag(head)


def forge_chunk(sender: DirectionKeys, sequence: int, header: ChunkHeader, payload: bytes) -> bytes:
    """A chunk frame with a true tag under any header."""
    frame = bytearray(frames.CHUNK.size + len(payload) + 16)
    frames.write_chunk_header(header, sequence, frame)
    view = memoryview(frame)
    start = frames.CHUNK.size
    sender.encrypt_into(sequence, view[:start], memoryview(payload), view[start:])
    return bytes(frame)
