"""The port of a relay-only host: who may come in, and what passes through.

    /ws/join     passed on to the controller, byte for byte; the session is between the host and the controller
    /ws/control  the same
    /ws/data     ends here for the run that this host takes part in; passed on for any other

Everything else is refused. A connection must say in time which run it wants, in the plain hello that every session
begins with; what it holds until then is bounded, and so is the number of connections.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from websockets.asyncio.client import connect
from websockets.asyncio.connection import Connection
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.http11 import Request, Response

from wire.codes import CloseCode, close_code
from wire.errors import ErrorCode, RemoteProtocolError
from wire.frames import Kind, read_client_hello, read_kind
from wire.messages import RelayHello
from wire.session import Channel, Received, Session
from worker.site_links import close

if TYPE_CHECKING:
    from worker.site import Site, SiteHost

MAX_FRAME = 2 << 20
_CHANNELS = {f"/ws/{channel.name.lower()}": channel for channel in Channel}
_TRY_AGAIN = 1013
_UNSENDABLE = (1005, 1006, 1015)
"""close codes that no close frame may carry: the connection just ended"""
_PLAIN = "This is a Marchline relay-only host. Hosts join through it: python -m worker --join http://THIS:PORT\n"

log = logging.getLogger("site")


@dataclass(frozen=True, slots=True)
class SiteLimits:
    """Waits in seconds, bounds in connections."""

    head_seconds: float = 5.0
    """from a connection to the end of its upgrade"""
    hello_seconds: float = 5.0
    """from the upgrade to the session's hello, and on a data link from there to the relay's own"""
    dial_seconds: float = 10.0
    """for the controller's answer when a connection is passed on"""
    connections: int = 1024
    connections_per_source: int = 256


class Door:
    """Accepts websockets for a site. ``base`` is the controller's address: ``ws://host:port/prefix``."""

    def __init__(self, base: str, site: Site, limits: SiteLimits) -> None:
        self._base = base
        self._site = site
        self._limits = limits
        self._by_source: Counter[str] = Counter()

    @asynccontextmanager
    async def listening(self, listener: socket.socket) -> AsyncIterator[None]:
        """Serve this socket. At the end everybody who is connected is let go."""
        async with serve(
            self._serve,
            sock=listener,
            process_request=self._look,
            origins=[None],
            compression=None,
            server_header=None,
            open_timeout=self._limits.head_seconds,
            ping_interval=None,  # ours and the controller's own heartbeats tell more
            close_timeout=2,
            max_size=MAX_FRAME,
            max_queue=4,
            create_connection=self._counted(),
            logger=logging.getLogger("websockets.site"),
        ):
            yield

    # ---------------------------------------------------------------------------------------- before a session

    def _look(self, connection: ServerConnection, request: Request) -> Response | None:
        """Refuse what is not one of the three paths."""
        if request.path in _CHANNELS and "Upgrade" in request.headers:
            return None
        return connection.respond(HTTPStatus.NOT_FOUND, _PLAIN)

    async def _serve(self, connection: ServerConnection) -> None:
        assert connection.request is not None, "the upgrade is done"
        channel = _CHANNELS[connection.request.path]
        try:
            first = await self._first_frame(connection)
            run_id = _run_of(first, channel)
            hosted = await self._site.hosted_run(run_id) if channel is Channel.DATA else None
            if hosted is not None:
                await self._end_here(connection, hosted, first)
                return
            if channel is Channel.DATA:
                log.warning("this host takes no part in run %s; a data link of it passes through unfolded", run_id)
            if channel is Channel.JOIN:
                await self._site.before_join()
            await self._pass_on(connection, connection.request.path, first)
        except RemoteProtocolError as error:
            log.info("%s was refused: %s", connection.remote_address, error)
            await close(connection, close_code(error.code), error.text)
        except TimeoutError:
            await close(connection, CloseCode.SILENT, "it said nothing in time")
        except ConnectionClosed:
            return

    async def _first_frame(self, connection: ServerConnection) -> bytes:
        async with asyncio.timeout(self._limits.hello_seconds):
            frame = await connection.recv()
        if isinstance(frame, str):
            raise RemoteProtocolError(ErrorCode.BAD_MAGIC, "a text message came; frames are binary")
        return frame

    async def _end_here(self, connection: ServerConnection, hosted: SiteHost, first: bytes) -> None:
        """A data link of this host's own run: prove, hear who it is, then fold."""
        session = Session.server(
            lambda _, run_id: hosted.secret if run_id == hosted.run_id else None, channel=Channel.DATA
        )
        try:
            async with asyncio.timeout(self._limits.hello_seconds):
                hello = await _introduction(connection, session, first)
        except RemoteProtocolError as error:
            if (refusal := session.refusal(error)) is not None:
                await connection.send(refusal)
            raise
        await hosted.run.serve(connection, session, hello)

    # -------------------------------------------------------------------------------------------- passing on

    async def _pass_on(self, connection: ServerConnection, path: str, first: bytes) -> None:
        """Connect to the controller and pass every message on, both ways, and each end to the other."""
        try:
            async with asyncio.timeout(self._limits.dial_seconds):
                upstream = await connect(
                    f"{self._base}{path}",
                    proxy=None,
                    compression=None,
                    max_size=MAX_FRAME,
                    max_queue=4,
                    ping_interval=None,
                    open_timeout=None,
                    close_timeout=2,
                )
        except (OSError, InvalidHandshake, InvalidURI, TimeoutError) as error:
            what = "it did not answer in time" if isinstance(error, TimeoutError) else str(error)
            log.warning("the controller cannot be reached for a host behind this one: %s", what)
            await close(connection, _TRY_AGAIN, f"the controller cannot be reached from here: {what}")
            return
        try:
            await upstream.send(first)
            await _both_ways(connection, upstream)
        finally:
            await asyncio.gather(_end(connection, upstream), _end(upstream, connection))

    # ---------------------------------------------------------------------------------------------- counting

    def _counted(self) -> type[ServerConnection]:
        """Connections that are counted by source from their first byte on, and dropped beyond the bounds."""
        limits, by_source = self._limits, self._by_source

        class Counted(ServerConnection):
            source = ""

            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                super().connection_made(transport)
                peer = transport.get_extra_info("peername")
                self.source = str(peer[0]) if peer else "unknown"
                by_source[self.source] += 1
                if by_source[self.source] > limits.connections_per_source or by_source.total() > limits.connections:
                    self.transport.abort()

            def connection_lost(self, exc: Exception | None) -> None:
                by_source[self.source] -= 1
                if by_source[self.source] <= 0:
                    del by_source[self.source]
                super().connection_lost(exc)

        return Counted


