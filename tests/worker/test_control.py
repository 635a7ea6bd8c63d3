"""The worker's machine, row by row of its table, without a socket or a tensor."""

import pytest

from wire.messages import (
    ChunkDone,
    DeclareDead,
    Evaluate,
    RankReady,
    RequestLocalState,
    RequestParams,
    Rewind,
    RoundCommitted,
    Shutdown,
    SnapshotReady,
    StartChunk,
    Update,
    UpdateStaged,
)
from worker.control import (
    Adopt,
    Back,
    Control,
    IllegalMessage,
    Leave,
    LookAhead,
    Pack,
    Resend,
    Score,
    SendLocal,
    SetClock,
    State,
    Train,
)


def chunk(offset: int = 0, size: int = 8, epoch: int = 0, step: int = 0) -> StartChunk:
    return StartChunk(epoch=epoch, offset=offset, size=size, batches=size // 4, global_step=step)


def request(number: int = 0, attempt: int = 0, initial: bool = False) -> RequestParams:
    return RequestParams(round=number, attempt=attempt, initial=initial)


def commit(number: int = 0, attempt: int = 0, realized: bool = True, buffers: bool = True) -> RoundCommitted:
    return RoundCommitted(round=number, attempt=attempt, realized=realized, buffers_realized=buffers)


def ready(number: int = 0, attempt: int = 0, steps: int = 0, mass: float = 0.0, mover: float = 0.0) -> SnapshotReady:
    return SnapshotReady(round=number, attempt=attempt, steps=steps, mass=mass, mover_mass=mover)


def work(control: Control, message: StartChunk, steps: int) -> None:
    control.receive(message)
    for _ in range(steps):
        control.step_done()
    control.chunk_done()


def test_a_chunk_is_trained_and_reported() -> None:
    control = Control(rank=1, gamma=1.0)
    assert control.receive(chunk(step=40)) == [SetClock(40), Train(chunk(step=40))]
    assert control.state is State.WORKING
    control.step_done()
    control.step_done()
    assert control.chunk_done() == (ChunkDone(epoch=0, offset=0, size=8), [])
    assert (control.state, control.steps) == (State.IDLE, 2)


def test_a_plan_that_is_issued_again_is_not_trained_again() -> None:
    control = Control(rank=1, gamma=1.0)
    control.receive(chunk())
    assert control.receive(chunk()) == []
    control.chunk_done()
    assert control.receive(chunk()) == []
    assert control.state is State.IDLE
    assert control.receive(chunk(epoch=1)) == [SetClock(0), Train(chunk(epoch=1))]


def test_no_chunk_of_the_window_is_trained_again_however_late_its_plan_comes() -> None:
    control = Control(rank=1, gamma=1.0, overlap=True)
    for offset in (0, 8, 16):
        control.receive(chunk(offset=offset))
    for _ in range(3):
        control.chunk_done()
    assert [control.receive(chunk(offset=offset)) for offset in (0, 8, 16)] == [[], [], []]


def test_a_plan_that_comes_again_behind_its_round_is_not_trained_again() -> None:
    """Found by the simulator: news and commit were held up on the way, and the plan was issued again meanwhile."""
    control = Control(rank=1, gamma=1.0, overlap=True)
    work(control, chunk(), 2)
    control.receive(request())
    control.receive(commit())
    assert control.receive(chunk()) == []


def test_another_chunk_waits_for_the_one_in_work() -> None:
    control = Control(rank=1, gamma=1.0)
    control.receive(chunk(offset=0))
    assert control.receive(chunk(offset=8)) == []
    assert control.receive(chunk(offset=8)) == []
    done, actions = control.chunk_done()
    assert done.offset == 0
    assert actions == [SetClock(0), Train(chunk(offset=8))]
    assert control.chunk_done()[1] == []


@pytest.mark.parametrize(
    ("gamma", "steps", "mass", "mover"),
    [(1.0, 3, 3.0, 1.0), (0.5, 4, 2.0, 1.0), (0.0, 5, 1.0, 1.0), (-1.0, 4, 0.25, 1.0), (0.0, 0, 0.0, 0.0)],
)
def test_the_mass_of_a_round_is_the_work_since_the_last_one(
    gamma: float, steps: int, mass: float, mover: float
) -> None:
    control = Control(rank=0, gamma=gamma)
    work(control, chunk(), steps)
    assert control.receive(request()) == [Pack(ready(steps=steps, mass=mass, mover=mover))]
    assert control.state is State.REDUCING
    assert control.receive(commit()) == [Adopt(0, params=True, buffers=True)]
    assert (control.state, control.steps_since_round, control.steps) == (State.IDLE, 0, steps)


def test_an_aborted_attempt_keeps_the_work_and_is_sent_again_untouched() -> None:
    control = Control(rank=1, gamma=1.0)
    work(control, chunk(), 3)
    control.receive(request(attempt=0))
    assert control.receive(request(attempt=1)) == [Resend(ready(attempt=1, steps=3, mass=3.0, mover=1.0))]
    assert control.receive(request(attempt=1)) == []
    assert control.steps_since_round == 3
    assert control.receive(request(attempt=3)) == [Resend(ready(attempt=3, steps=3, mass=3.0, mover=1.0))]
    assert control.receive(commit(attempt=3)) == [Adopt(0, params=True, buffers=True)]
    assert control.steps_since_round == 0


def test_only_rank_zero_has_mass_in_the_initial_broadcast_and_it_costs_no_work() -> None:
    for rank, packed in (
        (0, ready(-1, steps=1, mass=1.0, mover=1.0)),
        (3, ready(-1, steps=0, mass=0.0, mover=0.0)),
    ):
        control = Control(rank=rank, gamma=0.0)
        assert control.receive(request(-1, initial=True)) == [Pack(packed)]
        assert control.receive(commit(-1)) == [Adopt(-1, params=True, buffers=True)]
        assert control.steps_since_round == 0
        work(control, chunk(), 2)
        assert control.receive(request(0)) == [Pack(ready(0, steps=2, mass=1.0, mover=1.0))]


@pytest.mark.parametrize(
    ("realized", "buffers", "adopted"),
    [
        (True, True, Adopt(0, params=True, buffers=True)),
        (True, False, Adopt(0, params=True, buffers=False)),
        (False, True, Adopt(0, params=False, buffers=False)),
        (False, False, Adopt(0, params=False, buffers=False)),
    ],
)
def test_only_what_was_realized_is_adopted(realized: bool, buffers: bool, adopted: Adopt) -> None:
    control = Control(rank=0, gamma=1.0)
    control.receive(request())
    assert control.receive(commit(realized=realized, buffers=buffers)) == [adopted]


def test_a_round_in_the_middle_of_a_chunk_counts_what_was_done_and_the_chunk_goes_on() -> None:
    control = Control(rank=0, gamma=1.0)
    control.receive(chunk())
    control.step_done()
    assert control.receive(request()) == [Pack(ready(steps=1, mass=1.0, mover=1.0))]
    assert control.receive(chunk(offset=8)) == []
    assert control.receive(commit()) == [Adopt(0, params=True, buffers=True)]
    assert control.state is State.WORKING
    control.step_done()
    assert control.chunk_done()[1] == [SetClock(0), Train(chunk(offset=8))]
    assert control.steps_since_round == 1


def test_a_chunk_that_comes_during_a_round_starts_after_it() -> None:
    control = Control(rank=0, gamma=1.0)
    control.receive(request())
    assert control.receive(chunk(step=7)) == []
    assert control.receive(commit()) == [Adopt(0, params=True, buffers=True), SetClock(7), Train(chunk(step=7))]
    assert control.state is State.WORKING


def test_a_stale_commit_changes_nothing() -> None:
    control = Control(rank=0, gamma=1.0)
    control.receive(request(0))
    control.receive(commit(0))
    assert control.receive(commit(0)) == []
    control.receive(request(1))
    assert control.receive(commit(0)) == []
    assert control.state is State.REDUCING


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(commit(5), id="a commit without a request"),
        pytest.param(request(-2), id="a round that is closed"),
        pytest.param(RankReady("", 1, 0), id="a message of our own"),
    ],
)
def test_what_has_no_row_is_illegal(message: object) -> None:
    control = Control(rank=0, gamma=1.0)
    control.receive(request(0))
    control.receive(commit(0))
    with pytest.raises(IllegalMessage, match="while idle"):
        control.receive(message)  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "prepare", [[], [chunk(offset=8)], [chunk(offset=8), request(4)]], ids=["idle", "work", "pack"]
)
def test_a_rank_that_goes_back_does_again_what_no_round_has_accepted(prepare: list, overlap: bool) -> None:
    control = Control(rank=1, gamma=1.0, overlap=overlap)
    control.receive(request(3))
    control.receive(commit(3))
    control.receive(chunk())
    control.step_done()
    control.chunk_done()
    for earlier in prepare:
        control.receive(earlier)
    for controller in ("the first", "the one after it, before it began"):
        assert control.receive(Rewind(reason=controller)) == [Back(3, restart=False)]
        assert (control.state, control.chunk, control.steps_since_round) == (State.IDLE, None, 0)
    assert isinstance(control.receive(RequestParams(-1, 0, True, root=1, brings=3))[0], Pack)
    assert control.receive(Rewind(reason="in the broadcast")) == [Back(3, restart=False)]
    control.receive(RequestParams(-1, 0, True, root=0, brings=4))
    control.receive(commit(-1))
    assert Train(chunk()) in control.receive(chunk()), "done before, and void: it is dealt again"
    assert control.receive(Rewind(reason="after it")) == [Back(4, restart=False)], "the round that was brought"


