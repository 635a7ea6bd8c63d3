"""A real relay process between a small websocket controller (session and plane are real) and ranks in the test."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from torch import nn
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from backend.core.vocabulary import OpenRound, RoundBroken, RoundFinished
from backend.reduce import Proof, ReducePlane, SharedArenas
from wire.codes import CloseCode
from wire.errors import RemoteProtocolError
from wire.mass import gamma_mass, mover_mass
from wire.messages import (
    NO_RANK,
    Contribution,
    Message,
    NonFinite,
    RankHello,
    RankReady,
    Reject,
    RelayHeartbeat,
    RelayHello,
    RelayWelcome,
    RequestParams,
    RoundCommitted,
    SharedMemory,
    SnapshotReady,
    UpdateStaged,
)
from wire.ranges import Ranges
from wire.session import Channel, ChunkHeader, ChunkReceived, Incoming, Received, Session
from worker.arena import Arena
from worker.local_link import AsyncLink
from worker.relay_spec import RelaySpec
from worker.specs import line

RUN, SECRET = 5, bytes(range(32))
PATIENCE = 20.0
ROOT = Path(__file__).resolve().parents[2]


async def soon(awaitable: Any) -> Any:
    """Bounded: a test that waits longer has failed."""
    return await asyncio.wait_for(awaitable, PATIENCE)


class Door:
    """The controller's side of one relay link."""

    def __init__(self, websocket: ServerConnection) -> None:
        self.websocket = websocket
        self.session = Session.server(lambda channel, run: SECRET if run == RUN else None)
        self.outbox: asyncio.Queue[tuple[int, Message] | tuple[ChunkHeader, memoryview]] = asyncio.Queue()
        self.shared = asyncio.Event()
        self.chunks = self.elements = 0
        """what came up"""

    @staticmethod
    def channel_of(path: str) -> Channel:
        return Channel.DATA if path.endswith("/data") else Channel.CONTROL

    async def read(self) -> list[Incoming]:
        events = self.session.receive(await self.websocket.recv())
        for reply in self.session.pending():
            await self.websocket.send(reply)
        return events

    async def write(self) -> None:
        while True:
            first, second = await self.outbox.get()
            if isinstance(first, ChunkHeader):
                await self.websocket.send(self.session.seal_chunk(first, second))
            else:
                await self.websocket.send(self.session.seal(second, first))
            self.outbox.task_done()


