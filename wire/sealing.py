"""Keys and tags (design section 5; reliability 5.3 "Frames").

Every connection has keys of its own. HKDF-SHA256 makes them from the shared secret, both sides' 32-byte nonces, and the
client hello's header (version, channel, run): one key confirms the server hello, and each direction has one key for
HMAC-SHA256 tags and one for AES-256-GCM. So a recorded frame is dead on another connection, run or channel, and a frame
that is sent back to its sender fails. No shared secret ever tags a frame itself.

There is no forward secrecy, and whoever sees a handshake can try guesses of the token on it: tokens must be random, 256
bits. Control payloads are authenticated, not hidden.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from wire.errors import LocalProtocolError

SECRET_BYTES = 32
NONCE_BYTES = 32
MAC_BYTES = 32
"""a whole HMAC-SHA256 tag, never truncated"""
GCM_TAG_BYTES = 16
MIN_SALT_BYTES = 16
OPEN_SECRET = bytes(SECRET_BYTES)
"""the join channel's secret under open admission: known to all, so it authenticates nobody"""

_GCM_NONCE = struct.Struct("<IQ")


def join_secret(token: str) -> bytes:
    """The join channel's 32-byte secret: SHA-256 of the token's UTF-8 bytes, exactly as given (strip files first).

    Raises ``LocalProtocolError`` for an empty token.
    """
    if not token:
        raise LocalProtocolError("the join token is empty; pass the controller's join token")
    return hashlib.sha256(token.encode()).digest()


def run_secret(join_secret: bytes, run_salt: bytes) -> bytes:
    """The 32-byte secret of a run's control and data channels, from the join secret and the salt in ``Accept``.

    Raises ``LocalProtocolError`` when the secret is not 32 bytes or the salt is shorter than 16.
    """
    check_secret(join_secret)
    if len(run_salt) < MIN_SALT_BYTES:
        raise LocalProtocolError(f"a run salt has at least {MIN_SALT_BYTES} bytes, this one has {len(run_salt)}")
    return _hkdf(join_secret, salt=run_salt, info=b"marchline run secret")


def check_secret(secret: bytes) -> None:
    """Refuse a secret of the wrong length: it would silently weaken every key made from it."""
    if len(secret) != SECRET_BYTES:
        raise LocalProtocolError(f"a secret has {SECRET_BYTES} bytes, this one has {len(secret)}; use join_secret()")


@dataclass(frozen=True, slots=True)
class DirectionKeys:
    """What protects the frames of one direction of one connection; used by its sender and by its receiver.

    Holds no state and never changes, so any number of threads may use it at once. Uniqueness of sequence numbers, on
    which AES-GCM's safety rests, is the session's duty.
    """

    mac_key: bytes = field(repr=False)
    cipher: AESGCM = field(repr=False)

    def tag(self, data: bytes | bytearray | memoryview) -> bytes:
        """The 32-byte HMAC-SHA256 tag of ``data``, from a fresh HMAC each time."""
        return hmac.digest(self.mac_key, data, "sha256")

    def verify(self, data: bytes | memoryview, tag: bytes | memoryview) -> bool:
        """Whether ``tag`` is the whole tag of ``data``; takes equal time for every wrong tag."""
        return hmac.compare_digest(self.tag(data), tag)

    def encrypt_into(self, sequence: int, header: memoryview, plain: memoryview, out: memoryview) -> None:
        """Seal ``plain`` with ``header`` authenticated beside it; ``out`` holds ``len(plain) + 16`` bytes."""
        self.cipher.encrypt_into(_GCM_NONCE.pack(0, sequence), plain, header, out)

    def decrypt(self, sequence: int, header: memoryview, sealed: memoryview) -> bytes | None:
        """The plain bytes (``len(sealed) - 16``), or None when tag, header or sequence number do not fit."""
        try:
            return self.cipher.decrypt(_GCM_NONCE.pack(0, sequence), sealed, header)
        except InvalidTag:
            return None


@dataclass(frozen=True, slots=True)
class ConnectionKeys:
    """All keys of one connection."""

    server_hello: DirectionKeys
    from_client: DirectionKeys
    from_server: DirectionKeys


def connection_keys(secret: bytes, client_header: bytes, client_nonce: bytes, server_nonce: bytes) -> ConnectionKeys:
    """Derive a connection's keys; both sides call this with the same four values.

    ``client_header`` is the client hello up to its nonce: magic, wire version, kind, channel, run. Raises
    ``LocalProtocolError`` when the secret is not 32 bytes.
    """
    check_secret(secret)
    salt = client_nonce + server_nonce

    def key(label: bytes) -> bytes:
        return _hkdf(secret, salt=salt, info=b"marchline " + label + b" " + client_header)

    def direction(label: bytes) -> DirectionKeys:
        return DirectionKeys(key(label + b" mac"), AESGCM(key(label + b" aead")))

    return ConnectionKeys(direction(b"server hello"), direction(b"client"), direction(b"server"))


def _hkdf(secret: bytes, *, salt: bytes, info: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=SECRET_BYTES, salt=salt, info=info).derive(secret)
