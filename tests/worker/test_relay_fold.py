"""The relay's way up: who is folded, in which pieces, to which bits, and who is to blame for what is no number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from wire import arithmetic
from wire.messages import RequestParams, RoundAborted, SnapshotReady
from wire.ranges import Ranges
from wire.session import ChunkHeader, Encoding, Section
from worker.fold import Fold, FoldPlan, Model, Piece, SnapshotRefused
from worker.folding import NotFinite, fold

MODEL = Model(params_elements=10, buffers_elements=4)


def request(round_: int, attempt: int = 0, encoding: int = Encoding.F32) -> RequestParams:
    return RequestParams(round=round_, attempt=attempt, initial=round_ < 0, encoding=encoding)


def snapshot(steps: int, round_: int = 0, attempt: int = 0, still: Ranges | None = None) -> SnapshotReady:
    return SnapshotReady(round_, attempt, steps, mass=float(steps), mover_mass=float(steps > 0), still=still or [])


def folding(*ranks: int, round_: int = 0, attempt: int = 0, encoding: int = Encoding.F32) -> Fold:
    state = Fold(ranks)
    state.model = MODEL
    assert state.requested(request(round_, attempt, encoding))
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


def planned(state: Fold, snapshots: dict[int, SnapshotReady]) -> FoldPlan:
    plans = [state.ready(rank, snapshot) for rank, snapshot in snapshots.items()]
    assert plans[:-1] == [None] * (len(plans) - 1)
    plan: Any = plans[-1]
    assert isinstance(plan, FoldPlan)
    return plan


def cuts(plan: FoldPlan, size: int = 4) -> list[tuple[int, int, int]]:
    headers = [piece.header for piece in plan.pieces(size)]
    assert all(header.problem(None) == "" for header in headers)
    return [(header.section, header.offset, header.elements) for header in headers]


PARAMS, BUFFERS = Section.PARAMS, Section.BUFFERS


def test_pieces_cover_both_sections_and_leave_idle_ranks_out() -> None:
    plan = planned(folding(3, 1, 2), {3: snapshot(2), 1: snapshot(0), 2: snapshot(5)})
    assert cuts(plan) == [(PARAMS, 0, 4), (PARAMS, 4, 4), (PARAMS, 8, 2), (BUFFERS, 10, 4)]
    assert [piece.masses for piece in plan.pieces(100)] == [{2: 5.0, 3: 2.0}, {2: 1.0, 3: 1.0}]


def test_no_work_has_no_pieces() -> None:
    assert cuts(planned(folding(1, 2), {1: snapshot(0), 2: snapshot(0)})) == []


def test_headers_of_the_initial_broadcast_are_legal() -> None:
    assert len(cuts(planned(folding(0, round_=-1), {0: snapshot(1, -1)}))) == 4


def test_what_no_contributing_rank_moved_is_left_out() -> None:
    snapshots = {1: snapshot(1, still=[(0, 3), (5, 12)]), 2: snapshot(2, still=[(2, 6), (8, 14)]), 3: snapshot(0)}
    plan = planned(folding(1, 2, 3), snapshots)
    assert plan.contribution.still == [(2, 3), (5, 6), (8, 12)]
    assert cuts(plan) == [(PARAMS, 0, 2), (PARAMS, 3, 2), (PARAMS, 6, 2), (BUFFERS, 12, 2)]


def test_where_nobody_works_nothing_is_said_to_be_still() -> None:
    plan = planned(folding(1), {1: snapshot(0, still=[(0, 14)])})
    assert plan.contribution.still == []


def test_everything_travels_in_the_initial_broadcast() -> None:
    plan = planned(folding(0, round_=-1, encoding=Encoding.BF16), {0: snapshot(1, -1, still=[(0, 14)])})
    assert plan.contribution.still == []
    assert {piece.header.encoding for piece in plan.pieces()} == {Encoding.F32}
    assert plan.initial


def test_bf16_is_for_parameters() -> None:
    plan = planned(folding(1, encoding=Encoding.BF16), {1: snapshot(1)})
    assert [piece.header.encoding for piece in plan.pieces()] == [Encoding.BF16, Encoding.F32]


@pytest.mark.parametrize("still", [[(0, 15)], [(3, 3)], [(4, 6), (5, 7)], [(-1, 2)]])
def test_a_rank_that_declares_nonsense_is_refused(still: Ranges) -> None:
    with pytest.raises(SnapshotRefused, match="rank 1 declared that elements"):
        folding(1).ready(1, snapshot(1, still=still))


# ---------------------------------------------------------------------------------------------------- the folding


def piece(masses: dict[int, float], start: int = 1, elements: int = 2, encoding: int = Encoding.F32) -> Piece:
    return Piece(ChunkHeader(0, 0, Section.PARAMS, start, elements, encoding), masses)


def full(value: float) -> np.ndarray:
    return np.full(4, value, dtype=np.float32)


def test_fold_adds_in_rank_order_and_never_divides() -> None:
    big, one = full(-(2**24)), full(-1)
    assert fold(piece({1: 1, 2: 1, 3: 1}), {1: one, 2: one, 3: big}, full(0)).tolist() == [2**24 + 2] * 2
    assert fold(piece({1: 1, 2: 1, 3: 1}), {1: big, 2: one, 3: one}, full(0)).tolist() == [2**24] * 2


def test_fold_weighs_the_way_from_the_consensus() -> None:
    arenas = {1: full(4.0), 2: full(1.0)}
    assert fold(piece({1: 3.0, 2: 2.0}), arenas, full(2.0)).tolist() == [-6.0 + 2.0] * 2
    assert fold(piece({1: 3.0, 2: 2.0}), arenas, None).tolist() == [12.0 + 2.0] * 2, "the initial broadcast"


def test_fold_encodes_the_sum() -> None:
    folded = fold(piece({1: 1.0, 2: 1.0}, encoding=Encoding.BF16), {1: full(-1.0), 2: full(-(2.0**-8))}, full(0.0))
    decoded = np.empty(2, np.float32)
    arithmetic.decode_bf16(folded, decoded)
    assert decoded.tolist() == [1.0, 1.0], "a tie, to even; rounded apart they would be the same here"
    assert folded.dtype == np.uint16


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "masses", "blamed"),
    [
        pytest.param({1: 1.0, 2: NAN}, {1: 1.0, 2: 1.0}, (2, 3, "nan"), id="nan"),
        pytest.param({1: -INF, 2: INF}, {1: 1.0, 2: 1.0}, (1, 3, "-inf"), id="the lowest rank"),
        pytest.param({1: 1.0, 2: 3e38}, {1: 1.0, 2: 9.0}, (2, 3, "-inf"), id="its mass makes it so"),
        pytest.param({1: -3e38, 2: -3e38}, {1: 1.0, 2: 1.0}, (2, 3, "inf"), id="only together"),
    ],
)
def test_what_is_no_number_is_blamed_on_a_rank(
    values: dict[int, float], masses: dict[int, float], blamed: tuple[int, int, str]
) -> None:
    arenas = {rank: full(0.0) for rank in values}
    for rank, value in values.items():
        arenas[rank][3] = value
    with pytest.raises(NotFinite) as error:
        fold(piece(masses, elements=3), arenas, full(0.0))
    assert (error.value.rank, error.value.element, error.value.value) == blamed


def test_an_idle_rank_is_never_read() -> None:
    assert fold(piece({1: 1.0}), {1: full(1.0), 2: full(NAN)}, full(3.0)).tolist() == [2.0, 2.0]
