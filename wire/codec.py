"""Messages to payloads and back, with every failure named (the tag of a payload is checked before it comes here)."""

from __future__ import annotations

import msgspec

from wire.errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from wire.frames import printable
from wire.messages import MESSAGES, Message, decode, encode

_KNOWN_KINDS = frozenset(message.__name__ for message in MESSAGES)
# All that msgspec raises on foreign input: its own errors, bad UTF-8, unhashable keys, odd dates, deep nesting.
_CODEC_ERRORS = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)


def pack(message: Message) -> bytes:
    """The payload of one message. Raises ``LocalProtocolError`` for what msgpack cannot hold."""
    try:
        return encode(message)
    except _CODEC_ERRORS as error:
        raise LocalProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from error


def unpack(payload: memoryview) -> Message:
    """The message in an authentic payload.

    Raises ``RemoteProtocolError``: unknown_kind when no message has that name, bad_message for everything else.
    """
    try:
        return decode(payload)
    except _CODEC_ERRORS as error:
        raise _undecodable(payload, error) from error


class _Tag(msgspec.Struct):
    kind: str


def _undecodable(payload: memoryview, error: Exception) -> RemoteProtocolError:
    try:
        kind = msgspec.msgpack.decode(payload, type=_Tag).kind
    except _CODEC_ERRORS:
        return RemoteProtocolError(ErrorCode.BAD_MESSAGE, "the payload is no message of this protocol")
    kind = printable(kind, 40)
    if kind not in _KNOWN_KINDS:
        return RemoteProtocolError(ErrorCode.UNKNOWN_KIND, f"there is no message {kind!r} in this wire version")
    return RemoteProtocolError(ErrorCode.BAD_MESSAGE, f"{kind}: {printable(str(error), 200)}")
