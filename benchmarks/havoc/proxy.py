"""A TCP proxy between a host and the controller that cuts, holds back or slows what passes (reliability section 3.1).

A connection's channel is read off its first bytes: ``join``, ``control`` or ``data``.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

CHANNELS = ("join", "control", "data")
DIRECTIONS = ("up", "down")
_PIECE = 1 << 16
_DIAL_SECONDS = 30.0
_RESET = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class _Gate:
    """Whether the bytes of one channel and direction pass."""

    open: threading.Event = field(default_factory=threading.Event)
    held: int = 0
    """bytes that had to wait"""


class Proxy:
    """Passes every byte on, except where it is told otherwise."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.passed: Counter[tuple[str, str]] = Counter()
        """bytes by channel and direction, from the first byte of all"""
        self.cut = threading.Event()
        """set once a connection was cut"""
        self.slowed = 0
        """bytes that were slowed"""
        self._cut_at: tuple[str, int] | None = None
        self._bytes_per_second = 0.0
        self._gates = {(channel, direction): _Gate() for channel in CHANNELS for direction in DIRECTIONS}
        self.release()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._lock = threading.Lock()
        self._start(self._accept)

    def cut_after(self, count: int, channel: str = "data") -> int:
        """Reset this channel's connection once so many more bytes went up; how many that is from the first of all."""
        with self._lock:
            place = self.passed[channel, "up"] + count
            self._cut_at = channel, place
            return place

    def hold(self, direction: str, *channels: str) -> None:
        """Let nothing more pass ``up``, ``down`` or either way (``both``) on these channels, on all when none is
        named."""
        for (channel, way), gate in self._gates.items():
            if direction in (way, "both") and channel in (channels or CHANNELS):
                gate.open.clear()

    @property
    def held(self) -> int:
        """Bytes that had to wait at a gate so far."""
        return sum(gate.held for gate in self._gates.values())

    def release(self) -> None:
        """Let everything pass again."""
        for gate in self._gates.values():
            gate.open.set()

    def slow(self, bytes_per_second: float) -> None:
        """Pass so many bytes a second on each connection and direction; 0 passes them as they come."""
        self._bytes_per_second = bytes_per_second

    def close(self) -> None:
        """Drop every connection; whoever dials from now on, or is just dialling, is refused or reset. Nothing of the
        proxy runs on return."""
        self.slow(0)
        self.release()
        with self._lock:
            self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone leaves a thread in accept, and a host may get in
        self._listener.close()
        for each in self._sockets:
            _reset(each)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._keep(client)
                self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            try:
                server = socket.create_connection(self._target, timeout=_DIAL_SECONDS)
            except OSError:
                _reset(client)
                raise
            server.settimeout(None)
            self._keep(server)
            first = client.recv(_PIECE)
            channel = next((name for name in CHANNELS if f"/ws/{name}".encode() in first.partition(b"\r")[0]), "join")
            server.sendall(first)
            self._start(self._pass, server, client, channel, "down")
            self._pass(client, server, channel, "up")

    def _keep(self, each: socket.socket) -> None:
        """Close it at the end. Raises ``OSError`` when that has come, and closes it at once."""
        with self._lock:
            if not self._closed:
                self._sockets.append(each)
                return
        _reset(each)
        raise ConnectionAbortedError("the proxy is closed")

    def _start(self, act: Callable[..., None], *arguments: object) -> None:
        """Run in a thread that ``close`` waits for. Raises ``OSError`` once that was called."""
        thread = threading.Thread(target=act, args=arguments, daemon=True)
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("the proxy is closed")
            self._threads.append(thread)
            thread.start()

    def _pass(self, source: socket.socket, target: socket.socket, channel: str, direction: str) -> None:
        gate = self._gates[channel, direction]
        with contextlib.suppress(OSError):
            while True:
                gate.open.wait()
                piece = source.recv(_PIECE)
                if not piece:
                    target.shutdown(socket.SHUT_WR)
                    return
                if not gate.open.is_set():  # it came in while the gate was being closed
                    gate.held += len(piece)
                    gate.open.wait()
                allowed, cut = self._allowed(len(piece), channel, direction)
                self._send(target, piece[:allowed])
                if cut:
                    _reset(source)
                    _reset(target)
                    return

    def _send(self, target: socket.socket, piece: bytes) -> None:
        while piece:
            rate = self._bytes_per_second
            part = piece[: max(1, int(rate / 20))] if rate else piece
            target.sendall(part)
            piece = piece[len(part) :]
            if rate:
                self.slowed += len(part)
                time.sleep(len(part) / rate)

    def _allowed(self, count: int, channel: str, direction: str) -> tuple[int, bool]:
        """How much of a piece may pass, and whether the connection is cut then."""
        with self._lock:
            passed, cut = self.passed[channel, direction], False
            if direction == "up" and self._cut_at is not None and self._cut_at[0] == channel:
                place = self._cut_at[1]
                if passed + count >= place:
                    count, cut = max(0, place - passed), True
                    self._cut_at = None
                    self.cut.set()
            self.passed[channel, direction] += count
            return count, cut


def _reset(each: socket.socket) -> None:
    """Close with a reset: what is in flight is lost, as when a cable breaks or a process is killed."""
    with contextlib.suppress(OSError):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        each.shutdown(socket.SHUT_RDWR)
    each.close()


@contextmanager
def proxied(target: str) -> Iterator[Proxy]:
    """A proxy in front of the controller at this address."""
    proxy = Proxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
