"""A real controller with a real store, called in this process over ASGI or through real sockets, and watched."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import websockets
from sqlalchemy import select
from starlette.types import ASGIApp, Message, Scope

from backend.api.app import create_app
from backend.core.config import RunConfig
from backend.runtime.controller import Controller, Ports
from backend.runtime.limits import Limits
from backend.runtime.server import Server, bind, guarded
from backend.runtime.settings import Settings
from backend.store import Store, WriterOptions, sqlite_url
from backend.store.tables import events, metadata
from benchmarks.fuzzing.findings import Findings
from benchmarks.fuzzing.forging import RUN
from wire.session import Channel

JOB = '''
from dataclasses import dataclass


class Job:
    pass


class Toy(Job):
    """A job that nobody runs."""

    @dataclass
    class Params:
        hidden: int = 64
        rate: float = 0.003
        label: str = "toy"
        deep: bool = False

    def build_model(self): ...
    def build_optimizer(self, model): ...
    def train_dataset(self): ...
    def training_step(self, model, batch): ...
'''
PATIENCE = 20.0
_HOST = ("host", "127.0.0.1:8470")


Rows = dict[str, list[tuple[Any, ...]]]
"""rows by table"""


class Closed(Exception):
    """The far end closed the websocket, or never took it."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(f"{code} {reason}")
        self.code = code


class Wire(Protocol):
    """A client's end of a websocket."""

    async def send(self, data: bytes | str) -> None: ...

    async def recv(self) -> bytes | str: ...

    async def close(self) -> None: ...


class AsgiWire:
    """A websocket of the application in this process: messages, not bytes of TCP. ``failed`` hears of what escapes."""

    def __init__(
        self, app: ASGIApp, path: str, headers: dict[str, str], failed: Callable[[BaseException], None]
    ) -> None:
        bare, _, query = path.partition("?")
        pairs = [(name.encode(), value.encode()) for name, value in (dict([_HOST]) | headers).items()]
        self._scope: Scope = {
            "type": "websocket", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "ws", "path": bare,
            "raw_path": bare.encode(), "query_string": query.encode(), "headers": pairs, "root_path": "",
            "client": ("127.0.0.1", 40000), "server": ("127.0.0.1", 8470), "subprotocols": [], "state": {},
            "extensions": {"websocket.http.response": {}},
        }  # fmt: skip
        self._app = app
        self._failed = failed
        self._up: asyncio.Queue[Message] = asyncio.Queue(64)
        self._down: asyncio.Queue[bytes | str | Closed] = asyncio.Queue(64)
        self._over: Closed | None = None
        self._up.put_nowait({"type": "websocket.connect"})
        self._task = asyncio.create_task(self._serve())

    async def send(self, data: bytes | str) -> None:
        """Hand over one message. Raises ``Closed``."""
        if self._over is not None:
            raise self._over
        kind = "text" if isinstance(data, str) else "bytes"
        await self._either(self._up.put({"type": "websocket.receive", kind: data}))

    async def recv(self) -> bytes | str:
        """The next message. Raises ``Closed``."""
        if self._over is not None and self._down.empty():
            raise self._over
        item = await self._down.get()
        if isinstance(item, Closed):
            self._over = item
            raise item
        return item

    async def close(self) -> None:
        """Go away, and wait until the application knows."""
        self._over = self._over or Closed(1006)
        while not self._task.done():
            with contextlib.suppress(asyncio.QueueFull):
                self._up.put_nowait({"type": "websocket.disconnect", "code": 1006})
            while not self._down.empty():
                self._down.get_nowait()
            await asyncio.wait({self._task}, timeout=0.01)

    async def _either(self, putting: Any) -> None:
        """Until there is room, or nobody takes anything any more."""
        put = asyncio.ensure_future(putting)
        await asyncio.wait({put, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if not put.done():
            put.cancel()
            raise self._over or Closed(1006)

    async def _serve(self) -> None:
        try:
            await self._app(self._scope, self._up.get, self._said)
        except Exception as error:
            self._failed(error)
        self._over = self._over or Closed(1006)
        with contextlib.suppress(asyncio.QueueFull):
            self._down.put_nowait(self._over)

    async def _said(self, message: Message) -> None:
        match message["type"]:
            case "websocket.send":
                data = message.get("bytes")
                await self._down.put(message["text"] if data is None else bytes(data))
            case "websocket.close":
                self._over = Closed(message.get("code", 1000), message.get("reason") or "")
                with contextlib.suppress(asyncio.QueueFull):
                    self._down.put_nowait(self._over)
            case "websocket.http.response.start":
                self._over = Closed(message["status"])


class SocketWire:
    """The same through TCP, HTTP and the websocket library."""

    def __init__(self, connection: websockets.ClientConnection) -> None:
        self._connection = connection

    async def send(self, data: bytes | str) -> None:
        """Hand over one message. Raises ``Closed``."""
        try:
            await self._connection.send(data)
        except websockets.ConnectionClosed as closed:
            raise Closed(self._connection.close_code or 1006) from closed

    async def recv(self) -> bytes | str:
        """The next message. Raises ``Closed``."""
        try:
            return await self._connection.recv()
        except websockets.ConnectionClosed as closed:
            raise Closed(self._connection.close_code or 1006) from closed

    async def close(self) -> None:
        """Drop the connection without a word."""
        self._connection.transport.abort()
        await self._connection.wait_closed()


class _Watch(logging.Handler):
    """Errors that are logged are findings."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(logging.ERROR)
        self._findings = findings
        self.about = ""
        """what is being done: shown with a finding"""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            self._findings.note(error, self.about)
        else:
            self._findings.add(f"logged: {record.getMessage()}", self.about, record.name)


@dataclass
class Stand:
    """A running controller."""

    controller: Controller
    app: ASGIApp
    findings: Findings
    watch: _Watch
    port: int = 0
    """0: no socket is open, all is done over ASGI"""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def bearer(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.controller.operator_token}"}

    async def wire(self, path: str, headers: dict[str, str] | None = None) -> Wire:
        """A websocket to this path."""
        if not self.port:
            return AsgiWire(self.app, path, headers or {}, self.failed)
        url = f"ws://127.0.0.1:{self.port}{path}"
        connection = await websockets.connect(
            url, compression=None, max_size=None, ping_interval=None, additional_headers=headers or {}, proxy=None
        )
        return SocketWire(connection)

    async def channel(self, channel: Channel) -> Wire:
        """A websocket as hosts open them."""
        return await self.wire(f"/ws/{channel.name.lower()}")

    def keep(self, *works: Coroutine[Any, Any, None]) -> None:
        """Have these go on beside everything else."""
        self.tasks += [asyncio.create_task(work) for work in works]

    def failed(self, error: BaseException) -> None:
        """Something escaped from the application."""
        self.findings.note(error, self.watch.about)

    async def get(self, path: str, *, public: bool = False) -> tuple[int, bytes]:
        """Status and body of a GET, as the operator."""
        status, _, body = await call(self.app, "GET", path, {} if public else self.bearer)
        return status, body

    async def make_run(self, **changes: Any) -> int:
        """A run whose window is open for the operator."""
        values: dict[str, Any] = {"job": "toy.py:Toy", "start_mode": "manual", "quorum": 2, "batch_size": 4}
        return await self.controller.create_run(RunConfig(**(values | changes)))

    def rows(self) -> Rows:
        """All that the database holds, but for the events about strangers."""
        found = {}
        with self.controller.store.queries._engine.connect() as connection:
            for table in metadata.sorted_tables:
                wanted = select(table)
                if table is events:
                    wanted = wanted.where(events.c.kind.not_in(("stranger_refused", "controller_lagged")))
                found[table.name] = [tuple(row) for row in connection.execute(wanted)]
        return found


async def call(
    app: ASGIApp, method: str, path: str, headers: dict[str, str] | list[tuple[bytes, bytes]], body: bytes = b""
) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body of one request over ASGI."""
    bare, _, query = path.partition("?")
    if isinstance(headers, dict):
        given = dict([_HOST, ("content-length", str(len(body)))]) | headers
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in given.items()]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": bare, "raw_path": bare.encode("utf-8", "replace"), "query_string": query.encode("utf-8", "replace"),
        "headers": headers, "root_path": "", "client": ("127.0.0.1", 40000), "server": ("127.0.0.1", 8470), "state": {},
        "extensions": {},
    }  # fmt: skip
    sent: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    answer: list[Message] = []
    over = asyncio.Event()

    async def receive() -> Message:
        if sent:
            return sent.pop()
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        answer.append(message)

    await app(scope, receive, send)
    over.set()
    content = b"".join(message.get("body", b"") for message in answer[1:])
    return answer[0]["status"], answer[0]["headers"], content


