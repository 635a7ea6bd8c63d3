"""A relay-only host in one run: the data links of its children end here, and one leaves for the controller.

Up, every slice waits for all children that contribute, and leaves as one sum; down, every chunk is sealed again for
each child. A child that is slow holds back the stream and nothing else; one that takes nothing is let go, so that the
controller hears of it. Memory is a window of chunks for each link, whatever the model's size (decision 0015).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from websockets.asyncio.server import ServerConnection

from wire.codes import CloseCode, close_code
from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.messages import (
    ChildAttached,
    ChildLost,
    Contribution,
    FoldOrder,
    Message,
    NonFinite,
    Reject,
    RelayHello,
    RelayWelcome,
    RoundAborted,
    UpdateComing,
)
from wire.session import ChunkReceived, Received, Session
from wire.streams import SLICE_ELEMENTS, ContributionRefused, Slice
from worker.pulse import Pulse
from worker.relay_links import ControllerLink, LinkRefused, RunOver
from worker.site_fold import Attempt, fold
from worker.site_links import WINDOW_CHUNKS, Child, ChildGone, Outgoing, close
from worker.tasks import first_to_end

STALL_SECONDS = 20.0
"""A child that takes nothing for so long is let go. Less than the controller waits for this host."""
_THREADS = 4
_LEAVING_SECONDS = 5.0

log = logging.getLogger("site")


class SiteRun:
    """One run. ``run`` serves the uplink, ``serve`` one child's data link; both are over when the run is."""

    def __init__(self, stall_seconds: float = STALL_SECONDS) -> None:
        self.children: dict[int, Child] = {}
        self._stall_seconds = stall_seconds
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="site")
        self._moved = Pulse()
        self._up: Outgoing | None = None
        self._attempt: Attempt | None = None
        self._folded: Attempt | None = None
        """the last one that was looked at"""
        self._latest: tuple[int, int] | None = None
        """number of the last order that came, whatever became of it"""
        self._over: tuple[CloseCode | int, str] | None = None

    # -------------------------------------------------------------------------------------------- the uplink

    async def run(self, link: ControllerLink) -> None:
        """Serve an established data link to the controller until it ends, then let every child go.

        Returns when the run is over. Raises ``LinkLost``, ``ProtocolError``.
        """
        self._up = Outgoing(link.session, link.send_frame, self._pool, None)
        self._moved.fire()
        try:
            await first_to_end(self._read_uplink(link), self._up.run(), self._fold())
        except RunOver as over:
            self.finish(CloseCode.GONE, str(over))
        finally:
            self.finish(CloseCode.REFUSED, "the relay-only host lost its link to the controller")
            await link.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVING_SECONDS):
                    await self._moved.until(lambda: not self.children)
            self._pool.shutdown(wait=False, cancel_futures=True)

    def finish(self, code: CloseCode | int, reason: str) -> None:
        """Let every child go; the first reason counts."""
        if self._over is None:
            self._over = code, reason
            for child in self.children.values():
                child.drop(reason)
        self._moved.fire()

    async def _read_uplink(self, link: ControllerLink) -> None:
        while True:
            for event in await link.receive(threaded=True):
                if isinstance(event, ChunkReceived):
                    await self._pass_down(event)
                elif isinstance(event, Received):
                    self._from_controller(event.message)
                else:
                    raise LinkRefused(f"the controller sent {event!r} on the data link")

    def _from_controller(self, message: Message) -> None:
        match message:
            case FoldOrder():
                self._ordered(message)
            case RoundAborted():
                self._aborted(message)
            case UpdateComing():
                self._announce(message)
            case ChildLost(host=host, reason=reason):
                self._let_go(host, reason)
            case _:
                raise LinkRefused(f"the controller sent {type(message).__name__}, which is not for a relay-only host")

    def _ordered(self, order: FoldOrder) -> None:
        carriers = {host: child.host for child in self.children.values() for host in child.carries}
        self._latest = order.round, order.attempt
        try:
            self._attempt = Attempt(order, carriers)
        except LookupError as absent:
            self._attempt = None
            log.warning("round %s cannot be folded: %s is not here any more", order.round, absent)
        else:
            for number, part in self._attempt.parts.items():
                if self.children[number].relay_only:
                    self.children[number].out.post(part)
        self._moved.fire()

    def _aborted(self, message: RoundAborted) -> None:
        attempt = self._attempt
        if attempt is not None and attempt.number == (message.round, message.attempt):
            attempt.open = False
            for child in self._of(attempt):
                if child.relay_only:
                    child.out.post(message)
        self._moved.fire()

    async def _pass_down(self, chunk: ChunkReceived) -> None:
        """Seal a chunk of the update again for every child. The slowest decides when the next one is read."""
        attempt = self._attempt
        if attempt is None or not attempt.has(chunk.header):
            return
        for child in self._of(attempt):
            await child.out.room()
            child.out.post_chunk(chunk.header, chunk.payload)

    def _let_go(self, host: int, reason: str) -> None:
        """The controller does not want this host's link, or does not know it."""
        for child in self.children.values():
            if child.host == host:
                child.drop(reason)
            elif host in child.carries:
                child.out.post(ChildLost(host=host, reason=reason))

    def _announce(self, update: UpdateComing) -> None:
        attempt = self._attempt
        if attempt is not None and attempt.open and attempt.number == (update.round, update.attempt):
            for child in self._of(attempt):
                child.out.post(update)

    def _of(self, attempt: Attempt) -> list[Child]:
        return [self.children[child] for child in attempt.parts if child in self.children]

    # ------------------------------------------------------------------------------------------- the way up

    async def _fold(self) -> None:
        """Send this host's contributions, one attempt after the other."""
        while True:
            await self._moved.until(lambda: self._attempt is not None and self._attempt is not self._folded)
            self._folded = attempt = self._attempt
            assert attempt is not None
            await self._fold_attempt(attempt)

    async def _fold_attempt(self, attempt: Attempt) -> None:
        """Declare, then sum slice by slice; a value that is not finite ends it, whatever was sent before."""
        streams = attempt.streams
        if not await self._reached(attempt, lambda: streams.declared):
            return
        self._uplink.post(attempt.contribution())
        for piece in streams.slices():
            if not await self._reached(attempt, partial(self._summable, attempt, piece)):
                return
            if attempt.bad is not None:
                self._uplink.post(attempt.bad)
                return
            await self._send_sum(attempt, piece)

    async def _send_sum(self, attempt: Attempt, piece: Slice) -> None:
        await self._uplink.room()
        header, taken = attempt.header(piece), attempt.streams.take(piece)
        loop = asyncio.get_running_loop()
        try:
            payload = await loop.run_in_executor(self._pool, fold, taken, piece, header.encoding)
        except ContributionRefused as refused:
            self._blame(refused)
            attempt.open = False
            return
        attempt.streams.summed(taken)
        self._moved.fire()
        if self._is_current(attempt):
            self._uplink.post_chunk(header, payload)

    async def _reached(self, attempt: Attempt, condition: Callable[[], bool]) -> bool:
        """Wait for a condition; False when the attempt is over first."""
        await self._moved.until(lambda: not self._is_current(attempt) or condition())
        return self._is_current(attempt)

    def _summable(self, attempt: Attempt, piece: Slice) -> bool:
        return attempt.bad is not None or attempt.streams.complete(piece)

    def _is_current(self, attempt: Attempt) -> bool:
        return attempt.open and attempt is self._attempt

    def _blame(self, refused: ContributionRefused) -> None:
        child = self.children.get(refused.host)
        if child is not None:
            child.drop(f"its contribution was refused: {refused.reason}")

    @property
    def _uplink(self) -> Outgoing:
        assert self._up is not None, "children are taken once the uplink is up"
        return self._up

    # ------------------------------------------------------------------------------------------- the children

    async def serve(self, socket: ServerConnection, session: Session, hello: RelayHello) -> None:
        """Serve a child's data link, whose hello was read, to its end; the websocket is closed then."""
        await self._moved.until(lambda: self._up is not None or self._over is not None)
        if self._over is not None:
            await close(socket, *self._over)
            return
        if hello.host_id in self.children:
            reason = f"the data link of host {hello.host_id} is attached already"
            await socket.send(session.seal(Reject(code="relay_refused", reason=reason, permanent=True)))
            await close(socket, CloseCode.REFUSED, reason)
            return
        child = Child(hello.host_id, hello.ranks, socket, session, self._pool, self._stall_seconds)
        self.children[child.host] = child
        child.out.post(RelayWelcome())
        self._uplink.post(ChildAttached(host=child.host, ranks=child.ranks))
        log.info("host %s attached its data link", child.host)
        code, reason = CloseCode.REFUSED, "the relay-only host is closing"
        try:
            code, reason = await self._converse(child)
        finally:
            self._lost(child, reason)
            await close(socket, *(self._over or (code, reason)))

    async def _converse(self, child: Child) -> tuple[CloseCode, str]:
        """Read, write and wait to be told to stop; why it is over, and the code to close with."""
        try:
            await first_to_end(self._read(child), child.out.run(), _raised(child.dropped))
        except RemoteProtocolError as error:
            return close_code(error.code), f"protocol error {error.code}: {error.text}"
        except ContributionRefused as refused:
            return CloseCode.REFUSED, f"its contribution was refused: {refused.reason}"
        except (ChildGone, LocalProtocolError) as gone:
            return CloseCode.REFUSED, str(gone)
        raise AssertionError("a child's link ends by an error only")

    def _lost(self, child: Child, reason: str) -> None:
        """A child's link is over, and with it that of every host behind it."""
        del self.children[child.host]
        if self._over is None:
            log.warning("the data link of host %s is over: %s", child.host, reason)
        for host in child.carries:
            self._uplink.post(ChildLost(host=host, reason=reason))
        self._moved.fire()

    async def _read(self, child: Child) -> None:
        window = WINDOW_CHUNKS * SLICE_ELEMENTS
        while True:
            # Not read further until there is room: TCP then holds this child back, and nobody else.
            await self._moved.until(lambda: self._held(child) < window)
            for event in await child.read():
                if isinstance(event, ChunkReceived):
                    self._arrived(child, event)
                elif isinstance(event, Received):
                    await self._from_child(child, event.message)
                else:
                    raise ChildGone(f"it sent {type(event).__name__}, which has no place there")

    def _held(self, child: Child) -> int:
        return 0 if self._attempt is None or not self._attempt.open else self._attempt.streams.held(child.host)

    def _arrived(self, child: Child, chunk: ChunkReceived) -> None:
        attempt = self._attempt
        if attempt is not None and attempt.has(chunk.header) and child.host in attempt.parts:
            attempt.streams.arrived(child.host, chunk.header, chunk.payload)
            self._moved.fire()

    async def _from_child(self, child: Child, message: Message) -> None:
        match message:
            case Contribution(round=round_, attempt=number) | NonFinite(round=round_, attempt=number):
                attempt = await self._attempt_of(child, (round_, number))
                if attempt is not None and isinstance(message, Contribution):
                    attempt.streams.contribute(child.host, message)
                elif attempt is not None and isinstance(message, NonFinite):
                    attempt.refuse_bad(child.host, message)
                self._moved.fire()
            case ChildAttached(host=host, ranks=ranks) if child.relay_only:
                child.carries[host] = ranks
                self._uplink.post(message)
            case ChildLost(host=host) if child.relay_only:
                child.carries.pop(host, None)
                self._uplink.post(message)
            case _:
                raise ChildGone(f"it sent {type(message).__name__}, which has no place there")

    async def _attempt_of(self, child: Child, number: tuple[int, int]) -> Attempt | None:
        """The attempt that a child speaks of; waits for its order, which may be slower than the child. None for one
        that is over."""
        await self._moved.until(lambda: self._latest is not None and number <= self._latest)
        attempt = self._attempt
        if attempt is None or not attempt.open or attempt.number != number or child.host not in attempt.parts:
            return None
        return attempt


async def _raised(dropped: asyncio.Future[str]) -> None:
    raise ChildGone(await dropped)
