"""One thread, one connection, one queue: everything that is written goes through here, in the order it was
given.

**Transactions.** A durable task is committed at once, together with all that is queued (up to
``group_rows``); others wait at most ``batch_seconds``. Each task runs in a savepoint, so a failing one fails
its own future and not its neighbours. Futures resolve after the commit, in order.

**Trouble** (locked, full, read-only, I/O, gone): the transaction is rolled back and tried again until
``patience_seconds`` after the trouble began. From then on every durable future that waits, or comes, fails
at once, so that nobody is held up by a broken disk; its row, and all others, stay in memory (``error.kept``)
and are tried again every ``batch_seconds`` until the trouble ends. Tasks that are not to be kept (a command
whose caller is told that it failed) are tried once and dropped. Corruption is not tried again.

**Doubt.** A commit that reports an error may have happened all the same (reliability F92). Every transaction
puts a number into SQLite's file header (``user_version``); after such an error the next transaction reads it
before it writes, so that nothing is written twice and nothing that was written counts as lost. Before a task is
dropped the number is read, too: its caller is told what happened, or ``outcome_unknown`` where it cannot be read.
A server has no such number: there a connection that breaks in a commit leaves its rows as ``outcome_unknown``.

**Bounds.** At most ``capacity`` rows wait in memory, and a tenth more if durable; beyond that the newest is
refused (backlog_full). ``close`` flushes within ``close_seconds``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import IntegrityError

from backend.store.engine import last_mark, put_mark
from backend.store.errors import LocalError, StoreError, fault, fault_of, is_held, is_patient
from wire import failpoints

log = logging.getLogger(__name__)

Perform = Callable[[Connection], Any]
OnTrouble = Callable[[StoreError | None], None]
"""Called from the writer's thread when trouble begins (with its error) and when it ends (with None)."""


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """Times in seconds. ``patience_seconds`` is how long a run's training may wait for its durable rows, once for each
    trouble: a lock held for a moment is waited out, and no disk holds a run up."""

    batch_seconds: float = 0.5
    patience_seconds: float = 4.0
    retry_seconds: float = 0.1
    close_seconds: float = 10.0
    capacity: int = 20_000
    group_rows: int = 1000


@dataclass(slots=True, eq=False)
class _Task:
    perform: Perform
    future: Future[Any]
    durable: bool
    keep: bool
    queued_at: float
    written: bool = False
    """a commit that reported an error did write it: only its waiter does not know yet"""
    outcome: Any = None

    def settle(self, outcome: Any) -> None:
        """Resolve the future, unless trouble did so before: then the row was kept and its waiter is gone."""
        if self.future.done():
            return
        if isinstance(outcome, StoreError):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


@dataclass(frozen=True, slots=True)
class _Trouble:
    error: StoreError
    since: float


@dataclass(frozen=True, slots=True)
class _Doubt:
    """A transaction whose commit reported an error: by ``mark`` the next one finds out whether it happened."""

    mark: int
    outcomes: list[tuple[_Task, Any]]

    def __contains__(self, task: object) -> bool:
        return any(task is each for each, _ in self.outcomes)


