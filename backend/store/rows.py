"""From a record of the core to a row: checked and copied by the caller's thread, written by the writer's.

The copy matters: the caller may go on changing its dicts while the row waits for its batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Connection,
    Double,
    Integer,
    String,
    Table,
    delete,
    func,
    insert,
    select,
    update,
)

from backend.store.errors import LocalError
from backend.store.tables import APPENDED, UPSERTED, continuations, hosts, runs

Row = dict[str, Any]
Perform = Callable[[Connection], Row]

RUNNING_PHASES = ("waiting", "staging", "forming", "training")
ENDED_PHASES = ("done", "failed", "interrupted")
GONE_STATES = ("left", "lost", "turned_away")
_STORES_OWN = {"id", "run_id", "at", "created_at"}
_MAX_DEPTH = 32
_INT64 = range(-(2**63), 2**63)

_RUN_DEFAULTS: Row = {
    "name": "",
    "params": {},
    "config": {},
    "phase": "waiting",
    "world_size": 0,
    "epochs_done": 0,
    "rounds_done": 0,
    "global_step": 0,
    "emulated": False,
}


def new_run(values: Mapping[str, Any], at: str) -> Perform:
    """The insertion of a run; ``job`` and ``mode`` are required. Raises LocalError."""
    given = _checked(runs, _RUN_DEFAULTS | dict(values))
    _require(runs, given, ("job", "mode"))
    row = _whole(runs, given | {"created_at": at})
    return lambda connection: insert_row(connection, runs, row)


def new_row(run_id: int, table: str, row: Mapping[str, Any], at: str) -> Perform:
    """The writing of one record by its table's rule; gives the whole row as the queries do. Raises LocalError.

    runs: the run's own row is updated; started_at and ended_at are stamped once, by the phase; with its end goes what
    was kept of it for another controller. hosts, ranks, epochs, checkpoints: the row is merged by its number;
    joined_at and left_at of a host are stamped once, by its state, and ``at`` stays that of the first writing. Every
    other table: appended.
    """
    if table == "runs":
        return _run_update(run_id, _checked(runs, row), at)
    if table in UPSERTED:
        return _merge(run_id, *UPSERTED[table], row, at)
    if table in APPENDED:
        appended = APPENDED[table]
        given = _checked(appended, row)
        _require(appended, given, _required(appended))
        whole = _whole(appended, given | {"run_id": run_id, "at": at})
        return lambda connection: insert_row(connection, appended, whole)
    names = ", ".join(sorted({"runs", *UPSERTED, *APPENDED}))
    raise LocalError("unknown_table", f"there is no table {table!r} to write to", cure=f"Use one of {names}")


# ------------------------------------------------------------------------------------------------ writing


def _run_update(run_id: int, given: Row, at: str) -> Perform:
    stamps = dict(given)
    if given.get("phase") == "training":
        stamps.setdefault("started_at", func.coalesce(runs.c.started_at, at))
    over = given.get("phase") in ENDED_PHASES
    if over:
        stamps.setdefault("ended_at", func.coalesce(runs.c.ended_at, at))

    def perform(connection: Connection) -> Row:
        if over:
            forget_continuations(connection, run_id)
        return _update(connection, runs, {"id": run_id}, stamps) or _unknown_run(run_id)

    return perform


def forget_continuations(connection: Connection, run_id: int) -> None:
    """The run is over: no controller takes its cohort up again, and the secret of its links is of no use."""
    connection.execute(delete(continuations).where(continuations.c.run_id == run_id))


def _merge(run_id: int, table: Table, number: str, row: Mapping[str, Any], at: str) -> Perform:
    given = _checked(table, row)
    _require(table, given, (number,))
    key = {"run_id": run_id, number: given.pop(number)}
    changes = dict(given)
    first = _whole(table, given | key | ({"at": at} if "at" in table.c else {}))
    if table is hosts:
        first["joined_at"] = first["joined_at"] or at
        if given.get("state") in GONE_STATES:
            first["left_at"] = first["left_at"] or at
            changes.setdefault("left_at", func.coalesce(hosts.c.left_at, at))
    # one writer, one transaction: nobody can insert between the two statements
    return lambda connection: _update(connection, table, key, changes) or insert_row(connection, table, first)


def insert_row(connection: Connection, table: Table, row: Row) -> Row:
    """Insert and return the row, with its new id where the table has one."""
    given = {name: value for name, value in row.items() if name != "id"}
    key = connection.execute(insert(table).values(given)).inserted_primary_key
    return row | {"id": key[0]} if "id" in table.c and key is not None else dict(row)


def _update(connection: Connection, table: Table, key: Row, changes: Row) -> Row | None:
    """The whole row after the change; None when there is no such row."""
    match = [table.c[name] == value for name, value in key.items()]
    connection.execute(update(table).where(*match).values(changes or key))
    found = connection.execute(select(table).where(*match)).mappings().one_or_none()
    return None if found is None else dict(found)


def _unknown_run(run_id: int) -> Row:
    raise LocalError("unknown_run", f"there is no run {run_id}", cure="Create the run before writing to it")


# ----------------------------------------------------------------------------------------------- checking


def _checked(table: Table, row: Mapping[str, Any]) -> Row:
    return {name: _value(_column(table, name), value) for name, value in row.items()}


def _column(table: Table, name: str) -> Column[Any]:
    known = isinstance(name, str) and name in table.c
    if known and name not in _STORES_OWN:
        return table.c[name]
    if known:
        raise LocalError(
            "unknown_column", f"{table.name}.{name} is filled by the store", cure="Leave it out of the row"
        )
    names = ", ".join(column.name for column in table.c if column.name not in _STORES_OWN)
    raise LocalError("unknown_column", f"{table.name} has no column {name!r}", cure=f"Its columns are {names}")


def _required(table: Table) -> Iterable[str]:
    return (column.name for column in table.c if not column.nullable and column.name not in _STORES_OWN)


def _require(table: Table, given: Row, names: Iterable[str]) -> None:
    for name in names:
        if given.get(name) is None:
            raise LocalError("missing_column", f"{table.name} needs {name}", cure="Give it a value")


def _whole(table: Table, given: Row) -> Row:
    return {column.name: given.get(column.name) for column in table.c}


def _value(column: Column[Any], value: Any) -> Any:
    """The value as the column's type wants it; SQLite itself would take anything anywhere."""
    where = f"{column.table.name}.{column.name}"
    if value is None:
        return None
    match column.type:
        case JSON():
            return _json(value, where, _MAX_DEPTH)
        case Boolean() if isinstance(value, bool):
            return value
        case Integer() if isinstance(value, int) and not isinstance(value, bool) and value in _INT64:
            return int(value)
        case Double() if isinstance(value, int | float) and not isinstance(value, bool):
            return _finite(float(value))
        case String() if isinstance(value, str):
            return _text(value)
    raise LocalError("bad_value", f"{where} cannot hold {value!r:.100}", cure=f"It is of type {column.type}")


