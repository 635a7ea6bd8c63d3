"""The rank's half of the collective plane's protocol: what is asked for, and what is a bug of the controller."""

import pytest

from wire.messages import (
    AbortSession,
    DeclareDead,
    Message,
    NewSession,
    RequestLocalState,
    RequestParams,
    RequestSessionId,
    Rewind,
    RoundCommitted,
    Shutdown,
    StartChunk,
    SyncCommitted,
    SyncNow,
)
from worker.actions import AdoptSync, DropSession, JoinSession, MakeSessionId, SendLocal, SetClock, Sync, Train
from worker.control import Control, IllegalMessage, State
from worker.interrupt import Interrupt


def chunk(offset: int = 0, size: int = 8) -> StartChunk:
    return StartChunk(epoch=0, offset=offset, size=size, batches=size // 4, global_step=0)


def begun(rank: int = 1) -> Control:
    """A rank behind the initial broadcast."""
    control = Control(rank, gamma=1.0, collective=True)
    control.receive(RequestParams(round=-1, attempt=0, initial=True))
    control.receive(RoundCommitted(round=-1, attempt=0, realized=True, buffers_realized=True, consensus="x"))
    return control


def work(control: Control, steps: int, offset: int = 0) -> None:
    control.receive(chunk(offset))
    for _ in range(steps):
        control.step_done()
    control.chunk_done()


def sync(attempt: int = 0, *, number: int = 0, generation: int = 0, excluded: bool = False) -> SyncNow:
    return SyncNow(number, attempt, generation, excluded)


def test_a_session_is_made_joined_and_dropped_whatever_the_rank_does() -> None:
    control = Control(1, gamma=1.0, collective=True)
    session = NewSession(4, b"id", [0, 1])
    for _ in range(2):
        assert control.receive(RequestSessionId(4)) == [MakeSessionId(4)]
        assert control.receive(session) == [JoinSession(session)]
        assert control.receive(AbortSession(4, "dead")) == [DropSession(4)]
        control.receive(chunk())
    assert control.state is State.WORKING


def test_a_sync_counts_the_work_since_the_last_one_and_is_adopted_once_committed() -> None:
    control = begun()
    work(control, 3)
    assert control.receive(sync()) == [Sync(0, 0, 0, steps=3, first=True)]
    assert control.state is State.REDUCING
    assert control.receive(chunk(8)) == []
    committed = control.receive(SyncCommitted(0, 0))
    assert committed == [AdoptSync(0), SetClock(0), Train(chunk(8))]
    assert (control.state, control.steps_since_round, control.steps) == (State.WORKING, 0, 3)
    assert control.receive(SyncCommitted(0, 0)) == []


def test_a_broken_session_leaves_the_sync_open_and_the_work_counted() -> None:
    control = begun()
    work(control, 3)
    control.receive(sync())
    assert control.receive(AbortSession(0, "dead")) == [DropSession(0)]
    assert control.state is State.REDUCING
    assert control.receive(RequestSessionId(1)) == [MakeSessionId(1)]
    assert control.receive(sync(0)) == []
    assert control.receive(sync(1, generation=1)) == [Sync(0, 1, 1, steps=3, first=False)]
    with pytest.raises(IllegalMessage, match="no sum of that attempt"):
        control.receive(SyncCommitted(0, 0))
    assert control.receive(SyncCommitted(0, 1)) == [AdoptSync(0)]
    assert (control.state, control.steps_since_round) == (State.IDLE, 0)


def test_an_excluded_rank_declares_nothing_and_starts_anew_in_whatever_attempt_is_committed() -> None:
    control = begun()
    work(control, 2)
    control.receive(sync())
    assert control.receive(sync(1, excluded=True)) == [Sync(0, 1, 0, steps=0, first=False)]
    assert control.receive(sync(2, generation=1)) == [Sync(0, 2, 1, steps=0, first=False)]
    assert control.receive(SyncCommitted(0, 2)) == [AdoptSync(0, restart=True)]
    assert control.steps_since_round == 0
    work(control, 1, 8)
    assert control.receive(sync(number=1, generation=1)) == [Sync(1, 0, 1, steps=1, first=True)]


def test_a_sync_in_the_middle_of_a_chunk_counts_what_was_done_and_the_chunk_goes_on() -> None:
    control = begun()
    control.receive(chunk())
    control.step_done()
    assert control.receive(sync()) == [Sync(0, 0, 0, steps=1, first=True)]
    assert control.state is State.REDUCING
    assert control.receive(SyncCommitted(0, 0)) == [AdoptSync(0)]
    assert control.state is State.WORKING
    control.step_done()
    assert control.steps_since_round == 1


def test_a_checkpoint_may_want_the_consensus() -> None:
    assert begun().receive(RequestLocalState(3, consensus=True)) == [SendLocal(3, consensus=True)]


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(sync(number=1), id="another round"),
        pytest.param(SyncCommitted(1, 0), id="a commit of another round"),
        pytest.param(RequestParams(round=1, attempt=0, initial=True), id="a round of the other plane"),
        pytest.param(Rewind(reason="gone"), id="a way back"),
    ],
)
def test_a_sync_that_is_open_excludes_other_rounds(message: Message) -> None:
    control = begun()
    control.receive(sync())
    with pytest.raises(IllegalMessage):
        control.receive(message)


def test_there_is_no_sync_before_the_first_consensus_and_none_of_a_closed_round() -> None:
    with pytest.raises(IllegalMessage, match="initial broadcast"):
        Control(1, gamma=1.0, collective=True).receive(sync())
    control = begun()
    control.receive(sync())
    control.receive(SyncCommitted(0, 0))
    with pytest.raises(IllegalMessage, match="closed already"):
        control.receive(sync(1))


@pytest.mark.parametrize("message", [RequestSessionId(0), NewSession(0, b"", [0]), AbortSession(0, ""), sync()])
def test_other_modes_have_no_sessions(message: Message) -> None:
    with pytest.raises(IllegalMessage, match="do not take it"):
        Control(0, gamma=1.0).receive(message)


# ------------------------------------------------------------------------------------------------ the interrupt


@pytest.mark.parametrize(
    ("message", "void"),
    [
        (AbortSession(3, "rank 2 died"), [True, True, False]),
        (AbortSession(1, "late news"), [False, False, False]),
        (NewSession(4, b"", [0]), [True, True, False]),
        (RequestSessionId(3), [True, False, False]),
        (Shutdown(reason="over"), [True, True, True]),
        (DeclareDead(rank=7, reason="hung"), [True, True, True]),
        (DeclareDead(rank=6, reason="hung"), [False, False, False]),
        (sync(), [False, False, False]),
    ],
)
def test_a_word_about_a_session_ends_the_waits_in_it_and_in_older_ones(message: Message, void: list[bool]) -> None:
    interrupt = Interrupt(rank=7)
    interrupt.hear(message)
    assert [bool(interrupt.reason(generation)) for generation in (2, 3, 4)] == void


def test_the_reason_is_the_newest_word() -> None:
    interrupt = Interrupt(rank=0)
    interrupt.hear(AbortSession(2, "rank 2 died"))
    interrupt.hear(AbortSession(1, "old"))
    assert (interrupt.reason(1), interrupt.reason(3)) == ("rank 2 died", "")
    interrupt.lose("the relay closed the link")
    assert interrupt.reason(99) == "the relay closed the link"
