from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_cases import RUN, Wall

from backend.store import Store, WriterOptions, sqlite_url


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "var" / "marchline.db"


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def open_store(database: Path, wall: Wall) -> Iterator[Callable[..., Store]]:
    opened: list[Store] = []

    def open_one(path: Path = database, **changes: Any) -> Store:
        on_trouble = changes.pop("on_trouble", None)
        options = WriterOptions(**changes)
        store = Store.open(sqlite_url(path), wall_clock=wall, options=options, on_trouble=on_trouble)
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[..., Store]) -> Store:
    """A store whose batches never fall due by time: what is not durable waits for what is."""
    return open_store(batch_seconds=3600.0)


@pytest.fixture
def run(store: Store) -> int:
    return store.create_run(RUN)


@pytest.fixture
def look(database: Path) -> Iterator[Callable[..., list[tuple[Any, ...]]]]:
    """Ask the file through a connection of its own, beside the store's."""
    connections: list[sqlite3.Connection] = []

    def ask(sql: str, *values: Any) -> list[tuple[Any, ...]]:
        if not connections:
            connections.append(sqlite3.connect(database, isolation_level=None))
        return connections[0].execute(sql, values).fetchall()

    yield ask
    for connection in connections:
        connection.close()
