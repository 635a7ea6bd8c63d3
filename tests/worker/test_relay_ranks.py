"""The relay's unix socket server: bounded queues, one rank never holds up another."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

import pytest

from wire.messages import BatchDone, DeclareDead, LocalState, Message, RankHello, Update
from worker.local_link import AsyncLink, LocalLinkError
from worker.relay_ranks import RankPorts

PATIENCE = 10.0
BULK = LocalState(checkpoint=1, part=0, parts=1, data=bytes(64 << 10))
DECLARED = DeclareDead(rank=0, reason="silent")


class Hall:
    """Ports of ranks 0 and 1, and what they said."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.heard: asyncio.Queue[tuple[int, Message]] = asyncio.Queue()
        self.failure: Exception | None = None
        self.ports = RankPorts([0, 1], self._hear)
        self.writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Hall:
        await self.ports.listen(self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        for writer in self.writers:
            writer.transport.abort()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        await self.ports.close()

    async def _hear(self, rank: int, message: Message) -> None:
        if self.failure is not None:
            raise self.failure
        self.heard.put_nowait((rank, message))

    async def join(self, rank: int) -> AsyncLink:
        """Connect, and wait until the ports know who that is."""
        reader, writer = await asyncio.open_unix_connection(self.path)
        self.writers.append(writer)
        link = AsyncLink(reader, writer)
        await link.send(RankHello(rank=rank))
        done = BatchDone(batch_ms=1.0, data_ms=0.0, steps=1, samples=1, loss=None)
        await link.send(done)
        assert await asyncio.wait_for(self.heard.get(), PATIENCE) == (rank, done)
        return link


async def test_a_rank_that_does_not_read_ends_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Hall(tmp_path / "relay.sock") as hall:
        wedged, healthy = await hall.join(0), await hall.join(1)
        with caplog.at_level(logging.WARNING):
            for _ in range(1030):
                hall.ports.send(0, BULK)
        assert "rank 0 does not read" in caplog.text
        hall.ports.send(1, Update(round=0, global_step=1))
        assert await asyncio.wait_for(healthy.receive(), PATIENCE) == Update(round=0, global_step=1)
        assert await asyncio.wait_for(_until_the_end(wedged), PATIENCE) < 1030


async def _until_the_end(link: AsyncLink) -> int:
    """How many messages came before the link ended, orderly or not."""
    count = 0
    with suppress(OSError, LocalLinkError):
        while await link.receive() is not None:
            count += 1
    return count


async def test_messages_for_an_absent_rank_are_dropped_and_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Hall(tmp_path / "relay.sock") as hall:
        with caplog.at_level(logging.INFO):
            hall.ports.send(1, Update(round=0, global_step=1))
        assert caplog.messages == ["Update for rank 1 was dropped: it is not connected"]


async def test_an_error_of_the_relay_itself_is_not_blamed_on_the_rank(tmp_path: Path) -> None:
    async with Hall(tmp_path / "relay.sock") as hall:
        link = await hall.join(0)
        hall.failure = RuntimeError("no room for the consensus")
        serving = asyncio.create_task(hall.ports.serve())
        await link.send(Update(round=0, global_step=1))
        with pytest.raises(RuntimeError, match="no room"):
            await asyncio.wait_for(serving, PATIENCE)


async def test_farewell_waits_for_the_ranks_to_leave(tmp_path: Path) -> None:
    async with Hall(tmp_path / "relay.sock") as hall:
        link = await hall.join(0)
        hall.ports.send(0, Update(round=0, global_step=1))
        leaving = asyncio.create_task(hall.ports.farewell(PATIENCE))
        assert await asyncio.wait_for(link.receive(), PATIENCE) == Update(round=0, global_step=1)
        assert not leaving.done()
        link.close()
        await asyncio.wait_for(leaving, PATIENCE)


async def test_farewell_is_bounded(tmp_path: Path) -> None:
    async with Hall(tmp_path / "relay.sock") as hall:
        await hall.join(0)
        await asyncio.wait_for(hall.ports.farewell(0.01), PATIENCE)


async def test_a_rank_may_come_back_unless_it_was_refused(tmp_path: Path) -> None:
    async with Hall(tmp_path / "relay.sock") as hall:
        first = await hall.join(0)
        first.close()
        await asyncio.wait_for(hall.ports.farewell(PATIENCE), PATIENCE)
        second = await hall.join(0)
        hall.ports.refuse(0, DECLARED)
        await second.send(BatchDone(batch_ms=1.0, data_ms=0.0, steps=2, samples=1, loss=None))
        assert await asyncio.wait_for(second.receive(), PATIENCE) == DECLARED
        assert await asyncio.wait_for(second.receive(), PATIENCE) is None
        assert hall.heard.empty(), "what the dead still say is not heard"
        reader, writer = await asyncio.open_unix_connection(hall.path)
        hall.writers.append(writer)
        third = AsyncLink(reader, writer)
        await third.send(RankHello(rank=0))
        assert await asyncio.wait_for(third.receive(), PATIENCE) is None
