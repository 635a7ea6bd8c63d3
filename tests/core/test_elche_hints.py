"""What ElChe takes into account besides the last windows: hints before them, errands after them, and a pace that
changed for good (behaviour C3, C4, C21; decision 0009)."""

import pytest
from elche_windows import calibrated, ran, window

from backend.core.elche import ElChe
from backend.core.elche_rules import Rates, SpeedHint
from backend.core.verdicts import Stable

STABLE = Stable("All is well.")

# -------------------------------------------------------------------------------------------------- hints


@pytest.mark.parametrize(
    ("hint", "counts", "sentence"),
    [
        (
            SpeedHint(1, 2.5),
            {0: 25, 1: 10, 2: 25},
            "No round has closed yet: the speed hint takes rank 1 as the slow one with 10 and gives the others 25.",
        ),
        (SpeedHint(1, 1e9), {0: 640, 1: 10, 2: 640}, None),
        (
            SpeedHint(1, 1.0),
            {0: 10, 1: 10, 2: 10},
            "No round has closed yet: every rank gets the same share until it has been timed, and rank 1 sets the "
            "pace, as the speed hint says.",
        ),
        (
            SpeedHint(1, configured=False),
            {0: 10, 1: 10, 2: 10},
            "No round has closed yet: every rank gets the same share until it has been timed, and rank 1 sets the "
            "pace: its device looks slowest by name and memory.",
        ),
        (
            None,
            {0: 10, 1: 10, 2: 10},
            "No round has closed yet: every rank gets the same share until it has been timed.",
        ),
    ],
)
def test_the_first_allotments(hint, counts, sentence):
    elche = ElChe([0, 1, 2], speed_hint=hint)

    assert elche.counts == counts
    assert elche.anchor_rank == (hint.slow_rank if hint else None)
    assert not elche.calibrated
    assert sentence in (None, elche.opening)
    elche.check()


def test_a_hint_about_a_rank_that_never_came_is_ignored_aloud():
    elche = ElChe([0, 1], speed_hint=SpeedHint(7, 2.0))

    assert (elche.counts, elche.anchor_rank) == ({0: 10, 1: 10}, None)
    assert elche.opening.endswith("The speed hint names rank 7, which the cohort lacks, so it is ignored.")


def test_a_hint_pins_the_anchor_until_enough_is_known():
    """The hint is wrong: rank 0 is the slow one. The counts follow the measurement at once, the pin only when the phase
    is stable."""
    elche = ElChe([0, 1], speed_hint=SpeedHint(1, 2.0))
    rates = {0: 40.0, 1: 10.0}

    elche.report_window(ran(elche.counts, rates))

    assert (elche.anchor_rank, elche.counts) == (1, {0: 3, 1: 10})
    for _ in range(4):
        elche.report_window(ran(elche.counts, rates))
    assert (elche.anchor_rank, elche.phase) == (1, "stable")
    elche.report_window(ran(elche.counts, rates))
    assert (elche.anchor_rank, elche.counts) == (0, {0: 10, 1: 40})


def test_a_hinted_rank_that_dies_leaves_the_others_their_counts():
    elche = ElChe([0, 1, 2], speed_hint=SpeedHint(1, 2.0))

    decision = elche.drop(1)

    assert (decision.counts, decision.anchor_rank) == ({0: 20, 2: 20}, None)


# ------------------------------------------------------------------------------------------------ errands


def test_an_errand_makes_room_in_one_window_only():
    rates = {0: 10.0, 1: 40.0}
    elche = calibrated(rates)
    assert elche.counts == {0: 40, 1: 10}
    elche.stage_slack({0: 105.0})

    decision = elche.report_window(ran(elche.counts, rates))

    assert decision.counts == {0: 29, 1: 10}
    assert decision.reason.endswith(
        "rank 0 is 4.0 times as fast and gets 29. Rank 0 gets fewer this time, because an errand will take 105 ms of "
        "its window."
    )
    assert elche.report_window(ran(elche.counts, rates)).counts == {0: 40, 1: 10}


