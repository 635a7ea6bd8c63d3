"""One authenticated connection without any I/O, both ends (design section 5; reliability 5.3 "Frames").

A shell owns the websocket and does four things: it sends what ``opening()`` gives (client only), passes every incoming
message to ``receive()``, then sends what ``pending()`` holds, and acts on the events. When ``receive()`` raises, it
sends ``refusal(error)`` if there is one and closes with ``wire.codes.close_code(error.code)``.

    client                                 server
      client hello (version, channel, run, nonce) ──►   secret for that channel and run
      ◄── server hello (nonce, tag)                     the server has proved that it holds the secret
      Established()
      message 0 (tag) ──►                               the client has proved it too
                                                        Established(), Received(...)

Before that tag verifies, the server decodes nothing that the client chose, beyond the fixed header of its hello.

Sequence numbers start at 0 in each direction, are shared by messages and chunks, and must arrive as last + 1.

Threads: at most one thread in ``receive()`` and one in ``seal()``, ``seal_chunk()`` or ``reserve_chunk()`` at a time;
these two may overlap. A reserved chunk may be sealed in any thread, many at once; its frame must still be sent in the
order of reservation, since that is when the sequence number was taken. Tags and chunk seals release the GIL (hashlib;
cryptography as of 50.0), so threads of several connections run side by side.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from wire import frames
from wire.chunks import ReservedChunk
from wire.codec import pack, unpack
from wire.errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from wire.frames import Channel, ChunkHeader, Encoding, Kind, Section
from wire.messages import NO_RANK, Message
from wire.sealing import (
    NONCE_BYTES,
    ConnectionKeys,
    DirectionKeys,
    check_secret,
    connection_keys,
    join_secret,
    run_secret,
)

__all__ = [
    "Channel",
    "ChunkHeader",
    "ChunkReceived",
    "Encoding",
    "Established",
    "Incoming",
    "Received",
    "ReservedChunk",
    "Section",
    "Session",
    "join_secret",
    "run_secret",
]

Data = bytes | bytearray | memoryview
SecretFor = Callable[[Channel, int], bytes | None]

_REFUSABLE = frozenset(
    {ErrorCode.VERSION_MISMATCH, ErrorCode.UNKNOWN_RUN, ErrorCode.BAD_MAC, ErrorCode.WRONG_CHANNEL, ErrorCode.OVERSIZE}
)


@dataclass(frozen=True, slots=True)
class Established:
    """Both sides hold the secret, as far as this side can know: sealing is allowed from here on."""


@dataclass(frozen=True, slots=True)
class Received:
    """An authentic message, for or from ``rank`` (``NO_RANK``: the whole host)."""

    rank: int
    message: Message


@dataclass(frozen=True, slots=True)
class ChunkReceived:
    """An authentic chunk; ``payload`` is plain bytes of ``header.payload_bytes`` length, owned by the receiver."""

    header: ChunkHeader
    payload: memoryview


Incoming = Established | Received | ChunkReceived


class State(Enum):
    """Where a session is; the table of ``Session._receive`` says which frames move it."""

    CLIENT_START = "the client hello was not sent yet"
    CLIENT_WAITS = "a server hello is expected"
    SERVER_START = "a client hello is expected"
    SERVER_WAITS = "the client's first message is expected"
    ESTABLISHED = "established"


def _no_run(_channel: Channel, _run_id: int) -> bytes | None:
    return None


class Session:
    """One end of one connection. Build it with :meth:`client` or :meth:`server`."""

    def __init__(
        self,
        state: State,
        channel: Channel | None,
        nonce: bytes | None,
        *,
        secret: bytes = b"",
        run_id: int = 0,
        secret_for: SecretFor = _no_run,
    ) -> None:
        self._state = state
        self._is_client = state is State.CLIENT_START
        self._channel = channel
        self._run_id = run_id
        self._secret = secret
        self._secret_for = secret_for
        self._nonce = os.urandom(NONCE_BYTES) if nonce is None else nonce
        self._keys: ConnectionKeys | None = None
        self._sent = itertools.count()
        self._sent_any = False
        self._expected = 0
        self._replies: list[bytes] = []
        self._failure: RemoteProtocolError | None = None
        if len(self._nonce) != NONCE_BYTES:
            raise LocalProtocolError(f"a nonce has {NONCE_BYTES} bytes, this one has {len(self._nonce)}")

    @classmethod
    def client(cls, channel: Channel, secret: bytes, *, run_id: int = 0, nonce: bytes | None = None) -> Session:
        """The dialling end. ``run_id`` names the run on the control and data channels.

        ``nonce`` (32 bytes) is fresh randomness unless a test fixes it. Raises ``LocalProtocolError`` when the secret
        is not 32 bytes or the run's number does not fit 32 bits.
        """
        check_secret(secret)
        if not 0 <= run_id <= frames.MAX_U32:
            raise LocalProtocolError(f"run {run_id} does not fit the client hello's 32 bits")
        return cls(State.CLIENT_START, channel, nonce, secret=secret, run_id=run_id)

    @classmethod
    def server(cls, secret_for: SecretFor, *, channel: Channel | None = None, nonce: bytes | None = None) -> Session:
        """The listening end. ``secret_for(channel, run_id)`` gives the 32-byte secret, or None for an unknown run.

        With ``channel``, a client hello for another channel is refused as wrong_channel before ``secret_for`` is asked.
        """
        return cls(State.SERVER_START, channel, nonce, secret_for=secret_for)

    def __repr__(self) -> str:
        side = "client" if self._is_client else "server"
        return f"<Session {side} {self._channel!r} run {self._run_id}: {self._failure or self._state.value}>"

    @property
    def channel(self) -> Channel:
        """The connection's channel. Raises ``LocalProtocolError`` on a server that has not read a client hello."""
        if self._channel is None:
            raise LocalProtocolError("the channel is known once the client hello was read")
        return self._channel

    @property
    def run_id(self) -> int:
        """The run that the client hello named; 0 on the join channel and before the hello was read."""
        return self._run_id

    @property
    def established(self) -> bool:
        """Whether sealing is allowed: the handshake is done and nothing has failed."""
        return self._state is State.ESTABLISHED and self._failure is None

    @property
    def failure(self) -> RemoteProtocolError | None:
        """What killed this session, if anything did."""
        return self._failure

    # ------------------------------------------------------------------------------------------ sending

    def opening(self) -> bytes:
        """The client hello: what a client sends first, once. Raises ``LocalProtocolError`` when called out of turn."""
        if self._state is not State.CLIENT_START:
            raise LocalProtocolError("opening() is for a client, once, before anything else")
        self._state = State.CLIENT_WAITS
        return frames.client_hello(self.channel, self._run_id, self._nonce)

    def pending(self) -> list[bytes]:
        """Handshake replies to send now, in order; each is given out once."""
        replies, self._replies = self._replies, []
        return replies

    def seal(self, message: Message, rank: int = NO_RANK) -> bytes:
        """The frame of one message for or from ``rank``; send frames in the order in which they were sealed.

        Raises ``LocalProtocolError`` before establishment, over 1 MiB (64 KiB for the client's first message), and for
        what msgpack cannot hold; ``RemoteProtocolError`` (the original failure) on a dead session.
        """
        keys = self._sending_keys()
        payload = pack(message)
        cap = self._sending_cap()
        if len(payload) > cap:
            raise LocalProtocolError(f"{type(message).__name__} takes {len(payload)} bytes, the cap here is {cap}")
        if not 0 <= rank <= NO_RANK:
            raise LocalProtocolError(f"rank {rank} does not fit 32 bits")
        head = frames.message_head(rank, self._next_sequence(), payload)
        return head + keys.tag(head)

    def reserve_chunk(self, header: ChunkHeader) -> ReservedChunk:
        """Take the next sequence number for a chunk that another thread seals.

        Raises ``LocalProtocolError`` off the data channel, before the first message was sealed, and for an illegal
        header; ``RemoteProtocolError`` (the original failure) on a dead session.
        """
        keys = self._sending_keys()
        if self.channel is not Channel.DATA:
            raise LocalProtocolError(f"chunks travel on the data channel, this is {self.channel.name.lower()}")
        if self._is_client and not self._sent_any:
            raise LocalProtocolError("a client's first frame is a message: it proves that the client holds the secret")
        if problem := header.problem(None):
            raise LocalProtocolError(problem)
        return ReservedChunk(header, self._next_sequence(), keys)

    def seal_chunk(self, header: ChunkHeader, payload: Data) -> bytearray:
        """The frame of one chunk, sealed here and now (AES-256-GCM, the header authenticated beside it).

        ``payload`` is contiguous and ``header.payload_bytes`` long. Raises as ``reserve_chunk`` and for a payload that
        does not fit the header, without spending a sequence number.
        """
        frames.check_chunk(header, memoryview(payload))
        return self.reserve_chunk(header).seal(payload)

    def refusal(self, error: RemoteProtocolError) -> bytes | None:
        """A plain frame that tells the peer why, or None when it gets no answer.

        Only a handshake is ever answered: strangers with garbage learn nothing, and established peers have tags.
        """
        if self._state is State.ESTABLISHED or error.code not in _REFUSABLE:
            return None
        return frames.refusal(error.code, error.text)

    def _sending_keys(self) -> DirectionKeys:
        if self._failure is not None:
            raise self._failure.again()
        if self._state is not State.ESTABLISHED or self._keys is None:
            raise LocalProtocolError(f"nothing can be sealed yet: {self._state.value}")
        return self._keys.from_client if self._is_client else self._keys.from_server

    def _sending_cap(self) -> int:
        first = self._is_client and not self._sent_any
        return frames.MAX_FIRST_PAYLOAD if first else frames.MAX_PAYLOAD

    def _next_sequence(self) -> int:
        # A count gives each number once even if callers break the threading rule: a GCM nonce must never repeat.
        sequence = next(self._sent)
        if sequence > frames.MAX_SEQUENCE:
            raise LocalProtocolError("this connection has used up its sequence numbers; dial again")
        self._sent_any = True
        return sequence

    # ---------------------------------------------------------------------------------------- receiving

    def receive(self, data: Data | str) -> list[Incoming]:
        """Take one websocket message, which is one frame, and return what it means.

        Raises ``RemoteProtocolError`` for anything illegal, whatever the bytes (text messages too); the session is then
        dead, and each later call raises the same failure again. Raises nothing else on account of the peer.
        """
        if self._failure is not None:
            raise self._failure.again()
        try:
            return self._receive(_as_frame(data))
        except RemoteProtocolError as error:
            self._failure = error
            raise

    def _receive(self, frame: memoryview) -> list[Incoming]:
        kind = frames.read_kind(frame)
        match self._state, kind:
            case _, Kind.REFUSAL:
                return self._on_refusal(frame)
            case State.CLIENT_WAITS, Kind.SERVER_HELLO:
                return self._on_server_hello(frame)
            case State.SERVER_START, Kind.CLIENT_HELLO:
                return self._on_client_hello(frame)
            case State.SERVER_WAITS, Kind.MESSAGE:
                return self._on_first_message(frame)
            case State.ESTABLISHED, Kind.MESSAGE:
                return [self._on_message(frame, frames.MAX_PAYLOAD)]
            case State.ESTABLISHED, Kind.CHUNK:
                return [self._on_chunk(frame)]
            case State.ESTABLISHED, _:
                raise RemoteProtocolError(ErrorCode.UNEXPECTED_KIND, f"a {_name(kind)} came after the handshake")
        raise RemoteProtocolError(ErrorCode.HANDSHAKE_EXPECTED, f"{self._state.value}, not a {_name(kind)}")

    def _on_refusal(self, frame: memoryview) -> list[Incoming]:
        if self._expected > 0:
            raise RemoteProtocolError(ErrorCode.BAD_MAC, "a refusal without a tag came after authentic frames")
        code, text = frames.read_refusal(frame)
        raise RemoteProtocolError(ErrorCode.PEER_REFUSED, f"the peer refused ({code}): {text}", peer_code=code)

    def _on_client_hello(self, frame: memoryview) -> list[Incoming]:
        hello = frames.read_client_hello(frame)
        if self._channel not in (None, hello.channel):
            text = f"this is the {self.channel.name.lower()} channel, the hello is for {hello.channel.name.lower()}"
            raise RemoteProtocolError(ErrorCode.WRONG_CHANNEL, text)
        secret = self._secret_for(hello.channel, hello.run_id)
        if secret is None:
            text = f"run {hello.run_id} takes no {hello.channel.name.lower()} connection here"
            raise RemoteProtocolError(ErrorCode.UNKNOWN_RUN, text)
        self._channel, self._run_id = hello.channel, hello.run_id
        self._keys = connection_keys(secret, hello.header, hello.nonce, self._nonce)
        head = frames.server_hello(self._nonce)
        self._replies.append(head + self._keys.server_hello.tag(head))
        self._state = State.SERVER_WAITS
        return []

    def _on_server_hello(self, frame: memoryview) -> list[Incoming]:
        nonce, covered, tag = frames.read_server_hello(frame)
        header = frames.client_hello(self.channel, self._run_id, b"")
        keys = connection_keys(self._secret, header, self._nonce, nonce)
        if not keys.server_hello.verify(covered, tag):
            raise RemoteProtocolError(
                ErrorCode.BAD_MAC, "the server holds another secret; is the join token this controller's?"
            )
        self._keys = keys
        self._state = State.ESTABLISHED
        return [Established()]

    def _on_first_message(self, frame: memoryview) -> list[Incoming]:
        received = self._on_message(frame, frames.MAX_FIRST_PAYLOAD)
        self._state = State.ESTABLISHED
        return [Established(), received]

    def _on_message(self, frame: memoryview, cap: int) -> Received:
        rank, sequence, payload, covered, tag = frames.read_message(frame, cap)
        if not self._receiving_keys().verify(covered, tag):
            raise self._bad_mac("a message")
        self._take(sequence)
        return Received(rank, unpack(payload))

    def _on_chunk(self, frame: memoryview) -> ChunkReceived:
        if self.channel is not Channel.DATA:
            raise RemoteProtocolError(
                ErrorCode.WRONG_CHANNEL, f"a chunk came on the {self.channel.name.lower()} channel"
            )
        header, sequence, head, sealed = frames.read_chunk(frame)
        plain = self._receiving_keys().decrypt(sequence, head, sealed)
        if plain is None:
            raise self._bad_mac("a chunk")
        self._take(sequence)
        if problem := header.problem(len(plain)):
            raise RemoteProtocolError(ErrorCode.BAD_MESSAGE, problem)
        return ChunkReceived(header, memoryview(plain))

    def _receiving_keys(self) -> DirectionKeys:
        if self._keys is None:
            raise AssertionError("keys exist in every state that reads tagged frames")
        return self._keys.from_server if self._is_client else self._keys.from_client

    def _bad_mac(self, what: str) -> RemoteProtocolError:
        if self._state is State.SERVER_WAITS:
            return RemoteProtocolError(
                ErrorCode.BAD_MAC, "the peer holds another secret; is its join token this controller's?"
            )
        return RemoteProtocolError(ErrorCode.BAD_MAC, f"the tag of {what} does not verify")

    def _take(self, sequence: int) -> None:
        if sequence != self._expected:
            text = f"frame {sequence} came where frame {self._expected} belongs"
            raise RemoteProtocolError(ErrorCode.REPLAY, text)
        self._expected += 1


def _as_frame(data: Data | str) -> memoryview:
    if isinstance(data, str):
        raise RemoteProtocolError(ErrorCode.BAD_MAGIC, "a text message came; frames are binary")
    return memoryview(data).cast("B")


def _name(kind: Kind) -> str:
    return kind.name.lower().replace("_", " ")
