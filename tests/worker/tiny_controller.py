"""A controller in a hundred lines: it holds the secrets and says what the test tells it to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from wire.codes import close_code
from wire.errors import RemoteProtocolError
from wire.messages import (
    NO_RANK,
    Accept,
    BatchDone,
    ControllerHeartbeat,
    Hello,
    HostHeartbeat,
    JobOffer,
    Message,
    ProbeReport,
    RankAssignment,
    RelayHeartbeat,
    RelayHello,
    RelayWelcome,
    TrainingPlan,
    WorldFormed,
)
from wire.sealing import OPEN_SECRET, join_secret, run_secret
from wire.session import Channel, Received, Session

SALT = bytes(range(32))
RUN = 7
PATIENCE = 60.0

M = TypeVar("M", bound=Message)


class Guest:
    """One link that came in. Messages wait in ``inbox`` as (rank, message); an ended link leaves (NO_RANK, None)."""

    def __init__(self, socket: ServerConnection, session: Session) -> None:
        self.socket = socket
        self.session = session
        self.inbox: asyncio.Queue[tuple[int, Message | None]] = asyncio.Queue()
        self.known = False

    async def send(self, *messages: Message, rank: int = NO_RANK) -> None:
        for message in messages:
            await self.socket.send(self.session.seal(message, rank))

    async def expect(self, kind: type[M], *, rank: int | None = None) -> M:
        """The next message of this kind; heartbeats and batches on the way are passed over, anything else fails."""
        passed = tuple(other for other in (HostHeartbeat, RelayHeartbeat, BatchDone) if other is not kind)
        while True:
            async with asyncio.timeout(PATIENCE):
                speaker, message = await self.inbox.get()
            if isinstance(message, kind) and rank in (None, speaker):
                return message
            assert isinstance(message, (*passed, kind)), f"wanted {kind.__name__}, got {message}"

    async def ended(self) -> None:
        """Wait until the other side is gone."""
        async with asyncio.timeout(PATIENCE):
            while (await self.inbox.get())[1] is not None:
                pass

    async def close(self, code: int = 1000) -> None:
        await self.socket.close(code)


class TinyController:
    """Serves /ws/join, /ws/control and /ws/data below any path. Guests wait in ``joins`` and ``relays``."""

    def __init__(self, token: str = "secret", *, beats: bool = True) -> None:
        self.secret = join_secret(token) if token else OPEN_SECRET
        self.joins: asyncio.Queue[Guest] = asyncio.Queue()
        self.relays: asyncio.Queue[Guest] = asyncio.Queue()
        self.beats = beats
        self._server: Server | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{next(iter(self._server.sockets)).getsockname()[1]}"

    async def guest(self) -> Guest:
        """The next agent that dials in."""
        async with asyncio.timeout(PATIENCE):
            return await self.joins.get()

    async def relay(self) -> Guest:
        """The next relay's control link."""
        async with asyncio.timeout(PATIENCE):
            return await self.relays.get()

    async def admit(
        self, guest: Guest, job: str, params: dict, *, ranks: int = 1, silence: float = 30.0, beat: float = 0.2
    ) -> None:
        """Offer a job, take the report, accept."""
        await guest.expect(Hello)
        await guest.send(JobOffer(run_id=RUN, job=job, params=params, job_hash=""))
        report = await guest.expect(ProbeReport)
        assert report.error == ""
        await self.accept(guest, ranks=ranks, silence=silence, beat=beat)

    async def accept(self, guest: Guest, *, ranks: int = 1, silence: float = 30.0, beat: float = 0.2) -> None:
        """It is in, for the first time or again."""
        await guest.send(
            Accept(
                run_id=RUN,
                host_id=3,
                ranks=list(range(ranks)),
                run_salt=SALT,
                formation_wait_seconds=60.0,
                heartbeat_seconds=beat,
                heartbeat_timeout_seconds=silence,
            )
        )

    async def form(
        self, guest: Guest, plan: TrainingPlan, ranks: int = 1, device: str = "cpu", patience: float = 0.0
    ) -> Guest:
        """Form a world of this host alone, which waits so long for a controller that it loses; its relay's control
        link."""
        assignments = [RankAssignment(rank=rank, local_rank=rank, device=f"{device}:{rank}") for rank in range(ranks)]
        await guest.send(WorldFormed(plan, ranks, 0, assignments, patience))
        return await self.relay()

    async def _serve(self, socket: ServerConnection) -> None:
        session = Session.server(self._secret_for)
        guest = Guest(socket, session)
        beating: asyncio.Task[None] | None = None
        try:
            async for data in socket:
                events = session.receive(data)
                for reply in session.pending():
                    await socket.send(reply)
                for event in events:
                    if isinstance(event, Received):
                        await self._hear(guest, event)
                if session.established and beating is None:
                    beating = asyncio.create_task(self._beat(guest))
        except RemoteProtocolError as error:
            if (refusal := session.refusal(error)) is not None:
                await socket.send(refusal)
            await socket.close(close_code(error.code))
        except ConnectionClosed:
            pass
        finally:
            if beating is not None:
                beating.cancel()
            guest.inbox.put_nowait((NO_RANK, None))

    async def _hear(self, guest: Guest, event: Received) -> None:
        if isinstance(event.message, RelayHello):
            await guest.send(RelayWelcome())
            if guest.session.channel is Channel.CONTROL:
                self.relays.put_nowait(guest)
            return
        if guest.session.channel is Channel.JOIN and not guest.known:
            guest.known = True
            self.joins.put_nowait(guest)
        guest.inbox.put_nowait((event.rank, event.message))

    async def _beat(self, guest: Guest) -> None:
        with contextlib.suppress(ConnectionClosed):
            while guest.session.channel is Channel.JOIN and self.beats:
                await guest.send(ControllerHeartbeat())
                await asyncio.sleep(0.2)

    def _secret_for(self, channel: Channel, run_id: int) -> bytes | None:
        if channel is Channel.JOIN:
            return self.secret
        return run_secret(self.secret, SALT) if run_id == RUN else None


@asynccontextmanager
async def tiny_controller(token: str = "secret", *, beats: bool = True, port: int = 0) -> AsyncIterator[TinyController]:
    """A controller, on a free port unless one is given."""
    controller = TinyController(token, beats=beats)
    async with serve(
        controller._serve, "127.0.0.1", port, compression=None, max_size=2 << 20, ping_interval=None
    ) as server:
        controller._server = server
        yield controller
