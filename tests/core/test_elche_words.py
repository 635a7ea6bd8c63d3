"""The sentence under the allotment map."""

import pytest

from backend.core.elche_words import explain


def say(before, counts, rates, anchor_rank, **more) -> str:
    return explain(before=before, counts=counts, rates=rates, anchor_rank=anchor_rank, **more)


@pytest.mark.parametrize(
    ("before", "counts", "rates", "anchor_rank", "sentence"),
    [
        pytest.param(
            {0: 10, 2: 10},
            {0: 39, 2: 10},
            {0: 20.8, 2: 81.2},
            2,
            "Rank 2 sets the pace at 81.2 ms a batch and keeps 10; rank 0 is 3.9 times as fast and gets 39.",
            id="the signature",
        ),
        pytest.param(
            {0: 40, 1: 20, 2: 10},
            {0: 40, 1: 20, 2: 10},
            {0: 20.0, 1: 40.0, 2: 80.0},
            2,
            "Rank 2 sets the pace at 80.0 ms a batch and keeps 10; rank 0 is 4.0 times as fast and keeps 40; "
            "rank 1 is 2.0 times as fast and keeps 20.",
            id="nothing changed, the fastest first",
        ),
        pytest.param(
            {0: 10, 1: 10, 2: 10},
            {0: 38, 1: 10, 2: 9},
            {0: 8.0, 1: 30.0, 2: 32.0},
            1,
            "Rank 1 sets the pace at 30.0 ms a batch and keeps 10; rank 0 is 3.8 times as fast and gets 38; "
            "rank 2 is slower still at 32.0 ms and gets 9.",
            id="slower than the anchor",
        ),
        pytest.param(
            {0: 10, 1: 10, 2: 10},
            {0: 10, 1: 10, 2: 10},
            {0: 4.125, 1: 4.2, 2: 0.0},
            0,
            "Rank 0 sets the pace at 4.12 ms a batch and keeps 10; rank 1 is about as fast and keeps 10; "
            "rank 2 has no timing yet and keeps 10.",
            id="equals, and one without timing",
        ),
        pytest.param(
            {0: 10, 1: 10},
            {0: 640, 1: 10},
            {0: 10.0, 1: 1800.0},
            1,
            "Rank 1 sets the pace at 1800 ms a batch and keeps 10; rank 0 is 180 times as fast, counted as 64, "
            "and gets 640.",
            id="the ratio is cut, and that is said",
        ),
        pytest.param(
            {0: 12},
            {0: 10},
            {0: 0.0412},
            0,
            "Rank 0 sets the pace at 0.0412 ms a batch and gets 10.",
            id="a lone survivor",
        ),
    ],
)
def test_sentences(before, counts, rates, anchor_rank, sentence):
    assert say(before, counts, rates, anchor_rank) == sentence


@pytest.mark.parametrize(
    ("pace", "text"),
    [(0.0412, "0.0412"), (9.99, "9.99"), (10.0, "10.0"), (81.23, "81.2"), (999.9, "999.9"), (1000.0, "1000")],
)
def test_how_milliseconds_read(pace, text):
    assert say({0: 10}, {0: 10}, {0: pace}, 0).startswith(f"Rank 0 sets the pace at {text} ms a batch")


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (106.0, "is slower still at 106.0 ms"),
        (105.0, "is about as fast"),
        (95.3, "is about as fast"),
        (90.0, "is 1.1 times as fast"),
        (10.5, "is 9.5 times as fast"),
        (10.0, "is 10 times as fast"),
        (100 / 64, "is 64 times as fast and"),
        (1.5, "is 67 times as fast, counted as 64, and"),
    ],
)
def test_how_a_speed_reads(ms, text):
    assert f"; rank 1 {text}" in say({0: 10, 1: 10}, {0: 10, 1: 10}, {0: 100.0, 1: ms}, 0)


def test_an_epoch_of_one_batch_is_in_the_singular():
    assert "epoch's 1 batch, so" in say({0: 1}, {0: 1}, {0: 10.0}, 0, cap=1)


def test_what_kept_the_counts_from_following_the_speeds_is_said():
    sentence = say({0: 25, 1: 10}, {0: 28, 1: 10}, {0: 7.0, 1: 25.0}, 1, step=3, cap=400)

    assert sentence == (
        "Rank 1 sets the pace at 25.0 ms a batch and keeps 10; rank 0 is 3.6 times as fast and gets 28. "
        "Counts move by at most 3 per window, so they follow the speeds in steps. "
        "Together they may not exceed the epoch's 400 batches, so every share is scaled down to fit."
    )


@pytest.mark.parametrize(
    ("world", "tail"),
    [
        (6, "rank 4 is 2.0 times as fast and gets 20."),  # five others fit
        (7, "2 more ranks get 20 each."),
        (1000, "995 more ranks get 20 each."),
    ],
)
def test_a_large_cohort_is_summed_up(world, tail):
    rates = dict.fromkeys(range(world), 10.0) | {world - 1: 20.0}
    counts = dict.fromkeys(range(world), 20) | {world - 1: 10}

    sentence = say(dict.fromkeys(range(world), 10), counts, rates, world - 1)

    assert sentence.endswith(tail)
    assert len(sentence) < 400


def test_the_summary_gives_the_span():
    rates = {rank: 10.0 + rank for rank in range(8)}
    counts = {rank: 20 - rank for rank in range(8)}

    sentence = say(counts, counts, rates, 7)

    assert sentence.endswith("3 more ranks get between 14 and 16.")
