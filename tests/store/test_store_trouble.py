"""A locked, full or read-only database: nobody waits beyond the writer's patience, and what can be kept is kept.

The trouble is SQLite's own: another connection's lock, its page limit (a full disk) and its read-only switch.
"""

from __future__ import annotations

import logging
import resource
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event
from store_cases import EVENT, RUN

from backend.store import Store, StoreError, engine
from wire import failpoints
from wire.failpoints import Point

Look = Callable[..., list[tuple[Any, ...]]]


class Alarm:
    """Hears of trouble and of its end."""

    def __init__(self) -> None:
        self.codes: list[str] = []
        self.began = threading.Event()
        self.ended = threading.Event()

    def __call__(self, error: StoreError | None) -> None:
        self.codes.append(error.code if error else "")
        (self.began if error else self.ended).set()


class Limits(list[str]):
    """Pragmas for every connection that is opened while they are in the list; and how many those were."""

    connections = 0

    def on_connect(self, connection: sqlite3.Connection, _record: Any) -> None:
        self.connections += bool(self)
        for pragma in self:
            connection.execute(f"PRAGMA {pragma}").close()


@pytest.fixture
def alarm() -> Alarm:
    return Alarm()


@pytest.fixture
def limits() -> Iterator[Limits]:
    limits = Limits()
    event.listen(Engine, "connect", limits.on_connect)
    yield limits
    event.remove(Engine, "connect", limits.on_connect)


def error_of(store: Store, run: int, **row: Any) -> StoreError:
    error = store.write(run, "events", EVENT | row, durable=True).exception(10)
    assert isinstance(error, StoreError)
    return error


def texts(store: Store, run: int) -> list[str]:
    return [row["text"] for row in store.queries.events(run)]


# ------------------------------------------------------------------------------------------------- locked


def test_a_lock_is_waited_out(open_store: Callable[..., Store], alarm: Alarm, look: Look) -> None:
    store = open_store(on_trouble=alarm, patience_seconds=60.0, retry_seconds=0.01)
    run = store.create_run(RUN)
    look("begin immediate")
    row = store.write(run, "events", EVENT, durable=True)
    assert alarm.began.wait(30)
    assert not row.done()
    trouble = store.trouble
    assert trouble is not None
    assert trouble.code == "database_locked"
    assert store.where in str(trouble)
    assert store.pending == 1
    look("rollback")
    assert row.result(30)["text"] == "hello"
    assert store.trouble is None
    assert alarm.codes == ["database_locked", ""]


def test_beyond_patience_a_durable_row_fails_but_is_kept(
    open_store: Callable[..., Store], alarm: Alarm, look: Look
) -> None:
    store = open_store(on_trouble=alarm, patience_seconds=0.0, batch_seconds=0.02)
    run = store.create_run(RUN)
    look("begin immediate")
    batched = store.write(run, "events", EVENT | {"text": "batched"})
    error = error_of(store, run, text="durable")
    assert (error.code, error.kept) == ("database_locked", True)
    with pytest.raises(StoreError) as refusal:
        store.create_run(RUN | {"name": "ghost"})
    assert (refusal.value.code, refusal.value.kept) == ("database_locked", False)
    assert not batched.done()
    look("rollback")
    assert batched.result(30)["text"] == "batched"
    store.flush().result(30)
    assert texts(store, run) == ["batched", "durable"]
    assert [row["name"] for row in store.queries.list_runs()] == ["first"]
    assert alarm.codes == ["database_locked", ""]


def test_once_patience_is_used_up_nobody_waits_and_the_database_is_not_hammered(
    open_store: Callable[..., Store], limits: Limits
) -> None:
    store = open_store(patience_seconds=0.0, batch_seconds=3600.0, group_rows=2)
    limits.append("query_only=ON")
    for _ in range(10):
        store.write(1, "events", EVENT)
    assert error_of(store, 1).code == "database_read_only"
    assert limits.connections == 1
    for _ in range(300):  # a world of ranks that die at once: each record fails as it is written, and is kept
        error = store.write(1, "events", EVENT, durable=True).exception(0)
        assert isinstance(error, StoreError)
        assert (error.code, error.kept) == ("database_read_only", True)
    assert store.pending == 311
    assert limits.connections == 1, "what waits is tried again a batch later"
    for tries in (2, 3):  # whoever gives a command is told what comes of it now
        with pytest.raises(StoreError, match="cannot be written"):
            store.create_run(RUN)
        assert limits.connections == tries
    limits.clear()


def test_rows_behind_a_large_backlog_do_not_wait_for_it(open_store: Callable[..., Store], look: Look) -> None:
    store = open_store(patience_seconds=0.0, batch_seconds=3600.0, group_rows=2)
    run = store.create_run(RUN)
    look("begin immediate")
    batched = [store.write(run, "events", EVENT) for _ in range(10)]
    assert error_of(store, run, text="last").kept
    assert not any(future.done() for future in batched)
    look("rollback")
    store.flush().result(30)
    assert all(future.done() for future in batched)
    assert texts(store, run)[-1] == "last"