@asynccontextmanager
async def stand(findings: Findings, *, sockets: bool = False, limits: Limits | None = None) -> AsyncIterator[Stand]:
    """A controller in a directory of its own. Strangers are not slowed, since they are what is sent."""

    async def hurry(_seconds: float) -> None:
        await asyncio.sleep(0)

    limits = limits or Limits()
    with _place() as place, watched(findings) as watch:
        (place / "jobs").mkdir()
        (place / "jobs" / "toy.py").write_text(JOB)
        settings = Settings(data_dir=place / "var", job_dir=place / "jobs")
        settings.data_dir.mkdir(mode=0o700)
        store = Store.open(
            sqlite_url(settings.data_dir / "marchline.sqlite3"), options=WriterOptions(batch_seconds=0.01)
        )
        controller = Controller(settings, store, Ports(limits=limits, sleep=hurry))
        app = create_app(controller)
        await controller.start()
        made = Stand(controller, app, findings, watch)
        try:
            async with _served(app, limits) if sockets else contextlib.nullcontext(0) as made.port:
                yield made
        finally:
            await controller.close()


@asynccontextmanager
async def _served(app: ASGIApp, limits: Limits) -> AsyncIterator[int]:
    listener, ready = bind("127.0.0.1", 0), asyncio.Event()

    async def goodbye(_signal: str) -> None:
        await asyncio.sleep(0)

    server = Server(guarded(app, limits, lifespan="off", timeout_graceful_shutdown=1), ready=ready.set, goodbye=goodbye)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.wait_for(ready.wait(), PATIENCE)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await asyncio.wait_for(serving, PATIENCE)


@contextlib.contextmanager
def watched(findings: Findings) -> Iterator[_Watch]:
    """Whatever is logged as an error, and whatever a task of the event loop leaves behind, is a finding."""
    watch, loop, root = _Watch(findings), asyncio.get_running_loop(), logging.getLogger()
    root.addHandler(watch)

    def lost(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None:
            findings.note(error, watch.about)
        else:
            findings.add(f"event loop: {context.get('message')}", watch.about)

    loop.set_exception_handler(lost)
    try:
        yield watch
    finally:
        loop.set_exception_handler(None)
        root.removeHandler(watch)


@contextlib.contextmanager
def _place() -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="marchline-fuzz-", dir=memory if memory.is_dir() else None) as place:
        yield Path(place)


def parsed(body: bytes) -> Any:
    """The JSON of an answer."""
    return json.loads(body)


__all__ = ["RUN", "AsgiWire", "Closed", "Stand", "Wire", "call", "parsed", "stand"]
