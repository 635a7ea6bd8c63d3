"""Opening: one controller per file, private files, and every refusal by name with the database left as it was."""

from __future__ import annotations

import os
import sqlite3
import stat
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from backend.store import OpenError, Store, sqlite_url
from backend.store import engine as engine_module
from backend.store.engine import Role, make_engine

NOBODY = 65534


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def refusal_of(opening: Callable[[], object]) -> OpenError:
    with pytest.raises(OpenError) as refusal:
        opening()
    return refusal.value


def test_files_are_private_whatever_the_umask(open_store: Callable[..., Store], database: Path) -> None:
    before = os.umask(0)
    try:
        store = open_store()
        store.create_run({"job": "a.py:A", "mode": "cpu_sync"})
    finally:
        os.umask(before)
    assert mode(database.parent) == 0o700
    assert {path.name: mode(path) for path in database.parent.iterdir()} == {
        "marchline.db": 0o600,
        "marchline.db-wal": 0o600,
        "marchline.db-shm": 0o600,
        "marchline.db.lock": 0o600,
    }


def test_a_clean_close_leaves_one_whole_file(open_store: Callable[..., Store], database: Path) -> None:
    store = open_store()
    run = store.create_run({"job": "a.py:A", "mode": "cpu_sync"})
    assert store.queries.get_run(run) is not None
    store.close()
    assert {path.name for path in database.parent.iterdir()} == {"marchline.db", "marchline.db.lock"}


@pytest.mark.parametrize(
    ("role", "pragmas"),
    [
        (Role.WRITER, {"wal_autocheckpoint": 1000, "query_only": 0, "foreign_keys": 1, "busy_timeout": 1000}),
        (Role.READER, {"wal_autocheckpoint": 0, "query_only": 1, "foreign_keys": 1, "busy_timeout": 5000}),
    ],
)
def test_each_connection_follows_the_rules_of_its_role(
    store: Store, database: Path, role: Role, pragmas: dict[str, int]
) -> None:
    engine = make_engine(sqlite_url(database), role)
    with engine.connect() as connection:
        for pragma, value in pragmas.items():
            assert connection.exec_driver_sql(f"PRAGMA {pragma}").scalar_one() == value
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar_one() == 2
    engine.dispose()


@pytest.mark.parametrize(("role", "shuts_others_out"), [(Role.WRITER, True), (Role.READER, False)])
def test_only_a_writers_transaction_takes_the_lock_at_its_begin(
    store: Store, database: Path, role: Role, shuts_others_out: bool
) -> None:
    engine = make_engine(sqlite_url(database), role)
    other = sqlite3.connect(database, timeout=0, isolation_level=None)
    with closing(other), engine.begin():
        if shuts_others_out:
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("BEGIN IMMEDIATE")
        else:
            other.execute("BEGIN IMMEDIATE")
    engine.dispose()


def test_the_store_says_what_serves_it(store: Store, database: Path) -> None:
    assert store.describe() == {"where": str(database), "dialect": "sqlite", "version": sqlite3.sqlite_version}


def test_a_second_store_on_one_file_is_refused_until_the_first_is_closed(
    open_store: Callable[..., Store], database: Path
) -> None:
    first = open_store()
    refusal = refusal_of(open_store)
    assert refusal.code == "database_in_use"
    assert str(os.getpid()) in refusal.text
    assert refusal.where == str(database)
    first.close()
    assert open_store().queries.list_runs() == []


def test_a_link_to_a_served_file_is_the_same_file(open_store: Callable[..., Store], tmp_path: Path) -> None:
    first = open_store()
    link = tmp_path / "link.db"
    link.symlink_to(first.where)
    assert refusal_of(lambda: open_store(link)).code == "database_in_use"


def test_a_refused_open_lets_the_lock_go(open_store: Callable[..., Store], database: Path) -> None:
    database.parent.mkdir()
    database.write_bytes(b"garbage" * 1000)
    assert refusal_of(open_store).code == "database_corrupt"
    database.unlink()
    assert open_store().queries.list_runs() == []


