"""The three websocket endpoints: who may come in, and where what they say goes (design 2 and 5; behaviour B7, B16).

    /ws/join     an agent: Hello, then everything that the host says goes to its run's core
    /ws/control  a relay: what its ranks say, checked against the ranks that it owns
    /ws/data     the same relay's bulk link: contributions and chunks go to the reduce plane; a relay-only host tells
                 here whose data links end at it

Nothing here decides about a run. A peer that can't prove that it holds the secret, or says nothing, is a stranger:
counted, slowed in its own connection only, and of no consequence for anybody else.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, Protocol

from starlette.websockets import WebSocket

from backend.core.config import RunConfig
from backend.core.vocabulary import HostSaid, RankSaid, RelayHeard, StrangerRefused
from backend.reduce import Proof, ReducePlane, SharedArenas, SharedMemoryRefused
from backend.runtime.driver import Clock, Driver
from backend.runtime.endings import Stranger, expected, out_of_turn, verdict
from backend.runtime.errors import LinkEnded
from backend.runtime.limits import Gate, Limits, is_nearby, source_of
from backend.runtime.outbox import Outbox
from backend.runtime.peer import Peer
from backend.runtime.run_links import RunLinks
from wire.codes import CloseCode, close_code
from wire.errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from wire.messages import (
    NO_RANK,
    BatchDone,
    ChildAttached,
    ChildLost,
    ChunkDone,
    Contribution,
    EvalResult,
    Exiting,
    FetchState,
    Hello,
    HostHeartbeat,
    Leaving,
    LocalState,
    NonFinite,
    ProbeReport,
    RankExited,
    RankFailed,
    RankReady,
    Reject,
    RelayExited,
    RelayHeartbeat,
    RelayHello,
    RelayWelcome,
    SessionIdGenerated,
    SessionJoined,
    SessionLost,
    SharedMemory,
    SyncAck,
    Synced,
    SyncRefused,
)
from wire.sealing import OPEN_SECRET
from wire.session import Channel, ChunkReceived, Incoming, Received, Session

FROM_AGENT = (ProbeReport, HostHeartbeat, RankExited, RelayExited, Leaving)
FROM_RANK = (
    *(RankReady, BatchDone, ChunkDone, SyncAck, EvalResult, LocalState, FetchState, Exiting, RankFailed),
    *(SessionIdGenerated, SessionJoined, SessionLost, Synced, SyncRefused),
)

log = logging.getLogger(__name__)


class Served(Protocol):
    """A run, as far as its links are concerned."""

    @property
    def run_id(self) -> int: ...

    @property
    def config(self) -> RunConfig: ...

    @property
    def secret(self) -> bytes: ...

    @property
    def window_open(self) -> bool: ...

    @property
    def driver(self) -> Driver: ...

    @property
    def links(self) -> RunLinks: ...

    @property
    def plane(self) -> ReducePlane: ...


class Door:
    """Accepts websockets. ``runs`` gives the live runs, oldest first; ``sleep`` is what slows a stranger."""

    def __init__(
        self,
        runs: Callable[[], list[Served]],
        join_secret: bytes,
        limits: Limits,
        *,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]],
        pool: Executor,
    ) -> None:
        self.gate = Gate(limits)
        self.open_links: dict[Channel, int] = dict.fromkeys(Channel, 0)
        self.bytes_in = 0
        self.bytes_out = 0
        self._runs = runs
        self._join_secret = join_secret
        self._limits = limits
        self._clock = clock
        self._sleep = sleep
        self._pool = pool
        self._numbers = itertools.count(1)
        self._proof = Proof()
        self._warned: set[str] = set()

    # ------------------------------------------------------------------------------------------- endpoints

    async def join(self, socket: WebSocket) -> None:
        """Serve one ``/ws/join`` websocket to its end."""
        peer = self._peer(socket, Channel.JOIN)
        try:
            first = await self._first_message(peer)
            if not isinstance(first.message, Hello):
                raise out_of_turn("Hello", first.message)
        except Stranger as stranger:
            await self._turn_away(peer, stranger)
            return
        run = self._run_for(first.message, peer)
        if isinstance(run, Reject):
            await self._reject(peer, run)
            return
        self._warn_of_cleartext(peer.address)
        link, outbox = next(self._numbers), self._outbox(peer)
        run.links.add_join(link, outbox)
        reason = "the controller is closing"
        try:
            await run.driver.put(HostSaid(link, first.message, peer.address))
            reason = await self._converse(Channel.JOIN, outbox, self._listen_host(run, link, peer, first.message))
        finally:
            run.links.join_ended(link, reason)

    async def control(self, socket: WebSocket) -> None:
        """Serve one ``/ws/control`` websocket to its end."""
        await self._relay(socket, Channel.CONTROL, self._listen_ranks)

    async def data(self, socket: WebSocket) -> None:
        """Serve one ``/ws/data`` websocket to its end."""
        await self._relay(socket, Channel.DATA, self._listen_chunks)

    async def _relay(
        self, socket: WebSocket, channel: Channel, listen: Callable[[Served, int, Peer], Coroutine[Any, Any, None]]
    ) -> None:
        peer = self._peer(socket, channel)
        try:
            first = await self._first_message(peer)
            if not isinstance(first.message, RelayHello):
                raise out_of_turn("RelayHello", first.message)
        except Stranger as stranger:
            await self._turn_away(peer, stranger)
            return
        hello = first.message
        run = self._live(peer.session.run_id)
        objection = f"run {peer.session.run_id} is over"
        if run is not None:
            await run.links.world_known(self._limits.expect_seconds)
            objection = run.links.objection(channel, hello.host_id, hello.ranks)
        if run is None or objection:
            self._report(peer, "relay_refused", f"a relay was refused: {objection}")
            await self._reject(peer, Reject(code="relay_refused", reason=objection, permanent=True))
            return
        outbox = self._outbox(peer)
        offered = channel is Channel.DATA and peer.may_be_local and bool(hello.ranks)
        outbox.post(RelayWelcome(self._proof.path, self._proof.secret) if offered else RelayWelcome())
        run.links.attach(channel, hello.host_id, outbox)
        reason = "the controller is closing"
        try:
            reason = await self._converse(channel, outbox, listen(run, hello.host_id, peer))
        finally:
            run.links.relay_ended(channel, hello.host_id, outbox, reason)
            if channel is Channel.DATA:
                run.plane.unshare(hello.host_id)

    # ------------------------------------------------------------------------------------- before the session

    async def _first_message(self, peer: Peer) -> Received:
        """The peer's first authentic message. Raises ``Stranger`` for one that doesn't get that far in time."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(self._limits.handshake_seconds) as limit:

                def evict() -> None:
                    if not limit.expired():
                        limit.reschedule(loop.time())

                slot = self.gate.enter(source_of(peer.address), evict)
                try:
                    await peer.accept()
                    while True:
                        for event in await peer.read():
                            if isinstance(event, Received):
                                return event
                        limit.reschedule(started + self._limits.hello_seconds)
                finally:
                    self.gate.leave(slot)
        except TimeoutError as error:
            seconds = loop.time() - started
            raise Stranger("silent", f"it proved nothing within {seconds:.1f} s", CloseCode.SILENT) from error
        except RemoteProtocolError as error:
            raise Stranger(error.code, error.text, close_code(error.code), peer.session.refusal(error)) from error
        except LinkEnded as error:
            raise Stranger("closed", f"it left before it said who it is: {error}", CloseCode.PROTOCOL) from error

    async def _turn_away(self, peer: Peer, stranger: Stranger) -> None:
        delay = self.gate.failed(source_of(peer.address), self._clock())
        self._report(peer, stranger.code, stranger.reason, known=delay > 0)
        if delay > 0:
            await self._sleep(delay)
        try:
            async with asyncio.timeout(self._limits.close_seconds):
                if stranger.refusal is not None:
                    await peer.send_plain(stranger.refusal)
                await peer.close(stranger.close, stranger.reason)
        except (LinkEnded, TimeoutError):
            return

    async def _reject(self, peer: Peer, reject: Reject) -> None:
        """Say no over an authentic session, before any core knows of the peer."""
        try:
            async with asyncio.timeout(self._limits.close_seconds):
                await peer.send(reject)
                await peer.close(CloseCode.REFUSED, reject.reason)
        except (LinkEnded, TimeoutError, LocalProtocolError):
            await peer.close(CloseCode.REFUSED, reject.reason)

    def _report(self, peer: Peer, code: str, reason: str, known: bool = False) -> None:
        """Tell the run that was meant, or every run with an open window. A source that is known fills no log."""
        log.log(logging.DEBUG if known else logging.INFO, "%s was refused (%s): %s", peer.address, code, reason)
        meant = self._live(peer.session.run_id)
        for run in [meant] if meant is not None else [run for run in self._runs() if run.window_open]:
            run.driver.post(StrangerRefused(peer.address, str(code), reason))

    # ------------------------------------------------------------------------------------------- which run

    def _secret_for(self, channel: Channel, run_id: int) -> bytes | None:
        if channel is not Channel.JOIN:
            run = self._live(run_id)
            return None if run is None else run.secret
        run = self._live(run_id) if run_id else self._earliest_open()
        return OPEN_SECRET if run is not None and run.config.open_admission else self._join_secret

    def _run_for(self, hello: Hello, peer: Peer) -> Served | Reject:
        wanted = hello.run if hello.run is not None else (peer.session.run_id or None)
        if wanted is None:
            run = self._earliest_open()
            if run is None:
                return Reject(code="no_open_window", reason="no run has an open join window now; dial again later")
        else:
            run = self._live(wanted)
            if run is None or run.links.over:
                return Reject(code="unknown_run", reason=f"run {wanted} is not served here", permanent=True)
        opened_with = self._secret_for(Channel.JOIN, peer.session.run_id)
        if opened_with != self._join_secret and not run.config.open_admission:
            reason = f"run {run.run_id} admits hosts with the join token only"
            return Reject(code="token_required", reason=reason, permanent=True)
        return run

    def _live(self, run_id: int) -> Served | None:
        return next((run for run in self._runs() if run.run_id == run_id), None)

    def _earliest_open(self) -> Served | None:
        return next((run for run in self._runs() if run.window_open), None)

    # -------------------------------------------------------------------------------------------- listening

    async def _listen_host(self, run: Served, link: int, peer: Peer, hello: Hello) -> None:
        beats = run.links.beats_of(hello.host, run.config.heartbeat_seconds)
        while True:
            for event in await peer.read():
                message = expected(event, FROM_AGENT).message
                if isinstance(message, HostHeartbeat):
                    beats.heard(message, self._clock())
                if run.links.is_joined(link):
                    await run.driver.put(HostSaid(link, message, peer.address))

    async def _listen_ranks(self, run: Served, host: int, peer: Peer) -> None:
        while True:
            for event in await peer.read():
                received = expected(event, (*FROM_RANK, RelayHeartbeat))
                beats = isinstance(received.message, RelayHeartbeat)
                if not (received.rank == NO_RANK if beats else run.links.owns(host, received.rank)):
                    spoken = "the whole host" if received.rank == NO_RANK else f"rank {received.rank}"
                    raise RemoteProtocolError(ErrorCode.BAD_MESSAGE, f"host {host} does not speak for {spoken} here")
                await run.driver.put(RelayHeard(host) if beats else RankSaid(received.rank, received.message))

    async def _listen_chunks(self, run: Served, host: int, peer: Peer) -> None:
        while True:
            # Not read further until the plane can hold more: TCP then holds the host back, and nobody else.
            await run.plane.room(host)
            events = await peer.read()
            while events:  # popped, so that no chunk is held here while the next one is waited for
                self._heard_data(run, host, peer, events.pop(0))

    def _heard_data(self, run: Served, host: int, peer: Peer, event: Incoming) -> None:
        relay_only = run.links.is_relay_only(host)
        match event:
            case ChunkReceived(header=header, payload=payload):
                run.plane.chunk(host, header, payload)
            case Received(message=Contribution() as contribution):
                run.plane.contribution(host, contribution)
            case Received(message=NonFinite() as found):
                run.plane.non_finite(host, found)
            case Received(message=SharedMemory() as offer) if peer.may_be_local and not relay_only:
                self._share(run, host, offer)
            case Received(message=ChildAttached(host=child, ranks=ranks)) if relay_only:
                run.links.attach_child(host, child, ranks)
            case Received(message=ChildLost(host=child, reason=reason)) if relay_only:
                run.links.child_lost(host, child, reason)
            case _:
                expected(event, ())

    def _share(self, run: Served, host: int, offer: SharedMemory) -> None:
        """The relay has found our proof: read its ranks' arenas where they lie."""
        try:
            run.plane.share(host, SharedArenas(offer.directory))
        except SharedMemoryRefused as refused:
            raise RemoteProtocolError(ErrorCode.BAD_MESSAGE, f"its shared memory is refused: {refused}") from refused
        run.links.shares_memory(host)
        log.info("run %d: host %d shares its memory (%s)", run.run_id, host, offer.directory)

    async def _converse(self, channel: Channel, outbox: Outbox, listening: Coroutine[Any, Any, None]) -> str:
        """Write and listen until one of the two is over. Answers why."""
        writer = asyncio.create_task(outbox.run(), name=f"{channel.name.lower()} writer")
        reader = asyncio.create_task(listening, name=f"{channel.name.lower()} reader")
        self.open_links[channel] += 1
        try:
            await asyncio.wait((writer, reader), return_when=asyncio.FIRST_COMPLETED)
            reason, code = verdict(writer if writer.done() else reader)
        finally:
            self.open_links[channel] -= 1
            self.bytes_in += outbox.peer.bytes_in
            self.bytes_out += outbox.peer.bytes_out
            for task in (writer, reader):
                task.cancel()
            await asyncio.gather(writer, reader, return_exceptions=True)
        if code is not None:
            await outbox.peer.close(code, reason)
        return reason

    def _warn_of_cleartext(self, address: str) -> None:
        """Once per address: control frames can't be altered unseen, but they can be read (behaviour B15)."""
        if address in self._warned or is_nearby(address) or len(self._warned) >= self._limits.remembered_sources:
            return
        self._warned.add(address)
        log.warning("%s joined over a public network in clear text; use TLS or a tunnel to keep it private", address)

    def _peer(self, socket: WebSocket, channel: Channel) -> Peer:
        return Peer(socket, Session.server(self._secret_for, channel=channel), self._pool)

    def _outbox(self, peer: Peer) -> Outbox:
        return Outbox(peer, messages=self._limits.outbox_messages, stall_seconds=self._limits.send_stall_seconds)
