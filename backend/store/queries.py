"""Every read, as plain functions of a connection that return dicts ready for JSON; ``Queries`` gives them
connections.

Lists are ascending unless said otherwise. Pages go by key (``after``, ``before_id``), so rows that arrive
meanwhile neither shift nor repeat a page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Column, Connection, Engine, Select, and_, func, or_, select
from sqlalchemy.exc import TimeoutError as PoolTimeout

from backend.store import tables
from backend.store.errors import LocalError, StoreError, fault_of
from backend.store.rows import RUNNING_PHASES

Row = dict[str, Any]

P = ParamSpec("P")
T = TypeVar("T")

_DEATHS = select(func.count()).where(tables.deaths.c.run_id == tables.runs.c.id).scalar_subquery().label("deaths")
_SUMMARY = (
    "id", "name", "job", "mode", "phase", "reason", "created_at", "started_at", "ended_at", "world_size",
    "config", "epochs_done", "rounds_done", "loss", "metrics", "emulated",
)  # fmt: skip


def list_runs(connection: Connection, limit: int = 50, before_id: int | None = None) -> list[Row]:
    """Run summaries, newest first: the columns of the contract's RunSummary."""
    query = select(*(tables.runs.c[name] for name in _SUMMARY), _DEATHS)
    if before_id is not None:
        query = query.where(tables.runs.c.id < before_id)
    found = _rows(connection, query.order_by(tables.runs.c.id.desc()).limit(_checked(limit)))
    for row in found:
        row["epochs"] = _epochs(row.pop("config"))
    return found


def get_run(connection: Connection, run_id: int) -> Row | None:
    """All that is stored of a run, its number of ``deaths`` and configured ``epochs``; None if unknown."""
    found = _rows(connection, select(tables.runs, _DEATHS).where(tables.runs.c.id == run_id))
    return found[0] | {"epochs": _epochs(found[0]["config"])} if found else None


def hosts(connection: Connection, run_id: int) -> list[Row]:
    """The hosts that were admitted, by number."""
    return _all_of(connection, tables.hosts.c.run_id, run_id, tables.hosts.c.host)


def ranks(connection: Connection, run_id: int) -> list[Row]:
    """The ranks of the world, by number."""
    return _all_of(connection, tables.ranks.c.run_id, run_id, tables.ranks.c.rank)


def rounds(
    connection: Connection, run_id: int, after: int = -1, limit: int = 400, newest: bool = False, own: bool = False
) -> list[Row]:
    """Rounds above ``after``: the first ``limit`` of them, or the last. Those that a resumed run goes on from are among
    them, each number once, unless only its ``own`` are asked for."""
    table = tables.rounds
    parts = [table.c.run_id == run_id]
    if not own:
        parts += [
            and_(table.c.run_id == before.run_id, table.c.round <= before.round)
            for before in lineage(connection, run_id)
        ]
    query = select(table).where(or_(*parts), table.c.round > after)
    return _page(connection, query, table.c.round, limit, newest)


def epochs(connection: Connection, run_id: int) -> list[Row]:
    """Finished epochs, by number, those that a resumed run goes on from among them."""
    table = tables.epochs
    parts = [table.c.run_id == run_id]
    parts += [
        and_(table.c.run_id == before.run_id, table.c.epoch < before.epochs) for before in lineage(connection, run_id)
    ]
    return _rows(connection, select(table).where(or_(*parts)).order_by(table.c.epoch))


@dataclass(frozen=True, slots=True)
class Before:
    """A run that another one goes on from, and how far it counts: its last round and its finished epochs there."""

    run_id: int
    round: int
    epochs: int


def lineage(connection: Connection, run_id: int) -> list[Before]:
    """The runs that this one goes on from, the nearest first."""
    found: list[Before] = []
    runs, current = tables.runs.c, run_id
    columns = (runs.resumed_run, runs.resumed_round, runs.resumed_epochs)
    while True:
        row = connection.execute(select(*columns).where(runs.id == current)).one_or_none()
        if row is None or row[0] is None or row[0] >= current:
            return found
        limit = found[-1] if found else Before(0, row[1], row[2])
        current = row[0]
        found.append(Before(current, min(limit.round, row[1]), min(limit.epochs, row[2])))