def test_garbage_is_named_corrupt_and_not_touched(open_store: Callable[..., Store], database: Path) -> None:
    database.parent.mkdir()
    garbage = os.urandom(8192)
    database.write_bytes(garbage)
    refusal = refusal_of(open_store)
    assert refusal.code == "database_corrupt"
    assert str(database) in str(refusal)
    assert refusal.cure in str(refusal)
    assert database.read_bytes() == garbage


def test_a_damaged_page_is_found_at_start(open_store: Callable[..., Store], database: Path) -> None:
    store = open_store()
    run = store.create_run({"job": "a.py:A", "mode": "cpu_sync"})
    for step in range(2000):
        store.write(run, "scalars", {"step": step, "name": "loss", "value": 0.5})
    store.close()
    whole = database.read_bytes()
    page = 4096
    middle = len(whole) // page // 2 * page
    database.write_bytes(whole[:middle] + os.urandom(page) + whole[middle + page :])
    assert refusal_of(open_store).code == "database_corrupt"


def test_a_truncated_file_is_found_at_start(open_store: Callable[..., Store], database: Path) -> None:
    open_store().close()
    os.truncate(database, database.stat().st_size // 2)
    assert refusal_of(open_store).code == "database_corrupt"


def test_a_locked_file_is_refused_by_name(
    open_store: Callable[..., Store], database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store().close()
    monkeypatch.setattr(engine_module, "BUSY_MS", 50)
    with closing(sqlite3.connect(database, isolation_level=None)) as shell:
        shell.execute("BEGIN IMMEDIATE")
        refusal = refusal_of(open_store)
    assert refusal.code == "database_locked"
    assert "sqlite3 shell" in refusal.cure


def test_a_directory_in_the_files_place(open_store: Callable[..., Store], database: Path) -> None:
    database.mkdir(parents=True)
    assert refusal_of(open_store).code == "database_unopenable"


@pytest.fixture
def read_only_directory() -> Iterator[Path]:
    """A directory that this process may enter and not write; root gives up its powers for the time."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "existing.db").touch(0o644)
        directory.chmod(0o555)
        was_root = os.geteuid() == 0
        if was_root:
            os.seteuid(NOBODY)
        yield directory
        if was_root:
            os.seteuid(0)
        directory.chmod(0o700)


@pytest.mark.parametrize("name", ["new.db", "existing.db", "new/deep.db"])
def test_a_read_only_directory_is_named_with_its_cure(
    open_store: Callable[..., Store], read_only_directory: Path, name: str
) -> None:
    refusal = refusal_of(lambda: open_store(read_only_directory / name))
    assert refusal.code == "database_read_only"
    assert str(read_only_directory) in refusal.where
    assert "writable" in refusal.cure


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("sqlite://", "database_in_memory"),
        ("sqlite:///:memory:", "database_in_memory"),
        ("sqlite:///file:x.db?mode=ro&uri=true", "bad_url"),
        ("marchline.db", "bad_url"),
    ],
)
def test_urls_that_cannot_serve_are_refused(url: str, code: str) -> None:
    assert refusal_of(lambda: Store.open(url)).code == code


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("postgresql//user:hunter2@host/db", "bad_url"),
        ("postgresql://user:hunter2@host:port/db", "bad_url"),
        ("postgresql+nosuch://user:hunter2@host/db", "driver_missing"),
    ],
)
def test_a_password_is_never_repeated(url: str, code: str) -> None:
    refusal = refusal_of(lambda: Store.open(url))
    assert refusal.code == code
    assert "hunter2" not in "".join(traceback.format_exception(refusal)).replace(repr(url), "")


@pytest.mark.parametrize("name", ["50% done?.db", "a#b c.db", "ünï.db"])
def test_any_file_name_works(open_store: Callable[..., Store], tmp_path: Path, name: str) -> None:
    store = open_store(tmp_path / name)
    store.create_run({"job": "a.py:A", "mode": "cpu_sync"})
    assert (tmp_path / name).is_file()
    assert store.where == str(tmp_path / name)


def test_a_url_as_text_with_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Store.open("sqlite:///var/here.db") as store:
        assert store.where == str(tmp_path / "var" / "here.db")
