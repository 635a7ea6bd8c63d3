"""The server: raw connections have deadlines and caps, a taken port is named at once, and a signal is a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from runtime_site import config, eventually
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from backend.main import EXIT_SETTINGS, build, serve
from backend.runtime.census import REFUSALS, Census
from backend.runtime.errors import SettingsError
from backend.runtime.limits import FEWEST_CONNECTIONS, OTHER_DESCRIPTORS, Limits
from backend.runtime.server import Server, bind, guarded
from backend.runtime.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


async def _hello(request: Request) -> PlainTextResponse:
    await request.body()
    return PlainTextResponse("hello")


async def _echo(socket: WebSocket) -> None:
    await socket.accept()
    async for text in socket.iter_text():
        await socket.send_text(text)


@asynccontextmanager
async def serving(limits: Limits, app: ASGIApp | None = None) -> AsyncIterator[tuple[int, Census]]:
    app = app or Starlette(routes=[Route("/", _hello, methods=["GET", "POST"]), WebSocketRoute("/ws", _echo)])
    listener = bind("127.0.0.1", 0)
    ready = asyncio.Event()

    async def goodbye(signal_name: str) -> None:
        return None

    settings = guarded(app, limits, lifespan="off", timeout_graceful_shutdown=1)
    server = Server(settings, ready=ready.set, goodbye=goodbye)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await asyncio.wait_for(ready.wait(), 30)
    try:
        yield listener.getsockname()[1], settings.http_protocol_class.census  # type: ignore[union-attr]
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 10)


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    try:
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTTP/1.1\r\nHost: x\r\n", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf"],
)
async def test_a_request_that_never_ends_is_cut_off(sent: bytes) -> None:
    async with serving(Limits(request_head_seconds=0.1, request_body_seconds=0.1)) as (port, census):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert await until_closed(reader) == b""
        await hang_up(writer)
        await eventually(lambda: census.open == 0, "the connection to be let go")


async def test_dripped_headers_do_not_extend_the_deadline() -> None:
    async with serving(Limits(request_head_seconds=0.2)) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        started = time.monotonic()
        closed = asyncio.create_task(until_closed(reader))
        for byte in b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1000:
            if closed.done():
                break
            writer.write(bytes([byte]))
            await asyncio.wait({closed}, timeout=0.01)
        assert await closed == b""
        assert time.monotonic() - started < 10, "not for as long as it drips"
        await hang_up(writer)


async def test_a_prompt_client_keeps_its_connection_and_its_websocket_while_a_silent_one_is_cut_off() -> None:
    async with (
        serving(Limits(request_head_seconds=0.15)) as (port, census),
        connect(f"ws://127.0.0.1:{port}/ws", compression=None) as client,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            assert head.startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(5) == b"hello"
            await client.send("still here")
            assert await client.recv() == "still here"
            assert census.open == 2
            silent, silent_writer = await asyncio.open_connection("127.0.0.1", port)
            assert await until_closed(silent) == b""
            await hang_up(silent_writer)
        await hang_up(writer)
        await eventually(lambda: census.open == 1, "only the websocket to be left")


async def test_deflate_is_never_agreed_to() -> None:
    async with (
        serving(Limits()) as (port, _),
        connect(f"ws://127.0.0.1:{port}/ws", compression="deflate") as client,
    ):
        assert client.response is not None
        assert "Sec-WebSocket-Extensions" not in client.response.headers


async def test_a_source_has_only_so_many_connections() -> None:
    async with serving(Limits(connections_per_source=3)) as (port, census):
        kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        await eventually(lambda: census.open == 3, "three connections")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi")
        told = await until_closed(reader)
        assert told.startswith(b"HTTP/1.1 503 ")
        assert b"The controller holds 3 connections from your address, and takes no more" in told
        await hang_up(writer)
        assert (census.open, census.refused_total, census.refusing) == (3, 1, 0)
        await hang_up(kept.pop()[1])
        await eventually(lambda: census.open == 2, "one to be let go")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await until_closed(reader)).endswith(b"hello")
        for other in (writer, *(writer for _, writer in kept)):
            await hang_up(other)


async def test_who_is_refused_and_says_nothing_is_cut_off_and_there_are_only_so_many_of_them() -> None:
    async with serving(Limits(connections=1, request_head_seconds=0.1)) as (port, census):
        url = f"ws://127.0.0.1:{port}/ws"
        async with connect(url, compression=None):
            crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(REFUSALS + 3)]
            await eventually(lambda: census.refused_total == len(crowd), "all to be refused")
            assert [await until_closed(reader) for reader, _ in crowd] == [b""] * len(crowd)
            for _, writer in crowd:
                await hang_up(writer)
            await eventually(lambda: census.refusing == 0, "the last of them to be forgotten")
            with pytest.raises(InvalidStatus) as refused:
                await connect(url, compression=None)
            assert json.loads(refused.value.response.body or b"")["code"] == "connections_full"
        await eventually(lambda: census.open == 0, "room")
        async with connect(url, compression=None) as client:
            await client.send("back")
            assert await client.recv() == "back"


def test_connections_leave_open_files_to_the_rest() -> None:
    limits = Limits()
    assert limits.within(1 << 16).connections == limits.connections
    assert limits.within(1024).connections == 1024 - OTHER_DESCRIPTORS
    assert limits.within(64).connections == FEWEST_CONNECTIONS


def test_the_census_counts_by_source_and_in_all() -> None:
    census = Census(Limits(connections=3, connections_per_source=2))
    assert [census.enter("a"), census.enter("a"), census.enter("a")] == [True, True, False]
    assert [census.enter("b"), census.enter("c")] == [True, False]
    census.leave("a")
    assert census.enter("c")
    assert (census.open, census.refused_total) == (3, 2)


def test_a_taken_port_is_named_at_once() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(SettingsError, match=rf"port {port} on 127\.0\.0\.1 is taken.*--port"):
            bind("127.0.0.1", port)
        assert time.monotonic() - started < 2


def test_an_address_that_is_not_ours_is_named() -> None:
    with pytest.raises(SettingsError, match=r"192\.0\.2\.1"):
        bind("192.0.2.1", 8470)
    with pytest.raises(SettingsError, match=r"no\.such\.host\.invalid"):
        bind("no.such.host.invalid", 8470)


def test_a_start_that_cannot_be_is_one_line_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert serve(Settings(port=port, data_dir=tmp_path)) == EXIT_SETTINGS
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "file").write_text("in the way")
    assert serve(Settings(port=0, data_dir=tmp_path / "file")) == EXIT_SETTINGS
    assert "data directory" in capsys.readouterr().err


async def test_the_parts_fit_together(tmp_path: Path) -> None:
    """The composition root's own app: its lifespan starts the controller, its sockets lead to it, its end closes it."""
    controller, app = build(Settings(port=0, data_dir=tmp_path / "var", job_dir=ROOT / "tests" / "jobs"))
    listener = bind("127.0.0.1", 0)
    ready = asyncio.Event()
    server = Server(guarded(app, Limits()), ready=ready.set, goodbye=controller.close)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await asyncio.wait_for(ready.wait(), 30)
    run_id = await controller.create_run(config(job="constant.py:Constant"))
    port = listener.getsockname()[1]
    async with connect(f"ws://127.0.0.1:{port}/ws/join", compression=None) as stranger:
        await stranger.send(b"garbage")
        await asyncio.wait_for(stranger.wait_closed(), 30)
        assert stranger.close_code == 4400
    view = controller.live_view(run_id)
    assert view is not None
    assert view["window"]["strangers"]["count"] == 1
    server.should_exit = True
    await asyncio.wait_for(task, 20)
    assert controller.live_run_ids() == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_clean_end(tmp_path: Path, number: signal.Signals) -> None:
    story = (
        "import json, sys; from backend.main import serve, settings_from;"
        "sys.exit(serve(settings_from(), lambda controller, url: print(json.dumps(url), flush=True)))"
    )
    environment = {**os.environ, "MARCHLINE_PORT": "0", "MARCHLINE_DATA_DIR": str(tmp_path / "var")}
    with subprocess.Popen(
        [sys.executable, "-c", story],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        stop = threading.Timer(60, child.kill)
        stop.start()
        assert child.stdout is not None
        url = json.loads(child.stdout.readline())
        port = int(url.rpartition(":")[2])
        assert port != 0
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            child.send_signal(number)
            client.settimeout(15)
            assert client.recv(1) == b""
        _, errors = child.communicate(timeout=20)
        stop.cancel()
    assert child.returncode == 0, errors
    assert "Traceback" not in errors
