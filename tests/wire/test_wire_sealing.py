"""Keys against an independent HKDF (RFC 5869) and recorded values; tags and seals."""

from __future__ import annotations

import hashlib
import hmac
from itertools import combinations

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from wire_ends import CLIENT_NONCE, SECRET, SERVER_NONCE, keys

from wire.errors import LocalProtocolError
from wire.frames import Channel
from wire.messages import WIRE_VERSION
from wire.sealing import OPEN_SECRET, connection_keys, join_secret, run_secret


def hkdf(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """RFC 5869 with SHA-256, one block of output."""
    extracted = hmac.digest(salt, secret, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def test_the_join_secret_is_the_tokens_sha256() -> None:
    assert join_secret("péage") == hashlib.sha256("péage".encode()).digest()
    assert join_secret("a") != join_secret("a\n")


def test_the_run_secret_is_hkdf_of_join_secret_and_salt() -> None:
    assert run_secret(SECRET, b"s" * 16) == hkdf(SECRET, b"s" * 16, b"marchline run secret")
    assert run_secret(SECRET, b"s" * 16) != run_secret(SECRET, b"t" * 16)
    assert run_secret(SECRET, b"s" * 16) != run_secret(OPEN_SECRET, b"s" * 16)


def test_connection_keys_are_hkdf_with_one_label_each() -> None:
    header = b"MLIN" + bytes([WIRE_VERSION, 0, 1, 0, 3, 0, 0, 0, 7, 0, 0, 0])
    made = keys(Channel.DATA, run_id=7)
    for direction, label in [
        (made.server_hello, b"server hello"),
        (made.from_client, b"client"),
        (made.from_server, b"server"),
    ]:
        salt = CLIENT_NONCE + SERVER_NONCE
        assert direction.mac_key == hkdf(SECRET, salt, b"marchline " + label + b" mac " + header)
        sealed = bytearray(4 + 16)
        direction.encrypt_into(5, memoryview(b"head"), memoryview(b"data"), memoryview(sealed))
        cipher = AESGCM(hkdf(SECRET, salt, b"marchline " + label + b" aead " + header))
        assert cipher.decrypt(bytes(4) + (5).to_bytes(8, "little"), bytes(sealed), b"head") == b"data"


def test_every_input_changes_every_key() -> None:
    """Secret, channel, run and each nonce; and the three directions of each connection differ."""
    swapped = connection_keys(SECRET, b"header", SERVER_NONCE, CLIENT_NONCE)
    connections = [
        keys(),
        keys(Channel.CONTROL),
        keys(run_id=8),
        keys(secret=OPEN_SECRET),
        connection_keys(SECRET, b"header", CLIENT_NONCE, SERVER_NONCE),
        connection_keys(SECRET, b"header", CLIENT_NONCE, CLIENT_NONCE),
        connection_keys(SECRET, b"header", SERVER_NONCE, SERVER_NONCE),
        swapped,
    ]
    tags = [
        direction.tag(b"")
        for made in connections
        for direction in (made.server_hello, made.from_client, made.from_server)
    ]
    assert all(one != other for one, other in combinations(tags, 2))


def test_only_the_whole_true_tag_verifies() -> None:
    sender = keys().from_client
    tag = sender.tag(b"data")
    assert len(tag) == 32
    assert sender.verify(b"data", tag)
    assert sender.verify(memoryview(b"data"), memoryview(tag))
    for wrong in (b"", tag[:8], tag[:31], tag + b"\x00", bytes(32), tag[:-1] + bytes([tag[-1] ^ 1])):
        assert not sender.verify(b"data", wrong)
    assert not sender.verify(b"Data", tag)


@pytest.mark.parametrize("length", [0, 16, 31, 33, 64])
def test_secrets_of_the_wrong_length_are_refused(length: int) -> None:
    secret = bytes(length)
    with pytest.raises(LocalProtocolError, match="a secret has 32 bytes"):
        run_secret(secret, bytes(16))
    with pytest.raises(LocalProtocolError, match="a secret has 32 bytes"):
        connection_keys(secret, b"header", CLIENT_NONCE, SERVER_NONCE)


def test_short_salts_and_empty_tokens_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="salt"):
        run_secret(SECRET, bytes(15))
    with pytest.raises(LocalProtocolError, match="token is empty"):
        join_secret("")


def test_printing_keys_does_not_show_them() -> None:
    made = keys()
    shown = repr(made)
    for direction in (made.server_hello, made.from_client, made.from_server):
        assert repr(direction.mac_key)[2:-1] not in shown
    assert "mac_key" not in shown
    assert "cipher" not in shown
