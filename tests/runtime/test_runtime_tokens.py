"""Token files are private and made once; tickets are good once, and for ten minutes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from backend.runtime.errors import SettingsError
from backend.runtime.tokens import MAX_TICKETS, TICKET_SECONDS, Tickets, load_token


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_token_is_made_once_private_and_long(tmp_path: Path) -> None:
    path = tmp_path / "join.token"
    token = load_token(path)
    assert len(token) >= 43
    assert mode(path) == 0o600
    assert load_token(path) == token
    assert [entry.name for entry in tmp_path.iterdir()] == ["join.token"], "no temporary file stays"


def test_a_given_token_wins_and_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "join.token"
    load_token(path)
    assert load_token(path, "sixteen-letters-x") == "sixteen-letters-x"
    assert load_token(path) == "sixteen-letters-x"
    assert mode(path) == 0o600


def test_a_file_that_others_could_read_is_tightened(tmp_path: Path) -> None:
    path = tmp_path / "operator.token"
    path.write_text("was-world-readable\n")
    path.chmod(0o644)
    assert load_token(path) == "was-world-readable"
    assert mode(path) == 0o600


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe"])
def test_a_file_without_a_token_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "join.token"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"join\.token"):
        load_token(path)


def test_a_directory_in_the_way_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "join.token"
    path.mkdir()
    with pytest.raises(SettingsError, match=r"join\.token"):
        load_token(path)


class Hand:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_ticket_is_good_once() -> None:
    tickets = Tickets(Hand())
    ticket = tickets.issue()
    assert not tickets.redeem(ticket + "x")
    assert tickets.redeem(ticket)
    assert not tickets.redeem(ticket)


def test_a_ticket_expires() -> None:
    hand = Hand()
    tickets = Tickets(hand)
    ticket = tickets.issue()
    hand.now += TICKET_SECONDS
    assert not tickets.redeem(ticket)


def test_the_oldest_ticket_gives_way() -> None:
    tickets = Tickets(Hand())
    issued = [tickets.issue() for _ in range(MAX_TICKETS + 1)]
    assert not tickets.redeem(issued[0])
    assert tickets.redeem(issued[1])
    assert tickets.redeem(issued[-1])
