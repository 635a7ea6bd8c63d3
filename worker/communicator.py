"""What a session of the collective plane needs of a library that sums: NCCL between GPUs, gloo between CPUs.

A wait looks at an interrupt that another thread may set at any time (``interrupt``), so that no rank waits for a peer
that is gone; whoever is interrupted, or meets an error, gives the communicator up with ``abort``. (Design section 7;
behaviour H6 to H10; decision 0019.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

JOIN_SECONDS = 60.0
"""at most, until all ranks of a session have joined"""
COLLECTIVE_SECONDS = 600.0
"""at most, in one collective: the controller, which sees all ranks, ends one that stalls long before"""
ABORT_SECONDS = 15.0
"""at most, until a communicator is given up: half a second on a quiet host, over five where forty ranks of other
programs had all its cores and both its GPUs"""
_LONGEST_PAUSE = 0.001
JOINING, ABORTING = "join session", "abort session"
"""names of threads that wait for a library"""


class Aborted(Exception):
    """The session ended from outside while this rank waited; the text says why."""


class SessionError(Exception):
    """A session cannot be made or joined, or a collective failed; the text names library, call and cure."""


class AbortStuck(Exception):
    """A communicator could not be given up in time, so this process cannot take part in anything any more."""


@dataclass(frozen=True, slots=True)
class Guard:
    """Bounds of a wait. ``interrupted`` gives the reason once the session is void, else an empty text."""

    interrupted: Callable[[], str]
    join_seconds: float = JOIN_SECONDS
    collective_seconds: float = COLLECTIVE_SECONDS
    clock: Callable[[], float] = field(default=time.monotonic)

    def check(self) -> None:
        """Raises ``Aborted`` once interrupted."""
        if reason := self.interrupted():
            raise Aborted(reason)

    def wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Poll until ``done``: without pause for a millisecond, then with longer ones, up to that.

        Raises ``Aborted``; ``SessionError`` when it takes longer than ``seconds``, and whatever ``done`` raises.
        """
        started = self.clock()
        while not done():
            self.check()
            waited = self.clock() - started
            if waited > seconds:
                raise SessionError(f"{what} took longer than {seconds:g} s; is a rank stopped, or its network cut?")
            time.sleep(min(_LONGEST_PAUSE, waited / 32) if waited > _LONGEST_PAUSE else 0)


class Communicator(Protocol):
    """The living ranks of one session. Belongs to the training thread. What is asked for may only have begun when the
    call returns, in order on the device's stream; ``wait`` ends with it."""

    @property
    def transport(self) -> str:
        """For people: library, release and interface."""
        ...

    def sum(self, vector: Tensor, what: str) -> None:
        """Every rank's vector, (n,) int64 or f32, becomes the sum of all, the same bits everywhere. People are told
        ``what`` it is. Raises ``Aborted``, ``SessionError``; the vector holds anything then.
        """
        ...

    def wait(self) -> None:
        """Everything that was asked for is complete on return. Raises ``Aborted``, ``SessionError``."""
        ...

    def abort(self) -> None:
        """Give the session up, with whatever is in flight. Idempotent. Raises ``AbortStuck``."""
        ...


class Library(Protocol):
    """Makes sessions on this rank's device."""

    def make_id(self) -> bytes:
        """The identity of a session that can be joined from now on. Raises ``SessionError``."""
        ...

    def join(self, identity: bytes, place: int, size: int, guard: Guard) -> Communicator:
        """Take place ``place`` of ``size`` in the session; on return a first collective went through it.

        Raises ``Aborted``, ``SessionError``; nothing of the session is left then, or ``AbortStuck``.
        """
        ...

    def close(self) -> None:
        """Let go of what identities hold. Idempotent."""
        ...


def bounded(act: Callable[[], None], seconds: float, stuck: str) -> None:
    """Do something that may hang, in a thread of its own. Raises ``AbortStuck`` with this text when it does."""
    thread = threading.Thread(target=act, name=ABORTING, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise AbortStuck(stuck)


def leave_behind(what: object) -> None:
    """Keep something whose end would hang."""
    _behind.append(what)


def hangs() -> bool:
    """Whether something of a library still runs here, so that the process must end without waiting for it."""
    return bool(_behind) or any(thread.name in (JOINING, ABORTING) for thread in threading.enumerate())


_behind: list[object] = []
