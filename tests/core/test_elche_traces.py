"""The four worked traces, digit for digit, through the public interface: report, verdict, counts (behaviour C23)."""

import pytest
from elche_windows import ran

from backend.core.elche import ElChe
from backend.core.verdicts import Stable

STABLE = Stable("All is well.")


def trace(elche: ElChe, rates: dict[int, float], reports: int, *, sync_ms: float, fill_ms: float = 0.0) -> list[tuple]:
    """(ran, anchor, counts after the commit, phase after) of each report; the first follows no round."""
    rows = []
    for number in range(reports):
        before = elche.counts
        elche.report_window(ran(before, rates, sync_ms=sync_ms if number else 0.0, fill_ms=fill_ms))
        decision = elche.apply(STABLE)
        elche.check()
        assert decision.counts == elche.counts
        assert decision.changed == (decision.counts != before)
        rows.append((tuple(before.values()), elche.anchor, tuple(elche.counts.values()), elche.phase))
    return rows


def test_t1_two_ranks_and_a_round_of_60_ms():
    elche = ElChe([0, 1])

    assert trace(elche, {0: 10.0, 1: 25.0}, 9, sync_ms=60.0) == [
        ((10, 10), 10, (25, 10), "warmup"),  # the first report never proposes
        ((25, 10), 20, (50, 20), "warmup"),  # 0.1935 > 0.10
        ((50, 20), 40, (100, 40), "warmup"),  # 0.1071 > 0.10
        ((100, 40), 40, (100, 40), "warmup"),  # 0.0566 <= 0.10
        ((100, 40), 40, (100, 40), "stable"),
        ((100, 40), 46, (115, 46), "stable"),  # 0.0566 > 0.05: ceil(40 x 1.132)
        ((115, 46), 46, (115, 46), "stable"),  # 0.0496
        ((115, 46), 46, (115, 46), "stable"),
        ((115, 46), 46, (115, 46), "stable"),
    ]


def test_t2_a_cold_start_of_20_ms_counts_like_the_round():
    elche = ElChe([0, 1])

    rows = trace(elche, {0: 10.0, 1: 25.0}, 9, sync_ms=60.0, fill_ms=20.0)

    assert [(anchor, counts) for _, anchor, counts, _ in rows] == [
        (10, (25, 10)),
        (20, (50, 20)),
        (40, (100, 40)),
        (40, (100, 40)),
        (40, (100, 40)),
        (60, (150, 60)),  # 0.0741
        (61, (150, 60)),  # 0.0506: the anchor moves, the dead zone keeps the schedule
        (61, (150, 60)),
        (61, (150, 60)),
    ]


def test_t3_the_epoch_caps_the_window_and_so_ends_the_growth():
    elche = ElChe([0, 1, 2])
    elche.set_max_total(400)

    rows = trace(elche, {0: 8.0, 1: 30.0, 2: 32.0}, 4, sync_ms=900.0)

    assert [(anchor, counts) for _, anchor, counts, _ in rows] == [
        (10, (38, 10, 9)),
        (20, (75, 20, 19)),
        (40, (150, 40, 38)),
        (80, (265, 70, 65)),
    ]
    assert elche.anchor_rank == 1
    assert sum(elche.counts.values()) == 400
    assert elche.cap_binding
    assert [row[1:3] for row in trace(elche, {0: 8.0, 1: 30.0, 2: 32.0}, 30, sync_ms=900.0)] == [
        (80, (265, 70, 65))
    ] * 30


def test_t4_a_step_limit_spares_the_first_calibration():
    elche = ElChe([0, 1], max_batch_diff=3)
    assert trace(elche, {0: 10.0, 1: 25.0}, 1, sync_ms=0.0)[0][2] == (25, 10)

    rows = trace(elche, {0: 4.0, 1: 25.0}, 1, sync_ms=0.0)

    assert elche.smoothed(0) == 7.0
    assert rows[0][2] == (28, 10)  # the target is 36


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        (1, "Rank 1 sets the pace at 25.0 ms a batch and keeps 10; rank 0 is 2.5 times as fast and gets 25."),
        (
            2,
            "The last round cost 19 % of the window (target 5 %), so the anchor grows from 10 to 20 batches: rank 1 "
            "sets the pace at 25.0 ms a batch and gets 20; rank 0 is 2.5 times as fast and gets 50.",
        ),
        (4, "Rank 1 sets the pace at 25.0 ms a batch and keeps 40; rank 0 is 2.5 times as fast and keeps 100."),
        (
            6,
            "The last round cost 5.7 % of the window (target 5 %), so the anchor grows from 40 to 46 batches: rank 1 "
            "sets the pace at 25.0 ms a batch and gets 46; rank 0 is 2.5 times as fast and gets 115.",
        ),
    ],
)
def test_t1_in_words(report, sentence):
    elche = ElChe([0, 1])
    for number in range(report):
        elche.report_window(ran(elche.counts, {0: 10.0, 1: 25.0}, sync_ms=60.0 if number else 0.0))
        decision = elche.apply(STABLE)

    assert decision.reason == sentence
