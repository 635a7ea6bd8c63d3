"""The writer on its own: a task of several statements happens whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, func, insert, select

from backend.store import LocalError, WriterOptions, schema, sqlite_url
from backend.store.engine import Role, create_private, make_engine
from backend.store.tables import tokens
from backend.store.writer import Writer


@pytest.fixture
def writer(database: Path) -> Iterator[Writer]:
    url = sqlite_url(database)
    create_private(database)
    schema.prepare(url, migrate=True)
    writer = Writer(make_engine(url, Role.WRITER), str(database), WriterOptions(batch_seconds=3600.0))
    yield writer
    writer.close()


def add(connection: Connection, name: str) -> None:
    connection.execute(insert(tokens).values(kind="k", hash=name, created_at="now"))


def count(connection: Connection) -> int:
    return connection.execute(select(func.count()).select_from(tokens)).scalar_one()


def test_what_a_failing_task_did_is_undone_and_its_neighbours_stay(writer: Writer) -> None:
    def half(connection: Connection) -> None:
        add(connection, "half")
        raise ValueError("a bug")

    first = writer.submit(lambda connection: add(connection, "first"), durable=False)
    broken = writer.submit(half, durable=False)
    last = writer.submit(lambda connection: add(connection, "last"), durable=True)
    assert (first.result(10), last.result(10)) == (None, None)
    error = broken.exception(10)
    assert isinstance(error, LocalError)
    assert "ValueError: a bug" in str(error)
    assert writer.submit(count, durable=True).result(10) == 2
    assert writer.trouble is None


def test_tasks_run_in_the_order_they_were_given(writer: Writer) -> None:
    order: list[int] = []

    def record(number: int) -> Callable[[Connection], None]:
        return lambda _connection: order.append(number)

    futures = [writer.submit(record(number), durable=number % 3 == 0) for number in range(100)]
    writer.close()
    assert all(future.done() for future in futures)
    assert order == list(range(100))
