"""How a link ends: strangers who never got in, messages that have no place, and the words and codes of each."""

from __future__ import annotations

import asyncio
import logging

from backend.runtime.errors import LinkEnded
from wire.codes import CloseCode, close_code
from wire.errors import ErrorCode, RemoteProtocolError
from wire.messages import Message
from wire.session import Incoming, Received

log = logging.getLogger(__name__)


class Stranger(Exception):
    """A peer that never proved who it is, and what to tell it."""

    def __init__(self, code: str, reason: str, close: CloseCode, refusal: bytes | None = None) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.close = close
        self.refusal = refusal


def verdict(task: asyncio.Task[None]) -> tuple[str, CloseCode | None]:
    """Why a link's task ended, and the code to close with unless it's closed already."""
    error = task.exception()
    if error is None:
        return "the controller closed it", None
    if isinstance(error, RemoteProtocolError):
        return f"protocol error {error.code}: {error.text}", close_code(error.code)
    if isinstance(error, LinkEnded):
        return str(error), CloseCode.REFUSED
    log.error("a link failed inside the controller", exc_info=error)
    return f"internal error: {type(error).__name__}: {error}", CloseCode.REFUSED


def expected(event: Incoming, kinds: tuple[type[Message], ...]) -> Received:
    """The message, when it is of one of these kinds. Raises ``RemoteProtocolError``."""
    if isinstance(event, Received) and isinstance(event.message, kinds):
        return event
    what = type(event.message).__name__ if isinstance(event, Received) else type(event).__name__
    raise RemoteProtocolError(ErrorCode.BAD_MESSAGE, f"{what} has no place on this link")


def out_of_turn(due: str, message: Message) -> Stranger:
    """What a peer is that began with another message than the one due."""
    text = f"the first message must be {due}, not {type(message).__name__}"
    return Stranger("hello_expected", text, CloseCode.PROTOCOL)
