"""Hostile bytes: whatever comes, ``receive`` raises a ``RemoteProtocolError`` or accepts the one frame that is due."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from wire_ends import (
    FIRST,
    HEADER,
    PAYLOAD,
    UNHURRIED,
    Ends,
    connect,
    forge_chunk,
    forge_message,
    keys,
    new_client,
    new_server,
)

from wire import frames
from wire.errors import ErrorCode, RemoteProtocolError
from wire.frames import Channel, ChunkHeader, Kind
from wire.messages import NO_RANK, WIRE_VERSION, Accept, JobOffer, Update, encode
from wire.session import ChunkReceived, Established, Incoming, Received, Session

UP = keys().from_client


def waiting_client() -> Session:
    client = new_client()
    client.opening()
    return client


def greeted_server() -> Session:
    server = new_server()
    server.receive(new_client().opening())
    return server


STATES: dict[str, Callable[[], Session]] = {
    "new client": new_client,
    "waiting client": waiting_client,
    "established client": lambda: connect().client,
    "new server": new_server,
    "greeted server": greeted_server,
    "established server": lambda: connect().server,
    "established control server": lambda: connect(new_client(Channel.CONTROL)).server,
}


def receive(session: Session, frame: bytes) -> list[Incoming] | RemoteProtocolError:
    """The events, or the refusal; any other exception fails the test."""
    try:
        return session.receive(frame)
    except RemoteProtocolError as error:
        return error


plausible = st.builds(
    lambda version, kind, body: struct.pack("<4sHH", b"MLIN", version, kind) + body,
    st.sampled_from([WIRE_VERSION, WIRE_VERSION, WIRE_VERSION, 0, 65535]),
    st.sampled_from([*Kind, 0, 6, 65535]),
    st.binary(max_size=200),
)


@pytest.mark.parametrize("state", STATES)
@given(frame=st.binary(max_size=200) | plausible)
@settings(UNHURRIED, max_examples=60)
def test_random_bytes_are_refused_in_every_state(state: str, frame: bytes) -> None:
    """Only a client hello needs no key, so only a new server may accept one, and answers it."""
    session = STATES[state]()
    outcome = receive(session, frame)
    if isinstance(outcome, RemoteProtocolError):
        assert outcome.text.isprintable()
        assert session.failure is outcome
    else:
        assert (state, outcome, len(frame), frame[6]) == ("new server", [], 48, Kind.CLIENT_HELLO)
        assert len(session.pending()) == 1


@given(text=st.text(max_size=50))
@UNHURRIED
def test_text_messages_are_refused(text: str) -> None:
    with pytest.raises(RemoteProtocolError):
        new_server().receive(text)


# -------------------------------------------------------------------- bit flips and truncations of true frames


def flips(frame: bytes) -> list[bytes]:
    flipped = []
    for position in range(len(frame) * 8):
        altered = bytearray(frame)
        altered[position // 8] ^= 1 << position % 8
        flipped.append(bytes(altered))
    return flipped


def cuts(frame: bytes) -> list[bytes]:
    return [frame[:length] for length in range(len(frame))] + [frame + b"\x00", frame + frame]


def true_frames() -> dict[str, tuple[Callable[[], Session], bytes]]:
    ends = connect()
    message, up = ends.client.seal(Update(5, 6), 1), connect().client.seal_chunk(HEADER, PAYLOAD)
    down, back = ends.server.seal(Update(5, 6), 1), connect().server.seal_chunk(HEADER, PAYLOAD)
    return {
        "server hello": (waiting_client, ends.server_hello),
        "first message": (greeted_server, ends.first),
        "message to the server": (STATES["established server"], message),
        "message to the client": (STATES["established client"], down),
        "chunk to the server": (STATES["established server"], bytes(up)),
        "chunk to the client": (STATES["established client"], bytes(back)),
        "refusal": (waiting_client, frames.refusal(ErrorCode.UNKNOWN_RUN, "no run 7")),
    }


TRUE_FRAMES = true_frames()


@pytest.mark.parametrize("alter", [flips, cuts])
@pytest.mark.parametrize("name", TRUE_FRAMES)
def test_no_altered_frame_is_accepted(name: str, alter: Callable[[bytes], list[bytes]]) -> None:
    state, frame = TRUE_FRAMES[name]
    for altered in alter(frame):
        session = state()
        with pytest.raises(RemoteProtocolError):
            session.receive(altered)
        assert session.failure is not None
    if name != "refusal":
        assert state().receive(frame)


def test_no_altered_client_hello_leads_to_a_connection() -> None:
    """The hello has no tag of its own; its every bit goes into the keys, so that the client refuses the answer."""
    hello = connect().client_hello
    answered = 0
    for altered in [*flips(hello), *cuts(hello)]:
        server = new_server()
        if isinstance(receive(server, altered), RemoteProtocolError):
            continue
        answered += 1
        [answer] = server.pending()
        with pytest.raises(RemoteProtocolError) as refused:
            waiting_client().receive(answer)
        assert refused.value.code == "bad_mac"
    assert answered >= 32 * 8 + 32, "every nonce bit and every run bit is plausible"


# ---------------------------------------------------------------------------- replays, drops, reorderings


def burst(ends: Ends) -> list[bytes]:
    """Eight frames in sending order, chunks and messages mixed."""
    return [
        ends.client.seal(Update(n, n), n) if n % 2 else bytes(ends.client.seal_chunk(HEADER, PAYLOAD)) for n in range(8)
    ]


@given(order=st.lists(st.integers(0, 7), max_size=10))
@example(order=[0, 1, 2, 3, 4, 5, 6, 7])
@example(order=[0, 1, 1])
@example(order=[0, 2, 1])
@example(order=[1])
@UNHURRIED
def test_frames_pass_in_sending_order_only(order: list[int]) -> None:
    """Any list of replayed, dropped or reordered frames gets as far as it equals what was sent, and dies there."""
    ends = connect()
    sent = burst(ends)
    for place, index in enumerate(order):
        if index == place:
            [event] = ends.server.receive(sent[index])
            expected = (
                Received(index, Update(index, index)) if index % 2 else ChunkReceived(HEADER, memoryview(PAYLOAD))
            )
            assert event == expected
            continue
        with pytest.raises(RemoteProtocolError) as refused:
            ends.server.receive(sent[index])
        assert refused.value.code == "replay"
        with pytest.raises(RemoteProtocolError):
            ends.server.receive(sent[place] if place < 8 else b"")
        return


FAMILY = [
    (channel, run_id, secret)
    for channel in (Channel.CONTROL, Channel.DATA)
    for run_id in (1, 2)
    for secret in (b"a" * 32, b"b" * 32)
]


@given(st.permutations(range(len(FAMILY))), st.integers(0, 2))
@settings(UNHURRIED, max_examples=40)
def test_frames_of_many_connections_cannot_be_mixed(order: list[int], way: int) -> None:
    """Connections that differ in channel, run or secret only, even with the same nonces on all."""
    family = [
        connect(new_client(channel, secret=secret, run_id=run_id), new_server(secret=secret))
        for channel, run_id, secret in FAMILY
    ]
    for target, source in enumerate(order):
        sender = family[source].server if way == 0 else family[source].client
        receiver = family[target].client if way == 0 else family[target].server
        frame = sender.seal(FIRST)
        if source == target:
            assert receiver.receive(frame) == [Received(NO_RANK, FIRST)]
            continue
        with pytest.raises(RemoteProtocolError) as refused:
            receiver.receive(frame)
        assert refused.value.code == "bad_mac"


# ------------------------------------------------------------------- authentic, but written by a bad member

SAMPLES = [
    encode(JobOffer(1, "a.py:Job", {"a": [1, {"b": None}], "c": 1.5}, "")),
    encode(Accept(1, 2, [0, 1], b"s" * 16, 1.0, 1.0, 30.0)),
    encode(Update(1, 2)),
]


def accepted_or_refused(session: Session, frame: bytes) -> None:
    outcome = receive(session, frame)
    if isinstance(outcome, RemoteProtocolError):
        assert outcome.code in {"bad_message", "unknown_kind"}
        assert outcome.text.isprintable()
        assert len(outcome.text) < 300
    else:
        assert [type(event) for event in outcome] == [Received]


@given(payload=st.binary(max_size=80))
@UNHURRIED
def test_authentic_random_payloads_are_messages_or_refused(payload: bytes) -> None:
    accepted_or_refused(connect().server, forge_message(UP, 1, payload))


@given(sample=st.sampled_from(SAMPLES), edits=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4))
@settings(UNHURRIED, max_examples=300)
def test_authentic_damaged_messages_are_messages_or_refused(sample: bytes, edits: list[tuple[int, int]]) -> None:
    payload = bytearray(sample)
    for position, value in edits:
        payload[position % len(payload)] = value
    accepted_or_refused(connect().server, forge_message(UP, 1, bytes(payload)))


@given(
    header=st.builds(
        ChunkHeader,
        round=st.integers(0, 2**32 - 1),
        attempt=st.integers(0, 2**32 - 1),
        section=st.integers(0, 65535) | st.integers(0, 1),
        offset=st.integers(0, 2**64 - 1),
        elements=st.integers(0, 2**32 - 1) | st.integers(0, 8),
        encoding=st.integers(0, 65535) | st.integers(0, 1),
    ),
    payload=st.binary(max_size=40),
)
@settings(UNHURRIED, max_examples=300)
def test_an_authentic_chunk_passes_exactly_when_its_header_is_true(header: ChunkHeader, payload: bytes) -> None:
    session = connect().server
    legal = header.section <= 1 and header.encoding <= 1 and header.offset < 2**63 and header.elements > 0
    legal = legal and len(payload) == header.elements * (4, 2)[header.encoding]
    frame = forge_chunk(UP, 1, header, payload)
    if legal:
        assert session.receive(frame) == [ChunkReceived(header, memoryview(payload))]
        return
    with pytest.raises(RemoteProtocolError) as refused:
        session.receive(frame)
    assert refused.value.code == "bad_message"


def test_the_first_frame_of_a_true_client_still_passes_after_all_this() -> None:
    assert greeted_server().receive(connect().first) == [Established(), Received(NO_RANK, FIRST)]
