"""Websocket close codes (RFC 6455 leaves 4000 to 4999 to applications) and which one closes after which error."""

from __future__ import annotations

from enum import IntEnum

from wire.errors import ErrorCode


class CloseCode(IntEnum):
    """Why this side closes a link."""

    PROTOCOL = 4400
    """the peer's bytes were illegal"""
    AUTH = 4401
    """the peer does not hold the secret"""
    REFUSED = 4403
    """authentic or not, this peer is not wanted here: rejected, turned away, unknown run, too many connections"""
    SILENT = 4408
    """nothing verified came in time"""
    SUPERSEDED = 4409
    """a newer link of the same host took over"""
    GONE = 4410
    """the run that this link served is over"""


_BY_ERROR = {
    ErrorCode.BAD_MAC: CloseCode.AUTH,
    ErrorCode.UNKNOWN_RUN: CloseCode.REFUSED,
    ErrorCode.PEER_REFUSED: CloseCode.REFUSED,
}


def close_code(error: ErrorCode) -> CloseCode:
    """The close code to end a connection with after this error."""
    return _BY_ERROR.get(error, CloseCode.PROTOCOL)