def test_who_was_refused_forgets_its_optimizer_when_it_goes_back() -> None:
    control = Control(rank=0, gamma=1.0)
    control.receive(request(3))
    control.receive(commit(3))
    control.receive(request(4))
    control.receive(RequestParams(4, 1, False, excluded=True))
    assert control.receive(Rewind(reason="gone")) == [Back(3, restart=True)]
    assert control.receive(Rewind(reason="gone")) == [Back(3, restart=False)]


def test_a_consensus_that_went_with_its_controller_is_not_held() -> None:
    control = Control(rank=0, gamma=1.0)
    for number in (3, 4):
        control.receive(request(number))
        control.receive(commit(number))
    control.not_adopted()
    assert control.receive(Rewind(reason="gone")) == [Back(3, restart=False)]


def test_the_root_of_an_initial_broadcast_need_not_be_rank_0() -> None:
    for rank in (0, 1):
        (pack,) = Control(rank, gamma=1.0).receive(RequestParams(-1, 0, True, root=1))
        assert isinstance(pack, Pack)
        assert pack.ready.mass == float(rank == 1)


def test_there_is_no_going_back_before_the_first_broadcast() -> None:
    with pytest.raises(IllegalMessage, match="no round to go back to"):
        Control(rank=0, gamma=1.0).receive(Rewind(reason="gone"))