def _run_of(first: bytes, channel: Channel) -> int:
    """The run that a session's hello names. Raises ``RemoteProtocolError`` for anything but a hello of this
    channel."""
    frame = memoryview(first)
    kind = read_kind(frame)
    if kind is not Kind.CLIENT_HELLO:
        raise RemoteProtocolError(ErrorCode.HANDSHAKE_EXPECTED, "a client hello is expected")
    hello = read_client_hello(frame)
    if hello.channel is not channel:
        text = f"this path is for channel {channel.name.lower()}, the hello is for {hello.channel.name.lower()}"
        raise RemoteProtocolError(ErrorCode.WRONG_CHANNEL, text)
    return hello.run_id


async def _introduction(connection: ServerConnection, session: Session, first: bytes) -> RelayHello:
    """A relay's hello on a data link. Raises ``RemoteProtocolError``, ``ConnectionClosed``."""
    frame: bytes | str = first
    while True:
        events = session.receive(frame)
        for reply in session.pending():
            await connection.send(reply)
        for event in events:
            if isinstance(event, Received):
                if isinstance(event.message, RelayHello):
                    return event.message
                what = type(event.message).__name__
                raise RemoteProtocolError(ErrorCode.BAD_MESSAGE, f"the first message must be RelayHello, not {what}")
        frame = await connection.recv()


async def _both_ways(one: Connection, other: Connection) -> None:
    """Pass messages on in both directions until either side is over."""
    pumps = [asyncio.create_task(_pump(one, other)), asyncio.create_task(_pump(other, one))]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(source: Connection, sink: Connection) -> None:
    with suppress(ConnectionClosed):
        while True:
            await sink.send(await source.recv())


async def _end(connection: Connection, other: Connection) -> None:
    """End a connection the way the other one ended: with its code and reason, or without a word."""
    code: Any = other.close_code
    if code is None:
        await connection.close(1001)
    elif code in _UNSENDABLE:
        connection.transport.abort()
    else:
        await connection.close(code, other.close_reason or "")
