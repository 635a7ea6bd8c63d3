"""The agent's link to the controller: one URL, one websocket, one sealed session; and what is wrong when it cannot
be had.

Proxy variables of the environment are ignored (case K03): cluster traffic goes to the address that was given.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus, InvalidURI
from websockets.http11 import Response

from wire.codes import CloseCode, close_code
from wire.errors import ErrorCode, RemoteProtocolError
from wire.messages import NO_RANK, WIRE_VERSION, Message
from wire.sealing import OPEN_SECRET, join_secret
from wire.session import Channel, Received, Session
from worker.exits import ExitCode

MAX_FRAME_BYTES = 2 << 20
_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_BUSY = {429, 500, 502, 503, 504}
"""HTTP answers of a proxy whose controller is away for a moment"""


class Unreachable(Exception):
    """Nobody answered, this time; dialling again may help."""


class Refused(Exception):
    """Dialling again cannot help; ``code`` is the agent's exit code, the text names the cure."""

    def __init__(self, code: ExitCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class LinkEnded(Exception):
    """An established link ended. ``close_code`` is the websocket's, 1006 when it just broke."""

    def __init__(self, close_code: int, reason: str) -> None:
        super().__init__(reason or f"the connection ended ({close_code})")
        self.close_code = close_code


@dataclass(frozen=True, slots=True)
class Target:
    """Where to join, and with what. ``base`` is ``ws://host:port/prefix``; an empty token means open admission."""

    base: str
    token: str
    run: int | None = None
    """the run to ask for; its admission decides which secret opens the door"""
    connect_seconds: float = 10.0
    write_seconds: float = 30.0

    @property
    def secret(self) -> bytes:
        """The join channel's secret."""
        return join_secret(self.token) if self.token else OPEN_SECRET


def base_url(text: str) -> str:
    """``ws://host:port/prefix`` of what an operator types: http, https, ws, wss, or just ``host:port``.

    Raises ``Refused``.
    """
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in _SCHEMES or not parts.hostname or port == -1:
        raise Refused(
            ExitCode.USAGE, f"--join {text!r} is no address; give the controller's, like http://10.0.0.5:8470"
        )
    path = parts.path.rstrip("/").removesuffix("/ws/join")
    return f"{_SCHEMES[parts.scheme]}://{parts.netloc.rpartition('@')[2]}{path}"


class JoinLink:
    """An established link. One task receives; any task may send. ``heard_at`` is the loop's time of the last
    message."""

    def __init__(self, socket: ClientConnection, session: Session, write_seconds: float) -> None:
        self._socket = socket
        self._session = session
        self._write_seconds = write_seconds
        self._waiting: list[Message] = []
        self.heard_at = asyncio.get_running_loop().time()

    @classmethod
    async def dial(cls, target: Target) -> JoinLink:
        """Connect and shake hands, within ``connect_seconds``. Raises ``Unreachable``, ``Refused``."""
        try:
            async with asyncio.timeout(target.connect_seconds):
                socket = await _connect(target)
        except TimeoutError as error:
            raise Unreachable(f"{target.base} did not answer within {target.connect_seconds:g} s") from error
        session = Session.client(Channel.JOIN, target.secret, run_id=target.run or 0)
        try:
            async with asyncio.timeout(target.connect_seconds):
                await _shake_hands(socket, session)
        except BaseException as error:
            code = close_code(error.code) if isinstance(error, RemoteProtocolError) else 1001
            await socket.close(code)
            raise _handshake_failure(error, target) from error
        return cls(socket, session, target.write_seconds)

    @property
    def local_address(self) -> str:
        """This host's address, as the way to the controller leaves from it."""
        return str(self._socket.local_address[0])

    async def send(self, message: Message) -> None:
        """Seal and write one message. Raises ``LinkEnded``, also when the controller takes nothing for 30 s."""
        try:
            async with asyncio.timeout(self._write_seconds):
                await self._socket.send(self._session.seal(message, NO_RANK))
        except TimeoutError as error:
            raise LinkEnded(1006, f"the controller took nothing for {self._write_seconds:g} s") from error
        except ConnectionClosed as closed:
            raise _ended(closed) from closed

    async def receive(self) -> Message:
        """The next message. Raises ``LinkEnded``."""
        while not self._waiting:
            try:
                data = await self._socket.recv()
                events = self._session.receive(data)
            except ConnectionClosed as closed:
                raise _ended(closed) from closed
            except RemoteProtocolError as error:
                await self._socket.close(close_code(error.code))
                raise LinkEnded(close_code(error.code), f"the controller broke the protocol: {error}") from error
            self.heard_at = asyncio.get_running_loop().time()
            self._waiting += [event.message for event in events if isinstance(event, Received)]
        return self._waiting.pop(0)

    async def close(self, reason: str = "") -> None:
        """Close the websocket; idempotent."""
        await self._socket.close(1000, reason[:120])


async def _connect(target: Target) -> ClientConnection:
    url = f"{target.base}/ws/join"
    try:
        return await connect(
            url,
            proxy=None,
            compression=None,
            max_size=MAX_FRAME_BYTES,
            ping_interval=None,  # heartbeats of our own, both ways, tell more
            open_timeout=None,
            close_timeout=2,
        )
    except InvalidStatus as error:
        raise _http_failure(error.response, url) from error
    except InvalidURI as error:
        raise Refused(ExitCode.USAGE, f"--join: {error}") from error
    except InvalidHandshake as error:
        raise _not_http(error, url) from error
    except ssl.SSLCertVerificationError as error:
        raise Refused(ExitCode.ERROR, f"{url}: the certificate was not accepted: {error.verify_message}") from error
    except ssl.SSLError as error:
        text = f"{url}: no TLS is spoken there ({error.reason}); use http:// or ws:// for a plain port"
        raise Refused(ExitCode.ERROR, text) from error
    except ConnectionResetError as error:
        hint = "; does that port speak TLS? a plain one is dialled with http://" if url.startswith("wss:") else ""
        raise Unreachable(f"{target.base} dropped the connection{hint}") from error
    except OSError as error:
        raise Unreachable(f"{target.base} cannot be reached: {error.strerror or error}") from error


async def _shake_hands(socket: ClientConnection, session: Session) -> None:
    await socket.send(session.opening())
    while not session.established:
        session.receive(await socket.recv())
        for reply in session.pending():
            await socket.send(reply)


def _http_failure(response: Response, url: str) -> Unreachable | Refused:
    status = response.status_code
    if status in _BUSY and (said := _problem(response)):
        return Unreachable(f"{url} answered HTTP {status}: {said}")
    if status in _BUSY:
        return Unreachable(f"{url} answered HTTP {status}: a proxy is there, the controller behind it is not")
    if status in (400, 403, 421):
        text = f"{url} answered HTTP {status}; if it is a Marchline controller, it does not go by that host name"
        return Refused(ExitCode.ERROR, f"{text}: add the name to its allowed hosts, or dial its address")
    text = f"{url} answered HTTP {status}: not a Marchline controller, or its path prefix is missing from --join"
    return Refused(ExitCode.ERROR, text)


def _problem(response: Response) -> str:
    """A controller's own words on why not now; empty when they are not a controller's."""
    if not response.headers.get("Content-Type", "").startswith("application/problem+json"):
        return ""
    try:
        return str(json.loads(response.body)["detail"])
    except (ValueError, KeyError, TypeError):
        return ""


def _not_http(error: InvalidHandshake, url: str) -> Unreachable | Refused:
    if isinstance(error, InvalidMessage) and isinstance(error.__cause__, EOFError | ConnectionError):
        hint = "; if that port speaks TLS, dial it with https://" if url.startswith("ws:") else ""
        return Unreachable(f"{url} closed the connection without an answer{hint}")
    return Refused(ExitCode.ERROR, f"{url} is not a Marchline controller: {error}; does the port speak TLS (https://)?")


def _handshake_failure(error: BaseException, target: Target) -> BaseException:
    if isinstance(error, RemoteProtocolError):
        return _protocol_failure(error, target)
    if isinstance(error, TimeoutError):
        return Unreachable(f"{target.base} took the connection and did not speak within {target.connect_seconds:g} s")
    if isinstance(error, ConnectionClosed):
        ended = _ended(error)
        if ended.close_code == CloseCode.AUTH:
            return Refused(ExitCode.AUTHENTICATION, _wrong_token(target))
        return Unreachable(f"{target.base} ended the handshake: {ended}")
    return error


def _protocol_failure(error: RemoteProtocolError, target: Target) -> Refused:
    code = error.peer_code or error.code
    if code == ErrorCode.BAD_MAC:
        return Refused(ExitCode.AUTHENTICATION, _wrong_token(target))
    if code == ErrorCode.VERSION_MISMATCH:
        text = f"{error.text}; this worker speaks wire version {WIRE_VERSION}: install the same release on both"
        return Refused(ExitCode.REJECTED, text)
    if error.code == ErrorCode.PEER_REFUSED:
        return Refused(ExitCode.REJECTED, error.text)
    return Refused(ExitCode.ERROR, f"{target.base} is not a Marchline controller: {error.text}")


def _wrong_token(target: Target) -> str:
    if target.token:
        return (
            f"{target.base} has another join token; copy the one that the controller printed (var/join.token there), "
            "or give none if it admits openly"
        )
    return (
        f"{target.base} wants a join token: pass --token, --token-file or MARCHLINE_JOIN_TOKEN "
        "(the controller keeps it in var/join.token)"
    )


def _ended(closed: ConnectionClosed) -> LinkEnded:
    frame = closed.rcvd
    return LinkEnded(frame.code if frame else 1006, frame.reason if frame else "")
