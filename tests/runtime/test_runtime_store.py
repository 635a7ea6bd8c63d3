"""A run and its database in trouble: training goes on, whoever asks is told, and nothing is missing afterwards."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from runtime_site import ScriptedHost, Site, config, eventually, site
from small_disks import fill, small_disk
from test_runtime_round import Rank, beat, formed

from backend.store import Store, StoreError, WriterOptions, engine, sqlite_url

PATIENCE = 0.2


def open_there(path: Path) -> Store:
    return Store.open(sqlite_url(path), options=WriterOptions(batch_seconds=0.02, patience_seconds=PATIENCE))


@asynccontextmanager
async def training(where: Site, **changes: Any) -> AsyncIterator[int]:
    """A run of two scripted ranks that goes on for as long as the block; then it is stopped, and over."""
    run_id = await where.controller.create_run(config(epochs=100_000, fixed_counts=(3, 1), **changes))
    hosts = [ScriptedHost(where, name) for name in ("left", "right")]
    for host in hosts:
        await host.admitted(size=32)
    await where.controller.command(run_id, "start")
    ranks: list[Rank] = await asyncio.gather(*map(formed, hosts))
    beats = [asyncio.create_task(beat(rank.host, rank.rank)) for rank in ranks]
    work = [asyncio.create_task(rank.train()) for rank in ranks]
    try:
        yield run_id
        await where.controller.command(run_id, "stop", by="test")
        await asyncio.wait_for(asyncio.gather(*work), 30)
    finally:
        for task in (*beats, *work):
            task.cancel()
    for host in hosts:
        await host.join.close()
    await where.until_over(run_id)


def view(where: Site, run_id: int) -> dict[str, Any]:
    found = where.controller.live_view(run_id)
    assert found is not None
    return found


async def rounds_go_on(where: Site, run_id: int, count: int = 20) -> None:
    target = view(where, run_id)["round"] + count
    await eventually(lambda: view(where, run_id)["round"] >= target, f"{count} more rounds")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with closing(sqlite3.connect(path, isolation_level=None)) as shell:
        shell.execute("begin immediate")
        yield
        shell.execute("rollback")


@contextmanager
def full(path: Path) -> Iterator[None]:
    ballast = fill(path.parent)
    yield
    ballast.unlink()


@pytest.mark.parametrize(
    ("trouble", "code", "says"),
    [(locked, "database_locked", "Close the program that has it open"), (full, "disk_full", "Free space on that disk")],
)
async def test_training_goes_on_and_no_row_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Any, code: str, says: str
) -> None:
    monkeypatch.setattr(engine, "WRITER_BUSY_MS", 20)
    with small_disk(tmp_path / "disk", "16m") if trouble is full else _plain(tmp_path / "disk") as disk:
        path = disk / "m.sqlite3"
        async with site(tmp_path, store=open_there(path)) as where:
            controller, queries = where.controller, where.controller.store.queries
            async with training(where, checkpoint_epochs=None) as run_id:
                await rounds_go_on(where, run_id)
                with trouble(path):
                    await eventually(lambda: view(where, run_id)["not_durable"], "the view to say so")
                    # Every epoch's row is durable: each of them would wait, were it not for the first one's patience.
                    await rounds_go_on(where, run_id)
                    told = view(where, run_id)["not_durable"]
                    assert says in told
                    assert str(path) in told
                    overview = await anext(controller.feed.subscribe(None))
                    assert overview["view"]["controller"]["not_durable"] == told
                    with pytest.raises(StoreError, match=says) as refused:
                        await controller.create_run(config())
                    assert refused.value.code == code
                    assert await asyncio.to_thread(queries.get_run, run_id), "it can be read all the while"
                await eventually(lambda: not view(where, run_id)["not_durable"], "it to be recorded again")
                await rounds_go_on(where, run_id)
            rounds = await asyncio.to_thread(queries.rounds, run_id, limit=100_000)
            epochs = await asyncio.to_thread(queries.epochs, run_id)
            runs = await asyncio.to_thread(queries.list_runs)
    assert [row["round"] for row in rounds] == list(range(len(rounds)))
    assert [row["epoch"] for row in epochs] == list(range(len(epochs)))
    assert len(rounds) >= 60
    assert [row["id"] for row in runs] == [run_id], "what was refused is not there"


@contextmanager
def _plain(path: Path) -> Iterator[Path]:
    path.mkdir()
    yield path


async def test_what_a_dead_controller_had_announced_is_there(tmp_path: Path) -> None:
    """Rows that the feed showed, and counters as of the last of them: an image of the files, as kill -9 leaves them."""
    path = tmp_path / "m.sqlite3"
    async with site(tmp_path, store=open_there(path)) as where, training(where) as run_id:
        await rounds_go_on(where, run_id, 7)
        frame = await anext(where.controller.feed.subscribe(run_id))
        for name in ("m.sqlite3-wal", "m.sqlite3"):  # this way round a checkpoint in between does no harm
            (tmp_path / f"image-{name}").write_bytes((tmp_path / name).read_bytes())
    (tmp_path / "image-m.sqlite3-wal").rename(tmp_path / "image.sqlite3-wal")
    (tmp_path / "image-m.sqlite3").rename(tmp_path / "image.sqlite3")
    with open_there(tmp_path / "image.sqlite3") as store:
        assert store.interrupt_unserved() == [run_id]
        row = store.queries.get_run(run_id)
        rounds = store.queries.rounds(run_id)
        events = store.queries.events(run_id)
        epochs = store.queries.epochs(run_id)
        checkpoints = store.queries.checkpoints(run_id)
    assert frame["rounds"], "the feed had shown some"
    assert rounds[: len(frame["rounds"])] == frame["rounds"]
    assert events[: len(frame["events"])] == frame["events"]
    assert checkpoints[: len(frame["view"]["checkpoints"])] == frame["view"]["checkpoints"]
    assert row is not None
    assert row["phase"] == "interrupted"
    last = rounds[-1]
    assert (row["rounds_done"], row["global_step"], row["loss"]) == (len(rounds), last["global_step"], last["loss"])
    assert row["epochs_done"] == len([each for each in epochs if each["samples_accepted"] is not None])
    assert row["world_size"] == 2