def test_the_room_stays_when_the_anchor_grows_in_the_same_round():
    rates = {0: 10.0, 1: 40.0}
    elche = calibrated(rates)
    elche.stage_slack({0: 1500.0})
    elche.report_window(ran(elche.counts, rates, sync_ms=400.0))

    decision = elche.apply(STABLE)

    assert (decision.anchor, decision.counts) == (20, {0: 1, 1: 20})  # 80 less 150, but never below one
    assert "an errand will take 1.5 s of its window" in decision.reason


@pytest.mark.parametrize(
    ("anchor", "cost_ms", "fast"),
    [
        (10, 99.0, 40),  # below 100 ms
        (10, 100.0, 30),
        (100, 199.0, 400),  # below 5 % of the anchor's 4 s
        (100, 200.0, 380),
        (10, float("inf"), 40),
        (10, float("nan"), 40),
    ],
)
def test_a_cheap_errand_is_not_worth_a_change(anchor, cost_ms, fast):
    rates = {0: 10.0, 1: 40.0}
    elche = calibrated(rates, initial_anchor=anchor)
    elche.stage_slack({0: cost_ms})

    assert elche.report_window(ran(elche.counts, rates)).counts[0] == fast


def test_nothing_is_staged_before_calibration():
    elche = ElChe([0, 1])
    elche.stage_slack({0: 5000.0})

    assert elche.report_window(window({0: 10.0, 1: 40.0})).counts == {0: 40, 1: 10}


def test_a_capped_epoch_does_not_seem_to_fit_because_of_an_errand():
    rates = {0: 10.0, 1: 40.0}
    elche = ElChe(rates)
    elche.set_max_total(45)
    elche.report_window(window(rates))
    assert elche.cap_binding
    elche.stage_slack({0: 300.0})

    elche.report_window(ran(elche.counts, rates))

    assert elche.counts == {0: 10, 1: 10}
    assert elche.cap_binding


def test_the_errand_of_a_rank_that_dies_is_forgotten():
    elche = calibrated({0: 10.0, 1: 40.0, 2: 10.0})
    elche.stage_slack({0: 200.0})
    elche.drop(0)

    assert "errand" not in elche.report_window(window({1: 40.0, 2: 10.0})).reason


# -------------------------------------------------------------------------------------------------- drift


def smoothed(*readings: float) -> float:
    rates = Rates([0])
    for ms in readings:
        rates.observe(window({0: ms}))
    return rates.smoothed(0)


@pytest.mark.parametrize(
    ("readings", "mean"),
    [
        pytest.param((10, 10, 10, 20, 20), 20, id="twice as slow, twice in a row"),
        pytest.param((10, 10, 10, 5, 5), 5, id="twice as fast"),
        pytest.param((10, 10, 16, 20, 20), 20, id="it changed in the middle of a window"),
        pytest.param((10, 20, 20), 20, id="after one reading"),
        pytest.param((10, 10, 10, 20), 12.5, id="once may be noise"),
        pytest.param((10, 10, 20, 10, 20), 14, id="a stutter"),
        pytest.param((10, 10, 10, 13, 13), 11.2, id="within 30 %"),
        pytest.param((10, 10, 10, 20, 24), 14.8, id="two that disagree"),
        pytest.param((20, 20), 20, id="nothing came before"),
    ],
)
def test_a_new_pace_replaces_the_old_one(readings, mean):
    assert smoothed(*readings) == pytest.approx(mean)


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("drifter", [0, 1, 2])
def test_a_drift_by_two_is_followed_within_three_windows(drifter, factor):
    """Followed: every rank needs the anchor's time for its allotment again, to within a batch."""
    rates = {0: 10.0, 1: 20.0, 2: 40.0}
    elche = calibrated(rates, reports=8, initial_anchor=20)
    rates[drifter] *= factor
    for _ in range(3):
        elche.report_window(ran(elche.counts, rates))

    pace = elche.counts[elche.anchor_rank] * rates[elche.anchor_rank]
    for rank, ms in rates.items():
        assert abs(elche.counts[rank] * ms - pace) <= ms
