"""Dialling: what an operator may type, and what is said when nobody fit answers (cases K01, K03, K07, K08)."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tiny_controller import tiny_controller
from websockets.asyncio.server import ServerConnection, serve

from wire.errors import ErrorCode
from wire.frames import refusal
from wire.messages import Hello, HostHeartbeat, RunEnded
from worker.exits import ExitCode
from worker.join_link import JoinLink, LinkEnded, Refused, Target, Unreachable, base_url
from worker.versions import host_versions


@pytest.mark.parametrize(
    ("typed", "dialled"),
    [
        ("http://10.0.0.5:8470", "ws://10.0.0.5:8470"),
        ("https://hub.example/marchline/", "wss://hub.example/marchline"),
        ("ws://host:1/ws/join", "ws://host:1"),
        ("wss://host", "wss://host"),
        ("10.0.0.5:8470", "ws://10.0.0.5:8470"),
        ("host", "ws://host"),
        ("http://[::1]:8470", "ws://[::1]:8470"),
        ("http://user:secret@host:1/p", "ws://host:1/p"),
        ("http://host:8470/#ticket=XYZ", "ws://host:8470"),
    ],
)
def test_an_address_may_be_typed_in_many_ways(typed: str, dialled: str) -> None:
    assert base_url(typed) == dialled


@pytest.mark.parametrize("typed", ["", "ftp://host", "http://", "http://host:99999", "http://host:port"])
def test_what_is_no_address_is_a_usage_error(typed: str) -> None:
    with pytest.raises(Refused, match="is no address") as caught:
        base_url(typed)
    assert caught.value.code is ExitCode.USAGE


async def receive_to_the_end(link: JoinLink) -> None:
    while True:
        await link.receive()


async def test_both_sides_speak_after_the_handshake() -> None:
    async with tiny_controller() as controller:
        link = await JoinLink.dial(Target(base_url(controller.url), "secret"))
        await link.send(HostHeartbeat(ranks=[]))
        guest = await controller.guest()
        assert await guest.expect(HostHeartbeat) == HostHeartbeat(ranks=[])
        await guest.send(RunEnded(phase="done", reason="because"))
        while not isinstance(message := await link.receive(), RunEnded):
            pass
        assert message.reason == "because"
        await guest.close(4410)
        with pytest.raises(LinkEnded) as caught:
            await receive_to_the_end(link)
        assert caught.value.close_code == 4410
        with pytest.raises(LinkEnded):
            await link.send(HostHeartbeat(ranks=[]))


async def test_proxy_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with tiny_controller() as controller:
        link = await JoinLink.dial(Target(base_url(controller.url), "secret"))
        await link.close()


@pytest.mark.parametrize(
    ("theirs", "ours", "says"),
    [
        ("right", "wrong", "another join token"),
        ("right", "", "wants a join token: pass --token"),
        ("", "some", "give none if it admits openly"),
    ],
)
async def test_a_wrong_token_ends_at_once_and_says_where_the_right_one_is(theirs: str, ours: str, says: str) -> None:
    async with tiny_controller(theirs) as controller:
        with pytest.raises(Refused, match=says) as caught:
            await JoinLink.dial(Target(base_url(controller.url), ours))
    assert caught.value.code is ExitCode.AUTHENTICATION


async def test_open_admission_needs_no_token() -> None:
    async with tiny_controller("") as controller:
        link = await JoinLink.dial(Target(base_url(controller.url), ""))
        await link.close()


async def dial_into(answer: Callable[[ServerConnection], Awaitable[None]]) -> None:
    async with serve(answer, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        await JoinLink.dial(Target(f"ws://127.0.0.1:{port}", "secret", connect_seconds=5))


async def test_another_wire_version_names_both() -> None:
    async def old(socket: ServerConnection) -> None:
        await socket.recv()
        await socket.send(refusal(ErrorCode.VERSION_MISMATCH, "this side speaks version 9, the peer speaks 1"))
        await socket.wait_closed()

    with pytest.raises(Refused, match=r"version 9.*wire version 1: install the same release") as caught:
        await dial_into(old)
    assert caught.value.code is ExitCode.REJECTED


@pytest.mark.parametrize("answer", [b"hello", "hello", b""], ids=["bytes", "text", "nothing"])
async def test_a_websocket_that_speaks_something_else_is_no_controller(answer: bytes | str) -> None:
    async def chat(socket: ServerConnection) -> None:
        await socket.send(answer)
        await socket.wait_closed()

    with pytest.raises(Refused, match="is not a Marchline controller") as caught:
        await dial_into(chat)
    assert caught.value.code is ExitCode.ERROR


async def test_a_controller_that_goes_away_in_the_handshake_may_come_back() -> None:
    async def leave(socket: ServerConnection) -> None:
        await socket.close(1012, "restarting")

    with pytest.raises(Unreachable, match="restarting"):
        await dial_into(leave)


async def test_one_that_accepts_and_says_nothing_is_given_up_in_time() -> None:
    async def mute(socket: ServerConnection) -> None:
        await socket.wait_closed()

    async with serve(mute, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        with pytest.raises(Unreachable, match=r"did not speak within 0\.2 s"):
            await JoinLink.dial(Target(f"ws://127.0.0.1:{port}", "secret", connect_seconds=0.2))


async def dial_raw(answer: bytes) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        await JoinLink.dial(Target(f"ws://127.0.0.1:{port}", "secret", connect_seconds=5))


@pytest.mark.parametrize(
    ("status", "error", "says"),
    [
        (b"404 Not Found", Refused, "not a Marchline controller"),
        (b"200 OK", Refused, "not a Marchline controller"),
        (b"403 Forbidden", Refused, "allowed hosts"),
        (b"502 Bad Gateway", Unreachable, "a proxy is there"),
        (b"503 Service Unavailable", Unreachable, "a proxy is there"),
    ],
)
async def test_http_answers_are_told_apart(status: bytes, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        await dial_raw(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n")


async def test_a_controller_that_takes_nobody_in_right_now_says_why() -> None:
    for body, says in ((b'{"detail": "It is full."}', "503: It is full."), (b"{nonsense", "a proxy is there")):
        head = b"Content-Type: application/problem+json\r\nContent-Length: %d\r\n\r\n" % len(body)
        with pytest.raises(Unreachable, match=says):
            await dial_raw(b"HTTP/1.1 503 Service Unavailable\r\n" + head + body)


async def test_what_does_not_speak_http_is_no_controller() -> None:
    with pytest.raises(Refused, match="is not a Marchline controller"):
        await dial_raw(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")


async def test_a_connection_that_is_dropped_without_an_answer_may_come_back() -> None:
    with pytest.raises(Unreachable, match="without an answer"):
        await dial_raw(b"")


async def test_a_closed_port_and_an_unknown_name_may_come_back() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    with pytest.raises(Unreachable, match="cannot be reached"):
        await JoinLink.dial(Target(f"ws://127.0.0.1:{port}", "secret"))


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", Refused, "no TLS is spoken there"),
        (b"", Unreachable, "does that port speak TLS"),
    ],
)
async def test_tls_to_a_plain_port_says_so(answer: bytes, error: type[Exception], says: str) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(error, match=says):
            await JoinLink.dial(Target(f"wss://127.0.0.1:{port}", "secret", connect_seconds=5))


async def test_bytes_that_were_altered_end_the_link() -> None:
    async with tiny_controller() as controller:
        link = await JoinLink.dial(Target(base_url(controller.url), "secret"))
        await link.send(Hello(host="h", devices=[], versions=host_versions()))
        guest = await controller.guest()
        frame = bytearray(guest.session.seal(RunEnded(phase="done", reason="x")))
        frame[-1] ^= 1
        await guest.socket.send(bytes(frame))
        with pytest.raises(LinkEnded, match="broke the protocol"):
            await receive_to_the_end(link)