def events(connection: Connection, run_id: int, after_id: int = 0, limit: int = 200, newest: bool = False) -> list[Row]:
    """Events with an id above ``after_id``: the first ``limit`` of them, or the last."""
    query = select(tables.events).where(tables.events.c.run_id == run_id, tables.events.c.id > after_id)
    return _page(connection, query, tables.events.c.id, limit, newest)


def deaths(connection: Connection, run_id: int) -> list[Row]:
    """Deaths in the order they were recorded."""
    return _all_of(connection, tables.deaths.c.run_id, run_id, tables.deaths.c.id)


def checkpoints(connection: Connection, run_id: int) -> list[Row]:
    """Written checkpoints, by number."""
    return _all_of(connection, tables.checkpoints.c.run_id, run_id, tables.checkpoints.c.checkpoint)


def unserved(connection: Connection) -> list[Row]:
    """Runs whose row says that they are being served, oldest first: after a start, what a dead controller left."""
    table = tables.runs
    return _rows(connection, select(table).where(table.c.phase.in_(RUNNING_PHASES)).order_by(table.c.id))


def continuations(connection: Connection, run_id: int) -> list[Row]:
    """What is kept of a run for a controller that comes back, by slot."""
    return _all_of(connection, tables.continuations.c.run_id, run_id, tables.continuations.c.slot)


def scalars(connection: Connection, run_id: int, name: str, after_id: int = 0, limit: int = 10_000) -> list[Row]:
    """One named series in the order it was written."""
    table = tables.scalars
    query = select(table).where(table.c.run_id == run_id, table.c.name == name, table.c.id > after_id)
    return _page(connection, query, table.c.id, limit, newest=False)


def scalar_names(connection: Connection, run_id: int) -> list[str]:
    """The names of a run's series, sorted."""
    name = tables.scalars.c.name
    query = select(name).where(tables.scalars.c.run_id == run_id).distinct().order_by(name)
    return list(connection.execute(query).scalars())


class Queries:
    """The functions above as methods without their connection: each call reads one snapshot and ends it.

    Synchronous and short, for a thread pool. Raises StoreError, naming the database and the cure.
    """

    def __init__(self, engine: Engine, where: str) -> None:
        self._engine = engine
        self._where = where
        self._closed = False
        self.list_runs = self._bound(list_runs)
        self.get_run = self._bound(get_run)
        self.hosts = self._bound(hosts)
        self.ranks = self._bound(ranks)
        self.rounds = self._bound(rounds)
        self.epochs = self._bound(epochs)
        self.events = self._bound(events)
        self.deaths = self._bound(deaths)
        self.checkpoints = self._bound(checkpoints)
        self.continuations = self._bound(continuations)
        self.unserved = self._bound(unserved)
        self.scalars = self._bound(scalars)
        self.scalar_names = self._bound(scalar_names)

    def close(self) -> None:
        """Refuse every later call by name, so that no read opens the file again."""
        self._closed = True

    def _bound(self, query: Callable[Concatenate[Connection, P], T]) -> Callable[P, T]:
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if self._closed:
                raise StoreError("store_closed", "the store is closed", where=self._where)
            try:
                with self._engine.connect() as connection:
                    return query(connection, *args, **kwargs)
            except PoolTimeout as error:
                cure = "Close some dashboards, or ask less often"
                raise StoreError("readers_busy", "too many reads at once", where=self._where, cure=cure) from error
            except StoreError:
                raise
            except Exception as error:
                known = fault_of(error, self._where)
                if known is None:
                    raise
                raise known from error

        return call


def _page(connection: Connection, query: Select[Any], key: Column[Any], limit: int, newest: bool) -> list[Row]:
    found = _rows(connection, query.order_by(key.desc() if newest else key).limit(_checked(limit)))
    return found[::-1] if newest else found


def _all_of(connection: Connection, owner: Column[Any], run_id: int, key: Column[Any]) -> list[Row]:
    return _rows(connection, select(key.table).where(owner == run_id).order_by(key))


def _rows(connection: Connection, query: Select[Any]) -> list[Row]:
    return [dict(row) for row in connection.execute(query).mappings()]


def _checked(limit: int) -> int:
    if limit < 1:
        raise LocalError("bad_argument", f"limit must be at least 1, not {limit}")
    return limit


def _epochs(config: Row | None) -> int | None:
    return None if config is None else config.get("epochs")
