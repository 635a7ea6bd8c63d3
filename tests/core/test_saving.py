"""Checkpoints as the core decides on them: when, of whom, and what becomes of the dead, the late and a full disk."""

from typing import Any

import pytest
from test_errands import world

from backend.core.config import RunConfig
from backend.core.errands import Errands
from backend.core.saving import CheckpointDesk
from backend.core.vocabulary import CheckpointWritten, Effect, KeepState, OpenCheckpoint, SendRank, WriteCheckpoint
from backend.core.world import World
from wire.messages import LocalState, RequestLocalState

MANIFEST = {"round": 4, "epoch": 1, "global_step": 50, "loss": 0.5}


def desk(ranks: int = 2, **config: Any) -> tuple[CheckpointDesk, World]:
    cohort = world(ranks)
    settings = RunConfig(job="j.py:J", **config)
    return CheckpointDesk(settings, cohort, Errands(cohort, lambda rank: 1.0)), cohort


def part(number: int, of: int, checkpoint: int = 1) -> LocalState:
    return LocalState(checkpoint=checkpoint, part=number, parts=of, data=bytes([number]))


def writes(effects: list[Effect]) -> list[WriteCheckpoint]:
    return [effect for effect in effects if isinstance(effect, WriteCheckpoint)]


def texts(effects: list[Effect]) -> list[str]:
    return [effect.row["text"] for effect in effects if getattr(effect, "table", "") == "events"]


def test_every_rank_is_asked_and_the_consensus_is_held_first():
    saving, _ = desk(3)
    effects = saving.begin("why", MANIFEST, 0.0)
    assert effects[0] == OpenCheckpoint(1)
    assert effects[1:] == [SendRank(rank, RequestLocalState(checkpoint=1)) for rank in range(3)]
    assert saving.busy


def test_it_is_written_once_every_state_came_whole_and_in_order():
    saving, _ = desk(2, keep_checkpoints=7)
    saving.begin("why", MANIFEST, 0.0)
    assert saving.local_state(1, part(0, 1), 1.0) == [KeepState(1, 1, 0, b"\0")]
    assert saving.local_state(1, part(0, 1), 1.0) == [], "said twice"
    assert saving.local_state(0, part(1, 2), 1.0) == [], "out of turn"
    assert saving.local_state(0, part(0, 2, checkpoint=9), 1.0) == [], "of another checkpoint"
    saving.local_state(0, part(0, 2), 1.0)
    (write,) = writes(saving.local_state(0, part(1, 2), 1.0))
    assert (write.states, write.keep, write.reason) == ((0, 1), 7, "why")


def test_a_death_leaves_its_state_out_and_holds_nothing_up():
    saving, cohort = desk(2)
    saving.begin("why", MANIFEST, 0.0)
    saving.local_state(1, part(0, 2), 1.0)
    saving.local_state(0, part(0, 1), 1.0)
    cohort.remove(1, "dead")
    (write,) = writes(saving.rank_died(1, 2.0))
    assert write.states == (0,)
    assert writes(saving.rank_died(0, 3.0)) == [], "it is being written already"


def test_with_nobody_alive_the_consensus_is_saved_all_the_same():
    saving, cohort = desk(2)
    for rank in (0, 1):
        cohort.remove(rank, "dead")
    (write,) = writes(saving.begin("AllRanksLost", MANIFEST, 0.0))
    assert write.states == ()


def test_a_state_that_stops_coming_is_left_out_by_name():
    saving, _ = desk(2, stall_seconds=300.0)
    saving.begin("why", MANIFEST, 0.0)
    saving.local_state(0, part(0, 1), 1.0)
    saving.local_state(1, part(0, 2), 200.0)
    assert saving.deadline() == 500.0, "every part is progress"
    assert saving.expire(499.0) == []
    effects = saving.expire(500.0)
    assert "without the state of rank 1 (a/cpu:1)" in texts(effects)[0]
    assert writes(effects)[0].states == (0,)


def test_a_disk_that_hangs_is_not_waited_for():
    saving, _ = desk(1, stall_seconds=300.0)
    saving.begin("why", MANIFEST, 0.0)
    saving.local_state(0, part(0, 1), 1.0)
    assert saving.awaited
    assert "not on disk after 300 s" in texts(saving.expire(301.0))[0]
    assert saving.busy
    assert not saving.awaited
    assert saving.deadline() is None
    assert saving.done(CheckpointWritten(1, "p", 1, "00"))[0].row["checkpoint"] == 1, "late, but there"


def test_a_failure_is_shown_until_one_succeeds():
    saving, _ = desk(1)
    saving.begin("why", MANIFEST, 0.0)
    saving.local_state(0, part(0, 1), 1.0)
    saving.done(CheckpointWritten(1, "", 0, "", error="No space left on device"))
    assert saving.trouble == "Checkpoint 1 could not be written: No space left on device"
    saving.begin("why", MANIFEST, 2.0)
    saving.local_state(0, part(0, 1, checkpoint=2), 3.0)
    effects = saving.done(CheckpointWritten(2, "p", 9, "00", pruned=(1,)))
    assert saving.trouble == ""
    rows = [effect.row for effect in effects if effect.table == "checkpoints"]
    assert rows[0] == {**MANIFEST, "reason": "why", "checkpoint": 2, "path": "p", "bytes": 9, "sha256": "00"}
    assert rows[1] == {"checkpoint": 1, "pruned": True}


@pytest.mark.parametrize(
    ("config", "round_number", "epochs", "closed", "due"),
    [
        ({}, 7, 1, True, "after epoch 1"),
        ({}, 7, 0, False, ""),
        ({"checkpoint_epochs": 2}, 7, 1, True, ""),
        ({"checkpoint_epochs": 2}, 7, 2, True, "after epoch 2"),
        ({"checkpoint_epochs": None}, 7, 2, True, ""),
        ({"checkpoint_epochs": None, "checkpoint_rounds": 4}, 7, 0, False, "after round 7"),
        ({"checkpoint_epochs": None, "checkpoint_rounds": 4}, 8, 0, False, ""),
    ],
)
def test_when_one_is_due(config: dict[str, Any], round_number: int, epochs: int, closed: bool, due: str):
    assert desk(1, **config)[0].due(round_number, epochs, closed) == due


def test_who_asks_gets_one_at_the_next_round_and_only_one():
    saving, _ = desk(1, checkpoint_epochs=None)
    assert len(saving.ask("operator")) == 1
    assert saving.ask("operator") == []
    assert saving.due(3, 0, False) == "asked for by operator"
    saving.begin(saving.due(3, 0, False), MANIFEST, 0.0)
    assert saving.due(4, 0, False) == ""


def test_one_that_is_due_during_another_is_taken_after_it():
    saving, _ = desk(1, checkpoint_epochs=None, checkpoint_rounds=1)
    saving.begin("first", MANIFEST, 0.0)
    assert saving.begin("second", MANIFEST, 1.0) == []
    saving.local_state(0, part(0, 1), 1.0)
    saving.done(CheckpointWritten(1, "p", 1, "00"))
    assert saving.due(9, 0, False)


@pytest.mark.parametrize("field", ["checkpoint_epochs", "checkpoint_rounds", "keep_checkpoints"])
def test_never_is_not_written_as_zero(field: str):
    problems = RunConfig(job="j.py:J", **{field: 0}).problems()
    assert [(problem.field, problem.code) for problem in problems] == [(field, "below_minimum")]