def test_the_next_round_cannot_open_inside_an_open_one() -> None:
    control = Control(rank=0, gamma=1.0)
    control.receive(request(0))
    with pytest.raises(IllegalMessage, match="round 0 is still open"):
        control.receive(request(1))
    with pytest.raises(IllegalMessage, match="no contribution in that attempt"):
        control.receive(commit(0, attempt=1))


@pytest.mark.parametrize("prepare", [[], [chunk()], [request()]], ids=["idle", "working", "reducing"])
@pytest.mark.parametrize(
    ("message", "actions"),
    [
        (Update(round=3, global_step=90), [SetClock(90)]),
        (Evaluate(epoch=2), [Score(2)]),
        (RequestLocalState(checkpoint=4), [SendLocal(4)]),
        (DeclareDead(rank=7, reason="gone"), []),
    ],
)
def test_errands_are_run_in_every_state(prepare: list, message: object, actions: list) -> None:
    control = Control(rank=1, gamma=1.0)
    for earlier in prepare:
        control.receive(earlier)
    before = control.state
    assert control.receive(message) == actions  # type: ignore[arg-type]
    assert control.state is before


@pytest.mark.parametrize(
    ("message", "leave"),
    [
        (Shutdown(reason="done"), Leave("done", fenced=False)),
        (DeclareDead(rank=1, reason="silent"), Leave("silent", fenced=True)),
    ],
)
def test_a_rank_that_leaves_hears_nothing_more(message: object, leave: Leave) -> None:
    control = Control(rank=1, gamma=1.0)
    control.receive(chunk())
    control.receive(chunk(offset=8))
    assert control.receive(message) == [leave]  # type: ignore[arg-type]
    assert control.state is State.DRAINING
    assert control.receive(chunk(offset=16)) == []
    assert control.receive(request()) == []


# --------------------------------------------------------------------------------- looking at what is not committed


def staged(stop: int, number: int = 0, attempt: int = 0) -> UpdateStaged:
    return UpdateStaged(number, attempt, "c", stop)


def test_a_rank_that_waits_looks_at_what_is_staged() -> None:
    control = Control(rank=0, gamma=1.0)
    control.receive(request())
    assert control.receive(staged(10)) == [LookAhead("c", 10, fresh=True)]
    assert control.receive(staged(20)) == [LookAhead("c", 20, fresh=False)]
    assert control.receive(commit()) == [Adopt(0, params=True, buffers=True, looked=True)]


def test_what_was_staged_of_an_aborted_attempt_does_not_count() -> None:
    control = Control(rank=0, gamma=1.0)
    control.receive(request())
    control.receive(staged(10))
    control.receive(request(attempt=1))
    assert control.receive(staged(20)) == []  # late, of the attempt before
    assert control.receive(commit(attempt=1)) == [Adopt(0, params=True, buffers=True, looked=False)]
    control.receive(request(1))
    control.receive(staged(10, number=1))
    control.receive(request(1, attempt=1))
    assert control.receive(staged(10, number=1, attempt=1)) == [LookAhead("c", 10, fresh=True)]


def test_a_rank_with_better_things_to_do_does_not_look() -> None:
    control = Control(rank=0, gamma=1.0, overlap=True)
    control.receive(chunk())
    control.receive(request())
    assert control.receive(staged(10)) == []
    assert Control(rank=0, gamma=1.0).receive(staged(10)) == []
