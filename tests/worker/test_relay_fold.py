"""The relay's bookkeeping: who is folded, what is staged, when the ranks may adopt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from wire.messages import RequestParams, RoundAborted, RoundCommitted, SnapshotReady
from wire.session import ChunkHeader, Section
from worker.fold import Fold, FoldError, FoldPlan, Model, Piece, Staging
from worker.relay import fold

MODEL = Model(params_elements=10, buffers_elements=4)


def request(round_: int, attempt: int = 0) -> RequestParams:
    return RequestParams(round=round_, attempt=attempt, initial=False)


def snapshot(steps: int, round_: int = 0, attempt: int = 0) -> SnapshotReady:
    mover = float(steps > 0)
    return SnapshotReady(round=round_, attempt=attempt, steps=steps, mass=float(steps), mover_mass=mover)


def folding(*ranks: int, round_: int = 0, attempt: int = 0) -> Fold:
    state = Fold(ranks)
    state.model = MODEL
    assert state.requested(request(round_, attempt))
    return state


# ------------------------------------------------------------------------------------------------- who is folded


def test_the_last_rank_completes_the_plan() -> None:
    state = folding(3, 1, 2)
    assert state.ready(3, snapshot(2)) is None
    assert state.ready(1, snapshot(0)) is None
    plan = state.ready(2, snapshot(5))
    assert plan is not None
    share = plan.contribution
    assert (share.round, share.attempt) == (0, 0)
    assert list(share.steps.items()) == [(1, 0), (2, 5), (3, 2)]
    assert share.masses == {1: 0.0, 2: 5.0, 3: 2.0}
    assert share.mover_masses == {1: 0.0, 2: 1.0, 3: 1.0}
    assert (share.params_elements, share.buffers_elements) == (10, 4)
    assert state.is_current(plan)


def test_a_request_begins_one_attempt_however_many_ranks_are_asked() -> None:
    state = folding(1, 2)
    state.ready(1, snapshot(1))
    assert not state.requested(request(0)), "the second rank's request"
    assert state.ready(2, snapshot(1)) is not None
    assert not state.requested(request(0))
    assert state.ready(2, snapshot(1)) is None, "a plan is made once"


@pytest.mark.parametrize("stale", [snapshot(1, round_=1), snapshot(1, round_=2, attempt=0), snapshot(1, round_=3)])
def test_declarations_of_another_attempt_are_ignored_and_counted(stale: SnapshotReady) -> None:
    state = folding(1, round_=2, attempt=1)
    assert state.ready(1, stale) is None
    assert state.ignored == 1
    assert state.ready(1, snapshot(1, round_=2, attempt=1)) is not None


def test_a_closed_socket_is_no_death() -> None:
    """Only DeclareDead takes a rank out: until then the host waits for it, as the controller does."""
    state = folding(1, 2)
    assert state.ready(1, snapshot(3)) is None
    plan = state.dead(2)
    assert plan is not None
    assert plan.contribution.steps == {1: 3}


def test_the_dead_are_out_of_the_plan_though_they_declared() -> None:
    state = folding(1, 2, 3)
    state.ready(2, snapshot(5))
    assert state.dead(2) is None
    state.ready(1, snapshot(1))
    plan = state.ready(3, snapshot(1))
    assert plan is not None
    assert plan.contribution.steps == {1: 1, 3: 1}
    assert state.ready(2, snapshot(9)) is None
    assert state.ignored == 1


def test_a_host_without_living_ranks_plans_nothing() -> None:
    state = folding(1)
    assert state.dead(1) is None


def test_an_abort_ends_the_plan_and_the_next_attempt_replaces_it() -> None:
    state = folding(1)
    plan = state.ready(1, snapshot(4))
    assert plan is not None
    state.aborted(RoundAborted(0, 1, "another attempt"))
    assert state.is_current(plan)
    state.aborted(RoundAborted(0, 0, "rank 7 died"))
    assert not state.is_current(plan)
    assert state.ready(1, snapshot(4)) is None
    assert state.requested(request(0, 1))
    again = state.ready(1, snapshot(4, attempt=1))
    assert again is not None
    assert again.contribution.masses == plan.contribution.masses
    assert not state.is_current(plan)
    assert not state.requested(request(0, 0)), "never backwards"


def test_rounds_count_from_the_initial_broadcast() -> None:
    state = folding(1, round_=-1)
    assert state.ready(1, snapshot(1, round_=-1)) is not None
    assert state.requested(request(0))


# ---------------------------------------------------------------------------------------------------- the pieces


def pieces(state: Fold, steps: dict[int, int], size: int, round_: int = 0) -> list[Piece]:
    plans = [state.ready(rank, snapshot(n, round_)) for rank, n in steps.items()]
    plan: Any = plans[-1]
    assert isinstance(plan, FoldPlan)
    return list(plan.pieces(size))


def test_pieces_cover_both_sections_and_leave_idle_ranks_out() -> None:
    found = pieces(folding(3, 1, 2), {3: 2, 1: 0, 2: 5}, 4)
    assert [(piece.header.section, piece.header.offset, piece.header.elements) for piece in found] == [
        (Section.PARAMS, 0, 4), (Section.PARAMS, 4, 4), (Section.PARAMS, 8, 2), (Section.BUFFERS, 10, 4),
    ]  # fmt: skip
    assert {piece.ranks for piece in found} == {(2, 3)}
    assert found[-1].stop == 14


def test_no_work_has_no_pieces() -> None:
    assert pieces(folding(1, 2), {1: 0, 2: 0}, 4) == []


def test_headers_of_the_initial_broadcast_are_legal() -> None:
    found = pieces(folding(0, round_=-1), {0: 1}, 4, round_=-1)
    assert all(piece.header.problem(None) == "" for piece in found)


def test_fold_adds_in_rank_order_and_never_divides() -> None:
    piece = Piece(ChunkHeader(0, 0, Section.PARAMS, 1, 2), (1, 2, 3))
    big, one = np.full(4, 2**24, dtype=np.float32), np.ones(4, dtype=np.float32)
    assert fold([one, one, big], piece).tolist() == [2**24 + 2] * 2
    assert fold([big, one, one], piece).tolist() == [2**24] * 2
    assert np.shares_memory(fold([one], piece), one), "a lone rank's slice is sent as it lies"


# -------------------------------------------------------------------------------------------------- what is staged


def header(offset: int, elements: int, round_: int = 0, attempt: int = 0, **changes: int) -> ChunkHeader:
    section = Section.PARAMS if offset < MODEL.params_elements else Section.BUFFERS
    return ChunkHeader(round_ & 0xFFFFFFFF, attempt, section, offset, elements, **changes)


def staging(round_: int = 0, attempt: int = 0) -> Staging:
    state = Staging()
    state.opened(round_, attempt)
    return state


def stage(state: Staging, *headers: ChunkHeader) -> list[RoundCommitted | None]:
    return [state.staged(chunk, MODEL) for chunk in headers if state.accepts(chunk, MODEL)]


ALL = (header(0, 6), header(6, 4), header(10, 4))


def commit(*, realized: bool = True, buffers: bool = True, round_: int = 0, attempt: int = 0) -> RoundCommitted:
    return RoundCommitted(round=round_, attempt=attempt, realized=realized, buffers_realized=buffers)


def test_commit_after_the_stream() -> None:
    state = staging()
    assert stage(state, *ALL) == [None, None, None]
    assert state.committed(commit(), MODEL) == commit()
    assert state.committed(commit(), MODEL) is None, "passed on once"


def test_commit_before_the_end_of_the_stream_waits_for_it() -> None:
    """The two links have no common order."""
    state = staging()
    assert stage(state, ALL[0]) == [None]
    assert state.committed(commit(), MODEL) is None
    assert stage(state, ALL[1], ALL[2]) == [None, commit()]


def test_a_round_without_buffers_ends_with_the_parameters() -> None:
    state = staging()
    stage(state, *ALL[:2])
    assert state.committed(commit(buffers=False), MODEL) == commit(buffers=False)


def test_a_round_without_work_is_passed_on_at_once() -> None:
    answer = commit(realized=False, buffers=False)
    assert staging().committed(answer, MODEL) == answer


def test_another_attempt_is_ignored_and_counted() -> None:
    state = staging(round_=4, attempt=1)
    assert stage(state, header(0, 6, 4, 0), header(0, 6, 3, 1), header(0, 6, 5, 1)) == []
    assert state.committed(commit(round_=4, attempt=0), MODEL) is None
    assert state.ignored == 4
    assert stage(state, header(0, 6, 4, 1)) == [None]


def test_an_aborted_attempt_is_never_released() -> None:
    state = staging()
    stage(state, *ALL)
    state.aborted(RoundAborted(0, 0, "rank 2 died"))
    assert state.committed(commit(), MODEL) is None
    state.opened(0, 1)
    assert state.committed(commit(attempt=1), MODEL) is None, "nothing of this attempt is here yet"
    again = [header(chunk.offset, chunk.elements, attempt=1) for chunk in ALL]
    assert stage(state, *ALL, *again) == [None, None, commit(attempt=1)]


def test_the_initial_broadcast_is_staged() -> None:
    state = staging(round_=-1)
    stage(state, header(0, 10, -1), header(10, 4, -1))
    assert state.committed(commit(round_=-1), MODEL) == commit(round_=-1)


BROKEN = [
    pytest.param([header(6, 4)], "goes on at element 6 where 0 was due", id="gap"),
    pytest.param([header(0, 6), header(0, 6)], "goes on at element 0 where 6 was due", id="repeat"),
    pytest.param([header(0, 10), header(10, 5)], "beyond the model's 14 elements", id="too long"),
    pytest.param([header(0, 6, encoding=1)], "encoding 1", id="encoding"),
]


@pytest.mark.parametrize(("headers", "reason"), BROKEN)
def test_a_broken_stream_is_an_error(headers: list[ChunkHeader], reason: str) -> None:
    with pytest.raises(FoldError, match=reason):
        stage(staging(), *headers)
