"""Epoch pools: every sample in exactly one state, and only the allowed moves (behaviour E1, E3; law L2)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.work import EpochPool, Range, WorkError, merged


def drain(pool: EpochPool, rank: int = 0, batches: int = 1000) -> list[Range]:
    """Take everything that is left."""
    taken = []
    while (piece := pool.take(batches, rank)) is not None:
        taken.append(piece)
        pool.check()
    return taken


def test_the_last_partial_batch_is_dealt():
    pool = EpochPool(0, samples=11, batch_size=4)

    assert pool.remaining_batches == 3
    assert drain(pool, batches=2) == [Range(0, 8), Range(8, 3)]
    assert pool.remaining_batches == 0
    assert pool.is_dealt
    assert not pool.is_done


def test_a_range_walks_from_the_pool_to_accepted():
    pool = EpochPool(3, samples=10, batch_size=4)
    piece = pool.take(2, rank=7)
    assert piece == Range(0, 8)
    assert pool.in_flight(7)
    assert pool.in_flight_ranges(7) == [piece]
    assert pool.uncovered() == [Range(0, 10)]

    pool.deliver(7, piece.offset, piece.size)
    assert not pool.in_flight(7)
    assert pool.delivered_samples(7) == 8
    assert pool.accepted_samples == 0

    assert pool.accept([7]) == {7: 8}
    assert pool.accepted_samples == 8
    assert pool.uncovered() == [Range(8, 2)]
    assert not pool.is_done

    rest = pool.take(1, rank=2)
    pool.deliver(2, rest.offset, rest.size)
    pool.accept([2])
    assert pool.is_done
    assert pool.uncovered() == []
    pool.check()


@pytest.mark.parametrize("batches", [0, -1])
def test_taking_nothing_takes_nothing(batches):
    pool = EpochPool(0, 10, 4)

    assert pool.take(batches, 0) is None
    assert not pool.in_flight(0)
    assert pool.remaining_batches == 3


@pytest.mark.parametrize(("offset", "size"), [(0, 4), (4, 4), (0, 9), (8, 2)])
def test_a_rank_may_only_deliver_what_it_holds(offset, size):
    pool = EpochPool(0, 10, 4)
    pool.take(2, rank=1)
    pool.take(1, rank=2)

    with pytest.raises(WorkError, match=r"rank 1 .* holds \[0, 8\)"):
        pool.deliver(1, offset, size)
    with pytest.raises(WorkError, match=rf"reports samples \[{offset}, {offset + size}\) of epoch 0 as trained"):
        pool.deliver(1, offset, size)
    pool.check()


def test_delivering_twice_or_for_nothing_is_refused():
    pool = EpochPool(0, 10, 4)
    pool.take(1, rank=1)
    pool.deliver(1, 0, 4)

    with pytest.raises(WorkError, match="holds no chunk"):
        pool.deliver(1, 0, 4)
    with pytest.raises(WorkError, match="rank 9 reports"):
        pool.deliver(9, 0, 4)


def test_accept_takes_only_the_contributors():
    pool = EpochPool(0, 12, 4)
    for rank in (0, 1):
        piece = pool.take(1, rank)
        pool.deliver(rank, piece.offset, piece.size)

    assert pool.accept([1, 5]) == {1: 4, 5: 0}
    assert pool.uncovered() == [Range(0, 4), Range(8, 4)]
    assert pool.delivered_samples(0) == 4
    assert pool.accept([0, 1]) == {0: 4, 1: 0}


def test_uncovered_lists_every_gap():
    pool = EpochPool(0, 22, 4)
    for rank in range(5):
        piece = pool.take(1, rank)
        pool.deliver(rank, piece.offset, piece.size)

    pool.accept([1, 3])

    assert pool.uncovered() == [Range(0, 4), Range(8, 4), Range(16, 6)]


def test_rollback_rewinds_the_cursor():
    pool = EpochPool(0, 12, 4)
    pool.take(1, 0)
    pool.take(1, 1)

    assert pool.rollback(1) == Range(4, 4)
    assert not pool.in_flight(1)
    assert pool.take(2, 2) == Range(4, 8)


def test_rollback_behind_the_cursor_is_first_in_line():
    pool = EpochPool(0, 16, 4)
    pool.take(1, 0)
    pool.take(1, 1)
    pool.rollback(0)

    assert pool.take(3, 2) == Range(0, 4)  # one range a call, even if more was wanted
    assert pool.take(3, 2) == Range(8, 8)


def test_rollback_undoes_the_newest_take_only():
    pool = EpochPool(0, 16, 4)
    first, second = pool.take(1, 0), pool.take(1, 0)

    assert pool.rollback(0) == second
    assert pool.in_flight_ranges(0) == [first]
    assert pool.rollback(0) == first
    with pytest.raises(WorkError, match="no chunk in flight"):
        pool.rollback(0)


def test_forfeit_returns_trained_and_untrained_work_and_is_idempotent():
    pool = EpochPool(0, 20, 4)
    for _ in range(2):
        pool.take(1, 0)
    other = pool.take(1, 1)
    pool.deliver(0, 0, 4)

    assert pool.forfeit(0) == [Range(0, 8)]
    assert pool.forfeit(0) == []
    assert not pool.in_flight(0)
    assert pool.remaining_batches == 4
    assert pool.in_flight_ranges(1) == [other]
    pool.check()


def test_forfeit_leaves_accepted_work_alone():
    pool = EpochPool(0, 8, 4)
    pool.take(1, 0)
    pool.deliver(0, 0, 4)
    pool.accept([0])

    assert pool.forfeit(0) == []
    assert pool.accepted_samples == 4


def test_returned_ranges_are_split_and_go_first():
    pool = EpochPool(0, 40, 4)
    pool.take(4, 0)
    pool.take(1, 1)
    pool.forfeit(0)

    assert [pool.take(3, 2) for _ in range(3)] == [Range(0, 12), Range(12, 4), Range(20, 12)]


def test_the_rest_of_a_split_range_stays_in_front_of_the_next():
    pool = EpochPool(0, 40, 4)
    for rank in (0, 1, 0, 1):
        pool.take(2, rank)
    pool.forfeit(0)

    assert [pool.take(1, 2) for _ in range(4)] == [Range(0, 4), Range(4, 4), Range(16, 4), Range(20, 4)]


def test_a_returned_partial_tail_stays_the_only_partial_batch():
    pool = EpochPool(0, 10, 4)
    drain(pool, rank=0, batches=1)
    pool.forfeit(0)

    assert pool.remaining_batches == 3
    assert drain(pool, rank=1, batches=2) == [Range(0, 8), Range(8, 2)]


@pytest.mark.parametrize(("samples", "batch_size"), [(0, 4), (-1, 4), (4, 0)])
def test_an_epoch_without_samples_or_batches_cannot_be(samples, batch_size):
    with pytest.raises(ValueError, match="at least one sample"):
        EpochPool(0, samples, batch_size)


def test_merged_joins_neighbours_and_keeps_gaps_and_overlaps():
    assert merged([Range(8, 4), Range(0, 4), Range(4, 4)]) == [Range(0, 12)]
    assert merged([Range(0, 4), Range(8, 4)]) == [Range(0, 4), Range(8, 4)]
    assert merged([Range(0, 4), Range(2, 4)]) == [Range(0, 4), Range(2, 4)]


def corrupt_lost(pool: EpochPool) -> None:
    pool._in_flight.clear()


def corrupt_doubled(pool: EpochPool) -> None:
    pool._accepted.append(Range(0, 4))


def corrupt_misaligned(pool: EpochPool) -> None:
    pool._in_flight[0] = [Range(0, 3), Range(3, 1)]


def corrupt_empty(pool: EpochPool) -> None:
    pool._reclaimed.append(Range(4, 0))


def corrupt_ghost(pool: EpochPool) -> None:
    pool._in_flight[9] = []


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (corrupt_lost, "lost or dealt twice"),
        (corrupt_doubled, "lost or dealt twice"),
        (corrupt_misaligned, "inside a batch"),
        (corrupt_empty, "empty range"),
        (corrupt_ghost, "in flight with nothing"),
    ],
)
def test_check_sees_every_broken_law(corrupt, message):
    pool = EpochPool(0, 12, 4)
    pool.take(1, 0)
    pool.check()

    corrupt(pool)

    with pytest.raises(AssertionError, match=message):
        pool.check()


moves = st.tuples(st.sampled_from(["take", "rollback", "deliver", "accept", "forfeit"]), st.integers(0, 3))


@given(
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 7),
    script=st.lists(st.tuples(moves, st.integers(1, 5)), max_size=60),
)
def test_no_order_of_moves_loses_or_doubles_a_sample(samples, batch_size, script):
    """An oracle keeps one state per sample; the pool must agree with it after every move."""
    pool = EpochPool(0, samples, batch_size)
    oracle = ["pool"] * samples
    for (move, rank), amount in script:
        if move == "take":
            piece = pool.take(amount, rank)
            assert (piece is None) == ("pool" not in oracle)
            for i in range(piece.offset, piece.end) if piece else ():
                assert oracle[i] == "pool"
                oracle[i] = f"flight{rank}"
        elif move == "rollback" and pool.in_flight(rank):
            piece = pool.rollback(rank)
            oracle[piece.offset : piece.end] = ["pool"] * piece.size
        elif move == "deliver" and pool.in_flight(rank):
            piece = pool.in_flight_ranges(rank)[0]
            pool.deliver(rank, piece.offset, piece.size)
            oracle[piece.offset : piece.end] = [f"delivered{rank}"] * piece.size
        elif move == "accept":
            accepted = pool.accept([rank])
            assert accepted == {rank: oracle.count(f"delivered{rank}")}
            oracle = ["accepted" if state == f"delivered{rank}" else state for state in oracle]
        elif move == "forfeit":
            returned = {i for piece in pool.forfeit(rank) for i in range(piece.offset, piece.end)}
            held = (f"flight{rank}", f"delivered{rank}")
            assert returned == {i for i, state in enumerate(oracle) if state in held}
            oracle = ["pool" if state in held else state for state in oracle]
        pool.check()
        assert pool.accepted_samples == oracle.count("accepted")
        open_batches = {i // batch_size for i, state in enumerate(oracle) if state == "pool"}
        assert pool.remaining_batches == len(open_batches)
        uncovered = {i for piece in pool.uncovered() for i in range(piece.offset, piece.end)}
        assert uncovered == {i for i, state in enumerate(oracle) if state != "accepted"}
        assert pool.is_done == (not uncovered)
        assert pool.is_dealt == ("pool" not in oracle)


class TestAcceptBatches:
    """What a round accepts of a rank that works ahead: the first batches that it was dealt, whatever its chunks."""

    def test_chunks_are_cut_at_batches_and_the_rest_stays_in_flight(self) -> None:
        pool = EpochPool(0, 30, 4)
        pool.take(2, 0)
        pool.take(1, 1)
        pool.take(5, 0)
        assert pool.held_batches(0) == 7
        assert pool.accept_batches({0: 3, 1: 0}) == 12
        assert (pool.accepted_samples, pool.held_batches(0), pool.held_batches(1)) == (12, 4, 1)
        assert pool.in_flight_ranges(0) == [Range(16, 14)]
        pool.check()
        assert pool.accept_batches({0: 4, 1: 1}) == 18
        assert pool.is_done
        pool.check()

    def test_the_partial_batch_counts_as_one(self) -> None:
        pool = EpochPool(0, 9, 4)
        pool.take(3, 0)
        assert pool.accept_batches({0: 2}) == 8
        assert pool.accept_batches({0: 1}) == 1
        assert pool.is_done

    def test_more_than_was_dealt_is_refused_and_changes_nothing(self) -> None:
        pool = EpochPool(0, 20, 4)
        pool.take(2, 0)
        pool.take(2, 1)
        with pytest.raises(WorkError, match="rank 1 contributed 3 batches of epoch 0, but holds 2"):
            pool.accept_batches({0: 2, 1: 3})
        assert (pool.accepted_samples, pool.held_batches(0), pool.held_batches(1)) == (0, 2, 2)
        pool.check()

    def test_a_death_returns_the_rest_and_only_the_rest(self) -> None:
        pool = EpochPool(0, 40, 4)
        pool.take(5, 0)
        pool.accept_batches({0: 2})
        assert pool.forfeit(0) == [Range(8, 12)]
        assert pool.take(9, 1) == Range(8, 32)
        pool.check()
