"""A TCP proxy between a host and the controller that cuts or holds back its data link (reliability section 3.1)."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

_PIECE = 1 << 16
_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Passes every byte on, except where a test says otherwise. Only ``/ws/data`` is ever touched."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.bytes_up = 0
        """of the data link, from its first byte"""
        self.bytes_down = 0
        self.cut = threading.Event()
        """set once the data link was cut"""
        self._cut_at: int | None = None
        self._flowing_down = threading.Event()
        self._flowing_down.set()
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, count: int) -> int:
        """Reset the data link once so many more bytes went up; answers how many that is from the link's start."""
        with self._lock:
            self._cut_at = self.bytes_up + count
            return self._cut_at

    def hold_down(self) -> None:
        """Read nothing more from the controller on the data link."""
        self._flowing_down.clear()

    def release(self) -> None:
        """Read on."""
        self._flowing_down.set()

    def close(self) -> None:
        """Drop every connection."""
        self.release()
        self._listener.close()
        for each in self._sockets:
            _reset(each)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            server = socket.create_connection(self._target)
            self._sockets += [client, server]
            first = client.recv(_PIECE)
            data = first.startswith(b"GET /ws/data")
            server.sendall(first)
            threading.Thread(target=self._down, args=(server, client, data), daemon=True).start()
            self._up(client, server, data)

    def _up(self, client: socket.socket, server: socket.socket, data: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := client.recv(_PIECE):
                server.sendall(piece[: self._allowed(len(piece))] if data else piece)
                if self.cut.is_set() and data:
                    _reset(client)
                    _reset(server)
                    return
            server.shutdown(socket.SHUT_WR)

    def _allowed(self, count: int) -> int:
        with self._lock:
            if self._cut_at is not None and self.bytes_up + count >= self._cut_at:
                count = self._cut_at - self.bytes_up
                self.cut.set()
            self.bytes_up += count
            return count

    def _down(self, server: socket.socket, client: socket.socket, data: bool) -> None:
        with contextlib.suppress(OSError):
            while True:
                if data:
                    self._flowing_down.wait()
                piece = server.recv(_PIECE)
                if not piece:
                    client.shutdown(socket.SHUT_WR)
                    return
                if data:
                    self.bytes_down += len(piece)
                client.sendall(piece)


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
