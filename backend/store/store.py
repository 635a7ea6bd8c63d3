"""The store's one face: open, write, ask, close."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy import URL, Connection, func, select, update

from backend.store import rows, schema
from backend.store.engine import (
    FileLock,
    Role,
    create_private,
    is_sqlite,
    make_engine,
    open_error,
    parse_url,
    where_of,
)
from backend.store.errors import LocalError, StoreError
from backend.store.queries import Queries
from backend.store.tables import epochs, events, ranks, rounds, runs, tokens
from backend.store.writer import OnTrouble, Writer, WriterOptions

WallClock = Callable[[], float]
"""Seconds since the epoch; used for the time columns only, never for a decision."""

_SETTLE_SECONDS = 60.0
"""How far beyond the writer's patience a blocking call waits before it says that the disk hangs."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Store:
    """All that Marchline remembers. Make it with ``Store.open``; every method may be called from any thread.

    ``write`` never blocks on the database. ``create_run``, ``add_token``, ``use_token``,
    ``interrupt_unserved``, ``close`` and the queries do: call them outside an event loop
    (``asyncio.to_thread``).
    """

    queries: Queries

    def __init__(
        self, url: URL, *, wall_clock: WallClock, options: WriterOptions, on_trouble: OnTrouble | None
    ) -> None:
        """Start the writer on a database that is already prepared and locked; for ``open`` only."""
        self.where = where_of(url)
        self._wall_clock = wall_clock
        self._options = options
        self._readers = make_engine(url, Role.READER)
        self.queries = Queries(self._readers, self.where)
        self._writer = Writer(make_engine(url, Role.WRITER), self.where, options, on_trouble)
        self._lock: FileLock | None = None
        self._close_lock = threading.Lock()
        self._closed = False

    @classmethod
    def open(
        cls,
        url: str | URL,
        migrate: bool = True,
        *,
        wall_clock: WallClock = time.time,
        options: WriterOptions | None = None,
        on_trouble: OnTrouble | None = None,
    ) -> Self:
        """Lock the database, check it, bring its schema to the newest revision, start the writer.

        ``on_trouble`` is called from the writer's thread when writing stops being durable (with the error)
        and when it is again (with None). Raises OpenError: database_in_use, database_corrupt, schema_newer,
        schema_outdated, database_foreign, database_read_only, disk_full, ... (errors.py); what it holds is then as it
        was.
        """
        parsed = parse_url(url)
        with ExitStack() as undo:
            lock = None
            if is_sqlite(parsed):
                path = Path(where_of(parsed))
                create_private(path)
                lock = FileLock(path)
                undo.callback(lock.release)
            schema.prepare(parsed, migrate=migrate)
            store = cls(parsed, wall_clock=wall_clock, options=options or WriterOptions(), on_trouble=on_trouble)
            store._lock = lock
            undo.pop_all()
        return store

    # -------------------------------------------------------------------------------------------- writing

    def create_run(self, values: Mapping[str, Any]) -> int:
        """Insert a run (``runs`` less id and created_at; ``job`` and ``mode`` required), committed on return.

        Raises LocalError for a bad column, StoreError when the database is in trouble (there is no run then).
        """
        row = self._commit(rows.new_run(values, self._now()))
        return int(row["id"])

    def write(self, run_id: int, table: str, row: Mapping[str, Any], durable: bool = False) -> Future[dict[str, Any]]:
        """Queue a row; the future gives the whole row as stored (with id, run_id, at) once it is committed.

        ``row`` holds the table's columns less those three; JSON columns take dicts and lists, with text or
        rank numbers as keys; numbers that are not finite become null. ``durable`` rows are committed at once,
        others within ``batch_seconds``; both in the order given. The rule of each table is in
        ``rows.new_row``. The future raises LocalError (unknown table, column or run, bad value, duplicate),
        or StoreError whose ``kept`` says whether the row waits in memory for the trouble's end.
        """
        try:
            perform = rows.new_row(run_id, table, row, self._now())
        except Exception as error:  # a bug in one record must not end the run that recorded it
            refused: Future[dict[str, Any]] = Future()
            refused.set_exception(error if isinstance(error, LocalError) else _bug(table, error))
            return refused
        return self._writer.submit(perform, durable=durable)

    def flush(self) -> Future[None]:
        """Resolves when everything that was queued before is committed; fails as a durable row would."""
        return self._writer.submit(lambda _connection: None, durable=True, keep=False)

    def interrupt_unserved(self, kept: Collection[int] = ()) -> list[int]:
        """At start, before any run is served: mark what a dead controller left running, but for runs that are ``kept``
        because their cohorts may come back. Returns those ids.

        Each becomes ``interrupted`` with the reason "controller stopped" and gets one event that says in
        which phase it was. How far it came is what its rounds say, for its own row is written at an epoch's end.
        """
        at = self._now()
        return list(self._commit(lambda connection: _interrupt(connection, at, kept)))

    # --------------------------------------------------------------------------------------------- tokens

    def add_token(self, kind: str, hash: str) -> int:
        """Remember a one-time token by the hex SHA-256 of its text, never the text itself. Returns its id."""
        if not _SHA256.fullmatch(hash):
            raise LocalError("bad_argument", "a token is stored by its SHA-256", cure="Pass 64 lower-case hex digits")
        row = {"kind": kind, "hash": hash, "created_at": self._now()}
        return int(self._commit(lambda connection: rows.insert_row(connection, tokens, row))["id"])

    def use_token(self, hash: str) -> str | None:
        """Use a token up: its kind the first time, None when it is unknown or was used before."""
        at = self._now()
        kind: str | None = self._commit(lambda connection: _use_token(connection, hash, at))
        return kind

    # --------------------------------------------------------------------------------------------- health

    @property
    def trouble(self) -> StoreError | None:
        """Why nothing can be made durable right now; None when all is well."""
        return self._writer.trouble

    @property
    def pending(self) -> int:
        """Rows in memory that are not committed."""
        return self._writer.pending

    def describe(self) -> dict[str, str]:
        """What serves the store, for the log at start: where, dialect, version."""
        try:
            with self._readers.connect() as connection:
                version = connection.dialect.server_version_info or ()
        except Exception as error:
            raise open_error(error, self.where) from error
        return {
            "where": self.where,
            "dialect": self._readers.dialect.name,
            "version": ".".join(str(part) for part in version),
        }

    # --------------------------------------------------------------------------------------------- ending

    def close(self) -> None:
        """Write what is queued, end the writer, let the next controller in. May be called twice."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            # the writer's connection goes last of all: the last one to close is the one that checkpoints
            self.queries.close()
            self._readers.dispose()
            self._writer.close()
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _now(self) -> str:
        moment = datetime.fromtimestamp(self._wall_clock(), UTC)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def _commit(self, perform: Callable[[Connection], Any]) -> Any:
        """Write and wait. A command that fails is dropped: its caller is told so and may try again."""
        future = self._writer.submit(perform, durable=True, keep=False)
        try:
            return future.result(self._options.patience_seconds + _SETTLE_SECONDS)
        except FutureTimeout as error:
            text = "the database took too long to write"
            raise StoreError(
                "write_timeout", text, where=self.where, cure="Check the disk: it seems to hang"
            ) from error


def _interrupt(connection: Connection, at: str, kept: Collection[int]) -> list[int]:
    running = select(runs.c.id, runs.c.phase).where(runs.c.phase.in_(rows.RUNNING_PHASES)).order_by(runs.c.id)
    left = [row for row in connection.execute(running).all() if row.id not in kept]
    for run_id, phase in left:
        change = {
            "phase": "interrupted",
            "reason": "controller stopped",
            "ended_at": func.coalesce(runs.c.ended_at, at),
            **_progress(connection, run_id),
        }
        connection.execute(update(runs).where(runs.c.id == run_id).values(change))
        rows.forget_continuations(connection, run_id)
        text = f"The controller stopped while this run was {phase}"
        event = {
            "run_id": run_id,
            "at": at,
            "kind": "run_interrupted",
            "level": "warning",
            "text": text,
            "data": {"phase": phase},
        }
        rows.insert_row(connection, events, event)
    return [run_id for run_id, _ in left]


def _progress(connection: Connection, run_id: int) -> dict[str, Any]:
    """How far a run came, by its last recorded round; nothing when it closed none."""
    last = connection.execute(
        select(rounds.c.round, rounds.c.global_step, rounds.c.loss)
        .where(rounds.c.run_id == run_id)
        .order_by(rounds.c.round.desc())
        .limit(1)
    ).one_or_none()
    if last is None:
        return {}
    closed = select(func.max(epochs.c.epoch)).where(epochs.c.run_id == run_id, epochs.c.samples_accepted.is_not(None))
    newest = connection.execute(closed).scalar_one()
    resumed = connection.execute(select(runs.c.resumed_epochs).where(runs.c.id == run_id)).scalar_one()
    world = connection.execute(select(func.count()).where(ranks.c.run_id == run_id)).scalar_one()
    done = (resumed or 0) if newest is None else newest + 1
    return {
        "epochs_done": done,
        "rounds_done": last[0] + 1,
        "global_step": last[1],
        "loss": last[2],
        "world_size": world,
    }


def _use_token(connection: Connection, hash: str, at: str) -> str | None:
    unused = (tokens.c.hash == hash, tokens.c.used_at.is_(None))
    kind = connection.execute(select(tokens.c.kind).where(*unused)).scalar_one_or_none()
    if kind is None or connection.execute(update(tokens).where(*unused).values(used_at=at)).rowcount != 1:
        return None
    return str(kind)


def _bug(table: str, error: Exception) -> LocalError:
    return LocalError("bad_value", f"the record for {table} cannot be read: {type(error).__name__}: {error}")
