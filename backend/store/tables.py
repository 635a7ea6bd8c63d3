"""The schema: SQLAlchemy Core tables, the same as ``migrations/`` builds (a test compares them).

Times are RFC 3339 UTC text with milliseconds (``2026-11-29T12:00:00.123Z``), so that they sort and read as
written. JSON columns with rank keys use string keys. Ids are never used twice: they are cursors, and a run's
id names its files.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _identity() -> Column[Any]:
    # SQLite numbers rows by itself only in a column that is exactly INTEGER PRIMARY KEY
    return Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True)


def _run(*, key: bool = False) -> Column[Any]:
    type_ = BigInteger().with_variant(Integer, "sqlite")
    return Column("run_id", type_, ForeignKey("runs.id"), primary_key=key, autoincrement=False, nullable=False)


def _number(name: str) -> Column[Any]:
    """The second half of a (run_id, number) key."""
    return Column(name, Integer, primary_key=True, autoincrement=False)


def _time(name: str, *, required: bool = False) -> Column[Any]:
    return Column(name, String(24), nullable=not required)


def _json(name: str) -> Column[Any]:
    return Column(name, JSON(none_as_null=True))


runs = Table(
    "runs",
    metadata,
    _identity(),
    Column("name", Text, nullable=False),
    Column("job", Text, nullable=False),
    _json("params"),
    _json("config"),
    Column("mode", Text, nullable=False),
    Column("phase", String(16), nullable=False),
    Column("reason", Text),
    Column("stopped_by", Text),
    _time("created_at", required=True),
    _time("started_at"),
    _time("ended_at"),
    Column("world_size", Integer),
    Column("epochs_done", Integer),
    Column("rounds_done", Integer),
    Column("global_step", BigInteger),
    Column("loss", Double),
    _json("metrics"),
    Column("job_hash", Text),
    Column("emulated", Boolean, nullable=False),
    _json("summary"),
    Column("resumed_run", BigInteger),
    Column("resumed_checkpoint", Integer),
    Column("resumed_round", Integer),
    Column("resumed_epochs", Integer),
    Index(None, "phase"),
    sqlite_autoincrement=True,
)

events = Table(
    "events",
    metadata,
    _identity(),
    _run(),
    _time("at", required=True),
    Column("kind", Text, nullable=False),
    Column("level", String(16), nullable=False),
    Column("text", Text, nullable=False),
    _json("data"),
    Index(None, "run_id", "id"),
    sqlite_autoincrement=True,
)

hosts = Table(
    "hosts",
    metadata,
    _run(key=True),
    _number("host"),
    Column("name", Text),
    Column("address", Text),
    _json("devices"),
    _json("versions"),
    Column("emulate_ms_per_batch", Double),
    Column("state", String(16)),
    Column("reason", Text),
    _time("joined_at", required=True),
    _time("left_at"),
)

ranks = Table(
    "ranks",
    metadata,
    _run(key=True),
    _number("rank"),
    Column("host", Integer),
    Column("local_rank", Integer),
    Column("device", Text),
    Column("emulate_ms_per_batch", Double),
    Column("state", String(16)),
)

rounds = Table(
    "rounds",
    metadata,
    _run(key=True),
    _number("round"),
    _time("at", required=True),
    Column("epoch", Integer),
    Column("attempt", Integer),
    Column("global_step", BigInteger),
    Column("samples", BigInteger),
    Column("seconds", Double),
    Column("reduce_seconds", Double),
    _json("planned"),
    _json("realized"),
    Column("mass", Double),
    Column("anchor", Integer),
    Column("anchor_rank", Integer),
    _json("ms_per_batch"),
    _json("compute_seconds"),
    _json("data_seconds"),
    _json("wait_seconds"),
    _json("load_seconds"),
    Column("divergence", Double),
    Column("loss", Double),
    Column("bytes_up", BigInteger),
    Column("bytes_down", BigInteger),
    Column("decision", Text),
    Column("params_hash", Text),
    Column("verdict", String(16)),
    Column("verdict_reason", Text),
)

epochs = Table(
    "epochs",
    metadata,
    _run(key=True),
    _number("epoch"),
    _time("at", required=True),
    Column("seconds", Double),
    Column("samples_accepted", BigInteger),
    _json("samples_lost"),
    Column("batches", BigInteger),
    Column("loss", Double),
    _json("metrics"),
)

scalars = Table(
    "scalars",
    metadata,
    _identity(),
    _run(),
    _time("at", required=True),
    Column("step", BigInteger, nullable=False),
    Column("name", String(200), nullable=False),
    Column("value", Double),
    Index(None, "run_id", "name", "id"),
    sqlite_autoincrement=True,
)

deaths = Table(
    "deaths",
    metadata,
    _identity(),
    _run(),
    _time("at", required=True),
    Column("rank", Integer),
    Column("host", Integer),
    Column("host_name", Text),
    Column("device", Text),
    Column("reason", Text),
    Column("exit_code", Integer),
    Column("signal", Text),
    Column("exception", Text),
    Column("message", Text),
    Column("last_lines", Text),
    Column("last_step", BigInteger),
    Column("last_round", Integer),
    Column("peak_rss_bytes", BigInteger),
    Column("returned_samples", BigInteger),
    Column("world_size", Integer),
    Column("memory_kills", Integer),
    Column("memory_limit_bytes", BigInteger),
    _json("waited"),
    _json("recovery"),
    Index(None, "run_id", "id"),
    sqlite_autoincrement=True,
)

checkpoints = Table(
    "checkpoints",
    metadata,
    _identity(),
    _run(),
    Column("checkpoint", Integer, nullable=False),
    _time("at", required=True),
    Column("round", Integer),
    Column("epoch", Integer),
    Column("global_step", BigInteger),
    Column("reason", Text),
    Column("path", Text, nullable=False),
    Column("bytes", BigInteger),
    Column("sha256", String(64)),
    Column("loss", Double),
    Column("pruned", Boolean),
    UniqueConstraint("run_id", "checkpoint"),
    sqlite_autoincrement=True,
)

continuations = Table(
    "continuations",
    metadata,
    _run(key=True),
    _number("slot"),
    _time("at", required=True),
    _json("state"),
)
"""What a restarted controller needs to go on with a cohort that still lives; backend.core.returning says what."""

tokens = Table(
    "tokens",
    metadata,
    _identity(),
    Column("kind", String(32), nullable=False),
    Column("hash", String(64), nullable=False),
    _time("created_at", required=True),
    _time("used_at"),
    UniqueConstraint("hash"),
    sqlite_autoincrement=True,
)

APPENDED = {table.name: table for table in (events, rounds, scalars, deaths)}
"""Tables whose rows are written once; a second row under the same key is refused."""
UPSERTED = {
    "hosts": (hosts, "host"),
    "ranks": (ranks, "rank"),
    "epochs": (epochs, "epoch"),
    "recoveries": (deaths, "rank"),
    "checkpoints": (checkpoints, "checkpoint"),
    "continuations": (continuations, "slot"),
}
"""Tables whose rows are merged by (run_id, this column): given columns are replaced, the others stay."""
