"""The one door: every request and every websocket passes here before anything is routed. Default deny.

In this order, each refusal with its code:

    Host         loopback name, IP literal (cannot be rebound) or configured name    421 host_not_allowed
    Origin       absent, or this very host                                           403 origin_refused
    Fetch site   absent, same-origin or none, but for opening the page               403 cross_site_refused
    size         at most 64 KiB, 4 KiB from strangers, within ten seconds            413, 408
    credential   operator token or session cookie, but for what is public below      401, 429
    header       X-Marchline on whatever a cookie alone would change                 403 header_missing

Host is the check that stops DNS rebinding; Origin, the header and SameSite stop other pages of one browser.
There are no CORS headers at all, so no preflight of another origin ever succeeds.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backend.api.credentials import FREE_FAILURES, Failures, OperatorToken, Sessions
from backend.api.problems import ApiProblem, internal, response_of

MAX_BODY_BYTES = 64 * 1024
MAX_STRANGER_BODY_BYTES = 4 * 1024
BODY_SECONDS = 10.0
HEADER = b"x-marchline"

SESSION_PATH = "/api/v1/session"
WORKER_SOCKETS = frozenset({"/ws/join", "/ws/control", "/ws/data"})
"""agents and relays prove themselves inside, by the join token"""
PUBLIC_PATHS = frozenset({"/", "/favicon.ico", "/livez", "/healthz", "/readyz", "/version"})
PUBLIC_TREES = ("/app/", "/vendor/")
SAFE_METHODS = frozenset({"GET", "HEAD"})

API_POLICY = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-security-policy", API_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who was let in. ``session`` is the key of the session in use, none for the token or a stranger."""

    kind: str
    """token, session or stranger"""
    session: bytes | None = None


def caller_of(scope: Scope) -> Caller:
    """The caller of an admitted request."""
    caller: Caller = scope["marchline.caller"]
    return caller


class Gatekeeper:
    """The ASGI middleware. One instance guards one app."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: OperatorToken,
        sessions: Sessions,
        failures: Failures,
        allowed_hosts: Iterable[str] = (),
    ) -> None:
        self._app = app
        self._token = token
        self._sessions = sessions
        self._failures = failures
        self._names = {"localhost", *(name.lower().rstrip(".") for name in allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        guard = _Answer(send)
        try:
            scope["marchline.caller"] = self._admit(scope)
            if scope["type"] == "http":
                receive = await _read_body(scope, receive, scope["marchline.caller"])
            await self._app(scope, receive, guard)
        except ApiProblem as problem:
            await _refuse(problem, scope, receive, guard)
        except Exception as error:
            if guard.started:
                raise
            answer = internal(error, scope.get("method", "WEBSOCKET"), scope["path"])
            await _refuse(answer, scope, receive, guard)

    def _admit(self, scope: Scope) -> Caller:
        headers = _Headers(scope)
        host = headers.single(b"host")
        self._check_host(host)
        _check_origin(scope, headers, host)
        _check_site(scope, headers)
        _check_length(headers, MAX_BODY_BYTES)
        caller = self._identify(scope, headers)
        if caller.kind == "stranger" and not _is_public(scope):
            raise _unauthenticated("credential_missing", "Sign in, or send the operator token as a bearer token.")
        if caller.kind == "session" and not _is_safe(scope) and headers.single(HEADER) is None:
            raise ApiProblem(403, "header_missing", "A change by cookie needs the header X-Marchline: 1.")
        return caller

    def _check_host(self, host: str | None) -> None:
        name = _host_name(host or "")
        if name is None:
            raise ApiProblem(421, "host_not_allowed", "The request names no host, or not exactly one.")
        if name not in self._names and not _is_ip(name):
            raise ApiProblem(
                421,
                "host_not_allowed",
                f"This controller does not answer to the name {name[:100]}; use its IP address, or start it "
                f"with --allow-host {name[:100]}.",
            )

    def _identify(self, scope: Scope, headers: _Headers) -> Caller:
        authorization = headers.single(b"authorization")
        if authorization is not None and scope["path"] not in WORKER_SOCKETS:
            scheme, _, shown = authorization.partition(" ")
            if scheme.lower() == "bearer" and self._token.matches(shown.strip()):
                return Caller("token")
            raise failure(self._failures, scope, "The bearer token is not this controller's operator token.")
        value = cookie_parser(headers.joined(b"cookie")).get(self._token.cookie_name)
        key = self._sessions.find(value) if value else None
        return Caller("session", key) if key is not None else Caller("stranger")


def failure(failures: Failures, scope: Scope, detail: str) -> ApiProblem:
    """Count a wrong credential of this peer, and say what to answer."""
    address = scope["client"][0] if scope.get("client") else "unknown"
    count, seconds = failures.count(address)
    if count in (1, FREE_FAILURES + 1):
        log.warning("wrong credential from %s, %d in the last minute", address, count)
    if count <= FREE_FAILURES:
        return _unauthenticated("credential_wrong", detail)
    wait = str(max(1, round(seconds)))
    return ApiProblem(
        429,
        "too_many_failures",
        f"Too many wrong credentials from {address}; the next wrong one may be sent in {wait} s.",
        headers={"Retry-After": wait},
    )


class _Headers:
    """Header lookup that notices repetition: two values of a header that decides are none."""

    def __init__(self, scope: Scope) -> None:
        self._values: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            self._values.setdefault(name.lower(), []).append(value)

    def single(self, name: bytes) -> str | None:
        """The one value; none when there is none, and an impossible one when there are several."""
        values = self._values.get(name)
        if not values:
            return None
        return values[0].decode("latin-1") if len(values) == 1 else "\0"

    def joined(self, name: bytes) -> str:
        return "; ".join(value.decode("latin-1") for value in self._values.get(name, ()))


class _Answer:
    """The way out: adds the security headers that the answer does not set itself."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.http.response.start"):
            present = {name.lower() for name, _ in message.get("headers", ())}
            extra = [(name, value) for name, value in _HEADERS if name not in present]
            message = {**message, "headers": [*message.get("headers", ()), *extra]}
        self.started = True
        await self._send(message)