class Controller:
    """Just enough of a controller: one port, two endpoints, a reduce plane. ``welcome`` greets data links."""

    def __init__(self, hosts: dict[int, list[int]], slice_elements: int = 64) -> None:
        self.hosts = hosts
        self.welcome = RelayWelcome()
        self.proof = Proof()
        self.doors: dict[tuple[Channel, int], Door] = {}
        self.heard: asyncio.Queue[tuple[int, Message]] = asyncio.Queue()
        self.beats: defaultdict[int, asyncio.Queue[Message]] = defaultdict(asyncio.Queue)
        """heartbeats by host's relay"""
        self.results: asyncio.Queue[RoundFinished | RoundBroken] = asyncio.Queue()
        self.attached: dict[int, asyncio.Event] = {host: asyncio.Event() for host in hosts}
        self.refuse = ""
        self.deaf: dict[Channel, asyncio.Event] = {}
        """it does not answer on these, and says when somebody dials"""
        self.gate = asyncio.Event()
        self.gate.set()
        self.paths: list[str] = []
        self.plane = ReducePlane(
            send=lambda host, header, payload: self.doors[Channel.DATA, host].outbox.put_nowait((header, payload)),
            tell=lambda host, message: self.doors[Channel.DATA, host].outbox.put_nowait((NO_RANK, message)),
            finished=self.results.put_nowait,
            broken=self.results.put_nowait,
            tuning={"slice_elements": slice_elements},
        )
        self._server: Server | None = None

    async def start(self, port: int = 0) -> None:
        self._server = await serve(
            self._accept, "127.0.0.1", port, compression=None, max_size=2 << 20, max_queue=2, ping_interval=None
        )

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        self.plane.close()
        self.gate.set()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def send_rank(self, rank: int, message: Message) -> None:
        host = next(host for host, ranks in self.hosts.items() if rank in ranks)
        self.doors[Channel.CONTROL, host].outbox.put_nowait((rank, message))

    def send_relays(self, message: Message) -> None:
        for host in self.hosts:
            self.doors[Channel.CONTROL, host].outbox.put_nowait((NO_RANK, message))

    def offer_memory(self) -> None:
        """From here on relays hear where to find this controller's memory."""
        self.welcome = RelayWelcome(self.proof.path, self.proof.secret)

    def open(
        self, round_: int, attempt: int, alive: dict[int, tuple[int, ...]], model: Arena, encoding: int = 0
    ) -> None:
        """What the core does to begin an attempt: the plane first, then every living rank."""
        sizes = {"params_elements": model.params_elements, "buffers_elements": model.buffers_elements}
        self.plane.open(OpenRound(round_, attempt, alive, round_ < 0, encoding=encoding, **sizes))
        for ranks in alive.values():
            for rank in ranks:
                self.send_rank(rank, RequestParams(round_, attempt, initial=round_ < 0, encoding=encoding))

    def commit(self, finished: RoundFinished) -> None:
        self.send_relays(RoundCommitted(finished.round, finished.attempt, finished.realized, finished.buffers_realized))

    async def beating(self, host: int, times: int = 3) -> None:
        """Until this host's relay has shown a few times more that it runs."""
        for _ in range(self.beats[host].qsize() + times):
            await soon(self.beats[host].get())

    async def end(self, channel: Channel) -> None:
        """Close these links as a run that is over does, once all is written."""
        for host in self.hosts:
            await self.doors[channel, host].outbox.join()
            await self.doors[channel, host].websocket.close(CloseCode.GONE, "done")

    async def _accept(self, websocket: ServerConnection) -> None:
        assert websocket.request is not None
        self.paths.append(websocket.request.path)
        door = Door(websocket)
        if (dialled := self.deaf.get(door.channel_of(websocket.request.path))) is not None:
            dialled.set()
            await websocket.wait_closed()
            return
        writing: asyncio.Task[None] | None = None
        try:
            hello = await self._greet(door)
            if hello is not None:
                writing = asyncio.create_task(door.write())
                await self._listen(door, hello.host_id)
        except RemoteProtocolError as error:
            if (refusal := door.session.refusal(error)) is not None:
                await websocket.send(refusal)
            await websocket.close(CloseCode.AUTH)
        except ConnectionClosed:
            pass
        finally:
            if writing is not None:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)

    async def _greet(self, door: Door) -> RelayHello | None:
        while True:
            for event in await door.read():
                if not isinstance(event, Received):
                    continue
                assert isinstance(event.message, RelayHello)
                if self.refuse:
                    answer = Reject(code="relay_refused", reason=self.refuse, permanent=True)
                    await door.websocket.send(door.session.seal(answer))
                    await door.websocket.close(CloseCode.REFUSED, self.refuse)
                    return None
                assert event.message.ranks == self.hosts[event.message.host_id]
                data = door.session.channel is Channel.DATA
                await door.websocket.send(door.session.seal(self.welcome if data else RelayWelcome()))
                self.doors[door.session.channel, event.message.host_id] = door
                if all((channel, event.message.host_id) in self.doors for channel in (Channel.CONTROL, Channel.DATA)):
                    self.attached[event.message.host_id].set()
                return event.message

    async def _listen(self, door: Door, host: int) -> None:
        while True:
            await self.gate.wait()
            if door.session.channel is Channel.DATA:
                await self.plane.room(host)
            for event in await door.read():
                match event:
                    case ChunkReceived(header=header, payload=payload):
                        door.chunks, door.elements = door.chunks + 1, door.elements + header.elements
                        self.plane.chunk(host, header, payload)
                    case Received(message=Contribution() as contribution):
                        self.plane.contribution(host, contribution)
                    case Received(message=NonFinite() as found):
                        self.plane.non_finite(host, found)
                    case Received(message=SharedMemory() as offer):
                        self.plane.share(host, SharedArenas(offer.directory))
                        door.shared.set()
                    case Received(rank=rank, message=RelayHeartbeat() as beat):
                        assert (rank, door.session.channel) == (NO_RANK, Channel.CONTROL)
                        self.beats[host].put_nowait(beat)
                    case Received(rank=rank, message=message):
                        self.heard.put_nowait((rank, message))


