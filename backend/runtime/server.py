"""uvicorn as we need it: a port bound before all else, deadlines and caps on raw connections, a clean end.

uvicorn itself has no deadline for a request's headers, no cap per source, and closes websockets before the application
may say goodbye (reliability section 0, measured); all three are here.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Generator
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from backend.runtime.census import REFUSALS, UNKNOWN_SOURCE, Census
from backend.runtime.errors import SettingsError
from backend.runtime.limits import Limits, source_of
from backend.runtime.websocket import GuardedWebSocket

BACKLOG = 512
WS_MAX_BYTES = 2 << 20
"""one chunk of 1 MiB and its frame, twice over"""
GRACE_SECONDS = 10
MAX_HEAD_BYTES = 64 << 10
"""of a request's head, beyond the read in which it begins; the parser itself would take any number"""
_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"

log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ``SettingsError`` naming the port that can't be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SettingsError(f"the address {host} can't be used: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            cure = "stop what listens there, or choose another with --port (0 takes a free one)"
            raise SettingsError(f"port {port} on {host} is taken; {cure}") from error
        raise SettingsError(f"port {port} on {host} can't be opened: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


class GuardedHttp(HttpToolsProtocol):
    """HTTP with a bound on headers, a deadline for them and the body, counted by source. ``census`` is set by
    ``guarded``."""

    census: Census
    _head: int | None = None
    """bytes of a head that has begun and not ended, without those of the read in which it began; none between heads"""
    _heads = 0
    """that have begun"""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, or drop it."""
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._refusal, self._told = b"", False
        source = source_of(self.client[0]) if self.client else UNKNOWN_SOURCE
        self._source: str | None = source
        if not self.census.enter(source):
            self._source = None
            if self.census.refusing >= REFUSALS:
                transport.abort()
                return
            self._refusal = self.census.refusal(source)
            self.census.refusing += 1
        _bound_unacknowledged(transport, self.census.limits)
        self._arm(self.census.limits.request_head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let the connection go."""
        self._let_go()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came, and refuse a head that doesn't end."""
        before = self._heads
        super().data_received(data)
        if self._head is None or self._heads != before:
            return
        self._head += len(data)
        if self._head > MAX_HEAD_BYTES and not self.transport.is_closing():
            log.info("%s sent a request whose head is over %d KiB", self._source, MAX_HEAD_BYTES >> 10)
            self.transport.write(_HEAD_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        """A request's first byte came."""
        self._head = 0
        self._heads += 1
        self._arm(self.census.limits.request_head_seconds)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is whole; the body has a deadline of its own."""
        self._head = None
        if self._refusal:
            self.transport.write(self._refusal)
            self.transport.close()
            return
        self._arm(self.census.limits.request_body_seconds)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Some of the body; of no use when the answer is given already."""
        if not self._refusal:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        if self._refusal:
            return
        self._disarm()
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        """The websocket's protocol takes over, and counts itself."""
        if self._refusal:
            return
        self._let_go()
        super().handle_websocket_upgrade()

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._too_slow)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        log.info("%s sent no whole request in time", self._source)
        self.transport.abort()

    def _let_go(self) -> None:
        self._disarm()
        source, self._source = self._source, None
        if source is not None:
            self.census.leave(source)
        elif self._refusal and not self._told:
            self._told = True
            self.census.refusing -= 1


class Server(uvicorn.Server):
    """Lets the controller say goodbye before connections are closed; a signal ends it without ending the process."""

    def __init__(
        self, config: uvicorn.Config, *, ready: Callable[[], None], goodbye: Callable[[str], Awaitable[None]]
    ) -> None:
        super().__init__(config)
        self._ready = ready
        self._goodbye = goodbye
        self.stopped_by = ""
        """name of the signal that asked for the end, once one did"""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve, then say so."""
        await super().startup(sockets)
        if self.started and not self.should_exit:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Say goodbye, then close. A second Ctrl-C cuts it short."""
        goodbye = asyncio.ensure_future(self._goodbye(self.stopped_by))
        while not goodbye.done() and not self.force_exit:
            await asyncio.wait([goodbye], timeout=0.1)
        if goodbye.done():
            goodbye.result()
        else:
            goodbye.cancel()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Take SIGINT, SIGTERM and SIGHUP as a wish to stop, once; uvicorn would raise them again afterwards.

        A SIGHUP that is ignored already, as under nohup, stays so.
        """
        before = signal.getsignal(signal.SIGHUP)
        with super().capture_signals():
            if before is not signal.SIG_IGN:
                signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                if before is not signal.SIG_IGN:
                    signal.signal(signal.SIGHUP, before)
                self._captured_signals.clear()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal names the end, so that the record can say who asked for it."""
        self.stopped_by = self.stopped_by or signal.Signals(sig).name
        super().handle_exit(sig, frame)


def guarded(app: Any, limits: Limits, **options: Any) -> uvicorn.Config:
    """A uvicorn configuration with all of the above, for a socket from ``bind``."""
    census = Census(limits)
    http = type("CountedHttp", (GuardedHttp,), {"census": census})
    ws = type("CountedWebSocket", (GuardedWebSocket,), {"census": census})
    settings: dict[str, Any] = {
        "http": http,
        "ws": ws,
        "ws_max_size": WS_MAX_BYTES,
        "ws_per_message_deflate": False,
        # Our own heartbeats and stalls tell life from death; a pong stuck behind bulk data would not (H3).
        "ws_ping_interval": None,
        "ws_ping_timeout": None,
        # Connections are counted above, and refused by name; this one bounds handlers whose client is gone.
        "limit_concurrency": 2 * limits.connections,
        "timeout_graceful_shutdown": GRACE_SECONDS,
        "backlog": BACKLOG,
        # Nobody in front of us is trusted to say who is behind.
        "proxy_headers": False,
        "server_header": False,
        "access_log": False,
        "log_config": None,
    }
    return uvicorn.Config(app, **(settings | options))


def _bound_unacknowledged(transport: asyncio.Transport, limits: Limits) -> None:
    """Have the kernel give up a peer that acknowledges nothing; its own patience is a quarter of an hour.

    Probes on an idle link also keep it open in the tables of whatever translates addresses on the way.
    """
    handle = transport.get_extra_info("socket")
    if handle is None or handle.family not in (socket.AF_INET, socket.AF_INET6):
        return
    seconds = max(1, int(limits.send_stall_seconds))
    options = {"TCP_KEEPIDLE": seconds, "TCP_KEEPINTVL": max(1, seconds // 3), "TCP_USER_TIMEOUT": 2000 * seconds}
    with contextlib.suppress(OSError):
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):
                handle.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
