"""A controller in a process of its own that may open few files, or none (F95): its run goes on, who comes is told."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from e2e.stage import Stage
from runtime_remote import remote
from runtime_scripted import moment
from runtime_site import ScriptedHost, eventually
from test_runtime_round import Rank, beat, formed

from backend.runtime.limits import OTHER_DESCRIPTORS
from wire.messages import StartChunk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
CONNECTIONS = 24
JOB = "odometer.py:Odometer"


class Steady(Rank):
    """Takes its time for a chunk, so that the controller has some for others."""

    async def _work(self, chunk: StartChunk) -> None:
        await moment(0.05)
        await super()._work(chunk)


@asynccontextmanager
async def serving(tmp_path: Path, inside: tuple[str, ...] = ()) -> AsyncIterator[tuple[Stage, int, Rank]]:
    """A controller, and a run of two scripted ranks, saved every few rounds, that goes on for as long as the block; one
    of the ranks, which tells of it when no further connection can be had."""
    tasks: list[asyncio.Task[None]] = []
    async with remote(tmp_path, inside=inside) as (marchline, where):
        config = {"fixed_counts": [3, 1], "epochs": 100_000, "batch_size": 4}
        config |= {"checkpoint_epochs": None, "checkpoint_rounds": 4}
        run = await asyncio.to_thread(marchline.create, JOB, **config)
        hosts = [ScriptedHost(where, name) for name in ("left", "right")]
        for host in hosts:
            await host.admitted(size=32)
        await asyncio.to_thread(marchline.post, f"runs/{run}/start")
        ranks = [Steady(rank.host, rank.rank) for rank in await asyncio.gather(*map(formed, hosts))]
        tasks += [asyncio.create_task(beat(rank.host, rank.rank)) for rank in ranks]
        tasks += [asyncio.create_task(rank.train()) for rank in ranks]
        try:
            await goes_on(ranks[0])
            yield marchline, run, ranks[0]
            assert (await asyncio.to_thread(marchline.view, run))["deaths"] == []
        finally:
            for task in tasks:
                task.cancel()


async def goes_on(rank: Rank) -> None:
    target = rank.steps + 12
    await eventually(lambda: rank.steps >= target, "more batches to be asked for", 120)


def saved(marchline: Stage, run: int) -> int:
    """The newest complete checkpoint's number."""
    root = marchline.data_dir / "runs" / str(run) / "checkpoints"
    return max((int(path.parent.name) for path in root.glob("[0-9]*/manifest.json")), default=0)


async def let_in(marchline: Stage, run: int) -> None:
    await asyncio.to_thread(marchline.until, run, lambda view: len(view["members"]) == 1, "the host to be let in")


def watch(marchline: Stage, taken: ExitStack) -> tuple[int, dict[str, Any]]:
    """One more page that looks at the overview: the status of its handshake, and the problem if it is refused."""
    port = int(marchline.url.rpartition(":")[2])
    token = (marchline.data_dir / "operator.token").read_text().strip()
    connection = taken.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
    lines = (
        "GET /api/v1/stream HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
        f"Authorization: Bearer {token}",
    )
    connection.sendall("\r\n".join([*lines, "", ""]).encode())
    answer = taken.enter_context(connection.makefile("rb"))
    status = int(answer.readline().split()[1])
    length = 0
    while (line := answer.readline().strip()) != b"":
        name, _, value = line.partition(b":")
        length = int(value) if name.lower() == b"content-length" else length
    return status, json.loads(answer.read(length)) if status != 101 else {}


async def test_connections_leave_files_to_the_run_and_who_comes_too_late_is_told(tmp_path: Path) -> None:
    few = ("sh", "-c", f'ulimit -n {OTHER_DESCRIPTORS + CONNECTIONS}; exec "$@"', "sh")
    async with serving(tmp_path, few) as (marchline, run, rank):
        waiting = await asyncio.to_thread(marchline.create, JOB)
        with ExitStack() as taken:
            opened = 0
            while (answer := await asyncio.to_thread(watch, marchline, taken))[0] == 101:
                opened += 1
                assert opened <= CONNECTIONS
            status, problem = answer
            assert (status, problem["code"]) == (503, "connections_full")
            assert f"The controller holds {CONNECTIONS} connections in all, and takes no more" in problem["detail"]
            assert "ulimit -n" in problem["detail"]
            late, said = _late(marchline, waiting), f"holds {CONNECTIONS} connections in all"
            await eventually(lambda: said in late.output(), "the host to be told why", 120)
            await goes_on(rank)
            before = saved(marchline, run)
            await eventually(lambda: saved(marchline, run) > before, "a save all the same", 120)
        await let_in(marchline, waiting)
        print(f"{opened} pages, then a refusal by name")


async def test_when_no_file_can_be_opened_the_run_goes_on_and_hosts_come_in_afterwards(tmp_path: Path) -> None:
    """EMFILE for whatever is opened: connections, checkpoints, reads of the database."""
    async with serving(tmp_path) as (marchline, run, rank):
        waiting = await asyncio.to_thread(marchline.create, JOB)
        pid = marchline.process.pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))  # what is open stays open
        failed = "was not written: Too many open files"
        await eventually(lambda: failed in marchline.log.read_text(), "a save to fail", 120)
        late = _late(marchline, waiting)
        await eventually(lambda: "trying again" in late.output(), "a host to be kept out", 120)
        await goes_on(rank)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        before = saved(marchline, run)
        await let_in(marchline, waiting)
        await eventually(lambda: saved(marchline, run) > before, "a save", 120)
        events = await asyncio.to_thread(marchline.items, run, "events")
        assert [row for row in events if row["kind"] == "checkpoint_failed" and "Too many open files" in row["text"]]


def _late(marchline: Stage, run: int) -> Any:
    return marchline._start("late", marchline.url, "--relay-only", "--listen", "127.0.0.1:0", "--run", str(run))
