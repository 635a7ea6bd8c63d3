"""The relay's two websockets to the controller, control and data: dialling, handshake, frames."""

from __future__ import annotations

import asyncio
import ipaddress
import random
from collections.abc import Coroutine
from typing import Any

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI, ProxyError

from wire.bulk import HEADROOM
from wire.chunks import ReservedChunk
from wire.codes import CloseCode, close_code
from wire.errors import RemoteProtocolError
from wire.messages import NO_RANK, Message, Reject, RelayHello, RelayWelcome
from wire.session import Channel, Incoming, Received, Session
from worker.bulk_connection import BulkClient
from worker.relay_spec import RelaySpec

MAX_FRAME = 2 << 20
_PAUSE_SECONDS = (0.2, 2.0)
"""first and longest pause between two dials, a quarter more or less: not all relays dial at one moment"""
_DATA_PING_SECONDS = 20.0
_CLOSE_SECONDS = 0.5
_REFUSALS = frozenset({CloseCode.AUTH, CloseCode.REFUSED, CloseCode.PROTOCOL})


class LinkLost(Exception):
    """A link to the controller ended, or could not be made in time."""


class LinkRefused(LinkLost):
    """The controller does not want this relay; dialling again cannot help."""


class RunOver(LinkLost):
    """The controller closed the link because the run is over."""


class ControllerLink:
    """One established link. One task may send and one may receive."""

    def __init__(self, name: str, websocket: BulkClient, session: Session) -> None:
        self.name = name
        self.session = session
        self.welcome = RelayWelcome()
        self._websocket = websocket

    @property
    def within_one_machine(self) -> bool:
        """Whether both ends of the socket are on this machine, as far as their addresses say."""
        here, there = self._websocket.local_address, self._websocket.remote_address
        if here is None or there is None:
            return False
        return is_one_machine(str(here[0]), str(there[0]))

    async def send(self, message: Message, rank: int = NO_RANK) -> None:
        """Seal and write one message. Raises ``LinkLost``, ``LocalProtocolError``."""
        await self.send_frame(self.session.seal(message, rank))

    async def send_frame(self, frame: bytes | bytearray) -> None:
        """Write a sealed frame and wait until the socket takes it. Raises ``LinkLost``."""
        try:
            await self._websocket.send(frame)
        except ConnectionClosed as closed:
            raise self._lost(closed) from closed

    def seal_framed(self, reserved: ReservedChunk, payload: memoryview) -> memoryview:
        """Seal one chunk for ``send_framed``; in any thread."""
        return self._websocket.frame(reserved.seal(payload, HEADROOM))

    async def send_framed(self, frame: memoryview) -> None:
        """Write what ``seal_framed`` made and wait until the socket takes it. Raises ``LinkLost``."""
        try:
            await self._websocket.send_framed(frame)
        except ConnectionClosed as closed:
            raise self._lost(closed) from closed

    async def receive(self, *, threaded: bool = False) -> list[Incoming]:
        """Wait for one frame and return its events; ``threaded`` opens it in a thread. Raises ``LinkLost``."""
        try:
            frame = await self._websocket.recv()
        except ConnectionClosed as closed:
            raise self._lost(closed) from closed
        try:
            if threaded:
                return await asyncio.to_thread(self.session.receive, frame)
            return self.session.receive(frame)
        except RemoteProtocolError as error:
            await self._websocket.close(close_code(error.code))
            raise LinkRefused(f"the {self.name} link failed: {error}") from error

    async def ended(self) -> None:
        """Wait until the connection is closed, by whichever side."""
        await self._websocket.wait_closed()

    async def close(self) -> None:
        """Close the websocket; waits for the controller's answer, half a second at most."""
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._websocket.close(1001)
        except TimeoutError:
            self.abort()

    def abort(self) -> None:
        """Drop the connection without a word."""
        self._websocket.transport.abort()

    def _lost(self, closed: ConnectionClosed) -> LinkLost:
        code = closed.rcvd.code if closed.rcvd is not None else 0
        reason = closed.rcvd.reason if closed.rcvd is not None else "the connection broke"
        if code == CloseCode.GONE:
            return RunOver(reason or "the run is over")
        kind = LinkRefused if code in _REFUSALS else LinkLost
        return kind(f"the {self.name} link to the controller ended: {reason or 'closed'} ({code})")


