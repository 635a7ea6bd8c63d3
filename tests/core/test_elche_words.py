"""The sentence under the allotment map."""

import pytest

from backend.core import elche_words as words
from backend.core.elche_growth import Pressure
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


# ------------------------------------------------------------------------------------------- the anchor moves


GROWTH = words.moved("The last round cost 11 % of the window (target 5 %)", 20, 23)


def test_why_the_anchor_grew_goes_first():
    sentence = say({0: 50, 1: 20}, {0: 58, 1: 23}, {0: 10.0, 1: 25.0}, 1, moves=[GROWTH])

    assert sentence == (
        "The last round cost 11 % of the window (target 5 %), so the anchor grows from 20 to 23 batches: "
        "rank 1 sets the pace at 25.0 ms a batch and gets 23; rank 0 is 2.5 times as fast and gets 58."
    )


def test_a_growth_within_the_dead_zone_says_that_it_waits():
    sentence = say({0: 150, 1: 60}, {0: 150, 1: 60}, {0: 10.0, 1: 25.0}, 1, moves=[words.moved("It cost", 60, 61)])

    assert sentence.endswith("keeps 150. So small a change does not move the allotments yet.")
    assert "So small" not in say({0: 1}, {0: 1}, {0: 1.0}, 0, moves=[GROWTH], cap=1)
    assert "So small" not in say({0: 1}, {0: 1}, {0: 1.0}, 0)


@pytest.mark.parametrize(
    ("before", "after", "clause"),
    [(20, 23, "X, so the anchor grows from 20 to 23 batches"), (2, 1, "X, so the anchor shrinks from 2 to 1 batch")],
)
def test_how_an_anchor_moves(before, after, clause):
    assert words.moved("X", before, after) == clause


def test_several_moves_are_one_sentence():
    assert words.joined(["The one, so", "The other, so"]) == "The one, so; the other, so"


@pytest.mark.parametrize(
    ("overhead", "target", "fill", "text"),
    [
        (0.1935, 0.05, 0.0, "The last round cost 19 % of the window (target 5 %)"),
        (0.0566, 0.05, 0.0, "The last round cost 5.7 % of the window (target 5 %)"),
        (0.0995, 0.07, 0.09, "The last round cost 10 % of the window (target 7 %)"),
        (0.0994, 0.025, 0.1, "The last round and the window's cold start cost 9.9 % of the window (target 2.5 %)"),
        (0.996, 0.5, 1.0, "The last round and the window's cold start cost 100 % of the window (target 50 %)"),
    ],
)
def test_how_an_overhead_reads(overhead, target, fill, text):
    assert words.pressed(Pressure(overhead, target, target, fill)) == text


@pytest.mark.parametrize(("count", "text"), [(1, "1 more round"), (4, "4 more rounds")])
def test_rounds_to_come(count, text):
    assert words.rounds(count) == text


@pytest.mark.parametrize(("ms", "text"), [(105.4, "105 ms"), (999.0, "999 ms"), (1000.0, "1.0 s"), (12345.0, "12.3 s")])
def test_how_long_an_errand_takes(ms, text):
    assert f"an errand will take {text} of its window." in say({0: 9}, {0: 1}, {0: 1.0}, 0, slack={0: ms})