def _host_name(host: str) -> str | None:
    """``name``, ``name:port`` or ``[v6]:port`` without the port, in lower case; none for anything else."""
    if host.startswith("["):
        name, bracket, rest = host[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            return None
        port = rest[1:]
    else:
        name, _, port = host.partition(":")
    if not name or (port and not (port.isascii() and port.isdigit())):
        return None
    return name.lower().rstrip(".") if name.isascii() and name.isprintable() else None


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _check_origin(scope: Scope, headers: _Headers, host: str | None) -> None:
    origin = headers.single(b"origin")
    if origin is None:
        return
    # A proxy that ends TLS in front of us makes our http the browser's https, which is no weaker an origin.
    schemes = ("https",) if scope["scheme"] in ("https", "wss") else ("http", "https")
    if origin.lower() not in [f"{scheme}://{host}".lower() for scheme in schemes]:
        raise ApiProblem(403, "origin_refused", "The request comes from a page of another origin.")


def _check_site(scope: Scope, headers: _Headers) -> None:
    site = headers.single(b"sec-fetch-site")
    opens_page = scope["path"] == "/" and _is_safe(scope) and scope["type"] == "http"
    if site not in (None, "same-origin", "none") and not opens_page:
        raise ApiProblem(403, "cross_site_refused", "The request comes from another site.")


def _is_safe(scope: Scope) -> bool:
    return scope["type"] == "websocket" or scope["method"] in SAFE_METHODS


def _is_public(scope: Scope) -> bool:
    path = scope["path"]
    if scope["type"] == "websocket":
        return path in WORKER_SOCKETS
    if scope["method"] in SAFE_METHODS:
        return path in PUBLIC_PATHS or path.startswith(PUBLIC_TREES)
    return bool(path == SESSION_PATH and scope["method"] == "POST")


def _unauthenticated(code: str, detail: str) -> ApiProblem:
    return ApiProblem(401, code, detail, headers={"WWW-Authenticate": 'Bearer realm="marchline"'})


# ---------------------------------------------------------------------------------------------------- bodies


def _check_length(headers: _Headers, limit: int) -> None:
    length = headers.single(b"content-length")
    if length is not None and not (length.isascii() and length.isdigit()):
        raise ApiProblem(400, "bad_request", "Content-Length is not a number.")
    if length is not None and int(length[:20]) > limit:
        raise _too_large(limit)


def _too_large(limit: int) -> ApiProblem:
    return ApiProblem(413, "body_too_large", f"The body is over {limit // 1024} KiB.", headers={"Connection": "close"})


async def _read_body(scope: Scope, receive: Receive, caller: Caller) -> Receive:
    """Take the body in, bounded in size and time; the ``receive`` handed out gives it back in one piece."""
    if scope["method"] in SAFE_METHODS:
        return receive
    limit = MAX_STRANGER_BODY_BYTES if caller.kind == "stranger" else MAX_BODY_BYTES
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    break
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise _too_large(limit)
                if not message.get("more_body", False):
                    break
    except TimeoutError as error:
        detail = f"The body did not arrive within {BODY_SECONDS:g} s."
        raise ApiProblem(408, "body_too_slow", detail, headers={"Connection": "close"}) from error
    whole: dict[str, Any] | None = {"type": "http.request", "body": b"".join(parts), "more_body": False}

    async def replay() -> Message:
        nonlocal whole
        if whole is None:
            return await receive()
        message, whole = whole, None
        return message

    return replay


async def _refuse(problem: ApiProblem, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the problem; a websocket handshake is answered in HTTP where the server can."""
    if scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008, "reason": problem.code})
        return
    await response_of(problem, scope["path"])(scope, receive, send)
