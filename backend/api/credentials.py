"""Who may come in: the operator's token, browser sessions traded for it, and a count of those who failed."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from backend.runtime.limits import source_of

SESSION_SECONDS = 7 * 86400.0
"""a session ends this long after it was opened"""
IDLE_SECONDS = 86400.0
"""and this long after it was last used"""
MAX_SESSIONS = 256

FREE_FAILURES = 10
"""wrong credentials of one source that are answered with 401 in one window; further ones with 429"""
FAILURE_WINDOW_SECONDS = 60.0
MAX_SOURCES = 4096

Clock = Callable[[], float]


def digest(secret: str) -> bytes:
    """What is kept and compared in a secret's place."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


class OperatorToken:
    """Compares what a caller shows with the token, in a time that tells nothing of either."""

    def __init__(self, token: str) -> None:
        self._digest = digest(token)

    def matches(self, shown: str) -> bool:
        """Whether this is the token."""
        return hmac.compare_digest(digest(shown), self._digest)

    @property
    def cookie_name(self) -> str:
        """Cookies do not know ports: controllers of one machine must not overwrite each other's."""
        return f"marchline_{hashlib.sha256(b'cookie name' + self._digest).hexdigest()[:8]}"


@dataclass(slots=True)
class Session:
    """One signed-in browser. Times in monotonic seconds."""

    opened: float
    used: float


class Sessions:
    """Browser sessions, by the hash of the cookie. They live in memory: a restart signs everybody out."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self) -> str:
        """A new session's cookie value. The one unused for longest gives way when there are too many."""
        now = self._clock()
        self._expire(now)
        while len(self._sessions) >= MAX_SESSIONS:
            self._sessions.popitem(last=False)
        value = secrets.token_urlsafe(32)
        self._sessions[digest(value)] = Session(now, now)
        return value

    def find(self, value: str) -> bytes | None:
        """The key of the session that this cookie value opens, now used again; none when there is none."""
        now = self._clock()
        self._expire(now)
        key = digest(value)
        session = self._sessions.get(key)
        if session is None:
            return None
        session.used = now
        self._sessions.move_to_end(key)
        return key

    def alive(self, key: bytes) -> bool:
        """Whether the session still is; asking is not using it."""
        self._expire(self._clock())
        return key in self._sessions

    def close(self, key: bytes) -> None:
        """Sign the browser out."""
        self._sessions.pop(key, None)

    def _expire(self, now: float) -> None:
        over = [
            key
            for key, session in self._sessions.items()
            if now - session.opened >= SESSION_SECONDS or now - session.used >= IDLE_SECONDS
        ]
        for key in over:
            del self._sessions[key]


class Failures:
    """Wrong credentials by source, so that a guesser is slowed, counted and logged once instead of each time.

    The right credential is never refused for the failures of others: it has 256 bits and cannot be guessed,
    while a lock-out could be caused by anybody behind the same address.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._sources: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self.total = 0

    def count(self, address: str) -> tuple[int, float]:
        """One more failure of this address: how many are in its window, and in how many seconds that ends."""
        now = self._clock()
        source = source_of(address)
        failures, since = self._sources.pop(source, (0, now))
        if now - since >= FAILURE_WINDOW_SECONDS:
            failures, since = 0, now
        self._sources[source] = (failures + 1, since)
        if len(self._sources) > MAX_SOURCES:
            self._sources.popitem(last=False)
        self.total += 1
        return failures + 1, since + FAILURE_WINDOW_SECONDS - now
