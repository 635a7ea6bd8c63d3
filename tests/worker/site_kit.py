"""A relay-only host as it runs, between a scripted controller and scripted children; every socket is real."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import numpy as np
from websockets.asyncio.client import connect
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from wire.codes import close_code
from wire.errors import RemoteProtocolError
from wire.messages import (
    NO_RANK,
    Accept,
    ChildAttached,
    Contribution,
    ControllerHeartbeat,
    FoldOrder,
    Hello,
    HostHeartbeat,
    Message,
    RelayHello,
    RelayWelcome,
    TrainingPlan,
    WorldFormed,
)
from wire.sealing import join_secret, run_secret
from wire.session import Channel, ChunkHeader, ChunkReceived, Established, Received, Session
from wire.streams import chunk_round, slices
from worker.agent import Patience
from worker.exits import ExitCode
from worker.join_link import Target
from worker.membership import Offer, Waits
from worker.site import Site
from worker.site_door import SiteLimits
from worker.site_listen import listening

M = TypeVar("M", bound=Message)
PATIENCE = 20.0
RUN, SITE, TOKEN, SALT = 7, 0, "secret", bytes(range(32))
SECRET = run_secret(join_secret(TOKEN), SALT)
PLAN = TrainingPlan(RUN, "odometer.py:Odometer", {}, "cpu_sync", 1, 1, 0, 1.0, True, 8)
PARAMS, BUFFERS = 6, 2


class Far:
    """The far end of a link: what came in, in order, and what is said."""

    def __init__(self, socket: Any, session: Session) -> None:
        self.socket = socket
        self.session = session
        self.closed: asyncio.Future[tuple[int | None, str]] = asyncio.get_running_loop().create_future()
        self.bytes_in = 0
        self._inbox: asyncio.Queue[Received | ChunkReceived] = asyncio.Queue()

    async def say(self, message: Message, rank: int = NO_RANK) -> None:
        await self.socket.send(self.session.seal(message, rank))

    async def stream(self, header: ChunkHeader, values: np.ndarray) -> None:
        await self.socket.send(self.session.seal_chunk(header, np.ascontiguousarray(values, dtype="<f4").data))

    async def next(self) -> Received | ChunkReceived:
        async with asyncio.timeout(PATIENCE):
            return await self._inbox.get()

    async def hear(self, kind: type[M]) -> M:
        """The next thing, which must be this message."""
        event = await self.next()
        assert isinstance(event, Received), f"wanted {kind.__name__}, got {event}"
        assert isinstance(event.message, kind), f"wanted {kind.__name__}, got {event.message}"
        return event.message

    async def chunk(self) -> tuple[ChunkHeader, np.ndarray]:
        """The next thing, which must be a chunk."""
        event = await self.next()
        assert isinstance(event, ChunkReceived), f"wanted a chunk, got {event}"
        return event.header, np.frombuffer(event.payload, dtype="<f4")

    @property
    def silent(self) -> bool:
        """Whether nothing waits to be heard."""
        return self._inbox.empty()

    async def ended(self) -> tuple[int | None, str]:
        """Close code and reason."""
        async with asyncio.timeout(PATIENCE):
            return await asyncio.shield(self.closed)

    def take(self, data: bytes) -> None:
        self.bytes_in += len(data)
        for event in self.session.receive(data):
            beat = isinstance(event, Received) and isinstance(event.message, ControllerHeartbeat | HostHeartbeat)
            if not isinstance(event, Established) and not beat:
                self._inbox.put_nowait(event)

    async def read(self, reply: bool) -> None:
        """Until the link ends."""
        try:
            while True:
                self.take(await self.socket.recv())
                for frame in self.session.pending() if reply else []:
                    await self.socket.send(frame)
        except RemoteProtocolError as error:
            if (refusal := self.session.refusal(error)) is not None:
                await self.socket.send(refusal)
            await self.socket.close(close_code(error.code))
        except ConnectionClosed:
            pass
        finally:
            if not self.closed.done():
                self.closed.set_result((self.socket.close_code, self.socket.close_reason or ""))


class Upstream:
    """A controller that says what the test tells it to. Links wait by channel, in the order in which they came."""

    def __init__(self) -> None:
        self.links: dict[Channel, asyncio.Queue[Far]] = {channel: asyncio.Queue() for channel in Channel}
        self.server: Server

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{next(iter(self.server.sockets)).getsockname()[1]}"

    async def link(self, channel: Channel) -> Far:
        async with asyncio.timeout(PATIENCE):
            return await self.links[channel].get()

    async def serve(self, socket: ServerConnection) -> None:
        assert socket.request is not None
        channel = Channel[socket.request.path.rpartition("/")[2].upper()]
        far = Far(socket, Session.server(_secret_for, channel=channel))
        self.links[channel].put_nowait(far)
        await far.read(reply=True)


def _secret_for(channel: Channel, run_id: int) -> bytes | None:
    if channel is Channel.JOIN:
        return join_secret(TOKEN)
    return SECRET if run_id == RUN else run_secret(join_secret(TOKEN), b"other" * 8)


@asynccontextmanager
async def upstream() -> AsyncIterator[Upstream]:
    controller = Upstream()
    async with serve(controller.serve, "127.0.0.1", 0, compression=None, max_size=2 << 20, ping_interval=None) as made:
        controller.server = made
        yield controller


class Running:
    """A site, its controller, and the children that the test sends to it."""

    def __init__(
        self, controller: Upstream, stack: AsyncExitStack, persist: bool = False, limits: SiteLimits | None = None
    ) -> None:
        listener = listening("127.0.0.1", 0)
        self.controller = controller
        self.url = f"ws://127.0.0.1:{listener.getsockname()[1]}"
        offer = Offer(name="site", devices=(), job_dir=None, relay_only=True)  # type: ignore[arg-type]
        patience = Patience(persist=persist, attempts=3, pause_seconds=0.05, first_back_off_seconds=0.05)
        self.site = Site(Target(controller.url, TOKEN), offer, patience, Waits(), listener, limits)
        self.task: asyncio.Task[ExitCode] = asyncio.create_task(self.site.run())
        self.join: Far
        self.up: Far
        self._stack = stack

    async def admitted(self, run: int = RUN) -> None:
        self.join = await self.controller.link(Channel.JOIN)
        hello = await self.join.hear(Hello)
        assert (hello.relay_only, hello.devices) == (True, [])
        await self.join.say(Accept(run, SITE, [], SALT, 60.0, 0.2, 30.0))

    async def formed(self) -> None:
        """Admitted, the world is there, and the uplink is up."""
        await self.admitted()
        await self.join.say(WorldFormed(PLAN, 3, 0, []))
        self.up = await self.controller.link(Channel.DATA)
        assert await self.up.hear(RelayHello) == RelayHello(SITE, [])
        await self.up.say(RelayWelcome())

    async def dial(self, channel: Channel, secret: bytes = SECRET, run: int = RUN, url: str = "") -> Far:
        """Somebody behind the site connects and begins a session."""
        socket = await connect(
            f"{url or self.url}/ws/{channel.name.lower()}", compression=None, max_size=None, ping_interval=None
        )
        far = Far(socket, Session.client(channel, secret, run_id=run))
        await socket.send(far.session.opening())
        far.take(await asyncio.wait_for(socket.recv(), PATIENCE))
        reading = asyncio.create_task(far.read(reply=False))
        self._stack.push_async_callback(_ended, socket, reading)
        return far

    async def child(self, host: int, ranks: list[int]) -> Far:
        """A host's data link, welcomed here and announced above."""
        far = await self.dial(Channel.DATA)
        await far.say(RelayHello(host, ranks))
        await far.hear(RelayWelcome)
        assert await self.up.hear(ChildAttached) == ChildAttached(host, ranks)
        return far