async def test_the_event_loop_never_waits_for_the_database(open_store: Callable[..., Store], look: Look) -> None:
    store = open_store(patience_seconds=60.0)
    run = store.create_run(RUN)
    look("begin immediate")
    rows = [store.write(run, "events", EVENT, durable=True) for _ in range(100)]
    assert not any(row.done() for row in rows)  # the lock is still held: nothing here waited for it
    look("rollback")
    assert len({row.result(30)["id"] for row in rows}) == 100


def test_a_close_under_lock_is_bounded_and_says_what_is_lost(
    open_store: Callable[..., Store], look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(patience_seconds=3600.0, close_seconds=0.1, retry_seconds=0.01)
    run = store.create_run(RUN)
    look("begin immediate")
    rows = [store.write(run, "events", EVENT, durable=number == 2) for number in range(3)]
    with caplog.at_level(logging.ERROR):
        store.close()
    errors = [row.exception(0) for row in rows]
    assert [(error.code, error.kept) for error in errors if isinstance(error, StoreError)] == [
        ("database_locked", False)
    ] * 3
    assert "3 rows are lost" in caplog.text


# --------------------------------------------------------------------------------------- full, read-only


def test_a_full_disk_fails_nobody_for_ever(
    open_store: Callable[..., Store], alarm: Alarm, limits: Limits, look: Look
) -> None:
    store = open_store(on_trouble=alarm, patience_seconds=0.0, batch_seconds=0.02)
    [(pages,)] = look("pragma page_count")
    limits.append(f"max_page_count={pages + 2}")  # before the writer's first row, which opens its connection
    run = store.create_run(RUN)
    big = {"text": "x" * 100_000}
    error = error_of(store, run, **big)
    assert (error.code, error.kept) == ("disk_full", True)
    assert "Free space" in error.cure
    assert store.queries.get_run(run) is not None
    limits.clear()
    assert alarm.ended.wait(30)
    store.write(run, "events", EVENT, durable=True).result(30)
    assert [len(text) for text in texts(store, run)] == [100_000, 5]
    assert alarm.codes == ["disk_full", ""]
    assert look("pragma integrity_check") == [("ok",)]


def test_a_database_that_turns_read_only(open_store: Callable[..., Store], alarm: Alarm, limits: Limits) -> None:
    store = open_store(on_trouble=alarm, patience_seconds=60.0, batch_seconds=0.02)
    limits.append("query_only=ON")
    with pytest.raises(StoreError) as refusal:  # at once: waiting makes nothing writable
        store.create_run(RUN)
    assert refusal.value.code == "database_read_only"
    assert store.where in str(refusal.value)
    limits.clear()
    assert store.create_run(RUN) == 1
    assert alarm.codes == ["database_read_only", ""]


def test_a_damaged_file_fails_its_rows_for_good_and_the_writer_lives(
    open_store: Callable[..., Store], alarm: Alarm, look: Look
) -> None:
    store = open_store(on_trouble=alarm, batch_seconds=3600.0)
    run = store.create_run(RUN)
    look("pragma writable_schema=on")
    look("update sqlite_master set sql = 'create table events (nonsense' where name = 'events'")
    look("pragma schema_version=4711")  # so that the writer reads the schema anew
    batched = store.write(run, "events", EVENT)
    error = error_of(store, run)
    assert (error.code, error.kept) == ("database_corrupt", False)
    assert "backup" in error.cure
    assert isinstance(batched.exception(0), StoreError)
    assert store.pending == 0
    assert error_of(store, run).code == "database_corrupt"
    assert alarm.codes == ["database_corrupt"]


def test_a_failing_disk_costs_no_row(open_store: Callable[..., Store], alarm: Alarm, look: Look) -> None:
    store = open_store(on_trouble=alarm, batch_seconds=0.02, patience_seconds=0.0)
    run = store.create_run(RUN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        error = error_of(store, run, text="x" * 400_000)
        assert (error.code, error.kept) == ("database_io_error", True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert store.write(run, "events", EVENT).result(30)["text"] == "hello"
    assert [len(text) for text in texts(store, run)] == [400_000, 5]
    assert alarm.codes == ["database_io_error", ""]
    assert look("pragma integrity_check") == [("ok",)]


# ----------------------------------------------------------------------------------------- a commit in doubt


@pytest.fixture
def armed() -> Iterator[Callable[[str], list[Point]]]:
    """Arm failpoints in this process; they are off again afterwards."""

    def arm(points: str) -> list[Point]:
        found = failpoints.arm({failpoints.POINTS_VARIABLE: points})
        assert found is not None
        return found.points

    yield arm
    failpoints.arm({})


@pytest.mark.parametrize(
    "points",
    [
        "store.commit.after@1=error",
        "store.commit.before@1=error",
        "store.commit.after@1=error;store.commit.after@1=error;store.commit.after@1=error",
        "store.commit.after@1=error;store.commit.before@2=error;store.commit.after@1=error",
    ],
)
def test_a_commit_that_reports_an_error_is_written_once(
    open_store: Callable[..., Store], armed: Callable[[str], list[Point]], alarm: Alarm, points: str
) -> None:
    """Whether it happened or not (F92), and however often in a row."""
    store = open_store(on_trouble=alarm, patience_seconds=60.0, batch_seconds=3600.0, retry_seconds=0.01)
    run = store.create_run(RUN)
    found = armed(points)
    batched = store.write(run, "events", EVENT | {"text": "batched"})
    durable = store.write(run, "events", EVENT | {"text": "durable"}, durable=True)
    merged = store.write(run, "runs", {"phase": "training"}, durable=True)
    assert durable.result(30)["text"] == "durable"
    assert merged.result(30)["phase"] == "training"
    assert store.create_run(RUN) == run + 1
    assert [point.injected for point in found] == [1] * len(found)
    assert texts(store, run) == ["batched", "durable"]
    assert [row["id"] for row in store.queries.events(run)] == [batched.result(0)["id"], durable.result(0)["id"]]
    assert alarm.codes == ["database_io_error", ""]


def test_a_doubt_outlives_the_patience_of_those_who_wait(
    open_store: Callable[..., Store], armed: Callable[[str], list[Point]]
) -> None:
    store = open_store(patience_seconds=0.0, batch_seconds=0.02)
    run = store.create_run(RUN)
    (point,) = armed("store.commit.after@1=error")
    assert error_of(store, run).kept
    store.write(run, "events", EVENT | {"text": "later"}).result(30)
    assert point.injected == 1
    assert texts(store, run) == ["hello", "later"]


def test_a_command_whose_commit_reports_an_error_is_told_what_happened(
    open_store: Callable[..., Store], armed: Callable[[str], list[Point]]
) -> None:
    store = open_store(patience_seconds=0.0)
    (after,) = armed("store.commit.after@1=error")
    assert (store.create_run(RUN), after.injected) == (1, 1), "it was written"
    (before,) = armed("store.commit.before@1=error")
    with pytest.raises(StoreError, match="Check the disk") as refusal:
        store.create_run(RUN)
    assert (refusal.value.code, refusal.value.kept, before.injected) == ("database_io_error", False, 1)
    assert store.create_run(RUN) == 2, "it was not"
    assert [row["id"] for row in store.queries.list_runs()] == [2, 1]


def test_a_command_whose_commit_stays_in_doubt_is_told_so(
    open_store: Callable[..., Store],
    armed: Callable[[str], list[Point]],
    database: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another program takes the lock just then, so that nobody can look."""
    monkeypatch.setattr(engine, "WRITER_BUSY_MS", 20)
    store = open_store(patience_seconds=0.0)
    run = store.create_run(RUN)
    (point,) = armed("store.commit.after@1=error")

    with closing(sqlite3.connect(database, isolation_level=None, check_same_thread=False)) as other:

        def lock(_connection: sqlite3.Connection, _record: Any) -> None:
            other.execute("begin immediate")

        event.listen(Engine, "connect", lock, once=True)
        with pytest.raises(StoreError, match="unknown whether the rows were written") as refusal:
            store.create_run(RUN)
        assert (refusal.value.code, refusal.value.kept, point.injected) == ("outcome_unknown", False, 1)
        other.execute("rollback")
    assert store.create_run(RUN) == run + 2, "it was written"


# ------------------------------------------------------------------------------------------------- backlog


def test_the_backlog_is_bounded_with_room_left_for_durable_rows(open_store: Callable[..., Store], look: Look) -> None:
    store = open_store(capacity=20, patience_seconds=0.0, batch_seconds=3600.0)
    run = store.create_run(RUN)
    look("begin immediate")
    batched = [store.write(run, "events", EVENT | {"text": str(number)}) for number in range(20)]
    refused = store.write(run, "events", EVENT).exception(0)
    assert isinstance(refused, StoreError)
    assert (refused.code, refused.kept) == ("backlog_full", False)
    assert error_of(store, run, text="20").kept
    assert error_of(store, run, text="21").kept
    full = error_of(store, run, text="22")
    assert full.code == "backlog_full"
    assert "sqlite3 shell" in full.cure
    look("rollback")
    for future in batched[:-1]:
        assert not future.done()
    store.close()
    assert [future.result(0)["text"] for future in batched] == [str(number) for number in range(20)]
    assert look("select count(*) from events") == [(22,)]


def test_a_listener_that_fails_does_not_end_the_writing(
    open_store: Callable[..., Store], look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    def listener(_error: StoreError | None) -> None:
        raise RuntimeError("listener")

    store = open_store(on_trouble=listener, patience_seconds=0.0, batch_seconds=0.02)
    run = store.create_run(RUN)
    look("begin immediate")
    assert error_of(store, run).code == "database_locked"
    look("rollback")
    assert store.flush().result(30) is None
    assert "listener" in caplog.text
