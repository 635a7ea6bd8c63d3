"""Two sessions that talk: handshake, messages, chunks, and this side's own mistakes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from wire_ends import (
    CLIENT_NONCE,
    FIRST,
    HEADER,
    OTHER_SECRET,
    PAYLOAD,
    RUN,
    SECRET,
    connect,
    deliver,
    new_client,
    new_server,
)

from wire import frames
from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.messages import NO_RANK, Leaving, LocalState, RankHello, RelayWelcome, Update, encode
from wire.sealing import OPEN_SECRET
from wire.session import Channel, ChunkHeader, ChunkReceived, Encoding, Established, Received, Section, Session

# ------------------------------------------------------------------------------------------ handshake


@pytest.mark.parametrize("channel", Channel)
def test_a_connection_is_made_in_three_frames(channel: Channel) -> None:
    asked: list[tuple[Channel, int]] = []

    def secret_for(channel: Channel, run_id: int) -> bytes:
        asked.append((channel, run_id))
        return SECRET

    client, server = Session.client(channel, SECRET, run_id=RUN), Session.server(secret_for)
    assert deliver(server, [client.opening()]) == []
    assert asked == [(channel, RUN)]
    assert (server.channel, server.run_id, server.established) == (channel, RUN, False)
    assert deliver(client, server.pending()) == [Established()]
    assert client.established
    assert deliver(server, [client.seal(Leaving("x"), 4)]) == [Established(), Received(4, Leaving("x"))]
    assert server.established
    assert deliver(client, [server.seal(RelayWelcome())]) == [Received(NO_RANK, RelayWelcome())]


def test_replies_are_given_out_once() -> None:
    client, server = new_client(), new_server()
    server.receive(client.opening())
    assert len(server.pending()) == 1
    assert server.pending() == []


def test_open_admission_is_a_known_secret() -> None:
    ends = connect(new_client(Channel.JOIN, secret=OPEN_SECRET, run_id=0), new_server(secret=OPEN_SECRET))
    assert ends.server.established
    assert (ends.server.channel, ends.server.run_id) == (Channel.JOIN, 0)


def test_nonces_are_fresh() -> None:
    openings = {Session.client(Channel.JOIN, SECRET).opening() for _ in range(20)}
    assert len(openings) == 20
    replies = set()
    for _ in range(20):
        server = Session.server(lambda _channel, _run: SECRET)
        server.receive(new_client().opening())
        replies.add(server.pending()[0])
    assert len(replies) == 20


def test_any_kind_of_buffer_is_received() -> None:
    client, server = new_client(), new_server()
    server.receive(bytearray(client.opening()))
    client.receive(memoryview(server.pending()[0]))
    assert server.receive(memoryview(client.seal(FIRST)))[0] == Established()


# --------------------------------------------------------------------------------- messages and chunks


def test_messages_flow_both_ways_at_once() -> None:
    ends = connect()
    up = [ends.client.seal(Update(n, n), n) for n in range(50)]
    down = [ends.server.seal(Update(-n, n), n) for n in range(50)]
    assert deliver(ends.server, up) == [Received(n, Update(n, n)) for n in range(50)]
    assert deliver(ends.client, down) == [Received(n, Update(-n, n)) for n in range(50)]


@pytest.mark.parametrize("encoding", Encoding)
@pytest.mark.parametrize("section", Section)
def test_chunks_flow_both_ways_and_share_the_numbering(section: Section, encoding: Encoding) -> None:
    ends = connect()
    header = ChunkHeader(2**32 - 1, 5, section, 2**63 - 1, 4, encoding)
    payload = PAYLOAD[: header.payload_bytes]
    for sender, receiver in ((ends.client, ends.server), (ends.server, ends.client)):
        sent = [sender.seal_chunk(header, payload), sender.seal(FIRST), sender.seal_chunk(header, memoryview(payload))]
        chunk = ChunkReceived(header, memoryview(payload))
        assert deliver(receiver, sent) == [chunk, Received(NO_RANK, FIRST), chunk]


def test_the_largest_chunk_and_the_largest_message_pass() -> None:
    ends = connect()
    header = ChunkHeader(0, 0, 0, 0, frames.MAX_CHUNK_ELEMENTS)
    payload = bytes(range(256)) * 4096
    frame = ends.client.seal_chunk(header, payload)
    assert len(frame) <= frames.MAX_FRAME
    [chunk] = ends.server.receive(frame)
    assert isinstance(chunk, ChunkReceived)
    assert chunk.payload == payload
    room = frames.MAX_PAYLOAD - len(encode(LocalState(1, 0, 1, bytes(1 << 16)))) + (1 << 16)
    message = LocalState(1, 0, 1, bytes(room))
    assert len(encode(message)) == frames.MAX_PAYLOAD
    assert deliver(ends.server, [ends.client.seal(message)]) == [Received(NO_RANK, message)]


def test_a_chunk_of_floats_needs_no_cast() -> None:
    ends = connect()
    floats = memoryview(bytearray(16)).cast("f")
    floats[2] = 1.5
    [chunk] = ends.server.receive(ends.client.seal_chunk(HEADER, floats))
    assert isinstance(chunk, ChunkReceived)
    assert chunk.payload.cast("f").tolist() == [0.0, 0.0, 1.5, 0.0]


def test_a_chunks_payload_is_not_readable_on_the_wire() -> None:
    ends = connect()
    assert PAYLOAD[:8] not in bytes(ends.client.seal_chunk(HEADER, PAYLOAD))


def test_equal_chunks_look_different_each_time_and_in_each_direction() -> None:
    ends = connect()
    sealed = [
        bytes(sender.seal_chunk(HEADER, PAYLOAD))[frames.CHUNK.size :]
        for sender in (ends.client, ends.client, ends.server)
    ]
    assert len(set(sealed)) == 3


# ---------------------------------------------------------------------------------------------- threads


def test_chunks_reserved_in_order_may_be_sealed_in_any_order() -> None:
    ends = connect()
    headers = [ChunkHeader(0, 0, 0, 4 * n, 4) for n in range(64)]
    payloads = [bytes([n]) * 16 for n in range(64)]
    reserved = [ends.client.reserve_chunk(header) for header in headers]
    with ThreadPoolExecutor(4) as pool:
        sealing = [pool.submit(chunk.seal, payload) for chunk, payload in zip(reserved, payloads, strict=True)][::-1]
        sealed = [future.result(timeout=30) for future in sealing][::-1]
    received = deliver(ends.server, sealed)
    assert received == [ChunkReceived(h, memoryview(p)) for h, p in zip(headers, payloads, strict=True)]


def test_a_number_is_never_given_out_twice_even_to_careless_threads() -> None:
    ends = connect()
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(ends.client.reserve_chunk, HEADER) for _ in range(2000)]
        numbers = [future.result(timeout=30).sequence for future in futures]
    assert sorted(numbers) == list(range(1, 2001))


def test_a_reserved_chunk_is_sealed_only_once() -> None:
    ends = connect()
    chunk = ends.client.reserve_chunk(HEADER)
    with pytest.raises(LocalProtocolError, match="4 elements are 16 bytes, not 3"):
        chunk.seal(b"abc")
    frame = chunk.seal(PAYLOAD)
    with pytest.raises(LocalProtocolError, match="sealed before"):
        chunk.seal(bytes(16))
    assert deliver(ends.server, [frame]) == [ChunkReceived(HEADER, memoryview(PAYLOAD))]


# ---------------------------------------------------------------------------------- this side's mistakes


def test_nothing_is_sealed_before_the_handshake_is_done() -> None:
    client, server = new_client(), new_server()
    for session in (client, server):
        with pytest.raises(LocalProtocolError, match="nothing can be sealed yet"):
            session.seal(FIRST)
    server.receive(client.opening())
    for session in (client, server):
        with pytest.raises(LocalProtocolError, match="nothing can be sealed yet"):
            session.seal(FIRST)
        with pytest.raises(LocalProtocolError, match="nothing can be sealed yet"):
            session.seal_chunk(HEADER, PAYLOAD)


def test_a_client_opens_once_and_a_server_never() -> None:
    client = new_client()
    client.opening()
    for session in (client, new_server()):
        with pytest.raises(LocalProtocolError, match="opening"):
            session.opening()


def test_a_clients_first_frame_is_a_message() -> None:
    client, server = new_client(), new_server()
    server.receive(client.opening())
    deliver(client, server.pending())
    with pytest.raises(LocalProtocolError, match="first frame is a message"):
        client.seal_chunk(HEADER, PAYLOAD)
    deliver(server, [client.seal(FIRST), client.seal_chunk(HEADER, PAYLOAD)])


@pytest.mark.parametrize("channel", [Channel.JOIN, Channel.CONTROL])
def test_chunks_are_for_the_data_channel(channel: Channel) -> None:
    ends = connect(new_client(channel))
    for session in (ends.client, ends.server):
        with pytest.raises(LocalProtocolError, match="chunks travel on the data channel"):
            session.seal_chunk(HEADER, PAYLOAD)


def test_the_servers_channel_is_unknown_before_the_hello() -> None:
    server = new_server()
    with pytest.raises(LocalProtocolError, match="channel is known once"):
        _ = server.channel
    assert new_server(channel=Channel.JOIN).channel is Channel.JOIN


@pytest.mark.parametrize(
    ("header", "payload", "text"),
    [
        (ChunkHeader(0, 0, 0, 0, 0), b"", "1 to 262144 elements, not 0"),
        (ChunkHeader(0, 0, 0, 0, 262145), bytes(262145 * 4), "1 to 262144 elements, not 262145"),
        (ChunkHeader(0, 0, 2, 0, 4), PAYLOAD, "no section 2"),
        (ChunkHeader(0, 0, 0, 0, 4, 2), PAYLOAD, "no encoding 2"),
        (ChunkHeader(-1, 0, 0, 0, 4), PAYLOAD, "out of range"),
        (ChunkHeader(0, 2**32, 0, 0, 4), PAYLOAD, "out of range"),
        (ChunkHeader(0, 0, 0, 2**63, 4), PAYLOAD, "out of range"),
        (HEADER, PAYLOAD[:-1], "4 elements are 16 bytes, not 15"),
        (ChunkHeader(0, 0, 0, 0, 4, 1), PAYLOAD, "4 elements are 8 bytes, not 16"),
        (HEADER, memoryview(bytes(32))[::2], "contiguous"),
    ],
)
def test_an_illegal_chunk_is_not_sealed_and_costs_no_number(
    header: ChunkHeader, payload: bytes | memoryview, text: str
) -> None:
    ends = connect()
    with pytest.raises(LocalProtocolError, match=text):
        ends.client.seal_chunk(header, payload)
    assert deliver(ends.server, [ends.client.seal(FIRST)]) == [Received(NO_RANK, FIRST)]


def test_an_oversize_or_unpackable_message_is_not_sealed_and_costs_no_number() -> None:
    client, server = new_client(), new_server()
    server.receive(client.opening())
    deliver(client, server.pending())
    with pytest.raises(LocalProtocolError, match="the cap here is 65536"):
        client.seal(Leaving("x" * (64 << 10)))
    deliver(server, [client.seal(FIRST)])
    deliver(server, [client.seal(Leaving("x" * (64 << 10)))])
    with pytest.raises(LocalProtocolError, match="the cap here is 1048576"):
        client.seal(Leaving("x" * (1 << 20)))
    with pytest.raises(LocalProtocolError, match="RankHello cannot be encoded"):
        client.seal(RankHello(2**70))
    for rank in (-1, 2**32):
        with pytest.raises(LocalProtocolError, match="does not fit 32 bits"):
            client.seal(FIRST, rank)
    assert deliver(server, [client.seal(FIRST)]) == [Received(NO_RANK, FIRST)]


def test_a_server_may_open_with_a_large_message() -> None:
    ends = connect()
    assert deliver(ends.client, [ends.server.seal(Leaving("x" * (100 << 10)))])


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: Session.client(Channel.JOIN, b""), "a secret has 32 bytes"),
        (lambda: Session.client(Channel.JOIN, SECRET, run_id=2**32), "does not fit"),
        (lambda: Session.client(Channel.JOIN, SECRET, run_id=-1), "does not fit"),
        (lambda: Session.client(Channel.JOIN, SECRET, nonce=b"short"), "a nonce has 32 bytes"),
        (lambda: Session.server(lambda _channel, _run: SECRET, nonce=b""), "a nonce has 32 bytes"),
        (lambda: new_server(secret=b"short").receive(new_client().opening()), "a secret has 32 bytes"),
    ],
)
def test_mistakes_in_building_a_session_are_named(build: Callable[[], object], text: str) -> None:
    with pytest.raises(LocalProtocolError, match=text):
        build()


def test_numbers_run_out_before_a_nonce_repeats() -> None:
    ends = connect()
    ends.client._sent = itertools.count(2**64)
    with pytest.raises(LocalProtocolError, match="dial again"):
        ends.client.seal(FIRST)
    with pytest.raises(LocalProtocolError, match="dial again"):
        ends.client.reserve_chunk(HEADER)


# ------------------------------------------------------------------------------------------------- death


def test_a_dead_session_repeats_its_failure_and_never_recovers() -> None:
    ends = connect()
    good = ends.client.seal(FIRST)
    with pytest.raises(RemoteProtocolError) as first:
        ends.server.receive(b"garbage")
    assert not ends.server.established
    assert ends.server.failure is first.value
    for act in (
        lambda: ends.server.receive(good),
        lambda: ends.server.seal(FIRST),
        lambda: ends.server.seal_chunk(HEADER, PAYLOAD),
        lambda: ends.server.reserve_chunk(HEADER),
    ):
        with pytest.raises(RemoteProtocolError) as again:
            act()
        assert (again.value.code, again.value.text) == (first.value.code, first.value.text)


def test_printing_a_session_shows_its_state_and_no_secret() -> None:
    client = new_client(secret=OTHER_SECRET)
    assert repr(client) == f"<Session client {Channel.DATA!r} run 7: the client hello was not sent yet>"
    ends = connect()
    with pytest.raises(RemoteProtocolError):
        ends.server.receive(b"")
    shown = repr(client) + repr(ends.client) + repr(ends.server) + repr(ends.client.reserve_chunk(HEADER))
    assert "bad_magic" in shown
    for secret in (OTHER_SECRET, SECRET, CLIENT_NONCE):
        assert repr(secret)[2:-1] not in shown