async def _ended(socket: Any, reading: asyncio.Task[None]) -> None:
    await socket.close()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


@asynccontextmanager
async def running(persist: bool = False, limits: SiteLimits | None = None) -> AsyncIterator[Running]:
    async with upstream() as controller, AsyncExitStack() as stack:
        site = Running(controller, stack, persist, limits)
        try:
            yield site
        finally:
            await stack.aclose()
            site.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await site.task


def contribution(
    round_: int, attempt: int, steps: dict[int, int], still: Any = (), params: int = PARAMS, buffers: int = BUFFERS
) -> Contribution:
    masses = {rank: float(count) for rank, count in steps.items()}
    movers = {rank: float(count > 0) for rank, count in steps.items()}
    return Contribution(round_, attempt, steps, masses, movers, params, buffers, list(still))


async def contribute(far: Far, declared: Contribution, values: Callable[[int, int], np.ndarray]) -> None:
    """Declare, and stream ``values(start, stop)`` for what is not still, section by section."""
    await far.say(declared)
    if any(declared.masses.values()):
        for piece in slices(declared.params_elements, declared.buffers_elements, declared.still):
            header = ChunkHeader(
                chunk_round(declared.round), declared.attempt, piece.section, piece.offset, piece.elements
            )
            await far.stream(header, values(piece.offset, piece.stop))


def order(round_: int, attempt: int, hosts: dict[int, list[int]], **changes: Any) -> FoldOrder:
    values = {"params_elements": PARAMS, "buffers_elements": BUFFERS} | changes
    return FoldOrder(round=round_, attempt=attempt, hosts=hosts, **values)
