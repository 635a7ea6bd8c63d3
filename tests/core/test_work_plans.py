"""Sharing batches: clamping, the final window, and each window's plan (behaviour C16, E4, E5)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.allotments import (
    chunk_batches,
    clamp_total,
    final_window_plan,
    largest_remainder,
    scaled_down,
    window_plan,
)
from backend.core.work import EpochPool

COUNTS = {0: 71, 1: 18, 2: 15}
counts_of_ranks = st.dictionaries(st.integers(0, 9), st.integers(1, 200), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("remaining", "alive", "plan"),
    [
        (107, {0, 1, 2}, None),  # a whole window and more is left
        (106, {0, 1, 2}, [71, 19, 16]),
        (105, {0, 1, 2}, [71, 18, 16]),  # the slowest is padded first
        (104, {0, 1, 2}, [71, 18, 15]),
        (72, {0, 1, 2}, [49, 13, 10]),
        (40, {0, 1, 2}, [27, 7, 6]),
        (10, {0, 1, 2}, [7, 3, 0]),
        (5, {0, 1, 2}, [3, 0, 2]),
        (1, {0, 1, 2}, [1, 0, 0]),
        (40, {0, 2}, [33, 0, 7]),
        (16, {2}, [0, 0, 16]),  # a lone survivor takes all
        (0, {0, 1, 2}, None),
        (40, set(), None),
    ],
)
def test_the_final_window_by_the_examples(remaining, alive, plan):
    expected = None if plan is None else dict(enumerate(plan))

    assert final_window_plan(remaining, COUNTS, alive) == expected


def test_a_window_that_fits_exactly_is_the_counts_even_with_a_lone_batch_in_them():
    assert final_window_plan(6, {0: 5, 1: 1}, {0, 1}) == {0: 5, 1: 1}


def test_a_rank_without_a_count_is_not_padded():
    assert final_window_plan(6, {0: 5, 1: 0}, {0, 1}) == {0: 6, 1: 0}


def test_the_fastest_of_equals_is_the_lowest_rank_and_is_not_padded():
    assert final_window_plan(32, {0: 10, 1: 10, 2: 10}, {0, 1, 2}) == {0: 10, 1: 11, 2: 11}


@given(counts=counts_of_ranks, remaining=st.integers(0, 2000), dead=st.sets(st.integers(0, 9)))
def test_a_final_plan_uses_up_the_epoch_and_leaves_no_lone_batch(counts, remaining, dead):
    alive = counts.keys() - dead

    plan = final_window_plan(remaining, counts, alive)

    living = sum(counts[rank] for rank in alive)
    assert (plan is not None) == (0 < remaining < living + len(counts) and living > 0)
    if plan is not None:
        assert sum(plan.values()) == remaining
        assert all(plan[rank] >= 0 for rank in counts)
        assert all(plan[rank] == 0 for rank in dead & counts.keys())
        if remaining < living:
            assert list(plan.values()).count(1) == 0 or sum(plan.values()) == 1


@pytest.mark.parametrize(
    ("counts", "total", "clamped"),
    [
        ([71, 18, 15], 72, [50, 12, 10]),
        ([25, 10], 20, [15, 5]),
        ([5, 5, 5], 2, [1, 1, 1]),  # the floor of one wins
        ([5, 5, 5], 15, [5, 5, 5]),
        ([5, 5, 5], 99, [5, 5, 5]),
        ([100, 1], 50, [49, 1]),
        ([100, 1, 1, 1], 5, [2, 1, 1, 1]),  # the floors are paid for by the largest
    ],
)
def test_clamping_by_the_examples(counts, total, clamped):
    assert clamp_total(dict(enumerate(counts)), total) == dict(enumerate(clamped))


@given(counts=counts_of_ranks, total=st.integers(1, 3000))
def test_clamping_meets_the_total_unless_the_floor_of_one_wins(counts, total):
    clamped = clamp_total(counts, total)
    scaled = scaled_down(counts, total) if sum(counts.values()) > total else counts

    assert clamped.keys() == counts.keys()
    assert all(count >= 1 for count in clamped.values())
    assert sum(clamped.values()) == min(sum(counts.values()), max(total, len(counts)))
    assert sum(scaled.values()) <= max(total, len(counts))


@given(weights=counts_of_ranks, total=st.integers(0, 3000))
def test_largest_remainder_is_exact_and_within_one_of_the_quota(weights, total):
    shares = largest_remainder(total, weights)

    whole = sum(weights.values())
    assert sum(shares.values()) == total
    assert all(abs(shares[rank] * whole - total * weight) < whole for rank, weight in weights.items())


def pool_with(batches: int, batch_size: int = 4) -> EpochPool:
    return EpochPool(0, batches * batch_size - 1, batch_size)


@pytest.mark.parametrize(
    ("batches", "counts", "alive", "forced", "plan"),
    [
        pytest.param(200, [71, 18, 15], {0, 1, 2}, False, [71, 18, 15], id="a full window"),
        pytest.param(106, [71, 18, 15], {0, 1, 2}, False, [71, 19, 16], id="the final window is padded"),
        pytest.param(10, [71, 18, 15], {0, 1, 2}, False, [7, 3, 0], id="a short one leaves rank 2 idle"),
        pytest.param(200, [71, 18, 15], {0, 2}, False, [71, 0, 15], id="the dead get nothing"),
        pytest.param(200, [71, 18, 15], set(), False, [0, 0, 0], id="nobody is alive"),
        pytest.param(5, [1, 1, 1], {0, 1, 2}, True, [1, 1, 1], id="one batch each stays one batch each"),
        pytest.param(2, [1, 1, 1], {0, 1, 2}, True, [1, 1, 0], id="the last lock-step window"),
        pytest.param(5, [3, 1], {0, 1}, True, [3, 1], id="forced counts are not padded"),
        pytest.param(1, [3, 1], {0, 1}, True, [1, 0], id="the rest of forced counts"),
        pytest.param(11, [6, 6], {0, 1}, True, [6, 5], id="case J01: 11 batches, two equal ranks"),
    ],
)
def test_every_windows_plan(batches, counts, alive, forced, plan):
    counts = dict(enumerate(counts))

    assert window_plan(pool_with(batches), counts, alive, forced=forced) == dict(enumerate(plan))


def test_an_empty_pool_plans_nothing():
    pool = pool_with(2)
    pool.take(2, 0)

    assert window_plan(pool, {0: 5, 1: 5}, {0, 1}) == {0: 0, 1: 0}


@pytest.mark.parametrize(
    ("batches", "rank", "alive", "plan", "taken", "chunk"),
    [
        pytest.param(200, 1, {0, 1, 2}, None, 0, 18, id="rule 3: the whole window at once"),
        pytest.param(10, 0, {0, 1, 2}, None, 0, 10, id="rule 2: no more than remains"),
        pytest.param(40, 0, {0, 1, 2}, {0: 27, 1: 7, 2: 6}, 0, 27, id="rule 1: the plan's slot"),
        pytest.param(40, 2, {0, 1, 2}, {0: 40, 1: 0, 2: 0}, 0, 0, id="rule 1: an idle slot"),
        pytest.param(200, 1, {0, 1, 2}, None, 5, 13, id="the rest after a short returned range"),
        pytest.param(200, 1, {0, 1, 2}, None, 18, 0, id="the allotment is used up"),
        pytest.param(200, 1, {0, 1, 2}, None, 30, 0, id="never negative"),
        pytest.param(200, 1, {0, 2}, None, 0, 0, id="the dead get nothing"),
        pytest.param(200, 9, {0, 1, 2, 9}, None, 0, 0, id="a rank without a count"),
        pytest.param(200, 2, {0, 1, 2}, {0: 40}, 0, 0, id="a rank without a slot"),
    ],
)
def test_the_next_chunk(batches, rank, alive, plan, taken, chunk):
    assert chunk_batches(pool_with(batches), rank, COUNTS, alive, plan, taken) == chunk


def test_a_window_begins_with_nothing_taken():
    assert chunk_batches(pool_with(200), 2, COUNTS, {0, 1, 2}, None) == 15


def test_rule_0_without_a_pool_there_is_no_chunk():
    assert chunk_batches(None, 0, COUNTS, {0}, None) == 0
    empty = pool_with(1)
    empty.take(1, 0)
    assert chunk_batches(empty, 0, COUNTS, {0}, {0: 5}) == 0


def run_window(pool: EpochPool, counts: dict[int, int], alive: set[int], forced: bool, dies: int | None) -> None:
    """One window as the cycle does it: plan, deal until allotments are used up, deliver, commit, forfeit the dead."""
    plan = window_plan(pool, counts, alive, forced=forced)
    assert sum(plan.values()) <= pool.remaining_batches
    assert sum(plan.values()) > 0
    for rank in sorted(alive):
        taken = 0
        while (batches := chunk_batches(pool, rank, counts, alive, plan, taken)) > 0:
            piece = pool.take(batches, rank)
            assert piece is not None
            taken += -(-piece.size // pool.batch_size)
            pool.check()
            if rank != dies:
                pool.deliver(rank, piece.offset, piece.size)
        assert taken == plan[rank]
    if dies is not None:
        alive.discard(dies)
        pool.forfeit(dies)
    pool.accept(alive)
    pool.check()


@given(
    samples=st.integers(1, 500),
    batch_size=st.integers(1, 9),
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    forced=st.booleans(),
    deaths=st.lists(st.one_of(st.none(), st.integers(0, 4)), max_size=8),
)
def test_an_epoch_of_windows_accepts_every_sample_once_in_spite_of_deaths(samples, batch_size, counts, forced, deaths):
    pool, alive = EpochPool(0, samples, batch_size), set(range(len(counts)))
    script = iter(deaths)
    windows = 0
    while not pool.is_done:
        dies = next(script, None)
        run_window(pool, dict(enumerate(counts)), alive, forced, dies if dies in alive and len(alive) > 1 else None)
        windows += 1
        assert windows <= samples + len(deaths)
    assert pool.accepted_samples == samples
