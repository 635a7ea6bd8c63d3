"""The schema that migrations build is the one the code believes in; an upgrade happens whole or not at all."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, make_url
from sqlalchemy.schema import CreateTable

from backend.store import OpenError, Store, schema, sqlite_url
from backend.store.engine import Role, make_engine
from backend.store.tables import metadata

NEXT_REVISION = """
import sqlalchemy as sa
from alembic import op

revision = "9998"
down_revision = "NEWEST"


def upgrade():
    op.create_table("half_done", sa.Column("id", sa.Integer))
    op.execute("insert into runs (nonsense) values (1)")
"""


def statements(path: Path) -> dict[str, list[str]]:
    """Every object of a database by name, with the parts of the SQL that made it, whatever their order."""
    with closing(sqlite3.connect(path)) as connection:
        made = connection.execute("select name, sql from sqlite_master where sql is not null").fetchall()
    return {name: sorted(re.split(r"[\s\",()]+", sql)) for name, sql in made if name != "alembic_version"}


def test_an_empty_database_is_upgraded_to_the_models_exactly(
    open_store: Callable[..., Store], database: Path, tmp_path: Path
) -> None:
    open_store().close()
    engine = make_engine(sqlite_url(database), Role.READER)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()

    modelled = tmp_path / "modelled.db"
    by_models = create_engine(sqlite_url(modelled))
    metadata.create_all(by_models)
    by_models.dispose()
    assert statements(database) == statements(modelled)


def test_the_downgrade_leaves_nothing_but_the_revision_table(open_store: Callable[..., Store], database: Path) -> None:
    open_store().close()
    engine = make_engine(sqlite_url(database), Role.MIGRATION)
    with engine.begin() as connection:
        command.downgrade(schema.alembic_config(connection), "base")
    engine.dispose()
    assert set(statements(database)) == {"sqlite_sequence"}


def test_opening_again_keeps_schema_and_rows(open_store: Callable[..., Store], database: Path) -> None:
    first = open_store()
    run = first.create_run({"job": "a.py:A", "mode": "cpu_sync"})
    first.close()
    before = statements(database)
    again = open_store()
    assert again.queries.get_run(run) is not None
    assert statements(database) == before


def test_an_older_database_keeps_its_rows(open_store: Callable[..., Store], database: Path) -> None:
    database.parent.mkdir()
    engine = make_engine(sqlite_url(database), Role.MIGRATION)
    with engine.begin() as connection:
        command.upgrade(schema.alembic_config(connection), "0001")
        columns = "(id, name, job, mode, phase, created_at, emulated)"
        connection.exec_driver_sql(
            f"insert into runs {columns} values (7, 'old', 'a.py:A', 'cpu_sync', 'done', 'x', 0)"
        )
    engine.dispose()
    store = open_store()
    row = store.queries.get_run(7)
    assert row is not None
    assert (row["name"], row["phase"], row["resumed_run"]) == ("old", "done", None)
    assert store.create_run({"job": "a.py:A", "mode": "cpu_sync"}) == 8


KILLED = """
import sys
from pathlib import Path
from backend.store import Store, schema, sqlite_url
schema.MIGRATIONS = Path(sys.argv[2])
Store.open(sqlite_url(Path(sys.argv[1])))
"""


@pytest.mark.slow
def test_a_kill_in_the_middle_of_an_upgrade_leaves_the_database_as_it_was(
    open_store: Callable[..., Store], database: Path, tmp_path: Path
) -> None:
    open_store().close()
    before = statements(database)
    kill = NEXT_REVISION.replace('op.execute("insert into runs (nonsense) values (1)")', "os.kill(os.getpid(), 9)")
    deadly = with_revision(tmp_path, "import os\n" + kill)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(database), str(deadly)],
        env=os.environ | {"PYTHONPATH": str(schema.MIGRATIONS.parent)},
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL
    assert database.with_name(database.name + "-wal").exists(), "it had begun"
    assert open_store().queries.list_runs() == []
    assert statements(database) == before


def with_revision(tmp_path: Path, text: str) -> Path:
    """The migrations, and one more."""
    path = tmp_path / "migrations"
    shutil.copytree(schema.MIGRATIONS, path, ignore=shutil.ignore_patterns("__pycache__"))
    newest = max(entry.name[:4] for entry in (path / "versions").glob("[0-9]*.py"))
    (path / "versions" / "9998_broken.py").write_text(text.replace("NEWEST", newest))
    return path


def test_an_upgrade_that_fails_half_way_leaves_the_database_as_it_was(
    open_store: Callable[..., Store], database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store().close()
    before = statements(database)
    broken = with_revision(tmp_path, NEXT_REVISION)
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", broken)
        with pytest.raises(OpenError, match="nonsense"):
            open_store()
    assert statements(database) == before
    assert open_store().queries.list_runs() == []


def test_a_newer_schema_is_refused_by_name_and_left_alone(open_store: Callable[..., Store], database: Path) -> None:
    open_store().close()
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("update alembic_version set version_num = '9999'")
        connection.commit()
    with pytest.raises(OpenError) as refusal:
        open_store()
    assert refusal.value.code == "schema_newer"
    assert "9999" in str(refusal.value)
    assert str(database) in str(refusal.value)
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("select version_num from alembic_version").fetchall() == [("9999",)]


def test_without_migrating_an_empty_database_is_outdated(database: Path) -> None:
    with pytest.raises(OpenError) as refusal:
        Store.open(sqlite_url(database), migrate=False)
    assert refusal.value.code == "schema_outdated"
    assert statements(database) == {}


def test_without_migrating_a_current_database_opens(open_store: Callable[..., Store], database: Path) -> None:
    open_store().close()
    with Store.open(sqlite_url(database), migrate=False) as store:
        assert store.queries.list_runs() == []


def test_another_programs_database_is_not_touched(open_store: Callable[..., Store], database: Path) -> None:
    database.parent.mkdir()
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("create table bookmarks (url text)")
        connection.commit()
    with pytest.raises(OpenError) as refusal:
        open_store()
    assert refusal.value.code == "database_foreign"
    assert set(statements(database)) == {"bookmarks"}


def test_missing_migrations_are_named(
    open_store: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "MIGRATIONS", tmp_path / "nowhere")
    with pytest.raises(OpenError) as refusal:
        open_store()
    assert refusal.value.code == "migrations_missing"


def test_the_command_line_migrates_the_named_database(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database.parent.mkdir()
    monkeypatch.setenv("MARCHLINE_DATABASE_URL", sqlite_url(database).render_as_string())
    ini = Config(str(schema.MIGRATIONS.parent / "alembic.ini"))
    command.upgrade(ini, "head")
    command.check(ini)
    assert "runs" in statements(database)


def test_the_command_line_respects_a_running_controller(
    store: Store, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARCHLINE_DATABASE_URL", sqlite_url(database).render_as_string())
    with pytest.raises(OpenError) as refusal:
        command.upgrade(Config(str(schema.MIGRATIONS.parent / "alembic.ini")), "head")
    assert refusal.value.code == "database_in_use"


@pytest.mark.parametrize("server", ["postgresql", "mysql"])
def test_every_table_compiles_for_a_server(server: str) -> None:
    dialect = make_url(f"{server}://").get_dialect()()
    for table in metadata.sorted_tables:
        made = str(CreateTable(table).compile(dialect=dialect))
        assert "AUTOINCREMENT" not in made
        assert f"CREATE TABLE {table.name}" in made or f"CREATE TABLE `{table.name}`" in made


def test_the_migrations_can_be_written_out_for_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARCHLINE_DATABASE_URL", "postgresql://marchline@db/marchline")
    config = schema.alembic_config()
    config.output_buffer = io.StringIO()
    command.upgrade(config, "head", sql=True)
    written = config.output_buffer.getvalue()
    assert written.count("CREATE TABLE") == len(metadata.tables) + 1
    assert "BIGSERIAL" in written
    assert "PRAGMA" not in written
