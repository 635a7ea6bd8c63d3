"""A number that the kernel gives out again: who has it now is nobody of ours, and is left alone (F27)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from worker.child import Child

LAST = Path("/proc/sys/kernel/ns_last_pid")
TRIES = 200


@contextmanager
def heir(number: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this number that leads a group of its own, as a rank does; skips where none can be made."""
    for _ in range(TRIES):
        try:
            LAST.write_text(str(number - 1))
        except OSError as error:
            pytest.skip(f"a process's number cannot be chosen here: {error.strerror}")
        with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], process_group=0) as process:
            try:
                if process.pid == number:
                    yield process
                    return
            finally:
                process.kill()
    pytest.fail(f"number {number} was not given out again in {TRIES} tries")


async def test_who_got_a_childs_number_after_it_is_not_signalled() -> None:
    child = await Child.spawn("rank 0", "this", b"", dict(os.environ))
    assert (await child.exited).code == 0
    with heir(child.pid) as other:
        assert os.getpgid(other.pid) == child.pid, "a signal to the child's group would reach it"
        for number in (signal.SIGTERM, signal.SIGKILL):
            child.send_signal(number)
        await child.stop(0.0)
        assert other.poll() is None, "it lives"
