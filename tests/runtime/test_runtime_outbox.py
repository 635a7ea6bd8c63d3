"""The outbox of one link, over a websocket in memory: order, what is dropped, and what ends a stalled write."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from runtime_scripted import turns
from starlette.websockets import WebSocket, WebSocketState

from backend.runtime.errors import LinkEnded
from backend.runtime.outbox import Outbox
from backend.runtime.peer import Peer
from wire.codes import CloseCode
from wire.messages import Accept, Message, Reject, RelayHello, RelayWelcome, RunEnded, Shutdown
from wire.session import Channel, ChunkHeader, ChunkReceived, Received, Session

SECRET = b"s" * 32


class Wire:
    """The far end: what was written, and a valve that holds the next write back."""

    def __init__(self) -> None:
        self.client = Session.client(Channel.DATA, SECRET, run_id=1)
        self.server = Session.server(lambda channel, run_id: SECRET)
        self.server.receive(self.client.opening())
        for reply in self.server.pending():
            self.client.receive(reply)
        self.server.receive(self.client.seal(RelayHello(1, [0])))
        self.heard: list[Message | ChunkHeader] = []
        self.closed: tuple[int, str] | None = None
        self.open = asyncio.Event()
        self.open.set()
        self.writing = asyncio.Event()

    async def send(self, message: dict[str, Any]) -> None:
        self.writing.set()
        await self.open.wait()
        if message["type"] == "websocket.close":
            self.closed = (message["code"], message["reason"])
            return
        for event in self.client.receive(bytes(message["bytes"])):
            if isinstance(event, Received):
                self.heard.append(event.message)
            elif isinstance(event, ChunkReceived):
                self.heard.append(event.header)

    async def receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("nobody reads here")

    def socket(self) -> WebSocket:
        socket = WebSocket({"type": "websocket", "client": ("10.0.0.1", 5)}, self.receive, self.send)  # type: ignore[arg-type]
        socket.client_state = socket.application_state = WebSocketState.CONNECTED
        return socket


@asynccontextmanager
async def writing(
    messages: int = 100, stall_seconds: float = 30.0
) -> AsyncIterator[tuple[Wire, Outbox, asyncio.Task[None]]]:
    with ThreadPoolExecutor(1) as pool:
        wire = Wire()
        outbox = Outbox(Peer(wire.socket(), wire.server, pool), messages=messages, stall_seconds=stall_seconds)
        task = asyncio.create_task(outbox.run())
        try:
            yield wire, outbox, task
        finally:
            wire.open.set()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def chunk(number: int) -> tuple[ChunkHeader, memoryview]:
    return ChunkHeader(0, 0, 0, 4 * number, 4), np.full(4, number, dtype="<f4").data


async def finished(task: asyncio.Task[None]) -> None:
    await asyncio.wait_for(task, 30)


async def test_messages_and_chunks_are_written_in_the_order_they_were_posted() -> None:
    async with writing() as (wire, outbox, task):
        outbox.post(RelayWelcome())
        outbox.post_chunk(*chunk(0))
        outbox.post(Shutdown("between"))
        outbox.post_chunk(*chunk(1))
        outbox.finish("done with it", CloseCode.GONE)
        outbox.post(Shutdown("too late"))
        outbox.post_chunk(*chunk(2))
        await finished(task)
    assert wire.heard == [RelayWelcome(), chunk(0)[0], Shutdown("between"), chunk(1)[0]]
    assert wire.closed == (4410, "done with it")
    assert outbox.closed.is_set()


@pytest.mark.parametrize(
    ("last", "code"), [(Reject("code", "reason"), 4403), (RunEnded("done", "reason"), 4410), (Shutdown("x"), 4403)]
)
async def test_the_close_code_follows_from_the_last_words(last: Message, code: int) -> None:
    async with writing() as (wire, outbox, task):
        outbox.post(last)
        outbox.finish("x" * 200)
        await finished(task)
    assert wire.closed == (code, "x" * 123), "a close frame holds 123 bytes"


async def test_chunks_of_an_aborted_attempt_are_dropped_and_messages_are_not() -> None:
    async with writing() as (wire, outbox, task):
        wire.open.clear()
        outbox.post_chunk(*chunk(0))
        await asyncio.wait_for(wire.writing.wait(), 30)
        for number in (1, 2, 3):
            outbox.post_chunk(*chunk(number))
        outbox.post(Shutdown("kept"))
        outbox.drop_chunks()
        outbox.post_chunk(*chunk(9))
        outbox.finish("end")
        wire.open.set()
        await finished(task)
    # The first was being written already; its frame has its sequence number, so it has to go.
    assert wire.heard == [chunk(0)[0], Shutdown("kept"), chunk(9)[0]]


async def test_a_chunk_that_was_written_is_let_go_of() -> None:
    async with writing() as (wire, outbox, _):
        values = np.zeros(4, dtype="<f4")
        alive = weakref.ref(values)
        outbox.post_chunk(ChunkHeader(0, 0, 0, 0, 4), values.data)
        del values
        async with asyncio.timeout(30):
            while not wire.heard:
                wire.writing.clear()
                await wire.writing.wait()
        await turns(20)
        assert alive() is None


async def test_many_chunks_that_wait_say_nothing_of_a_slow_peer() -> None:
    async with writing(messages=3) as (wire, outbox, task):
        wire.open.clear()
        for number in range(10):
            outbox.post_chunk(*chunk(number))
        outbox.post(Shutdown("heard all the same"))
        outbox.finish("end")
        wire.open.set()
        await finished(task)
    assert wire.heard[-1] == Shutdown("heard all the same")
    assert len(wire.heard) == 11


async def test_a_write_that_stalls_ends_the_link() -> None:
    async with writing(stall_seconds=0.05) as (wire, outbox, task):
        wire.open.clear()
        outbox.post(RelayWelcome())
        with pytest.raises(LinkEnded, match=r"stalled for 0\.05 s"):
            await finished(task)
        assert outbox.closed.is_set()


async def test_too_much_waiting_ends_the_link_even_while_a_write_stalls() -> None:
    async with writing(messages=3) as (wire, outbox, task):
        wire.open.clear()
        outbox.post(RelayWelcome())
        await asyncio.wait_for(wire.writing.wait(), 30)
        for number in range(4):
            outbox.post(Shutdown(str(number)))
        with pytest.raises(LinkEnded, match="does not read: 3 messages"):
            await finished(task)
        outbox.post(Shutdown("after the end"))
        assert outbox.waiting == 0


async def test_what_cannot_be_sent_ends_the_link_by_name() -> None:
    async with writing() as (_, outbox, task):
        outbox.post(Shutdown("x" * (2 << 20)))
        with pytest.raises(LinkEnded, match=r"could not be sent.*cap"):
            await finished(task)


async def test_heartbeats_begin_with_the_acceptance_and_only_fill_silence() -> None:
    async with writing() as (wire, outbox, _):
        await turns(5)
        assert wire.heard == []
        outbox.post(Accept(1, 1, [0], SECRET, 1.0, 0.01, 1.0))
        async with asyncio.timeout(30):
            while len(wire.heard) < 3:
                wire.writing.clear()
                await wire.writing.wait()
        assert [type(message).__name__ for message in wire.heard[:3]] == ["Accept", *["ControllerHeartbeat"] * 2]
