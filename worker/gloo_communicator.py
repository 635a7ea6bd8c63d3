"""Sessions over gloo, for ranks on CPUs: process groups of our own, without torch's global one.

gloo has no abort that frees a rank whose peer hangs. Its connections can be shut from outside, though: then whatever is
in flight ends at once with an error, and the group goes like any other. So a session knows its sockets, by a second
descriptor each, which stays valid when gloo closes its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed
from torch import Tensor

from worker.communicator import ABORT_SECONDS, JOINING, AbortStuck, Guard, SessionError, leave_behind
from worker.meeting import Meeting, MeetingPoint, MeetingStore

_LOOK_SECONDS = 0.001
_REACH_SECONDS = 10.0
"""for the generator's host to answer; it listens before its identity is told"""
_distributed: Any = torch.distributed
"""what it brings for gloo has no types"""


class GlooLibrary:
    """Makes sessions over one network interface, by name."""

    def __init__(self, interface: str) -> None:
        self.interface = interface
        self._meeting: Meeting | None = None
        """of the others, where this rank made the identity"""

    def make_id(self) -> bytes:
        """See ``Library``: the ranks can meet until the next identity is made."""
        address = address_of(self.interface)
        self.close()
        try:
            self._meeting = Meeting(address)
        except OSError as error:
            raise SessionError(f"no session can be met at {address} ({self.interface}): {error}") from error
        return self._meeting.point.as_bytes()

    def join(self, identity: bytes, place: int, size: int, guard: Guard) -> GlooCommunicator:
        """See ``Library``. gloo connects to the others without looking up: a thread does it, and is left behind when it
        takes too long; its own bound ends it."""
        guard.check()
        joining = _Joining(_meeting_point(identity), address_of(self.interface), place, size, guard.join_seconds)
        try:
            guard.wait(joining.over, guard.join_seconds + 1.0, "joining the session")
        except BaseException:
            joining.abandon()
            raise
        group, sockets = joining.result()
        made = GlooCommunicator(group, sockets, guard, f"gloo on {self.interface}")
        try:
            ones = torch.ones(1, dtype=torch.int64)
            made.sum(ones, "the first sum", guard.join_seconds)
            if ones.tolist() != [size]:
                raise SessionError("the first sum of the session is wrong; do all ranks run the same torch?")
        except BaseException:
            made.abort()
            raise
        return made

    def close(self) -> None:
        """See ``Library``."""
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.close()


class GlooCommunicator:
    """See ``Communicator``."""

    def __init__(self, group: Any, sockets: list[socket.socket], guard: Guard, transport: str) -> None:
        self.transport = transport
        self._group = group
        self._sockets = sockets
        self._guard = guard
        self._work: Any = None

    def sum(self, vector: Tensor, what: str, seconds: float | None = None) -> None:
        """See ``Communicator``."""
        self._guard.check()
        if self._group is None:
            raise SessionError("the session was given up")
        seconds = self._guard.collective_seconds if seconds is None else seconds
        try:
            work = self._work = self._group.allreduce([vector])
            self._guard.wait(work.is_completed, seconds, what)
            work.wait()
            self._work = None
        except RuntimeError as error:
            self._guard.check()  # peers that were told first have hung up
            raise SessionError(f"{what}: gloo says {_first_line(error)}") from error

    def wait(self) -> None:
        """See ``Communicator``. Here every sum is complete when it returns."""

    def abort(self) -> None:
        """See ``Communicator``."""
        group, self._group = self._group, None
        work, self._work = self._work, None
        for one in self._sockets:
            with contextlib.suppress(OSError):  # the peer was faster
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._sockets = []
        deadline = time.monotonic() + ABORT_SECONDS
        while work is not None and not work.is_completed():
            if time.monotonic() > deadline:
                leave_behind((group, work))  # its destructor would wait for what is in flight
                raise AbortStuck(f"gloo did not end what was in flight within {ABORT_SECONDS:g} s")
            time.sleep(_LOOK_SECONDS)


