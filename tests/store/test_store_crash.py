"""Real processes: what was acknowledged survives kill -9 (law L13), of two controllers one is refused (F59, D01)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from backend.store import OpenError, Store
from backend.store.schema import MIGRATIONS

pytestmark = pytest.mark.slow

WRITER = """
import sys
from concurrent.futures import wait
from pathlib import Path
from backend.store import Store, sqlite_url

store = Store.open(sqlite_url(Path(sys.argv[1])))
run = store.create_run({"job": "a.py:A", "mode": "cpu_sync", "phase": "training"})
print("run", run, flush=True)
number = 0
while True:
    group = []
    for _ in range(5):
        row = {"step": number, "name": "loss", "value": number / 2}
        group.append(store.write(run, "scalars", row, durable=number % 5 == 4))
        number += 1
    for future in group:
        print("kept", future.result(60)["step"], flush=True)
"""

STUBBORN = """
import sys
from pathlib import Path
from backend.store import Store, sqlite_url

with Store.open(sqlite_url(Path(sys.argv[1]))) as store:
    run = store.create_run({"job": "a.py:A", "mode": "cpu_sync"})
    for number in range(40):
        store.write(run, "events", {"kind": "n", "level": "info", "text": str(number)}, durable=True).result(60)
    print([row["text"] for row in store.queries.events(run)] == [str(number) for number in range(40)], flush=True)
"""

OPENER = """
import sys
from pathlib import Path
from backend.store import OpenError, Store, sqlite_url

sys.stdin.readline()
try:
    store = Store.open(sqlite_url(Path(sys.argv[1])))
except OpenError as error:
    print(error.code, flush=True)
else:
    print("open", flush=True)
    sys.stdin.readline()
    store.close()
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(database: Path) -> Iterator[Start]:
    """Start a program on the database; whatever happens, it is gone at the end."""
    started: list[subprocess.Popen[str]] = []
    environment = os.environ | {"PYTHONPATH": str(MIGRATIONS.parent)}

    def start_one(program: str, inside: Sequence[str] = ()) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*inside, sys.executable, "-c", program, str(database)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()
        process.communicate(timeout=30)


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("kept_before_the_kill", [1, 37, 200, 1000])
def test_kill_9_while_committing_loses_no_acknowledged_row(
    start: Start,
    open_store: Callable[..., Store],
    look: Callable[..., list[tuple[Any, ...]]],
    kept_before_the_kill: int,
) -> None:
    process = start(WRITER)
    told = [hear(process) for _ in range(1 + kept_before_the_kill)]
    process.kill()  # it goes on committing until the signal arrives
    assert process.wait(30) == -signal.SIGKILL
    assert process.stdout is not None
    rest = process.stdout.read()
    told += rest.splitlines() if rest.endswith("\n") else rest.splitlines()[:-1]
    acknowledged = [int(line.split()[1]) for line in told[1:]]
    assert len(acknowledged) >= kept_before_the_kill

    store = open_store()
    run = int(told[0].split()[1])
    found = store.queries.scalars(run, "loss", limit=1_000_000)
    assert [row["step"] for row in found] == list(range(len(found)))
    assert len(found) >= len(acknowledged)
    assert acknowledged == list(range(len(acknowledged)))
    assert all(row["value"] == row["step"] / 2 for row in found)
    assert look("pragma integrity_check") == [("ok",)]
    assert store.interrupt_unserved() == [run]


def test_a_disk_that_fails_to_sync_costs_no_row_and_doubles_none(start: Start, tmp_path: Path) -> None:
    """EIO of the system call itself (F90): the frames lie in the write-ahead log, and do not count as committed."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    log = tmp_path / "calls"
    calls = "fsync,fdatasync"
    inject = f"inject={calls}:error=EIO:when=12..60+4"
    tracer = ["strace", "-f", "-qq", "-o", str(log), "-e", f"trace={calls}", "-e", inject]
    process = start(STUBBORN, tracer)
    told = hear(process)
    assert process.wait(60) == 0 or pytest.skip(f"strace cannot trace here: {log.read_text()[:200]}")
    assert told == "True"
    injected = log.read_text().count("(INJECTED)")
    assert injected >= 5
    print(f"{injected} of the program's syncs failed")


def test_another_process_is_refused_while_the_first_lives_and_let_in_when_it_is_killed(
    start: Start, open_store: Callable[..., Store]
) -> None:
    holder = start(OPENER)
    say(holder)
    assert hear(holder) == "open"
    with pytest.raises(OpenError) as refusal:
        open_store()
    assert refusal.value.code == "database_in_use"
    assert f"process {holder.pid}" in refusal.value.text
    holder.kill()
    holder.wait(30)
    assert open_store().queries.list_runs() == []


def test_of_controllers_that_start_at_once_on_an_empty_file_one_serves_it(
    start: Start, open_store: Callable[..., Store]
) -> None:
    rivals = [start(OPENER) for _ in range(3)]
    for rival in rivals:
        say(rival)
    assert sorted(hear(rival) for rival in rivals) == ["database_in_use", "database_in_use", "open"]
    for rival in rivals:
        if rival.poll() is None:
            rival.communicate("\n", timeout=30)
    store = open_store()
    assert store.create_run({"job": "a.py:A", "mode": "cpu_sync"}) == 1


def test_the_store_needs_neither_the_web_nor_torch(start: Start) -> None:
    asked = "import sys, backend.store; print(sorted({'fastapi', 'starlette', 'torch', 'numpy'} & set(sys.modules)))"
    assert hear(start(asked)) == "[]"
