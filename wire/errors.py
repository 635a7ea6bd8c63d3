"""Everything that can go wrong on the wire, by name.

* :class:`ProtocolError`
    * :class:`LocalProtocolError`: this side tried something illegal; a bug here, nothing was sent
    * :class:`RemoteProtocolError`: the peer sent something illegal; close the connection, naming :attr:`code`
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """Why a peer's bytes were refused. Equal to its plain string, so ``error.code == "bad_mac"`` works."""

    BAD_MAGIC = "bad_magic"
    """not a frame of this protocol"""
    VERSION_MISMATCH = "version_mismatch"
    """the peer speaks another wire version; the text names both"""
    UNKNOWN_KIND = "unknown_kind"
    """no such kind of frame or of message"""
    UNEXPECTED_KIND = "unexpected_kind"
    """a handshake frame after the handshake"""
    OVERSIZE = "oversize"
    """longer than the cap for its kind"""
    BAD_MAC = "bad_mac"
    """the tag does not verify: another secret, another direction, another connection, or altered bytes"""
    REPLAY = "replay"
    """authentic, but its sequence number is not exactly the last one plus one"""
    BAD_MESSAGE = "bad_message"
    """malformed: wrong length, wrong field, undecodable"""
    UNKNOWN_RUN = "unknown_run"
    """no run of this number takes connections on this channel"""
    HANDSHAKE_EXPECTED = "handshake_expected"
    """another frame came where the next frame of the handshake belongs"""
    WRONG_CHANNEL = "wrong_channel"
    """the frame, or the whole connection, belongs on another channel"""
    PEER_REFUSED = "peer_refused"
    """the peer ended the handshake; ``peer_code`` holds its own code"""


class ProtocolError(Exception):
    """Base of both sides' errors."""


class LocalProtocolError(ProtocolError):
    """This side asked for something the protocol forbids. The session stays usable: nothing was sealed."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol; the session is dead and its connection must be closed.

    ``code`` is stable and machine-readable, ``text`` is one line for people and logs, free of secrets. ``peer_code`` is
    set with ``peer_refused`` only: the code that the peer gave, which no tag protects.
    """

    def __init__(self, code: ErrorCode | str, text: str, *, peer_code: str = "") -> None:
        super().__init__(f"{code}: {text}")
        self.code = ErrorCode(code)
        self.text = text
        self.peer_code = peer_code

    def again(self) -> RemoteProtocolError:
        """The same failure as a new exception, for a later call on the dead session."""
        return RemoteProtocolError(self.code, self.text, peer_code=self.peer_code)