async def dial(
    spec: RelaySpec, channels: tuple[Channel, ...] = (Channel.CONTROL, Channel.DATA)
) -> tuple[ControllerLink, ...]:
    """Make these links, in order, within the one budget of ``spec.connect_seconds``. One that ends before the last is
    made takes the others with it: a controller that was killed and started again must not have one of either life.

    Raises ``LinkRefused`` at once, ``LinkLost`` when the budget is spent.
    """
    links: list[ControllerLink] = []
    failures: list[str] = ["no answer"]
    try:
        async with asyncio.timeout(spec.connect_seconds):
            while len(links) < len(channels):
                made = await _while_up(links, _until_connected(spec, channels[len(links)], failures))
                if made is not None:
                    links.append(made)
                    continue
                failures.append(f"the {links[-1].name} link ended")
                while links:
                    links.pop().abort()
    except BaseException as error:
        for link in links:
            link.abort()
        if not isinstance(error, TimeoutError):
            raise
        text = f"the controller at {spec.url} could not be reached within {spec.connect_seconds:g} s: {failures[-1]}"
        raise LinkLost(text) from error
    return tuple(links)


async def _while_up(
    links: list[ControllerLink], connecting: Coroutine[Any, Any, ControllerLink]
) -> ControllerLink | None:
    """What that makes; none when one of these links ends first."""
    task = asyncio.create_task(connecting)
    ends = [asyncio.create_task(link.ended()) for link in links]
    try:
        await asyncio.wait([task, *ends], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, *ends):
            each.cancel()
        await asyncio.gather(task, *ends, return_exceptions=True)


async def _until_connected(spec: RelaySpec, channel: Channel, failures: list[str]) -> ControllerLink:
    pause, longest = _PAUSE_SECONDS
    while True:
        try:
            return await _connect(spec, channel)
        except (LinkRefused, RunOver):
            raise
        except (OSError, InvalidHandshake, ProxyError, LinkLost) as error:
            failures.append(str(error) or type(error).__name__)
        except InvalidURI as error:
            raise LinkRefused(f"{spec.url} cannot be dialled: {error}") from error
        await asyncio.sleep(pause * random.uniform(0.75, 1.25))
        pause = min(2 * pause, longest)


async def _connect(spec: RelaySpec, channel: Channel) -> ControllerLink:
    """One dial: websocket, session, hello, welcome."""
    name = channel.name.lower()
    control = channel is Channel.CONTROL
    # The controller does not read a data link whose host is ahead of the others, so nothing there answers pings in
    # time; they only keep middleboxes from forgetting the connection. A dead path shows on the control link.
    websocket = await connect(
        spec.endpoint(name),
        create_connection=BulkClient,
        compression=None,
        proxy=spec.proxy,
        max_size=MAX_FRAME,
        max_queue=16 if control else 4,
        ping_interval=max(spec.heartbeat_seconds, spec.heartbeat_timeout_seconds / 3)
        if control
        else _DATA_PING_SECONDS,
        ping_timeout=spec.heartbeat_timeout_seconds if control else None,
        close_timeout=_CLOSE_SECONDS,
    )
    assert isinstance(websocket, BulkClient)
    link = ControllerLink(name, websocket, Session.client(channel, spec.secret, run_id=spec.run_id))
    try:
        await _handshake(link, RelayHello(host_id=spec.host_id, ranks=spec.ranks))
    except BaseException:
        link.abort()
        raise
    return link


async def _handshake(link: ControllerLink, hello: RelayHello) -> None:
    session = link.session
    await link.send_frame(session.opening())
    while not session.established:
        await link.receive()
        for reply in session.pending():
            await link.send_frame(reply)
    await link.send(hello)
    events = await link.receive()
    answer = events[0].message if events and isinstance(events[0], Received) else None
    if isinstance(answer, Reject):
        raise LinkRefused(f"the controller refused the {link.name} link: {answer.reason}")
    if not isinstance(answer, RelayWelcome):
        raise LinkRefused(f"the controller answered the {link.name} link's hello with {answer!r}")
    link.welcome = answer


def is_one_machine(here: str, there: str) -> bool:
    """Whether two ends of a connection, by their IP addresses, are one machine's."""
    try:
        ends = [ipaddress.ip_address(end.partition("%")[0]) for end in (here, there)]
    except ValueError:
        return False
    return ends[0] == ends[1] or all(end.is_loopback for end in ends)
