"""The schema of a database before it is used: sound, ours, not newer than this program, upgraded to the
newest revision."""

from __future__ import annotations

import threading
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, inspect

from backend.store.engine import Role, is_sqlite, last_mark, make_engine, open_error, put_mark, where_of
from backend.store.errors import OpenError, fault

MIGRATIONS = Path(__file__).resolve().parents[2] / "migrations"

_alembic = threading.Lock()
"""Alembic keeps the running migration in module globals, so stores are opened one by one."""


def prepare(url: URL, *, migrate: bool) -> None:
    """Check a database and bring it to the newest revision, in one transaction: a failed upgrade leaves it as
    it was.

    Raises OpenError database_corrupt, database_foreign, schema_newer, schema_outdated (only when ``migrate``
    is false), no_write_ahead_log, or a fault of the file or its disk.
    """
    where = where_of(url)
    try:
        with _alembic:
            _peek(url, where)
        # the engine pools nothing, so it needs no end of its own
        with _alembic, make_engine(url, Role.MIGRATION).begin() as connection:
            if is_sqlite(url):
                _check_sound(connection, where)
            _check_revision(connection, where, migrate=migrate)
            if migrate:
                command.upgrade(alembic_config(connection), "head")
            if is_sqlite(url):
                # One write at least: what can be read and not written is refused now, not when the first run is made.
                put_mark(connection, last_mark(connection))
    except OpenError:
        raise
    except Exception as error:
        raise open_error(error, where) from error


def alembic_config(connection: Connection | None = None) -> Config:
    """Alembic's configuration, without the ini file, for ``env.py``. Raises OpenError migrations_missing."""
    if not (MIGRATIONS / "env.py").is_file():
        raise OpenError(
            "migrations_missing",
            "the migrations folder is not installed beside the backend package",
            where=str(MIGRATIONS),
            cure="Run the controller from a checkout, or install a package that carries migrations/",
        )
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _peek(url: URL, where: str) -> None:
    """Look before anything is touched: to open it for writing turns a file of another program's to our journal mode."""
    engine = make_engine(url, Role.READER)
    try:
        with engine.connect() as connection:
            _check_revision(connection, where, migrate=True)
    finally:
        engine.dispose()


def _check_sound(connection: Connection, where: str) -> None:
    mode = connection.exec_driver_sql("PRAGMA journal_mode").scalar_one()
    if mode != "wal":
        raise OpenError(
            "no_write_ahead_log",
            f"SQLite cannot keep a write-ahead log there (journal mode {mode})",
            where=where,
            cure="Put the data directory on a local disk; network file systems do not work",
        )
    findings = connection.exec_driver_sql("PRAGMA quick_check(3)").scalars().all()
    if findings != ["ok"]:
        damage = fault("database_corrupt", where, "; ".join(findings))
        raise OpenError(damage.code, damage.text, where=where, cure=damage.cure)


def _check_revision(connection: Connection, where: str, *, migrate: bool) -> None:
    scripts = ScriptDirectory.from_config(alembic_config())
    known = {script.revision for script in scripts.walk_revisions()}
    current = set(MigrationContext.configure(connection).get_current_heads())
    if not current and inspect(connection).get_table_names():
        raise OpenError(
            "database_foreign",
            "the database has tables but no Marchline schema",
            where=where,
            cure="Name another file; this one belongs to another program",
        )
    if unknown := current - known:
        raise OpenError(
            "schema_newer",
            f"the schema is of a newer Marchline (revision {', '.join(sorted(unknown))})",
            where=where,
            cure="Run the version that wrote it, or a newer one, or start with another data directory",
        )
    if not migrate and current != set(scripts.get_heads()):
        raise OpenError(
            "schema_outdated",
            f"the schema is at revision {', '.join(sorted(current)) or 'none'}",
            where=where,
            cure="Open it with migrations allowed, or run: alembic upgrade head",
        )
