"""What can go wrong in the store, by name and with the cure.

    StoreError            a write or a read failed; ``code`` is stable, ``where`` names the database
    ├── OpenError         the database was refused at start; nothing in it was changed
    └── LocalError        our own bug: unknown table, column or run, a value of the wrong kind, a duplicate

Codes of StoreError and OpenError are the keys of ``_FAULTS`` plus: backlog_full, store_closed, write_failed,
write_timeout, readers_busy; database_in_use, schema_newer, schema_outdated, database_foreign,
database_in_memory, migrations_missing, no_write_ahead_log, bad_url, driver_missing.
"""

from __future__ import annotations

import errno
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import exc

FEW_BYTES = 64 << 10
"""on a disk with less than this, a failed write is for want of space"""


class StoreError(Exception):
    """``kept`` says that the row is not lost: it waits in memory and is written when the trouble ends."""

    def __init__(self, code: str, text: str, *, where: str = "", cure: str = "", kept: bool = False) -> None:
        sentence = f"{where}: {text}" if where else text
        super().__init__(f"{sentence}. {cure}" if cure else sentence)
        self.code = code
        self.text = text
        self.where = where
        self.cure = cure
        self.kept = kept

    def copy(self, *, kept: bool) -> StoreError:
        """The same error for another future: each waiter raises an exception object of its own."""
        return StoreError(self.code, self.text, where=self.where, cure=self.cure, kept=kept)


class OpenError(StoreError):
    """The database cannot be used; the process should say so and end."""


class LocalError(StoreError):
    """A caller broke the contract; ``code`` is unknown_table, unknown_column, missing_column, bad_value,
    unknown_run, row_refused or bad_argument."""


@dataclass(frozen=True, slots=True)
class _Fault:
    text: str
    cure: str
    patient: bool = False
    """passes by itself often enough to be waited for, within the writer's patience"""
    held: bool = True
    """the rows may be tried again without doubling them: nothing was written, or the next try finds out what was"""


_FAULTS = {
    "database_locked": _Fault(
        "another program holds the database locked",
        "Close the program that has it open (a sqlite3 shell, a backup)",
        patient=True,
    ),
    "disk_full": _Fault("no space is left on its disk", "Free space on that disk", patient=True),
    "database_read_only": _Fault(
        "the database cannot be written",
        "Make the file and its directory writable for the controller's user, or name another data directory",
    ),
    "database_unopenable": _Fault(
        "the database cannot be opened",
        "Check that the path exists, is a file and belongs to the controller's user",
    ),
    "database_unreachable": _Fault(
        "the database server does not answer",
        "Check that the server runs and that the URL is right",
        patient=True,
    ),
    "database_io_error": _Fault("the disk failed to read or write", "Check the disk (kernel log, quota)", patient=True),
    "database_corrupt": _Fault(
        "the file is damaged or is no SQLite database",
        "Move it away and restore a backup, or start with an empty data directory",
        held=False,
    ),
    "outcome_unknown": _Fault(
        "the connection broke during a commit, so it is unknown whether the rows were written",
        "Compare the run's last rows before entering them again",
        held=False,
    ),
}

_SQLITE_CODES = {
    sqlite3.SQLITE_BUSY: "database_locked",
    sqlite3.SQLITE_LOCKED: "database_locked",
    sqlite3.SQLITE_PROTOCOL: "database_locked",
    sqlite3.SQLITE_FULL: "disk_full",
    sqlite3.SQLITE_READONLY: "database_read_only",
    sqlite3.SQLITE_PERM: "database_read_only",
    sqlite3.SQLITE_CANTOPEN: "database_unopenable",
    sqlite3.SQLITE_IOERR: "database_io_error",
    sqlite3.SQLITE_NOMEM: "database_io_error",
    sqlite3.SQLITE_CORRUPT: "database_corrupt",
    sqlite3.SQLITE_NOTADB: "database_corrupt",
}

_OS_CODES = {
    errno.EACCES: "database_read_only",
    errno.EPERM: "database_read_only",
    errno.EROFS: "database_read_only",
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
}


def fault(code: str, where: str, detail: str = "") -> StoreError:
    """The error of a fault in the table above; ``detail`` is the driver's own word on it."""
    entry = _FAULTS[code]
    cure = f"{entry.cure}; writing resumes by itself" if entry.held else entry.cure
    return StoreError(code, f"{entry.text} ({detail})" if detail else entry.text, where=where, cure=cure)


def fault_of(error: BaseException, where: str) -> StoreError | None:
    """The fault of the database or its disk behind an exception; None when the statement is to blame."""
    for cause in _causes(error):
        if isinstance(cause, sqlite3.Error):
            # the low byte is the primary code, the rest tells variants such as SQLITE_BUSY_SNAPSHOT apart
            code = _SQLITE_CODES.get(getattr(cause, "sqlite_errorcode", 0) & 0xFF)
            if code == "database_io_error" and _has_no_space(where):
                code = "disk_full"  # SQLite says so for its main file only, not for the one that it maps
            if code is not None:
                return fault(code, where, str(cause))
        elif isinstance(cause, OSError):
            return fault(_OS_CODES.get(cause.errno or 0, "database_unopenable"), where, cause.strerror or str(cause))
        elif _is_server_fault(cause):
            return fault("database_unreachable", where, type(cause).__name__)
    return None


def is_held(error: StoreError) -> bool:
    """Whether the rows of a failed transaction may be tried again without doubling them."""
    return error.code in _FAULTS and _FAULTS[error.code].held


def is_patient(error: StoreError) -> bool:
    """Whether the trouble is worth waiting for."""
    return error.code in _FAULTS and _FAULTS[error.code].patient


def as_open_error(error: StoreError) -> OpenError:
    """The same refusal, as one of start: there is nobody who would try again by himself."""
    cure = _FAULTS[error.code].cure if error.code in _FAULTS else error.cure
    return OpenError(error.code, error.text, where=error.where, cure=cure)


def _has_no_space(where: str) -> bool:
    try:
        return shutil.disk_usage(Path(where).parent).free < FEW_BYTES
    except OSError:
        return False


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.orig if isinstance(cause, exc.DBAPIError) else cause.__cause__ or cause.__context__


def _is_server_fault(cause: BaseException) -> bool:
    """SQLite's errors carry codes; of a server's, SQLAlchemy shows us the class only."""
    if not isinstance(cause, exc.DBAPIError) or isinstance(cause.orig, sqlite3.Error):
        return False
    return cause.connection_invalidated or isinstance(cause, (exc.OperationalError, exc.InterfaceError))
