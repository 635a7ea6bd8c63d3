"""A controller on a real port, and hosts that speak to it through real websockets and real sessions, as scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import websockets
from runtime_scripted import ScriptedCore, moment
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from backend.core.config import RunConfig
from backend.runtime.controller import Controller, Ports
from backend.runtime.limits import Limits
from backend.runtime.server import Server, bind, guarded
from backend.runtime.settings import Settings
from backend.store import Store, WriterOptions
from wire.messages import (
    NO_RANK,
    WIRE_VERSION,
    Accept,
    Contribution,
    ControllerHeartbeat,
    Device,
    Hello,
    JobOffer,
    Message,
    ProbeReport,
    RelayHello,
    RelayWelcome,
    TensorSpec,
    UpdateComing,
    Versions,
)
from wire.sealing import OPEN_SECRET
from wire.session import Channel, ChunkHeader, ChunkReceived, Established, Received, Session, join_secret, run_secret

M = TypeVar("M", bound=Message)

PATIENCE = 10.0
JOB = """
class Job:
    pass


class Toy(Job):
    def build_model(self): ...
    def build_optimizer(self, model): ...
    def train_dataset(self): ...
    def training_step(self, model, batch): ...
"""
LAYOUT = [
    TensorSpec("w", "params", "float32", [2, 3], 0),
    TensorSpec("mean", "buffers", "float32", [2], 6),
    TensorSpec("count", "local", "int64", [], -1),
]
"""six parameter elements, two buffer elements, one integer buffer"""


class LateStore(Store):
    """A store that commits as always, and lets nobody know before it is told to."""

    hold: str = ""
    """rows of this table are held back"""

    def write(self, run_id: int, table: str, row: Mapping[str, Any], durable: bool = False) -> Future[dict[str, Any]]:
        real = super().write(run_id, table, row, durable)
        if table != self.hold:
            return real
        late: Future[dict[str, Any]] = Future()
        self.held.append((real, late))
        return late

    @property
    def held(self) -> list[tuple[Future[dict[str, Any]], Future[dict[str, Any]]]]:
        return self.__dict__.setdefault("_held", [])

    def release(self) -> None:
        self.hold = ""
        for real, late in self.held:
            real.add_done_callback(lambda done, late=late: late.set_result(done.result()))
        self.held.clear()


@dataclass
class Site:
    """A running controller and its address."""

    controller: Controller
    port: int
    cores: list[Any] = field(default_factory=list)

    def url(self, channel: Channel) -> str:
        return f"ws://127.0.0.1:{self.port}/ws/{channel.name.lower()}"

    def core(self, number: int = 0) -> ScriptedCore:
        found = self.cores[number]
        assert isinstance(found, ScriptedCore)
        return found

    @property
    def join_secret(self) -> bytes:
        return join_secret(self.controller.join_token)

    async def row(self, run_id: int) -> dict[str, Any]:
        row = await asyncio.to_thread(self.controller.store.queries.get_run, run_id)
        assert row is not None
        return row

    async def until_over(self, run_id: int) -> dict[str, Any]:
        """The run's row, once nobody serves it any more."""
        await eventually(lambda: run_id not in self.controller.live_run_ids(), f"run {run_id} to be over")
        return await self.row(run_id)


def job_dir(tmp_path: Path) -> Path:
    """A directory with one job, ``toy.py:Toy``."""
    path = tmp_path / "jobs"
    path.mkdir(exist_ok=True)
    (path / "toy.py").write_text(JOB)
    return path


def config(**changes: Any) -> RunConfig:
    """A run of the toy job that only an operator starts."""
    values: dict[str, Any] = {"job": "toy.py:Toy", "start_mode": "manual", "quorum": 2, "batch_size": 4}
    return RunConfig(**(values | changes))


S = TypeVar("S", bound=Store)


def open_store(tmp_path: Path, kind: type[S] = Store) -> S:  # type: ignore[assignment]
    """The site's database, quick to commit what it batches."""
    data_dir = tmp_path / "var"
    data_dir.mkdir(mode=0o700, exist_ok=True)
    return kind.open(f"sqlite:///{data_dir / 'test.sqlite3'}", options=WriterOptions(batch_seconds=0.02))


