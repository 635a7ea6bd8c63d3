"""The watch over ranks that have batches to do: nudged early and ever more rarely, stalled at the ceiling."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backend.core.stalls import ProgressWatch


def working(*ranks: int, ceiling: float = 300.0, expected: float = 0.0) -> ProgressWatch:
    watch = ProgressWatch(ceiling)
    for rank in ranks:
        watch.begins(rank, 0.0, expected)
    return watch


def test_nobody_with_work_is_waited_for_without_end() -> None:
    assert ProgressWatch(300.0).next_deadline() is None
    assert working(0).next_deadline() == 15.0


def test_a_rank_is_nudged_at_a_twentieth_and_stalls_at_the_ceiling() -> None:
    watch = working(0)
    nudged = []
    while True:
        due = watch.next_deadline()
        assert due is not None
        nudges, stalled = watch.overdue(due)
        if stalled:
            break
        nudged.append(due)
        assert nudges == [0]
    assert nudged == [15.0, 30.0, 60.0, 120.0, 240.0]
    assert due == 300.0


def test_a_batch_starts_the_clock_anew_and_brings_the_first_nudge_back() -> None:
    watch = working(0)
    assert watch.overdue(15.0) == ([0], [])
    assert watch.next_deadline() == 30.0
    watch.moved(0, 16.0)
    assert watch.next_deadline() == 31.0
    assert watch.overdue(30.5) == ([], [])
    assert watch.waited(0, 20.0) == 4.0


def test_a_long_chunk_has_ten_times_what_it_should_take() -> None:
    watch = working(0, expected=60.0)
    assert watch.next_deadline() == 30.0
    assert watch.overdue(599.0)[1] == []
    assert watch.overdue(600.0)[1] == [0]


def test_more_work_raises_the_ceiling_and_leaves_the_clock_alone() -> None:
    watch = working(0)
    watch.begins(0, 10.0, 60.0)
    assert watch.overdue(300.0)[1] == []
    assert watch.overdue(600.0)[1] == [0]


def test_an_errand_is_on_top_and_its_end_is_progress() -> None:
    watch = working(0)
    watch.excuse(0, 300.0)
    assert watch.next_deadline() == 15.0 + 300.0 or watch.next_deadline() == 15.0
    assert watch.overdue(599.0)[1] == []
    watch.back(0, 599.0)
    assert watch.excused(0) == 0.0
    assert watch.next_deadline() == 614.0


def test_who_rests_or_is_dead_is_not_watched() -> None:
    watch = working(0, 1)
    watch.rests(0)
    watch.excuse(1, 5.0)
    watch.forget(1)
    assert watch.next_deadline() is None
    assert watch.overdue(1e6) == ([], [])
    watch.moved(0, 1.0)  # its last batch, heard late
    assert not watch.working(0)


def test_the_controllers_own_absence_counts_for_nobody() -> None:
    watch = working(0)
    watch.lagged(1000.0)
    assert watch.overdue(1014.0) == ([], [])
    assert watch.next_deadline() == 1015.0


@given(st.lists(st.tuples(st.sampled_from(["begins", "moved", "rests", "tick"]), st.integers(0, 3)), max_size=40))
def test_the_first_deadline_is_never_later_than_the_true_one(steps: list[tuple[str, int]]) -> None:
    watch, now = ProgressWatch(100.0), 0.0
    for step, rank in steps:
        now += 1.7
        if step == "begins":
            watch.begins(rank, now, 0.0)
        elif step == "tick":
            due = watch.next_deadline()
            now = max(now, due or now)
            nudges, stalled = watch.overdue(now)
            assert due is None or due > now or nudges or stalled
            for each in stalled:
                watch.forget(each)
        else:
            getattr(watch, step)(*((rank, now) if step == "moved" else (rank,)))
        due = watch.next_deadline()
        true = [watch._due(each) for each in range(4) if watch.working(each)]
        assert due == min(true, default=None)
