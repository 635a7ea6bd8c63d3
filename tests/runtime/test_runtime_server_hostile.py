"""Raw bytes that end a connection and nothing else: heads without an end, broken upgrades, text that is none."""

from __future__ import annotations

import asyncio
import base64
import logging
import os

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from test_runtime_server import hang_up, serving, until_closed
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode

from backend.runtime.limits import Limits

PATIENT = Limits(request_head_seconds=60.0)
LINE = b"GET / HTTP/1.1\r\nHost: x\r\n"
UPGRADE = LINE.replace(b"/ ", b"/ws ") + (
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: "
    + base64.b64encode(bytes(16))
    + b"\r\n"
)


@pytest.mark.parametrize(
    "endless",
    [LINE + b"X: ", LINE, b"GET /", LINE + b"Range: bytes=0-"],
    ids=["one header", "many headers", "an address", "many ranges"],
)
async def test_a_head_without_an_end_is_refused_before_it_fills_memory(endless: bytes) -> None:
    """The parser has no limit of its own: within the deadline a fast link would bring gigabytes."""
    more = {LINE: b"X: y\r\n", LINE + b"Range: bytes=0-": b",0-"}.get(endless, b"a") * 20_000
    async with serving(PATIENT) as (port, census):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(endless)
        sent = 0
        answer = asyncio.create_task(until_closed(reader))
        while not answer.done():
            assert sent < 64 << 20, "it is taken in without end"
            writer.write(more)
            sent += len(more)
            await asyncio.wait({answer}, timeout=0.001)
        assert answer.result()[:12] in (b"HTTP/1.1 431", b"")  # a reset overtakes what was written before it
        await hang_up(writer)
        assert census.open == 0


async def test_requests_one_behind_the_other_are_no_endless_head() -> None:
    request = LINE + b"X: " + b"y" * 1000 + b"\r\n\r\n"
    async with serving(PATIENT) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        reading = asyncio.create_task(_answers(reader, 400))
        for _ in range(400):
            writer.write(request)
        await writer.drain()
        assert await asyncio.wait_for(reading, 20) == 400
        await hang_up(writer)


async def _answers(reader: asyncio.StreamReader, wanted: int) -> int:
    seen = 0
    while seen < wanted:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        await reader.readexactly(5)
        seen += 1
    return seen


@pytest.mark.parametrize(
    ("head", "then", "answer"),
    [
        (UPGRADE + b"X: " + b"a" * 20_000 + b"\r\n\r\n", b"", b"HTTP/1.1 431"),
        (UPGRADE + b"X: y\r\n" * 500 + b"\r\n", b"", b"HTTP/1.1 431"),
        (UPGRADE + b"\r\n", b"\xff" * 64, b"HTTP/1.1 101"),
        (UPGRADE + b"\r\n", bytes([0x82, 0x05]) + b"plain", b"HTTP/1.1 101"),
        (UPGRADE + b"\r\n", bytes([0x81, 0x81, 0, 0, 0, 0, 0xFF]), b"HTTP/1.1 101"),
    ],
    ids=["long header", "many headers", "reserved bits", "not masked", "text that is none"],
)
async def test_an_upgrade_that_breaks_the_protocol_is_closed_without_a_word_in_the_log(
    head: bytes, then: bytes, answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A stranger must not be able to fill the log with our errors, nor leave one of our tasks behind."""
    lost: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
    with caplog.at_level(logging.INFO):
        async with serving(PATIENT) as (port, _):
            for half_close in (False, True):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(head)
                assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).startswith(answer)
                writer.write(then)
                if half_close:
                    writer.write_eof()
                await until_closed(reader)
                await hang_up(writer)
            async with connect(f"ws://127.0.0.1:{port}/ws", compression=None) as client:
                await client.send("honest")
                assert await client.recv() == "honest"
    assert lost == []
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_refused_upgrade_is_no_error_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    """Anybody may ask for a stream without a credential, as often as the door lets them in."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await PlainTextResponse("no", 401)(scope, receive, send)

    async with serving(PATIENT, refuse) as (port, _):
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"ws://127.0.0.1:{port}/ws", compression=None)
        assert refused.value.response.status_code == 401
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_text_that_is_none_is_told_so_once_the_link_is_up(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(PATIENT) as (port, _):
        client = await connect(f"ws://127.0.0.1:{port}/ws", compression=None)
        frame = Frame(Opcode.TEXT, os.urandom(4) + b"\xff\xfe")
        client.transport.write(frame.serialize(mask=True))
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(client.recv(), 30)
        assert client.close_code == 1007
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