@asynccontextmanager
async def site(
    tmp_path: Path,
    *,
    core: Callable[[], ScriptedCore] | None = None,
    limits: Limits | None = None,
    store: Store | None = None,
    **ports: Any,
) -> AsyncIterator[Site]:
    """A controller that serves its three sockets; with ``core``, its runs are scripted ones."""
    data_dir = tmp_path / "var"
    data_dir.mkdir(mode=0o700, exist_ok=True)
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    settings = Settings(port=port, data_dir=data_dir, job_dir=job_dir(tmp_path))
    store = store or open_store(tmp_path)
    cores: list[Any] = []
    if core is not None:
        made = core

        def build(*_: Any, **__: Any) -> ScriptedCore:
            cores.append(made())
            return cores[-1]

        ports["core"] = build
    limits = limits or Limits()
    controller = Controller(settings, store, Ports(limits=limits, **ports))
    ready = asyncio.Event()
    server = Server(
        guarded(_app(controller), limits, lifespan="off", timeout_graceful_shutdown=1),
        ready=ready.set,
        goodbye=controller.close,
    )
    await controller.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.wait_for(ready.wait(), PATIENCE)
        yield Site(controller, port, cores)
    finally:
        server.should_exit = True
        await asyncio.wait_for(serving, 20)
        await controller.close()


def _app(controller: Controller) -> Starlette:
    async def join(socket: WebSocket) -> None:
        await controller.join_socket(socket)

    async def control(socket: WebSocket) -> None:
        await controller.control_socket(socket)

    async def data(socket: WebSocket) -> None:
        await controller.data_socket(socket)

    return Starlette(
        routes=[
            WebSocketRoute("/ws/join", join),
            WebSocketRoute("/ws/control", control),
            WebSocketRoute("/ws/data", data),
        ]
    )


