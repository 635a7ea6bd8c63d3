"""The error family, and the close code that follows each error."""

from __future__ import annotations

import pytest

from wire.codes import CloseCode, close_code
from wire.errors import ErrorCode, LocalProtocolError, ProtocolError, RemoteProtocolError


def test_errors_are_one_family() -> None:
    assert issubclass(LocalProtocolError, ProtocolError)
    assert issubclass(RemoteProtocolError, ProtocolError)
    with pytest.raises(ValueError, match="nonsense"):
        RemoteProtocolError("nonsense", "no such code")


@pytest.mark.parametrize("code", ErrorCode)
def test_every_error_closes_with_a_code_of_ours(code: ErrorCode) -> None:
    expected = {
        ErrorCode.BAD_MAC: CloseCode.AUTH,
        ErrorCode.UNKNOWN_RUN: CloseCode.REFUSED,
        ErrorCode.PEER_REFUSED: CloseCode.REFUSED,
    }.get(code, CloseCode.PROTOCOL)
    assert close_code(code) is expected
    assert 4000 <= expected < 5000
