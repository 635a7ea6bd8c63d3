"""Where a relay-only host listens: the flag's value, and the socket."""

from __future__ import annotations

import errno
import socket

BACKLOG = 256


class ListenError(Exception):
    """Nobody can listen there; the text says why, and what to change."""


def listen_address(text: str) -> tuple[str, int]:
    """(host, port) of ``HOST:PORT`` or ``:PORT``; an empty host is every address. Raises ``ListenError``."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ListenError(f"--listen {text!r} is no address to listen on; give HOST:PORT or :PORT, like :8471")
    return host.removeprefix("[").removesuffix("]"), int(port)


def listening(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ``ListenError`` naming the address that can't be had."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = next((each for each in found if each[0] == socket.AF_INET), found[0])
        return socket.create_server((str(address[0]), port), family=family, backlog=BACKLOG)
    except OSError as error:
        taken = "; choose another with --listen (:0 takes a free one)" if error.errno == errno.EADDRINUSE else ""
        where = f"port {port} on {host or 'this host'}"
        raise ListenError(f"{where} cannot be listened on: {error.strerror or error}{taken}") from error
