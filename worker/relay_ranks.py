"""The relay's side of the unix socket: one connection per rank, each with a bounded queue of its own.

A rank that does not read holds up nobody else: when its queue is full, its connection ends (behaviour M29,
M31).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path

from wire.messages import Message, RankHello
from worker.local_link import AsyncLink, LocalLinkError

logger = logging.getLogger(__name__)

_QUEUE = 1024
"""messages that wait for one rank"""


class _Port:
    """One rank's connection."""

    def __init__(self, rank: int, link: AsyncLink) -> None:
        self.rank = rank
        self.link = link
        self.queue: asyncio.Queue[Message | None] = asyncio.Queue(_QUEUE)
        """none ends the connection"""

    async def write(self) -> None:
        while (message := await self.queue.get()) is not None:
            await self.link.send(message)


class RankPorts:
    """Listens for the host's ranks and passes on what they say, rank by rank in order."""

    def __init__(self, ranks: Iterable[int], heard: Callable[[int, Message], Awaitable[None]]) -> None:
        self._allowed = set(ranks)
        self._heard = heard
        self._ports: dict[int, _Port] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._path: Path | None = None
        self._fatal: asyncio.Future[None] | None = None

    async def listen(self, path: Path) -> None:
        """Open the socket; ranks may connect from here on. Raises ``OSError``."""
        self._fatal = asyncio.get_running_loop().create_future()
        self._server = await asyncio.start_unix_server(self._accept, path=path)
        self._path = path

    async def serve(self) -> None:
        """Run until something that a rank said could not be handled; raises that error."""
        assert self._fatal is not None, "listen first"
        await asyncio.shield(self._fatal)

    def send(self, rank: int, message: Message | None) -> None:
        """Queue a message for a rank; none ends its connection. One that is not connected misses it, which its exit
        explains."""
        port = self._ports.get(rank)
        if port is None:
            logger.info("%s for rank %s was dropped: it is not connected", type(message).__name__, rank)
            return
        try:
            port.queue.put_nowait(message)
        except asyncio.QueueFull:
            logger.warning("rank %s does not read: %s messages wait, its connection ends", rank, _QUEUE)
            port.link.abort()

    def refuse(self, rank: int, last_words: Message) -> None:
        """The rank is out: nothing that it says is heard any more; it is told why, then its connection ends, and it
        gets no other."""
        self._allowed.discard(rank)
        if rank in self._ports:
            self.send(rank, last_words)
            self.send(rank, None)

    async def farewell(self, seconds: float) -> None:
        """Let the ranks read what is queued and leave by themselves, for at most this long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._tasks:
                    await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Close everything and remove the socket."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------------- connections

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._converse(AsyncLink(reader, writer)))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or self._fatal is None or self._fatal.done():
            return
        if (error := task.exception()) is not None:
            self._fatal.set_exception(error)

    async def _converse(self, link: AsyncLink) -> None:
        """One connection from its hello to its end. Errors of the rank end this connection only."""
        rank: int | None = None
        try:
            rank = await self._greet(link)
            if rank is not None:
                await self._serve(self._ports[rank])
        except (LocalLinkError, OSError) as error:
            logger.warning("the connection of rank %s broke: %s", rank, error)
        finally:
            link.close()
            if rank is not None:
                del self._ports[rank]

    async def _greet(self, link: AsyncLink) -> int | None:
        hello = await link.receive()
        if not isinstance(hello, RankHello):
            raise LocalLinkError(f"the first message must be RankHello, not {type(hello).__name__}")
        if hello.rank not in self._allowed or hello.rank in self._ports:
            raise LocalLinkError(f"rank {hello.rank} is connected already, or not a living rank of this host")
        self._ports[hello.rank] = _Port(hello.rank, link)
        return hello.rank

    async def _serve(self, port: _Port) -> None:
        both = {asyncio.create_task(self._read(port)), asyncio.create_task(port.write())}
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
        for task in done:
            task.result()

    async def _read(self, port: _Port) -> None:
        while (message := await port.link.receive()) is not None:
            if port.rank in self._allowed:
                await self._heard(port.rank, message)
