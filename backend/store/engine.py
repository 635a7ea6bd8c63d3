"""Engines and the file beneath them (anchors/reliability.md 1.13).

SQLite releases from 3.7.0 to 3.51.2 can corrupt a database when two connections write and checkpoint at the
same instant. So exactly one connection writes, in one thread, and only it checkpoints; readers may not write
at all.
"""

from __future__ import annotations

import enum
import fcntl
import os
import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, NullPool, QueuePool, create_engine, event, make_url
from sqlalchemy.exc import NoSuchModuleError, SQLAlchemyError

from backend.store.errors import OpenError, as_open_error, fault_of

MARKS = (1 << 31) - 1
"""numbers of transactions; SQLite's file header holds 31 bits"""
BUSY_MS = 5000
WRITER_BUSY_MS = 1000
"""Short: the writer's own patience goes on from there, and notices a close in between."""
READERS = 8
MORE_READERS = 32
READER_WAIT_SECONDS = 10


class Role(enum.Enum):
    """What an engine's connections may do."""

    WRITER = "writer"
    READER = "reader"
    MIGRATION = "migration"


def sqlite_url(path: Path) -> URL:
    """The URL of a database file; right for every file name, which a formatted string is not."""
    return URL.create("sqlite", database=str(path))


def parse_url(url: str | URL) -> URL:
    """A checked URL with an absolute path. Raises OpenError bad_url or database_in_memory."""
    try:
        parsed = make_url(url)
    except (SQLAlchemyError, ValueError):
        # the cause is left out: its text may repeat the URL, and with it a password
        raise OpenError(
            "bad_url", "the database URL cannot be read", cure="Write it as sqlite:///path/to/file.db"
        ) from None
    if not is_sqlite(parsed):
        return parsed
    name = parsed.database or ":memory:"
    if name == ":memory:":
        raise OpenError(
            "database_in_memory",
            "a database in memory keeps nothing",
            where=str(parsed),
            cure="Name a file: sqlite:///path",
        )
    if name.startswith("file:"):
        raise OpenError("bad_url", "SQLite's own file: URIs are not taken", where=str(parsed), cure="Name a plain path")
    return parsed.set(database=str(Path(name).resolve()))


def is_sqlite(url: URL) -> bool:
    """Whether the pragmas, the file rules and the lock file apply."""
    return url.get_backend_name() == "sqlite"


def where_of(url: URL) -> str:
    """How errors name the database: its path, or the server's URL without the password."""
    return str(url.database) if is_sqlite(url) else url.render_as_string(hide_password=True)


def make_engine(url: URL, role: Role) -> Engine:
    """An engine whose every connection and transaction follows the rules of its role."""
    if role is Role.READER:
        engine = create_engine(
            url,
            poolclass=QueuePool,
            pool_size=READERS,
            max_overflow=MORE_READERS,
            pool_timeout=READER_WAIT_SECONDS,
            pool_pre_ping=not is_sqlite(url),
            hide_parameters=True,
        )
    else:
        # the writer holds its one connection itself; a pool would only hide a second one
        engine = create_engine(url, poolclass=NullPool, hide_parameters=True)
    if is_sqlite(url):
        _follow_sqlite_rules(engine, role)
    return engine


def _follow_sqlite_rules(engine: Engine, role: Role) -> None:
    pragmas = _pragmas(role)
    begin = "BEGIN" if role is Role.READER else "BEGIN IMMEDIATE"

    @event.listens_for(engine, "connect")
    def on_connect(connection: sqlite3.Connection, _record: Any) -> None:
        connection.isolation_level = None  # SQLAlchemy starts transactions, not the sqlite3 module
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:
        # a deferred transaction that turns to writing fails at once, whatever busy_timeout says
        connection.exec_driver_sql(begin)


def _pragmas(role: Role) -> list[str]:
    busy = WRITER_BUSY_MS if role is Role.WRITER else BUSY_MS
    common = [f"busy_timeout={busy}", "synchronous=FULL", "mmap_size=0"]
    match role:
        case Role.READER:
            return [*common, "foreign_keys=ON", "query_only=ON", "wal_autocheckpoint=0"]
        case Role.WRITER:
            return [*common, "journal_mode=WAL", "foreign_keys=ON"]
        case Role.MIGRATION:
            # a rebuilt table is dropped, and with foreign keys on that would delete the rows that point to it
            return [*common, "journal_mode=WAL", "foreign_keys=OFF"]


def last_mark(connection: Connection) -> int:
    """The number of SQLite's last committed transaction, as its file header (``user_version``) has it."""
    return int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())


def put_mark(connection: Connection, last: int) -> int:
    """Number the open transaction, which comes after number ``last``; a write of its own. Answers the number."""
    mark = last % MARKS + 1
    connection.exec_driver_sql(f"PRAGMA user_version = {mark}")
    return mark


def create_private(path: Path) -> None:
    """Make the file (0600) and its directory (0700) where they are missing. Raises OpenError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise open_error(error, str(path)) from error


def open_error(error: BaseException, where: str) -> OpenError:
    """The refusal of start behind an exception; an unforeseen one is passed on by name."""
    if isinstance(error, NoSuchModuleError | ModuleNotFoundError):
        return OpenError(
            "driver_missing", str(error), where=where, cure="Install the database's Python driver, or use SQLite"
        )
    known = fault_of(error, where)
    if known is not None:
        return as_open_error(known)
    cure = "This is an unforeseen failure of the database: report it"
    return OpenError("database_unopenable", f"{type(error).__name__}: {error}", where=where, cure=cure)


class FileLock:
    """An advisory lock beside the database: one controller per file; the kernel releases it with its process.

    The lock file stays behind on purpose: removing it would let two processes lock two files of the same
    name.
    """

    def __init__(self, database: Path) -> None:
        """Take the lock. Raises OpenError: database_in_use (naming the holder), or a fault of the disk."""
        self.path = database.with_name(database.name + ".lock")
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise open_error(error, str(self.path)) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            raise OpenError(
                "database_in_use",
                f"another controller serves this database (process {holder or 'unknown'})",
                where=str(database),
                cure="Stop that controller, or give this one a data directory of its own",
            ) from error
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        except OSError as error:
            os.close(self._descriptor)
            raise open_error(error, str(self.path)) from error

    def release(self) -> None:
        """Let the next controller in."""
        os.close(self._descriptor)