def _json(value: Any, where: str, depth: int) -> Any:
    """A deep copy in JSON's own terms: string keys, lists, finite numbers."""
    if depth == 0:
        raise LocalError(
            "bad_value", f"{where} is nested too deeply", cure=f"Keep JSON values within {_MAX_DEPTH} levels"
        )
    match value:
        case None | bool():
            return value
        case int():
            return int(value)
        case float():
            return _finite(value)
        case str():
            return _text(value)
        case Mapping():
            return _json_object(value, where, depth)
        case list() | tuple():
            return [_json(item, where, depth - 1) for item in value]
    raise LocalError("bad_value", f"{where} holds a {type(value).__name__}", cure="Use dicts, lists, text and numbers")


def _json_object(value: Mapping[Any, Any], where: str, depth: int) -> dict[str, Any]:
    copied: dict[str, Any] = {}
    for key, item in value.items():
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise LocalError(
                "bad_value", f"{where} has the key {key!r:.100}", cure="Use text or a rank's number as keys"
            )
        name = _text(str(key))
        if name in copied:
            raise LocalError(
                "bad_value",
                f"{where} has the key {name!r} twice, as text and as a number",
                cure="Use one kind",
            )
        copied[name] = _json(item, f"{where}.{name}", depth - 1)
    return copied


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity: a diverged number becomes null, and the event about it says why."""
    return value if math.isfinite(value) else None


def _text(value: str) -> str:
    """Text that every database and UTF-8 can hold: the last lines of a dying process are not always that."""
    return value.encode("utf-8", "replace").decode("utf-8").replace("\0", "\N{REPLACEMENT CHARACTER}")