async def eventually(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> None:
    """Wait for a condition that nothing announces."""
    try:
        async with asyncio.timeout(seconds):
            while not condition():
                await moment(0.005)
    except TimeoutError:
        raise AssertionError(f"waited {seconds:g} s for {what}") from None


class Link:
    """A client's end of one websocket: the session, and what came in, in order."""

    def __init__(self, socket: websockets.ClientConnection, session: Session) -> None:
        self.socket = socket
        self.session = session
        self._incoming: list[Received | ChunkReceived] = []

    @classmethod
    async def dial(cls, url: str, channel: Channel, secret: bytes, run_id: int = 0, unread: int = 16) -> Self:
        """``unread``: frames that are taken off the socket before anybody asks for them."""
        socket = await websockets.connect(url, compression=None, max_size=None, ping_interval=None, max_queue=unread)
        link = cls(socket, Session.client(channel, secret, run_id=run_id))
        await socket.send(link.session.opening())
        return link

    async def say(self, message: Message, rank: int = NO_RANK) -> None:
        while not self.session.established:
            await self._read()
        await self.socket.send(self.session.seal(message, rank))

    async def stream(self, header: ChunkHeader, values: np.ndarray) -> None:
        await self.socket.send(bytes(self.session.seal_chunk(header, np.ascontiguousarray(values, dtype="<f4").data)))

    async def hear(self, kind: type[M], rank: int = NO_RANK) -> M:
        """The next message, which must be of this kind; heartbeats do not count."""
        message = await self.next_message()
        assert isinstance(message.message, kind), f"expected {kind.__name__}, heard {message.message}"
        assert message.rank == rank
        return message.message

    async def next_message(self) -> Received:
        event = await self._next(lambda event: isinstance(event, Received))
        assert isinstance(event, Received)
        return event

    async def next_chunk(self) -> tuple[ChunkHeader, np.ndarray]:
        event = await self._next(lambda event: isinstance(event, ChunkReceived))
        assert isinstance(event, ChunkReceived)
        return event.header, np.frombuffer(event.payload, dtype="<f4")

    async def closed(self) -> tuple[int | None, str]:
        """The close code and reason, once the controller has closed the link."""
        async with asyncio.timeout(PATIENCE):
            try:
                while True:
                    self._take(await self.socket.recv())
            except websockets.ConnectionClosed:
                return self.socket.close_code, self.socket.close_reason or ""

    async def close(self) -> None:
        await self.socket.close()

    async def _next(self, wanted: Callable[[Received | ChunkReceived], bool]) -> Received | ChunkReceived:
        async with asyncio.timeout(PATIENCE):
            while True:
                for index, event in enumerate(self._incoming):
                    if wanted(event):
                        return self._incoming.pop(index)
                await self._read()

    async def _read(self) -> None:
        async with asyncio.timeout(PATIENCE):
            self._take(await self.socket.recv())

    def _take(self, data: bytes | str) -> None:
        for event in self.session.receive(data):
            beat = isinstance(event, Received) and isinstance(event.message, ControllerHeartbeat)
            if not isinstance(event, Established) and not beat:
                self._incoming.append(event)


def hello(
    name: str, ranks: int = 1, run: int | None = None, emulate: float | None = None, returning: int | None = None
) -> Hello:
    """A host with that many CPU devices."""
    versions = Versions(marchline="0.1.0", wire=WIRE_VERSION, python="3.11", torch="2.13")
    devices = [Device(f"cpu:{n}", "cpu", "test", 1 << 30) for n in range(ranks)]
    return Hello(name, devices, versions, run, emulate, returning=returning)


class ScriptedHost:
    """An agent and a relay, played by a test."""

    def __init__(self, where: Site, name: str) -> None:
        self.site = where
        self.name = name
        self.emulate: float | None = None
        self.unread = 16
        self.join: Link
        self.control: Link
        self.data: Link
        self.accept: Accept
        self.base: np.ndarray
        """the consensus that it holds"""
        self.welcomes: list[RelayWelcome] = []
        """on its control link, then on its data link"""

    async def dial(self) -> Link:
        self.join = await Link.dial(self.site.url(Channel.JOIN), Channel.JOIN, self.site.join_secret)
        return self.join

    async def offered(self, ranks: int = 1, run: int | None = None) -> JobOffer:
        """Dial, offer devices, be offered the job."""
        await self.dial()
        await self.join.say(hello(self.name, ranks, run, self.emulate))
        return await self.join.hear(JobOffer)

    async def report(self, offer: JobOffer, size: int = 8) -> None:
        """Say that the job looks as it should."""
        await self.join.say(
            ProbeReport(
                job_hash=offer.job_hash,
                sources_hash="s" * 64,
                layout=LAYOUT,
                dataset_signature="d" * 64,
                dataset_size=size,
            )
        )

    async def admitted(self, ranks: int = 1, run: int | None = None, size: int = 8) -> Accept:
        """Dial, offer devices, look at the job, be accepted."""
        await self.report(await self.offered(ranks, run), size)
        self.accept = await self.join.hear(Accept)
        return self.accept

    @property
    def run_secret(self) -> bytes:
        return self.accept.run_secret or run_secret(self.site.join_secret, self.accept.run_salt)

    async def relay(self, channel: Channel, ranks: list[int] | None = None, host: int | None = None) -> Link:
        """Dial one of the relay's two links and say who it is."""
        link = await Link.dial(self.site.url(channel), channel, self.run_secret, self.accept.run_id, self.unread)
        owned = self.accept.ranks if ranks is None else ranks
        await link.say(RelayHello(self.accept.host_id if host is None else host, owned))
        return link

    async def attach(self) -> None:
        """Both relay links, welcomed."""
        self.control = await self.relay(Channel.CONTROL)
        self.welcomes = [await self.control.hear(RelayWelcome)]
        self.data = await self.relay(Channel.DATA)
        self.welcomes.append(await self.data.hear(RelayWelcome))

    async def contribute(self, request: Any, steps: dict[int, int], values: np.ndarray, buffers: np.ndarray) -> None:
        """Declare the work of the host's only rank and stream what it amounts to; nothing when it didn't work."""
        masses = {rank: float(count) for rank, count in steps.items()}
        movers = {rank: float(count > 0) for rank, count in steps.items()}
        await self.data.say(
            Contribution(request.round, request.attempt, steps, masses, movers, values.size, buffers.size)
        )
        if not any(masses.values()):
            return
        number, (count,) = request.round & 0xFFFFFFFF, masses.values()
        if not request.initial:
            values, buffers = self.base[: values.size] - values, self.base[values.size :] - buffers
        values = values * np.float32(count)
        await self.data.stream(ChunkHeader(number, request.attempt, 0, 0, values.size), values)
        if buffers.size:
            await self.data.stream(ChunkHeader(number, request.attempt, 1, values.size, buffers.size), buffers)

    async def consensus(self, elements: int) -> np.ndarray:
        """What the controller's stream of one round makes of the consensus that this host holds."""
        coming = await self.data.hear(UpdateComing)
        assert (coming.still, coming.path) == ([], "")
        arena = np.full(elements, np.nan, dtype=np.float32)
        filled = 0
        while filled < elements:
            header, values = await self.data.next_chunk()
            assert header.offset == filled, "slices come in arena order"
            cut = slice(header.offset, header.offset + header.elements)
            arena[cut] = values if coming.absolute else self.base[cut] - values
            filled += header.elements
        self.base = arena
        return arena


async def stranger(where: Site, channel: Channel, *frames: bytes | str) -> tuple[int | None, str, list[bytes | str]]:
    """Send these frames and wait to be closed: the code, the reason, and what was said before."""
    heard: list[bytes | str] = []
    async with asyncio.timeout(PATIENCE):
        socket = await websockets.connect(where.url(channel), compression=None, max_size=None, ping_interval=None)
        try:
            for frame in frames:
                await socket.send(frame)
            while True:
                heard.append(await socket.recv())
        except websockets.ConnectionClosed:
            return socket.close_code, socket.close_reason or "", heard


__all__ = [
    "LAYOUT", "OPEN_SECRET", "LateStore", "Link", "ScriptedHost", "Site",
    "config", "eventually", "hello", "job_dir", "open_store", "site", "stranger",
]  # fmt: skip
