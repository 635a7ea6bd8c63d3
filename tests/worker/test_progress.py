"""The shared counter: what the rank writes is what the agent reads, at any moment."""

from pathlib import Path

import pytest

from worker.progress import SIZE, STATES, ProgressBlock, ProgressError, Reading

SECOND = 1_000_000_000


def test_a_block_starts_as_starting_and_ages(tmp_path: Path) -> None:
    block = ProgressBlock.create(tmp_path / "p", now_ns=5 * SECOND)
    assert (tmp_path / "p").stat().st_size == SIZE
    assert (tmp_path / "p").stat().st_mode & 0o777 == 0o600
    assert block.read(now_ns=7 * SECOND) == Reading("starting", 0, 2.0)


def test_two_processes_see_one_block(tmp_path: Path) -> None:
    rank = ProgressBlock.create(tmp_path / "p", now_ns=0)
    agent = ProgressBlock.open(tmp_path / "p")
    for state in STATES:
        rank.enter(state, now_ns=SECOND)
        assert agent.read(now_ns=SECOND).state == state
    rank.count(2**40)
    assert agent.read(now_ns=4 * SECOND) == Reading("exited", 2**40, 3.0)


def test_entering_the_same_state_again_is_a_new_beginning(tmp_path: Path) -> None:
    block = ProgressBlock.create(tmp_path / "p", now_ns=0)
    block.enter("working", now_ns=SECOND)
    block.enter("working", now_ns=9 * SECOND)
    assert block.read(now_ns=10 * SECOND).age_seconds == 1.0


def test_the_time_of_a_change_is_written_before_its_state(tmp_path: Path) -> None:
    """Or a rank that waited long and now works would look, for a moment, as if it had worked that long."""
    block = ProgressBlock.create(tmp_path / "p", now_ns=0)
    with pytest.raises(ValueError, match="not in tuple"):
        block.enter("no such state", now_ns=300 * SECOND)
    assert block.read(now_ns=300 * SECOND) == Reading("starting", 0, 0.0)


def test_what_is_no_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProgressError, match="cannot be opened"):
        ProgressBlock.open(tmp_path / "none")
    (tmp_path / "short").write_bytes(b"x")
    with pytest.raises(ProgressError, match="64 bytes"):
        ProgressBlock.open(tmp_path / "short")
    (tmp_path / "other").write_bytes(b"\0" * SIZE)
    with pytest.raises(ProgressError, match="of this version"):
        ProgressBlock.open(tmp_path / "other")
    ProgressBlock.create(tmp_path / "p", now_ns=0)
    with pytest.raises(ProgressError, match="cannot be made"):
        ProgressBlock.create(tmp_path / "p", now_ns=0)
