"""Every refusal by name: one row each for what a peer can do wrong, and what it is told."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

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
    forge_chunk,
    forge_message,
    keys,
    new_client,
    new_server,
)

from wire import frames
from wire.errors import ErrorCode, RemoteProtocolError
from wire.frames import Channel, Kind
from wire.messages import NO_RANK, WIRE_VERSION, Leaving, Update, encode
from wire.session import Received, Session


def refused(session: Session, frame: bytes | bytearray | str) -> RemoteProtocolError:
    with pytest.raises(RemoteProtocolError) as raised:
        session.receive(frame)
    return raised.value


def prefix(kind: int, *, version: int = WIRE_VERSION, magic: bytes = b"MLIN") -> bytes:
    return struct.pack("<4sHH", magic, version, kind)


def greeted_server() -> Session:
    """A server that has answered a client hello and waits for the first message."""
    server = new_server()
    server.receive(new_client().opening())
    return server


def waiting_client() -> Session:
    client = new_client()
    client.opening()
    return client


def established_server() -> Session:
    return connect().server


def established_client() -> Session:
    return connect().client


def established_control() -> Session:
    return connect(new_client(Channel.CONTROL)).server


def other_servers_hello() -> bytes:
    server = new_server(secret=OTHER_SECRET)
    server.receive(new_client().opening())
    return server.pending()[0]


HELLO = frames.client_hello(Channel.DATA, RUN, CLIENT_NONCE)
UP, DOWN = keys().from_client, keys().from_server
BAD_CHUNK = {
    "elements": replace(HEADER, elements=5),
    "no elements": replace(HEADER, elements=0),
    "too many elements": replace(HEADER, elements=2**32 - 1),
    "section": replace(HEADER, section=2),
    "encoding": replace(HEADER, encoding=7),
    "bf16 of f32 length": replace(HEADER, encoding=1),
    "offset": replace(HEADER, offset=2**63),
}
MIB = 1 << 20

Row = tuple[Callable[[], Session], bytes | str, ErrorCode, str]
ROWS: dict[str, Row] = {
    # strangers
    "nothing at all": (new_server, b"", ErrorCode.BAD_MAGIC, "not a Marchline frame"),
    "an HTTP request": (new_server, b"GET / HTTP/1.1\r\n\r\n", ErrorCode.BAD_MAGIC, "right port"),
    "a text message": (new_server, "hello", ErrorCode.BAD_MAGIC, "frames are binary"),
    "seven bytes of prefix": (new_server, prefix(1)[:7], ErrorCode.BAD_MAGIC, "not a Marchline frame"),
    "other magic": (new_server, prefix(1, magic=b"MLIM"), ErrorCode.BAD_MAGIC, "not a Marchline frame"),
    "a newer client": (new_server, prefix(1, version=WIRE_VERSION + 1), ErrorCode.VERSION_MISMATCH, "same release"),
    "an older server": (waiting_client, prefix(2, version=0), ErrorCode.VERSION_MISMATCH, "wire version 0, this side"),
    "frame kind 0": (new_server, prefix(0), ErrorCode.UNKNOWN_KIND, "no frame kind 0"),
    "frame kind 6": (established_server, prefix(6), ErrorCode.UNKNOWN_KIND, "no frame kind 6"),
    # handshake
    "short client hello": (new_server, HELLO[:-1], ErrorCode.BAD_MESSAGE, "client hello has 48 bytes, not 47"),
    "long client hello": (new_server, HELLO + b"x", ErrorCode.BAD_MESSAGE, "client hello has 48 bytes, not 49"),
    "channel 0": (new_server, HELLO[:8] + bytes(4) + HELLO[12:], ErrorCode.WRONG_CHANNEL, "no channel 0"),
    "data hello on the control socket": (
        lambda: new_server(channel=Channel.CONTROL),
        HELLO,
        ErrorCode.WRONG_CHANNEL,
        "this is the control channel, the hello is for data",
    ),
    "unknown run": (
        lambda: Session.server(lambda _channel, _run: None),
        HELLO,
        ErrorCode.UNKNOWN_RUN,
        "run 7 takes no data connection",
    ),
    "message before client hello": (
        new_server,
        forge_message(UP, 0, encode(FIRST)),
        ErrorCode.HANDSHAKE_EXPECTED,
        "a client hello is expected, not a message",
    ),
    "server hello to a server": (new_server, prefix(2), ErrorCode.HANDSHAKE_EXPECTED, "not a server hello"),
    "two client hellos": (greeted_server, HELLO, ErrorCode.HANDSHAKE_EXPECTED, "first message is expected"),
    "chunk first": (
        greeted_server,
        forge_chunk(UP, 0, HEADER, PAYLOAD),
        ErrorCode.HANDSHAKE_EXPECTED,
        "the client's first message is expected, not a chunk",
    ),
    "message before server hello": (
        waiting_client,
        forge_message(DOWN, 0, encode(FIRST)),
        ErrorCode.HANDSHAKE_EXPECTED,
        "a server hello is expected, not a message",
    ),
    "client hello echoed": (waiting_client, HELLO, ErrorCode.HANDSHAKE_EXPECTED, "not a client hello"),
    "server speaks first": (new_client, prefix(2), ErrorCode.HANDSHAKE_EXPECTED, "not sent yet"),
    "short server hello": (waiting_client, prefix(2) + bytes(63), ErrorCode.BAD_MESSAGE, "has 72 bytes, not 71"),
    "server with another token": (waiting_client, other_servers_hello(), ErrorCode.BAD_MAC, "join token"),
    "server hello with no tag": (waiting_client, prefix(2) + bytes(64), ErrorCode.BAD_MAC, "another secret"),
    "client with another token": (
        greeted_server,
        forge_message(keys(secret=OTHER_SECRET).from_client, 0, encode(FIRST)),
        ErrorCode.BAD_MAC,
        "the peer holds another secret; is its join token this controller's?",
    ),
    "first message of 64 KiB and a byte": (
        greeted_server,
        forge_message(UP, 0, bytes((64 << 10) + 1)),
        ErrorCode.OVERSIZE,
        "at most 65536 bytes, not 65537",
    ),
    "first message is number 1": (greeted_server, forge_message(UP, 1, encode(FIRST)), ErrorCode.REPLAY, "frame 1"),
    "first message undecodable": (greeted_server, forge_message(UP, 0, b"\xc1"), ErrorCode.BAD_MESSAGE, "no message"),
    "hello after the handshake": (established_server, HELLO, ErrorCode.UNEXPECTED_KIND, "a client hello came after"),
    # messages
    "message of 1 MiB and a byte": (
        established_server,
        forge_message(UP, 1, bytes(MIB + 1)),
        ErrorCode.OVERSIZE,
        "at most 1048576 bytes, not 1048577",
    ),
    "message of 20 MiB": (established_server, prefix(3) + bytes(20 * MIB), ErrorCode.OVERSIZE, "at most"),
    "message shorter than its header": (established_server, prefix(3), ErrorCode.BAD_MESSAGE, "at least 56 bytes"),
    "length field of 2^31": (
        established_server,
        frames.MESSAGE.pack(b"MLIN", WIRE_VERSION, Kind.MESSAGE, 0, 2**31, 1) + bytes(32),
        ErrorCode.BAD_MESSAGE,
        "this message frame has 2147483704 bytes, not 56",
    ),
    "length field of 0": (
        established_server,
        frames.MESSAGE.pack(b"MLIN", WIRE_VERSION, Kind.MESSAGE, 0, 0, 1) + bytes(40),
        ErrorCode.BAD_MESSAGE,
        "this message frame has 56 bytes, not 64",
    ),
    "tag of zeros": (
        established_server,
        frames.message_head(0, 1, encode(FIRST)) + bytes(32),
        ErrorCode.BAD_MAC,
        "the tag of a message does not verify",
    ),
    "tag cut to 8 bytes": (
        established_server,
        forge_message(UP, 1, encode(FIRST))[:-24],
        ErrorCode.BAD_MESSAGE,
        "this message frame has",
    ),
    "message of another connection": (
        established_server,
        forge_message(keys(run_id=8).from_client, 1, encode(FIRST)),
        ErrorCode.BAD_MAC,
        "does not verify",
    ),
    "number repeated": (established_server, forge_message(UP, 0, encode(FIRST)), ErrorCode.REPLAY, "frame 0 came"),
    "number skipped": (established_server, forge_message(UP, 2, encode(FIRST)), ErrorCode.REPLAY, "frame 1 belongs"),
    "last number": (established_server, forge_message(UP, 2**64 - 1, encode(FIRST)), ErrorCode.REPLAY, "belongs"),
    "unknown message": (
        established_server,
        forge_message(UP, 1, b"\x81\xa4kind\xa4Sudo"),
        ErrorCode.UNKNOWN_KIND,
        "no message 'Sudo'",
    ),
    "field of the wrong type": (
        established_server,
        forge_message(UP, 1, b"\x82\xa4kind\xa9RankHello\xa4rank\xa1x"),
        ErrorCode.BAD_MESSAGE,
        "RankHello: Expected `int`, got `str`",
    ),
    # chunks
    "chunk on the control channel": (
        established_control,
        forge_chunk(keys(Channel.CONTROL).from_client, 1, HEADER, PAYLOAD),
        ErrorCode.WRONG_CHANNEL,
        "a chunk came on the control channel",
    ),
    "chunk shorter than its header": (established_server, prefix(4), ErrorCode.BAD_MESSAGE, "too few"),
    "chunk of 2 MiB": (established_server, prefix(4) + bytes(2 * MIB), ErrorCode.OVERSIZE, "at most 1048632 bytes"),
    "chunk cut short": (established_server, forge_chunk(UP, 1, HEADER, PAYLOAD)[:-1], ErrorCode.BAD_MAC, "a chunk"),
    "chunk number repeated": (established_server, forge_chunk(UP, 0, HEADER, PAYLOAD), ErrorCode.REPLAY, "frame 0"),
    "chunk number skipped": (established_server, forge_chunk(UP, 5, HEADER, PAYLOAD), ErrorCode.REPLAY, "frame 5"),
    **{
        f"chunk: {name}": (established_server, forge_chunk(UP, 1, header, PAYLOAD), ErrorCode.BAD_MESSAGE, "")
        for name, header in BAD_CHUNK.items()
    },
    # the peer gives up
    "refusal during the handshake": (
        waiting_client,
        frames.refusal(ErrorCode.UNKNOWN_RUN, "no run 7"),
        ErrorCode.PEER_REFUSED,
        "the peer refused (unknown_run): no run 7",
    ),
    "refusal longer than its cap": (waiting_client, prefix(5) + bytes(513), ErrorCode.OVERSIZE, "at most 512 bytes"),
    "refusal after authentic frames": (
        established_server,
        frames.refusal(ErrorCode.UNKNOWN_RUN, "go away"),
        ErrorCode.BAD_MAC,
        "a refusal without a tag",
    ),
}


@pytest.mark.parametrize(("session", "frame", "code", "text"), ROWS.values(), ids=ROWS.keys())
def test_refused_by_name(session: Callable[[], Session], frame: bytes | str, code: ErrorCode, text: str) -> None:
    receiver = session()
    error = refused(receiver, frame)
    assert error.code is code
    assert text in error.text
    assert str(error) == f"{code}: {error.text}"
    assert error.text.isprintable()
    assert not receiver.established
    assert refused(receiver, frame).code is code
    for secret in (SECRET, OTHER_SECRET):
        assert secret.hex() not in error.text


def test_every_code_has_a_row() -> None:
    assert {code for _, _, code, _ in ROWS.values()} == set(ErrorCode)


def test_a_version_mismatch_names_both_versions() -> None:
    error = refused(new_server(), prefix(1, version=WIRE_VERSION + 41))
    assert f"wire version {WIRE_VERSION + 41}, this side speaks {WIRE_VERSION}" in error.text


def test_reflected_frames_fail_on_both_sides() -> None:
    for back_to in ("client", "server"):
        ends = connect()
        session = getattr(ends, back_to)
        assert refused(session, session.seal(FIRST)).code == "bad_mac"
        ends = connect()
        session = getattr(ends, back_to)
        assert refused(session, session.seal_chunk(HEADER, PAYLOAD)).code == "bad_mac"


@pytest.mark.parametrize("kind", ["message", "chunk"])
def test_frames_of_another_connection_channel_run_or_secret_fail(kind: str) -> None:
    """The same place in the sequence, authentic over there."""
    elsewhere = [
        connect(new_client(), new_server(nonce=bytes(32))),
        connect(Session.client(Channel.DATA, SECRET, run_id=RUN), new_server()),
        connect(new_client(run_id=RUN + 1)),
        connect(new_client(secret=OTHER_SECRET), new_server(secret=OTHER_SECRET)),
    ]
    for other in elsewhere:
        here = connect()
        frame = other.client.seal_chunk(HEADER, PAYLOAD) if kind == "chunk" else other.client.seal(FIRST)
        assert refused(here.server, frame).code == "bad_mac"
    control = connect(new_client(Channel.CONTROL))
    assert refused(control.server, connect().client.seal(FIRST)).code == "bad_mac"


def test_a_whole_recorded_connection_cannot_be_replayed() -> None:
    recorded = connect()
    server = Session.server(lambda _channel, _run: SECRET)
    server.receive(recorded.client_hello)
    assert refused(server, recorded.first).code == "bad_mac"
    client = Session.client(Channel.DATA, SECRET, run_id=RUN)
    client.opening()
    assert refused(client, recorded.server_hello).code == "bad_mac"


def test_a_chunk_cannot_pass_as_a_message_nor_the_reverse() -> None:
    chunk, message = bytearray(connect().client.seal_chunk(HEADER, PAYLOAD)), bytearray(connect().client.seal(FIRST))
    chunk[6], message[6] = Kind.MESSAGE, Kind.CHUNK
    for frame in (chunk, message):
        assert refused(connect().server, frame).code in {"bad_mac", "bad_message"}


def test_a_rank_cannot_be_swapped_under_the_tag() -> None:
    ends = connect()
    frame = bytearray(ends.client.seal(Update(1, 2), rank=1))
    frame[8] = 2
    assert refused(ends.server, frame).code == "bad_mac"


# -------------------------------------------------------------------------------- what the peer is told


def tell(session: Session, frame: bytes | str) -> bytes | None:
    return session.refusal(refused(session, frame))


@pytest.mark.parametrize(
    "name",
    [
        "a newer client",
        "an older server",
        "unknown run",
        "data hello on the control socket",
        "server with another token",
        "client with another token",
        "first message of 64 KiB and a byte",
    ],
)
def test_a_failed_handshake_is_answered_and_the_peer_understands(name: str) -> None:
    session, frame, code, text = ROWS[name]
    answer = tell(session(), frame)
    assert answer is not None
    for waiting in (waiting_client(), greeted_server()):
        error = refused(waiting, answer)
        assert (error.code, error.peer_code) == ("peer_refused", code)
        assert text in error.text
        assert waiting.refusal(error) is None


@pytest.mark.parametrize("name", ["an HTTP request", "frame kind 0", "channel 0", "two client hellos", "chunk first"])
def test_who_gets_no_answer(name: str) -> None:
    session, frame, code, _ = ROWS[name]
    assert (tell(session(), frame) is None) is (code is not ErrorCode.WRONG_CHANNEL)


def test_established_peers_get_no_plain_answer() -> None:
    for session in (established_server(), established_client()):
        assert tell(session, frames.message_head(0, 1, encode(FIRST)) + bytes(32)) is None


def test_a_refused_first_message_reaches_a_client_that_thinks_it_is_established() -> None:
    client, server = new_client(), new_server()
    server.receive(client.opening())
    deliver(client, server.pending())
    tampered = bytearray(client.seal(FIRST))
    tampered[-1] ^= 1
    answer = tell(server, bytes(tampered))
    assert answer is not None
    assert refused(client, answer).peer_code == "bad_mac"


def test_a_refusal_of_any_version_is_read_and_made_printable() -> None:
    frame = prefix(5, version=999) + b"upgrade\x1b[2J\nplease\r\nuse \xff\xfe 2"
    error = refused(waiting_client(), frame)
    assert error.peer_code == "upgrade?[2J"
    assert error.text.isprintable()
    assert "please??use" in error.text


def test_a_long_reason_is_cut_to_the_refusals_cap() -> None:
    assert len(frames.refusal(ErrorCode.OVERSIZE, "x" * 9999)) == 8 + 512


def test_nothing_reaches_the_shell_from_a_frame_that_failed() -> None:
    ends = connect()
    good = ends.client.seal(Leaving("now"), 3)
    assert deliver(ends.server, [good]) == [Received(3, Leaving("now"))]
    assert refused(ends.server, good).code == "replay"
    assert ends.server.pending() == []
    assert refused(ends.server, ends.client.seal(FIRST)).code == "replay"
    assert NO_RANK == frames.MAX_U32