class Writer:
    """The thread that writes. ``submit`` never blocks on the database; errors arrive through the futures."""

    def __init__(self, engine: Engine, where: str, options: WriterOptions, on_trouble: OnTrouble | None = None) -> None:
        self._engine = engine
        self._marks = engine.dialect.name == "sqlite"
        self._where = where
        self._options = options
        self._on_trouble = on_trouble
        self._connection: Connection | None = None
        self._wake = threading.Condition()
        self._queue: deque[_Task] = deque()
        self._urgent = 0  # durable tasks in the queue that somebody waits for
        self._busy = 0  # tasks taken from the queue and not settled
        self._trouble: _Trouble | None = None
        self._spent: StoreError | None = None  # patience is used up: until the trouble ends nobody waits
        self._doubt: _Doubt | None = None
        self._retry_at = 0.0
        self._closing = threading.Event()
        self._close_by = 0.0
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> StoreError | None:
        """Why nothing can be written right now; None when all is well."""
        trouble = self._trouble
        return None if trouble is None else trouble.error

    @property
    def pending(self) -> int:
        """Rows in memory that are not committed."""
        with self._wake:
            return len(self._queue) + self._busy

    def submit(self, perform: Perform, *, durable: bool, keep: bool = True) -> Future[Any]:
        """Queue a task; its future gives what ``perform`` returned, once that is committed.

        A future cannot be cancelled: the task is a fact to be written, whoever still waits for it.
        """
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._wake:
            refusal = self._refusal(durable)
            if refusal is None:
                if durable and keep and self._spent is not None:
                    durable, refusal = False, self._spent.copy(kept=True)
                self._queue.append(_Task(perform, future, durable, keep, time.monotonic()))
                self._urgent += durable
                self._wake.notify()
        if refusal is not None:
            future.set_exception(refusal)
        return future

    def close(self) -> None:
        """Write what is queued, end the thread; what cannot be written within ``close_seconds`` fails."""
        with self._wake:
            if not self._closing.is_set():
                self._close_by = time.monotonic() + self._options.close_seconds
                self._closing.set()
            self._wake.notify()
        self._thread.join()

    def _refusal(self, durable: bool) -> StoreError | None:
        if self._closing.is_set():
            return StoreError("store_closed", "the store is closed", where=self._where)
        capacity = self._options.capacity
        if durable:
            capacity += capacity // 10
        if len(self._queue) + self._busy < capacity:
            return None
        cause = self.trouble
        text = f"{capacity} rows wait to be written already" + (f": {cause.text}" if cause else "")
        return StoreError("backlog_full", text, where=self._where, cure=cause.cure if cause else "Write less often")

    # ------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while (group := self._next_group()) is not None:
            try:
                self._settle(group)
            except Exception as error:  # a bug of ours must not end all writing
                log.exception("the store's writer failed")
                self._fail(group, StoreError("write_failed", f"{type(error).__name__}: {error}", where=self._where))
            finally:
                with self._wake:
                    self._busy = 0
        self._disconnect()

    def _next_group(self) -> list[_Task] | None:
        """Wait for work that is due, and take it; None when the store closes and nothing is left."""
        with self._wake:
            while True:
                wait = self._seconds_until_due()
                if wait is not None and wait <= 0:
                    return self._take() if self._queue else None
                self._wake.wait(wait)

    def _seconds_until_due(self) -> float | None:
        """None: nothing to wait for but news."""
        if self._urgent or self._closing.is_set():
            return 0.0
        if not self._queue:
            return None
        due = max(self._queue[0].queued_at + self._options.batch_seconds, self._retry_at)
        return due - time.monotonic()

    def _take(self) -> list[_Task]:
        group = [self._queue.popleft() for _ in range(min(len(self._queue), self._options.group_rows))]
        self._urgent -= sum(task.durable for task in group)
        self._busy = len(group)
        return group

    def _settle(self, group: list[_Task]) -> None:
        """Try until the group is committed, patience ends, or trying again would be wrong."""
        while True:
            outcomes = self._attempt(group)
            if not isinstance(outcomes, StoreError):
                self._note(None)
                for task, outcome in zip(group, outcomes, strict=True):
                    task.settle(outcome)
                return
            error = outcomes
            self._note(error)
            if not is_held(error):
                self._fail(group, error)
                return
            if self._is_out_of_patience(error):
                self._give_way(group, error)
                return
            self._pause()

    def _attempt(self, group: list[_Task]) -> list[Any] | StoreError:
        """One transaction: each task's result or LocalError, once that is committed; or why it is not."""
        committing, mark, outcomes = False, 0, list[Any]()
        try:
            if self._connection is None:
                self._connection = self._engine.connect()
            with self._connection.begin() as transaction:
                mark = self._mark(self._connection)
                outcomes = [self._perform(self._connection, task) for task in group]
                committing = True
                failpoints.hit("store.commit.before")
                transaction.commit()
                failpoints.hit("store.commit.after")
        except Exception as error:
            self._disconnect()  # whatever state it was left in, the next try starts clean
            if committing and mark:
                self._doubt = _Doubt(mark, list(zip(group, outcomes, strict=True)))
            return self._explain(error, committing)
        return outcomes

    def _mark(self, connection: Connection) -> int:
        """Give this transaction its number, once it is known whether the one in doubt was committed. 0: no numbers."""
        if not self._marks:
            return 0
        return put_mark(connection, self._learn(connection))

    def _learn(self, connection: Connection) -> int:
        """The number of the last transaction, which tells what became of the one in doubt."""
        last = last_mark(connection)
        doubt, self._doubt = self._doubt, None
        if doubt is not None and last == doubt.mark:
            for task, outcome in doubt.outcomes:
                task.written, task.outcome = True, outcome
        return last

    def _look(self) -> None:
        """Learn it without writing; where that fails, the doubt stays."""
        try:
            self._connection = self._engine.connect()
            with self._connection.begin():
                self._learn(self._connection)
        except Exception:
            self._disconnect()

    def _perform(self, connection: Connection, task: _Task) -> Any:
        if task.written:
            return task.outcome
        savepoint = connection.begin_nested()
        try:
            result = task.perform(connection)
            savepoint.commit()
        except Exception as error:
            if fault_of(error, self._where) is not None:
                raise
            savepoint.rollback()
            return self._refused(error)
        return result

    def _refused(self, error: Exception) -> LocalError:
        """A row that the database does not take, or that we wrote wrongly: the row's own failure."""
        if isinstance(error, LocalError):
            return error
        if not isinstance(error, IntegrityError):
            return LocalError("row_refused", f"the row was refused: {type(error).__name__}: {error}", where=self._where)
        if "foreign key" in str(error.orig).lower():  # every foreign key leads to runs
            return LocalError("unknown_run", "the row names a run that does not exist", where=self._where)
        return LocalError("row_refused", f"the row breaks a key: {_first_line(error.orig)}", where=self._where)

    def _explain(self, error: Exception, committing: bool) -> StoreError:
        known = fault_of(error, self._where)
        if known is None and committing and self._marks:
            # Whatever it was, the next try finds out whether it was written.
            return fault("database_io_error", self._where, f"{type(error).__name__}: {error}")
        if known is None:
            log.error("the store could not write", exc_info=error)
            known = StoreError("write_failed", f"{type(error).__name__}: {error}", where=self._where)
        if committing and known.code == "database_unreachable":
            known = fault("outcome_unknown", self._where)
        return known

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            connection.close()
        except Exception:  # it is broken, which is why it goes
            log.warning("the store's connection did not close cleanly", exc_info=True)

    # ---------------------------------------------------------------------------------------- trouble

    def _note(self, error: StoreError | None) -> None:
        before = self._trouble
        if error is None:
            self._trouble = self._spent = None
        else:
            self._trouble = _Trouble(error, before.since if before else time.monotonic())
        if (before and before.error.code) == (error and error.code):
            return
        if error is not None:
            log.warning("not durable: %s", error)
        elif before is not None:
            log.warning("durable again after %.1f s", time.monotonic() - before.since)
        if self._on_trouble is not None:
            try:
                self._on_trouble(error)
            except Exception:
                log.exception("the listener for the store's trouble failed")

    def _is_out_of_patience(self, error: StoreError) -> bool:
        assert self._trouble is not None
        until = self._trouble.since + (self._options.patience_seconds if is_patient(error) else 0.0)
        if self._closing.is_set():
            until = min(until, self._close_by)
        return time.monotonic() >= until

    def _pause(self) -> None:
        if self._closing.is_set():
            time.sleep(self._options.retry_seconds)
        else:
            self._closing.wait(self._options.retry_seconds)

    def _give_way(self, group: list[_Task], error: StoreError) -> None:
        """Let nobody wait any longer; keep in memory what may be written later."""
        with self._wake:
            closing = self._closing.is_set()
            waiting = [*group, *self._queue]
            self._queue = deque(() if closing else (task for task in waiting if task.keep))
            self._urgent = self._busy = 0
            self._retry_at = time.monotonic() + self._options.batch_seconds
            self._spent = error
        if closing:
            self._fail(waiting, error)
            return
        if any(not task.keep and self._in_doubt(task) for task in waiting):
            self._look()
        for task in waiting:
            if task.durable:
                task.settle(self._answer(task, error))
                task.durable = False

    def _answer(self, task: _Task, error: StoreError) -> Any:
        """What a waiter is told: the row of one who is told of a failure is kept, or is not there."""
        if not task.keep and task.written:
            return task.outcome
        if not task.keep and self._in_doubt(task):
            return fault("outcome_unknown", self._where)
        return error.copy(kept=task.keep)

    def _in_doubt(self, task: _Task) -> bool:
        return self._doubt is not None and task in self._doubt

    def _fail(self, tasks: list[_Task], error: StoreError) -> None:
        lost = sum(task.keep for task in tasks)
        if lost:
            log.error("%d rows are lost: %s", lost, error)
        for task in tasks:
            task.settle(error.copy(kept=False))


def _first_line(error: BaseException | None) -> str:
    """A server's further lines repeat the row's values."""
    return str(error).partition("\n")[0]
