"""The unix socket between relay and rank: framing, both shells."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from wire.messages import BatchDone, LocalState, Message, RankHello, Shutdown
from worker.local_link import MAX_MESSAGE, AsyncLink, BlockingLink, LocalLinkError, Unpacker, pack

MESSAGES: list[Message] = [
    RankHello(rank=3),
    BatchDone(batch_ms=1.5, data_ms=0.5, steps=7, samples=32, loss=None),
    LocalState(checkpoint=1, part=0, parts=1, data=bytes(range(256)) * 1024),
    Shutdown(reason="the run is over"),
]


def test_messages_survive_any_cut() -> None:
    stream = b"".join(map(pack, MESSAGES))
    for seed in range(20):
        dice, unpacker, found, rest = random.Random(seed), Unpacker(), [], stream
        while rest:
            cut = dice.choice([1, 2, 3, 5, 1000, 100_000])
            found += unpacker.feed(rest[:cut])
            rest = rest[cut:]
        assert found == MESSAGES
        unpacker.check_ended()


def test_an_end_inside_a_message_is_an_error() -> None:
    unpacker = Unpacker()
    assert unpacker.feed(pack(MESSAGES[0])[:-1]) == []
    with pytest.raises(LocalLinkError, match="inside a message"):
        unpacker.check_ended()


BROKEN = [
    pytest.param((MAX_MESSAGE + 1).to_bytes(4, "little"), f"a message of {MAX_MESSAGE + 1} bytes", id="oversize"),
    pytest.param(b"\x01\x00\x00\x00\xc1", "cannot be read", id="garbage"),
    pytest.param(b"\x06\x00\x00\x00\x81\xa4kind", "cannot be read", id="truncated inside"),
    pytest.param(pack(MESSAGES[0]).replace(b"RankHello", b"RankHullo"), "Invalid value 'RankHullo'", id="unknown kind"),
]


@pytest.mark.parametrize(("data", "reason"), BROKEN)
def test_illegal_bytes_are_an_error(data: bytes, reason: str) -> None:
    with pytest.raises(LocalLinkError, match=reason):
        Unpacker().feed(data)


def test_too_long_a_message_is_not_sent() -> None:
    with pytest.raises(LocalLinkError, match="LocalState takes"):
        pack(LocalState(checkpoint=1, part=0, parts=1, data=bytes(MAX_MESSAGE)))


async def test_a_blocking_rank_talks_to_an_asyncio_relay(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = AsyncLink(reader, writer)
        while (message := await link.receive()) is not None:
            await link.send(message)
        link.close()
        ended.set()

    def rank() -> list[Message | None]:
        link = BlockingLink.connect(tmp_path / "relay.sock", timeout=10)
        for message in MESSAGES:
            link.send(message)
        heard = [link.receive() for _ in MESSAGES]
        link.close()
        return [*heard]

    server = await asyncio.start_unix_server(echo, path=tmp_path / "relay.sock")
    assert await asyncio.to_thread(rank) == MESSAGES
    await asyncio.wait_for(ended.wait(), 10)
    server.close()


def test_close_wakes_a_thread_that_receives() -> None:
    ours, theirs = socket.socketpair()
    link, woke = BlockingLink(ours), threading.Event()

    def wait() -> None:
        with suppress(OSError):  # closed before it began to wait
            assert link.receive() is None
        woke.set()

    thread = threading.Thread(target=wait)
    thread.start()
    link.close()
    link.close()
    assert woke.wait(10)
    thread.join()
    theirs.close()


def test_a_relay_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        BlockingLink.connect(tmp_path / "relay.sock")
