"""Order and batches: every sample of an epoch once, in an order that only seed and epoch decide (case J14)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.data import SampleFeed, epoch_permutation, fetch

GOLDEN_42_0 = [11, 7, 1, 6, 10, 4, 3, 5, 9, 0, 2, 8]
GOLDEN_42_1 = [4, 10, 9, 5, 3, 0, 11, 2, 7, 1, 6, 8]
GOLDEN_MINUS_1 = [8, 9, 10, 11, 0, 7, 4, 2, 6, 3, 1, 5]


@given(st.integers(1, 500), st.integers(-(2**63), 2**63 - 1), st.integers(0, 1000))
@settings(deadline=None)
def test_an_epoch_holds_each_sample_once(size: int, seed: int, epoch: int) -> None:
    order = epoch_permutation(size, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(size))
    assert order.tolist() == epoch_permutation(size, seed, epoch).tolist()


def test_the_order_is_the_same_on_every_version() -> None:
    """Golden: hosts with different numpy releases must cut the same permutation."""
    assert epoch_permutation(12, 42, 0).tolist() == GOLDEN_42_0
    assert epoch_permutation(12, 42, 1).tolist() == GOLDEN_42_1
    assert epoch_permutation(12, -1, 0).tolist() == GOLDEN_MINUS_1


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(epoch_permutation(16, seed, epoch).tolist()) for seed in (1, 2) for epoch in range(3)}
    assert len(orders) == 6


def halves(seed: int, epochs: range) -> list[list[int]]:
    """The ids of each epoch as two ranks see them, each with a feed of its own and half of the epoch."""
    feeds = [SampleFeed(range(16), list, seed=seed, batch_size=3) for _ in range(2)]
    seen = []
    for epoch in epochs:
        cuts = [feed.batches(epoch, offset, 8) for feed, offset in zip(feeds, (0, 8), strict=True)]
        seen.append([sample for cut in cuts for batch, _ in cut for sample in batch])
    return seen


def test_two_ranks_over_three_epochs_and_a_resume_between_them() -> None:
    """Case J14: fresh orders without a call of the user's, the same again from the same seed, whenever one starts."""
    orders = halves(7, range(3))
    assert all(sorted(order) == list(range(16)) for order in orders), "distinct ids, disjoint over the ranks"
    assert len(set(map(tuple, orders))) == 3
    assert halves(7, range(3)) == orders
    assert not {tuple(order) for order in halves(8, range(3))} & set(map(tuple, orders))
    assert halves(7, range(2, 3)) == [orders[2]], "a resume goes on with epoch 2's order, not with epoch 0's"


def test_no_position_is_favoured() -> None:
    first = [int(epoch_permutation(4, 9, epoch)[0]) for epoch in range(4000)]
    counts = [first.count(value) for value in range(4)]
    assert all(850 < count < 1150 for count in counts), counts


@given(st.integers(1, 200), st.integers(1, 40), st.data())
@settings(deadline=None)
def test_chunks_of_an_epoch_make_up_the_epoch(size: int, batch_size: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, size), max_size=6)) | {size})
    feed = SampleFeed(range(size), list, seed=3, batch_size=batch_size)
    seen: list[int] = []
    start = 0
    for end in cuts:
        batches = list(feed.batches(1, start, end - start))
        assert all(len(batch) == samples <= batch_size for batch, samples in batches)
        assert all(samples == batch_size for _, samples in batches[:-1])
        seen += [sample for batch, _ in batches for sample in batch]
        start = end
    assert seen == epoch_permutation(size, 3, 1).tolist()


@pytest.mark.parametrize(("offset", "size"), [(-1, 2), (9, 2), (0, 11), (0, 0), (10, 1)])
def test_a_chunk_outside_the_dataset_is_refused(offset: int, size: int) -> None:
    with pytest.raises(ValueError, match="10 samples"):
        SampleFeed(range(10), list, seed=0, batch_size=4).batches(0, offset, size)


def test_a_dataset_that_serves_batches_is_asked_for_batches() -> None:
    class Batched:
        def __len__(self) -> int:
            return 4

        def __getitems__(self, indices: list[int]) -> tuple[int, ...]:
            assert all(type(index) is int for index in indices)
            return tuple(10 * index for index in indices)

    assert fetch(Batched(), [2, 0]) == [20, 0]
    feed = SampleFeed(Batched(), sum, seed=0, batch_size=4)
    assert list(feed.batches(0, 0, 4)) == [(60, 4)]