class Rank:
    """A rank in the test's own process, on the relay's real socket."""

    def __init__(
        self,
        number: int,
        model: nn.Module,
        directory: Path,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.number = number
        self.model = model
        self.steps = 0
        self.hash = ""
        """of the consensus that it adopted last"""
        self.writer = writer
        self.link = AsyncLink(reader, writer)
        self.arena = Arena.for_model(model)
        self.arena.create_out(directory / f"rank{number}.out")
        self.still: Ranges = []

    @classmethod
    async def join(cls, number: int, model: nn.Module, directory: Path) -> Rank:
        rank = cls(number, model, directory, *await asyncio.open_unix_connection(directory / "relay.sock"))
        await rank.link.send(RankHello(rank=number))
        await rank.ready()
        return rank

    async def ready(self, **held: Any) -> None:
        """Say so; ``held`` after going back."""
        arena = self.arena
        await self.link.send(RankReady(arena.layout_hash, arena.params_elements, arena.buffers_elements, **held))

    async def leave(self) -> None:
        """Close the socket and wait until that is done."""
        self.link.close()
        with suppress(OSError):
            await self.writer.wait_closed()

    async def hears(self, kind: type[Message]) -> Any:
        """The next message, which is of that kind; how far an update has come may be told in between."""
        message = await soon(self.link.receive())
        while isinstance(message, UpdateStaged) and kind is not UpdateStaged:
            message = await soon(self.link.receive())
        assert isinstance(message, kind), message
        return message

    async def answers(self, *, pack: bool = True) -> RequestParams:
        """Take one request for parameters, pack unless it is a retry, and declare."""
        request: RequestParams = await self.hears(RequestParams)
        mass, mover = gamma_mass(self.steps, 1.0), mover_mass(self.steps)
        if pack:
            self.still = self.arena.pack()
        await self.link.send(SnapshotReady(request.round, request.attempt, self.steps, mass, mover, self.still))
        return request

    async def adopts(self) -> RoundCommitted:
        commit: RoundCommitted = await self.hears(RoundCommitted)
        moved = self.arena.adopt(commit.consensus, params=commit.realized, buffers=commit.buffers_realized)
        self.hash = moved.consensus_hash or self.hash
        self.steps = 0
        return commit


class RelayProcess:
    """``python -m worker.relay`` with its orders."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path) -> None:
        self.process = process
        self.directory = directory

    async def listening(self) -> None:
        """Until its socket is there."""
        async with asyncio.timeout(PATIENCE):
            while not (self.directory / "relay.sock").exists():  # noqa: ASYNC110  # another process makes it
                await asyncio.sleep(0.01)

    async def ends(self) -> tuple[int, str]:
        """Exit code and the last line of stderr."""
        _, errors = await soon(self.process.communicate())
        lines = errors.decode().strip().splitlines()
        code = self.process.returncode
        assert code is not None
        return code, lines[-1] if lines else ""


@asynccontextmanager
async def relay(
    url: str, directory: Path, host: int = 0, ranks: list[int] | None = None, **changes: Any
) -> AsyncIterator[RelayProcess]:
    """Start a relay; it is killed at the end if it still runs."""
    os.makedirs(directory, mode=0o700, exist_ok=True)
    values = {"run_secret": SECRET.hex(), "connect_seconds": PATIENCE} | changes
    spec = RelaySpec(url=url, host_id=host, ranks=ranks or [0], run_id=RUN, shm_dir=str(directory), **values)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "worker.relay",
        stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(line(spec))
    await process.stdin.drain()
    try:
        yield RelayProcess(process, directory)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def controller(hosts: dict[int, list[int]], slice_elements: int = 64) -> AsyncIterator[Controller]:
    served = Controller(hosts, slice_elements)
    await served.start()
    try:
        yield served
    finally:
        await served.stop()
