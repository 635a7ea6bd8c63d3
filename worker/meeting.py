"""Where ranks of a session over gloo tell each other their addresses: a listener of the one that made its identity.

Whatever one of them says is passed on to all, so that each holds the same words in the end. torch's own store would do,
but asks name servers for the name of every address that it meets, and cannot be left while it waits.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store

MEETING = "meeting"
"""name of the thread that listens"""
_SEND_SECONDS = 5.0
"""for a guest to take what is said; all of a session is some kilobytes"""
_LONGEST_LINE = 1 << 16


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Where to meet; who knows the key belongs there."""

    host: str
    port: int
    key: str

    def as_bytes(self) -> bytes:
        """For the session's identity."""
        return json.dumps({"host": self.host, "port": self.port, "key": self.key}).encode()

    @classmethod
    def of(cls, identity: bytes) -> MeetingPoint:
        """Raises ``ValueError``: it is another library's."""
        try:
            found = json.loads(identity)
            return cls(str(found["host"]), int(found["port"]), str(found["key"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"no place to meet at: {error}") from error


class Meeting:
    """Listens from the start, on any free port of this address, until it is closed. Raises ``OSError``."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self._listener.setblocking(False)
        self.point = MeetingPoint(address, self._listener.getsockname()[1], secrets.token_hex(16))
        self._words: list[bytes] = []
        self._guests: dict[socket.socket, bytes] = {}
        """who is connected, and what of their last line has come"""
        self._known: set[socket.socket] = set()
        """those that said the key"""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._closer, self._closed = socket.socketpair()
        self._selector.register(self._closed, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=MEETING, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Whoever still waits here is hung up on. Idempotent."""
        self._closer.close()
        self._thread.join()

    def _run(self) -> None:
        with self._selector, self._listener, self._closed:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is self._closed:
                        for guest in list(self._guests):
                            self._drop(guest)
                        return
                    if key.fileobj is self._listener:
                        self._welcome()
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._guests:
                        self._hear(key.fileobj)

    def _welcome(self) -> None:
        try:
            guest, _ = self._listener.accept()
        except (ConnectionError, BlockingIOError):  # it was gone before we looked
            return
        except OSError:  # no descriptor is left: nobody else can come, which ends in a joining's own bound
            self._selector.unregister(self._listener)
            return
        guest.settimeout(_SEND_SECONDS)
        self._guests[guest] = b""
        self._selector.register(guest, selectors.EVENT_READ)

    def _hear(self, guest: socket.socket) -> None:
        try:
            came = guest.recv(_LONGEST_LINE)
        except OSError:
            came = b""
        *lines, rest = (self._guests[guest] + came).split(b"\n")
        self._guests[guest] = rest
        if not came or len(rest) > _LONGEST_LINE or not all(self._take(guest, line) for line in lines):
            self._drop(guest)

    def _take(self, guest: socket.socket, line: bytes) -> bool:
        """Whether the guest may stay."""
        if guest in self._known:
            self._words.append(line + b"\n")
            for other in list(self._known):
                if not _send(other, self._words[-1]):
                    self._drop(other)
            return guest in self._known
        if not hmac.compare_digest(line, self.point.key.encode()):
            return False
        self._known.add(guest)
        return _send(guest, b"".join(self._words))

    def _drop(self, guest: socket.socket) -> None:
        if self._guests.pop(guest, None) is not None:
            self._selector.unregister(guest)
            self._known.discard(guest)
            guest.close()


class MeetingStore(Store):
    """One guest's side, as torch's process groups take it. Whoever shuts the connection ends what waits here with a
    ``ConnectionError``. torch finds these methods only while the object is held in Python."""

    def __init__(self, connection: socket.socket, key: str) -> None:
        super().__init__()
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._values: dict[str, bytes] = {}
        connection.sendall(key.encode() + b"\n")

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Tell everybody. Raises ``OSError``."""
        self._connection.sendall(json.dumps([key, value.hex()]).encode() + b"\n")

    def get(self, key: str) -> bytes:
        """What somebody told under this key, once it is there. Raises ``OSError``."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all of these were told; the connection's own timeout counts. Raises ``OSError``."""
        while any(key not in self._values for key in keys):
            line = self._lines.readline()
            if not line:
                raise ConnectionError("the session's generator hung up")
            told, value = json.loads(line)
            self._values[told] = bytes.fromhex(value)

    def close(self) -> None:
        """Leave."""
        self._lines.close()
        self._connection.close()


def _send(guest: socket.socket, words: bytes) -> bool:
    with contextlib.suppress(OSError):
        guest.sendall(words)
        return True
    return False