class _Joining:
    """The thread that connects to the others."""

    def __init__(self, meeting: MeetingPoint, address: str, place: int, size: int, seconds: float) -> None:
        self._meeting = meeting
        self._address = address
        self._place = place
        self._size = size
        self._seconds = seconds
        self._lock = threading.Lock()
        self._abandoned = False
        self._meets: socket.socket | None = None
        """the connection to the meeting"""
        self._result: tuple[Any, list[socket.socket]] | Exception | None = None
        self._thread = threading.Thread(target=self._run, name=JOINING, daemon=True)
        self._thread.start()

    def over(self) -> bool:
        return self._result is not None

    def result(self) -> tuple[Any, list[socket.socket]]:
        """What came of it. Raises ``SessionError``."""
        self._thread.join()
        assert self._result is not None, "over"
        if isinstance(self._result, Exception):
            text = f"gloo says {_first_line(self._result)}; can the hosts reach each other on this network?"
            raise SessionError(f"joining the session: {text}") from self._result
        return self._result

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            self._abandoned = True
            result, self._result = self._result, None
            if self._meets is not None:
                _hang_up(self._meets)  # who waits for the others' words waits no longer
        if isinstance(result, tuple):
            _hang_up(*result[1])

    def _run(self) -> None:
        result: tuple[Any, list[socket.socket]] | Exception
        try:
            result = self._connect()
        except Exception as error:
            result = error.with_traceback(None)  # its frames hold what should go now
        with self._lock:
            if not self._abandoned:
                self._result = result
            elif isinstance(result, tuple):
                _hang_up(*result[1])

    def _connect(self) -> tuple[Any, list[socket.socket]]:
        where = (self._meeting.host, self._meeting.port)
        connection = socket.create_connection(where, min(_REACH_SECONDS, self._seconds))
        connection.settimeout(self._seconds)
        with connection:
            with self._lock:
                self._meets = connection
                if self._abandoned:
                    raise ConnectionAbortedError("nobody waits for this session any more")
            with contextlib.closing(MeetingStore(connection, self._meeting.key)) as store:
                return self._meet(store)

    def _meet(self, store: MeetingStore) -> tuple[Any, list[socket.socket]]:
        before = _descriptors()
        options = _distributed.ProcessGroupGloo._Options()
        options._devices = [_distributed.ProcessGroupGloo.create_device(hostname=self._address, lazy_init=False)]
        options._timeout = timedelta(seconds=self._seconds)
        ports = _ports(_sockets(_descriptors() - before, _listens))
        store.set(f"ports/{self._place}", json.dumps(ports).encode())
        group = _distributed.ProcessGroupGloo(store, self._place, self._size, options)
        group._set_default_timeout(timedelta(days=1))  # from here on every wait is ours
        everybody = {port for other in range(self._size) for port in json.loads(store.get(f"ports/{other}"))}
        return group, _sockets(_descriptors() - before, lambda one: _connects(one, everybody))


def address_of(interface: str) -> str:
    """The interface's address, IPv4 if it has one. Raises ``SessionError``, naming those that are there."""
    every = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for one in every.get(interface, ()):
            if one.family == family:
                return str(one.address)
    raise SessionError(
        f"there is no network interface {interface!r} with an address here; there are {', '.join(every)}"
    )


def _meeting_point(identity: bytes) -> MeetingPoint:
    try:
        return MeetingPoint.of(identity)
    except ValueError as error:
        raise SessionError("the session's identity is none of gloo's; do all ranks train on CPUs?") from error


def _descriptors() -> set[tuple[int, int]]:
    """Those that are open, each with what it is of: its number alone may be another's a moment later. The one by which
    they were listed is not open any more."""
    found = set()
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):
            found.add((int(name), os.fstat(int(name)).st_ino))
    return found


def _sockets(descriptors: set[tuple[int, int]], wanted: Callable[[socket.socket], bool]) -> list[socket.socket]:
    """Those among them that are TCP sockets and wanted, under descriptors of our own."""
    found = []
    for descriptor, inode in sorted(descriptors):
        try:
            own = os.dup(descriptor)
        except OSError:  # closed meanwhile
            continue
        of = os.fstat(own)
        if of.st_ino != inode or not stat.S_ISSOCK(of.st_mode):
            os.close(own)
            continue
        one = socket.socket(fileno=own)
        tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
        if tcp and wanted(one):
            found.append(one)
        else:
            one.close()
    return found


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _ports(sockets: list[socket.socket]) -> list[int]:
    """The sockets' own ports; they are closed."""
    ports = []
    for one in sockets:
        with one:
            ports.append(int(one.getsockname()[1]))
    return ports


def _connects(one: socket.socket, ports: set[int]) -> bool:
    """Whether it is a connection to or from one of these ports."""
    try:
        return one.getpeername()[1] in ports or one.getsockname()[1] in ports
    except OSError:
        return False


def _hang_up(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
