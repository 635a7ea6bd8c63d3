"""The controller's secrets: two token files for their owner's eyes only, and single-use tickets for a browser."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from backend.runtime.errors import SettingsError

TOKEN_BYTES = 32
TICKET_SECONDS = 600.0
MAX_TICKETS = 64

log = logging.getLogger(__name__)


def load_token(path: Path, given: str = "") -> str:
    """The token in this file, made at first use with mode 0600; ``given`` wins and is kept there for the command line.

    Raises ``SettingsError`` when the file can't be read or written, or holds no token.
    """
    try:
        if given:
            _write(path, given)
            return given
        if not path.exists():
            _write(path, secrets.token_urlsafe(TOKEN_BYTES))
        if path.stat().st_mode & 0o077:
            log.warning("%s was readable by others; its mode is 0600 now", path)
            path.chmod(0o600)
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the token file {path} can't be used: {error}") from error
    if not token:
        raise SettingsError(f"the token file {path} is empty; delete it to have a new token made")
    return token


def _write(path: Path, token: str) -> None:
    """Put the token in place whole, never readable by others even for an instant."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(token + "\n")
    temporary.replace(path)


class Tickets:
    """One-time passes that a printed URL carries in its fragment; each is worth one browser session."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deadlines: dict[bytes, float] = {}

    def issue(self) -> str:
        """A new ticket, good once within ten minutes. The oldest gives way when too many are out."""
        self._expire()
        while len(self._deadlines) >= MAX_TICKETS:
            del self._deadlines[next(iter(self._deadlines))]
        ticket = secrets.token_urlsafe(TOKEN_BYTES)
        self._deadlines[_digest(ticket)] = self._clock() + TICKET_SECONDS
        return ticket

    def redeem(self, ticket: str) -> bool:
        """Whether the ticket was good; it is not any more."""
        self._expire()
        # Looked up by digest: the time it takes tells nothing about a ticket that is near to a real one.
        return self._deadlines.pop(_digest(ticket), None) is not None

    def _expire(self) -> None:
        now = self._clock()
        for digest in [digest for digest, deadline in self._deadlines.items() if deadline <= now]:
            del self._deadlines[digest]


def _digest(ticket: str) -> bytes:
    return hashlib.sha256(ticket.encode("utf-8", "surrogatepass")).digest()
