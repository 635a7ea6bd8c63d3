"""When a relay uses the controller's memory: only what proves to be this user's, on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wire.messages import RelayWelcome
from worker.local_tier import obstacle
from worker.relay_links import is_one_machine

SECRET = bytes(range(32))


def asked(path: Path | str, secret: bytes = SECRET, *, wanted: bool = True, within: bool = True) -> str:
    return obstacle(RelayWelcome(str(path), secret), wanted=wanted, within_one_machine=within)


def test_the_right_bytes_are_proof(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    proof.write_bytes(SECRET)
    assert asked(proof) == ""
    (tmp_path / "fd").symlink_to(proof)
    assert asked(tmp_path / "fd") == "", "as /proc/<pid>/fd/<n> is"


def test_everything_else_streams_and_says_why(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    proof.write_bytes(SECRET)
    assert asked(proof, wanted=False) == "it was told to stream"
    assert asked(proof, within=False) == "the controller is on another machine"
    assert asked("") == asked(proof, b"") == "the controller does not offer its memory"
    assert "No such file" in asked(tmp_path / "missing")
    assert "Permission" in asked("/proc/1/mem") or "somebody else's" in asked("/proc/1/mem")
    for found in (SECRET[::-1], SECRET + b"x", b""):
        proof.write_bytes(found)
        assert "somebody else's" in asked(proof)
    for path in ("/dev/zero", tmp_path):
        assert "somebody else's" in asked(path)


def test_a_pipe_does_not_hold_it_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "somebody else's" in asked(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("here", "there", "same"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.1.1", True),
        ("::1", "127.0.0.1", True),
        ("10.0.0.5", "10.0.0.5", True),
        ("fe80::1%eth0", "fe80::1", True),
        ("10.0.0.5", "10.0.0.6", False),
        ("127.0.0.1", "10.0.0.5", False),
        ("proxy", "proxy", False),
    ],
)
def test_who_is_on_this_machine_by_address(here: str, there: str, same: bool) -> None:
    assert is_one_machine(here, there) == same
