"""How a child process receives its orders from the agent and never outlives it.

The agent writes one JSON line to the child's stdin and keeps the pipe open. Two things then end the child
when the agent is gone, even by SIGKILL: the kernel's parent-death signal (Linux; works while user code
holds the interpreter), and the end of the pipe (everywhere; takes the child's own helpers along).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from typing import BinaryIO

_PR_SET_PDEATHSIG = 1


class LifelineError(Exception):
    """The agent's orders did not arrive whole, or the agent is gone already."""


def receive_orders() -> bytes:
    """The agent's line. From here on this process dies with its agent.

    stdin itself becomes empty, so that user code that reads it cannot swallow the lifeline. Raises
    ``LifelineError``.
    """
    agent = os.getppid()
    _die_with_parent()
    pipe = os.fdopen(os.dup(0), "rb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    line = pipe.readline()
    if not line.endswith(b"\n"):
        raise LifelineError("the agent's orders ended too early; this process is started by an agent, not by hand")
    if os.getppid() != agent:
        raise LifelineError("the agent died while it started this process")
    threading.Thread(target=_watch, args=(pipe,), name="lifeline", daemon=True).start()
    return line


def _die_with_parent() -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise LifelineError(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")


def _watch(pipe: BinaryIO) -> None:
    while pipe.read(4096):
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)
