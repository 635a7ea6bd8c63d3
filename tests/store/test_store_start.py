"""A controller that cannot use its database says so in one line with the cure, ends with code 2, touches nothing."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from small_disks import fill, small_disk

from backend.main import DATABASE_FILE, EXIT_SETTINGS, serve
from backend.runtime.settings import Settings
from backend.store import Store, engine, sqlite_url

NOBODY = 65534


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data directory with a database that was used before."""
    path = tmp_path / "var"
    path.mkdir(mode=0o700)
    with Store.open(sqlite_url(path / DATABASE_FILE)) as store:
        store.create_run({"job": "a.py:A", "mode": "cpu_sync"})
    return path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[[Path], str]:
    """Start a controller there, which must refuse: the one line that it says."""

    def start(data_dir: Path) -> str:
        assert serve(Settings(port=0, data_dir=data_dir, job_dir=Path("."))) == EXIT_SETTINGS
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith(f"marchline: {data_dir}"), said.err
        assert said.err.count("\n") == 1, said.err
        return said.err

    return start


def change(database: Path, sql: str) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute(sql)
        connection.commit()


def damaged(database: Path) -> None:
    database.write_bytes(os.urandom(20_000))


def torn(database: Path) -> None:
    os.truncate(database, database.stat().st_size // 2)


def newer(database: Path) -> None:
    change(database, "update alembic_version set version_num = '9999'")


def foreign(database: Path) -> None:
    database.unlink()
    change(database, "create table bookmarks (url text)")


@pytest.mark.parametrize(
    ("harm", "says", "cure"),
    [
        (damaged, "is damaged or is no SQLite database", "restore a backup"),
        (torn, "is damaged or is no SQLite database", "restore a backup"),
        (newer, "the schema is of a newer Marchline (revision 9999)", "Run the version that wrote it, or a newer one"),
        (foreign, "has tables but no Marchline schema", "Name another file"),
    ],
)
def test_a_file_that_cannot_serve(
    data_dir: Path, refused: Callable[[Path], str], harm: Callable[[Path], None], says: str, cure: str
) -> None:
    harm(data_dir / DATABASE_FILE)
    before = (data_dir / DATABASE_FILE).read_bytes()
    told = refused(data_dir)
    assert says in told
    assert cure in told
    assert (data_dir / DATABASE_FILE).read_bytes() == before


def test_a_database_that_another_program_holds(
    data_dir: Path, refused: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "BUSY_MS", 50)
    with closing(sqlite3.connect(data_dir / DATABASE_FILE, isolation_level=None)) as shell:
        shell.execute("begin immediate")
        told = refused(data_dir)
    assert "another program holds the database locked" in told
    assert told.endswith("Close the program that has it open (a sqlite3 shell, a backup)\n")


def test_a_database_that_another_controller_serves(data_dir: Path, refused: Callable[[Path], str]) -> None:
    with Store.open(sqlite_url(data_dir / DATABASE_FILE)):
        told = refused(data_dir)
    assert f"another controller serves this database (process {os.getpid()})" in told
    assert "give this one a data directory of its own" in told


@pytest.fixture
def readable() -> Iterator[Path]:
    """A data directory of root's that this process may read; root gives up its powers for the time."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        with Store.open(sqlite_url(path / DATABASE_FILE)):
            pass
        was_root = os.geteuid() == 0
        for entry in (path, *path.iterdir()):
            entry.chmod(0o555 if entry.is_dir() else 0o444)
        if was_root:
            os.seteuid(NOBODY)
        yield path
        if was_root:
            os.seteuid(0)
        path.chmod(0o700)


def test_a_directory_that_may_only_be_read(readable: Path, refused: Callable[[Path], str]) -> None:
    told = refused(readable)
    assert "the database cannot be written" in told
    assert "Make the file and its directory writable for the controller's user" in told


def test_a_full_disk(tmp_path: Path, refused: Callable[[Path], str]) -> None:
    """With a database from before, and without one."""
    with small_disk(tmp_path / "disk", "4m") as disk:
        for name in ("before", "fresh"):
            (disk / name).mkdir(mode=0o700)
        with Store.open(sqlite_url(disk / "before" / DATABASE_FILE)) as store:
            run = store.create_run({"job": "a.py:A", "mode": "cpu_sync", "phase": "training"})
        ballast = fill(disk)
        for name in ("before", "fresh"):
            told = refused(disk / name)
            assert "no space is left on its disk" in told
            assert told.endswith("Free space on that disk\n")
        ballast.unlink()
        with Store.open(sqlite_url(disk / "before" / DATABASE_FILE)) as store:
            assert store.interrupt_unserved() == [run]
        with Store.open(sqlite_url(disk / "fresh" / DATABASE_FILE)) as store:
            assert store.queries.list_runs() == []
