"""ElChe: calibration, election, counts, cap, phases, deaths, and the sentence (behaviour C; traces T1, T3, T4)."""

import math
from dataclasses import replace

import pytest
from elche_windows import calibrated, window
from hypothesis import given
from hypothesis import strategies as st

from backend.core.elche import ElChe
from backend.core.elche_rules import Rates, capped, elect, round_half_away, target_count

# ------------------------------------------------------------------------------------------ construction


@pytest.mark.parametrize(
    ("knobs", "anchor"),
    [
        ({}, 10),
        ({"initial_anchor": 1}, 1),
        ({"initial_anchor": 10, "max_anchor": 4}, 4),  # the ceiling drags floor and anchor down
        ({"initial_anchor": 5, "min_anchor": 8}, 8),  # the floor lifts the anchor
        ({"initial_anchor": 0}, 1),
        ({"initial_anchor": 10, "min_anchor": 50, "max_anchor": 20}, 20),
        ({"initial_anchor": 3, "max_anchor": 0}, 1),
        ({"initial_anchor": 5000}, 1000),
    ],
)
def test_the_initial_anchor_keeps_to_its_bounds(knobs, anchor):
    elche = ElChe([0, 1], **knobs)

    assert elche.anchor == anchor
    assert elche.counts == {0: anchor, 1: anchor}
    assert (elche.phase, elche.calibrated, elche.anchor_rank) == ("probe", False, None)
    assert elche.smoothed(0) == elche.smoothed(99) == 0.0
    elche.check()


@pytest.mark.parametrize("ranks", [[], [3], [3, 3]])
def test_balancing_needs_two_ranks(ranks):
    with pytest.raises(ValueError, match="at least two ranks"):
        ElChe(ranks)


def test_ranks_are_names_not_positions():
    elche = calibrated({7: 10.0, 3: 25.0})

    assert elche.counts == {3: 10, 7: 25}
    assert elche.anchor_rank == 3


# ------------------------------------------------------------------------------------------- calibration


@pytest.mark.parametrize(
    ("rates", "counts", "anchor_rank"),
    [
        pytest.param({0: 10, 1: 25}, {0: 25, 1: 10}, 1, id="T1 report 1"),
        pytest.param({0: 8, 1: 30, 2: 32}, {0: 38, 1: 10, 2: 9}, 1, id="T3 report 1: the lowest of the slow"),
        pytest.param({0: 10, 1: 10}, {0: 10, 1: 10}, 0, id="equal devices"),
        pytest.param({0: 20, 1: 40, 2: 80}, {0: 40, 1: 20, 2: 10}, 2, id="the demo"),
        pytest.param({0: 1, 1: 1000}, {0: 640, 1: 10}, 1, id="the ratio stops at 64"),
        pytest.param({0: 10, 1: 0}, {0: 10, 1: 10}, 0, id="a rank without timing keeps the anchor's count"),
    ],
)
def test_the_first_report_calibrates_freely(rates, counts, anchor_rank):
    elche = ElChe(rates)
    elche.set_max_total(400 if len(rates) == 3 else 0)

    decision = elche.report_window(window(rates))

    assert decision.counts == elche.counts == counts
    assert decision.anchor_rank == elche.anchor_rank == anchor_rank
    assert decision.anchor == 10
    assert decision.changed == (set(counts.values()) != {10})
    assert (elche.calibrated, elche.phase) == (True, "warmup")
    elche.check()


def test_t4_a_step_limit_spares_the_first_calibration_and_then_holds():
    elche = ElChe([0, 1], max_batch_diff=3)
    assert "at most" not in elche.report_window(window({0: 10, 1: 25})).reason
    assert elche.counts == {0: 25, 1: 10}
    assert "at most" not in elche.report_window(window({0: 10, 1: 25})).reason
    elche.restore(elche.state())

    decision = elche.report_window(window({0: 4, 1: 25}))  # mean 7 ms, so the target is 36

    assert decision.counts == {0: 28, 1: 10}
    assert "at most 3 per window" in decision.reason
    decision = elche.report_window(window({0: 100, 1: 25}))  # mean 38 ms, target 7, and down it goes by 3
    assert decision.counts == {0: 25, 1: 10}


def test_the_dead_zone_keeps_a_count_that_would_hardly_move():
    elche = calibrated({0: 10.0, 1: 40.0})
    assert elche.counts == {0: 40, 1: 10}

    decision = elche.report_window(window({0: 9.2, 1: 40.0}))  # mean 9.6: 42 is within 5 % of 40

    assert decision.counts == {0: 40, 1: 10}
    assert not decision.changed
    assert "rank 0 is 4.2 times as fast and keeps 40" in decision.reason
    elche.report_window(window({0: 8.0, 1: 40.0}))  # mean 9.07: 44 is not
    assert elche.counts == {0: 44, 1: 10}


def test_the_smoothed_rate_is_the_mean_of_the_last_five_readings():
    elche = ElChe([0, 1])
    for ms in (100.0, 10.0, 20.0, 30.0, 40.0, 50.0):
        elche.report_window(window({0: ms, 1: 60.0}))

    assert elche.smoothed(0) == 30.0


def test_an_empty_feed_teaches_nothing():
    elche = calibrated({0: 10.0, 1: 25.0})

    for _ in range(9):
        decision = elche.report_window(window({0: 0.0, 1: 0.0}))

    assert not decision.changed
    assert decision.counts == {0: 25, 1: 10}
    assert "No rank reported any timing" in decision.reason
    assert (elche.calibrations, elche.smoothed(0)) == (1, 10.0)


def test_a_rank_that_stops_reporting_is_forgotten_after_five_windows():
    elche = calibrated({0: 10.0, 1: 25.0})
    for _ in range(4):
        elche.report_window(window({0: 0.0, 1: 25.0}))
    assert elche.smoothed(0) == 10.0

    decision = elche.report_window(window({0: 0.0, 1: 25.0}))

    assert elche.smoothed(0) == 0.0
    assert decision.counts == {0: 10, 1: 10}
    assert "rank 0 has no timing yet and gets 10" in decision.reason
    elche.report_window(window({0: 5.0, 1: 25.0}))
    assert elche.smoothed(0) == 5.0  # no memory of before


def test_a_pinned_anchor_that_falls_silent_does_not_freeze_the_allotments():
    elche = calibrated({0: 10.0, 1: 25.0, 2: 12.0})
    assert elche.anchor_rank == 1
    for _ in range(4):
        elche.report_window(window({0: 10.0, 1: 0.0, 2: 12.0}))
        assert elche.anchor_rank == 1
    elche_before_escape = elche.phase

    elche.report_window(window({0: 10.0, 1: 0.0, 2: 12.0}))

    assert elche_before_escape == "stable"
    assert elche.anchor_rank == 2
    assert elche.counts == {0: 12, 1: 10, 2: 10}


def test_the_dead_pin_escape_works_in_warmup_too():
    elche = ElChe([0, 1, 2])
    elche.restore(elche.state() | {"anchor_rank": 1, "phase": "warmup", "calibration_count": 1})
    for _ in range(4):
        decision = elche.report_window(window({0: 10.0, 1: 0.0, 2: 12.0}))
        assert elche.anchor_rank == 1
        assert "Rank 1 sets the pace but has not reported" in decision.reason
    assert elche.calibrations == 1  # waiting is no calibration

    elche.report_window(window({0: 10.0, 1: 0.0, 2: 12.0}))

    assert elche.anchor_rank == 2
    assert elche.counts == {0: 12, 1: 10, 2: 10}
    assert elche.calibrations == 2


def test_an_unusable_feed_elects_nobody():
    elche = ElChe([0, 1])

    decision = elche.report_window(window({0: math.inf, 1: 0.0}))

    assert decision.anchor_rank is None
    assert "No rank has a usable timing yet" in decision.reason
    assert not elche.calibrated


# ---------------------------------------------------------------------------------------------- election


@pytest.mark.parametrize(
    ("rates", "current", "elected"),
    [
        pytest.param({}, None, None, id="nobody"),
        pytest.param({0: 0.0, 1: 0.0}, 1, None, id="no rates"),
        pytest.param({0: 10.0, 1: 25.0}, None, 1, id="one slow rank"),
        pytest.param({0: 30.0, 1: 32.0}, None, 0, id="the lowest of a cohort"),
        pytest.param({0: 27.2, 1: 32.0}, None, 0, id="just inside the band of 15 %"),
        pytest.param({0: 27.1, 1: 32.0}, None, 1, id="just outside the band"),
        pytest.param({0: 30.0, 1: 32.0}, 1, 1, id="the sitting anchor stays among equals"),
        pytest.param({0: 32.9, 1: 30.0}, 1, 1, id="a rival within 10 % does not replace it"),
        pytest.param({0: 33.1, 1: 30.0}, 1, 0, id="a rival beyond 10 % does"),
        pytest.param({0: 33.1, 1: 30.0}, 0, 0, id="the slowest itself stays"),
        pytest.param({0: 10.0, 1: 30.0}, 0, 1, id="an anchor outside the cohort goes"),
        pytest.param({0: 30.0, 1: 10.0}, 9, 0, id="an anchor that is gone"),
    ],
)
def test_election(rates, current, elected):
    assert elect(rates, current) == elected


def test_the_anchor_is_pinned_until_the_fifth_calibration():
    elche = calibrated({0: 10.0, 1: 25.0}, reports=1)
    for _ in range(4):  # the devices swap speeds; reports 2 to 5 keep the pin
        elche.report_window(window({0: 200.0, 1: 25.0}))
        assert elche.anchor_rank == 1
    assert elche.phase == "stable"

    elche.report_window(window({0: 200.0, 1: 25.0}))

    assert elche.anchor_rank == 0
    assert elche.counts == {0: 10, 1: 80}


def test_phases_by_calibrations():
    elche = ElChe([0, 1])
    seen = [elche.phase]
    for _ in range(21):
        elche.report_window(window({0: 10.0, 1: 25.0}))
        seen.append(elche.phase)

    assert seen == ["probe"] + ["warmup"] * 4 + ["stable"] * 15 + ["mature"] * 2
    assert elche.calibrations == 21


# ------------------------------------------------------------------------------------------ counts and cap


@pytest.mark.parametrize(
    ("anchor", "slow_ms", "ms", "count"),
    [
        (10, 30.0, 32.0, 9),  # slower than the anchor
        (10, 30.0, 30.0000001, 10),
        (10, 30.0, 0.0, 10),
        (10, 25.0, 10.0, 25),
        (1, 30.0, 1000.0, 1),  # never below one
        (1, 25.0, 10.0, 3),  # 2.5 rounds away from zero
        (10, 1.0, 0.0001, 640),
    ],
)
def test_the_target_count(anchor, slow_ms, ms, count):
    assert target_count(anchor, slow_ms, ms) == count


@pytest.mark.parametrize(
    ("value", "whole"), [(0.0, 0), (0.49999999999999994, 0), (0.5, 1), (1.5, 2), (2.5, 3), (2.4, 2)]
)
def test_halves_round_up_and_nothing_else_does(value, whole):
    assert round_half_away(value) == whole


@pytest.mark.parametrize(
    ("counts", "total", "cut"),
    [
        ([300, 80, 75], 400, [265, 70, 65]),  # T3 report 4
        ([10, 10, 10], 20, [6, 6, 8]),  # what is left goes to the highest of equals
        ([25, 10], 20, [15, 5]),
        ([5, 5, 5], 2, [1, 1, 1]),
    ],
)
def test_the_cap_by_examples(counts, total, cut):
    assert capped(dict(enumerate(counts)), total) == dict(enumerate(cut))


def test_t3_the_window_never_exceeds_the_epoch():
    elche = ElChe([0, 1, 2], initial_anchor=80)
    elche.set_max_total(400)

    decision = elche.report_window(window({0: 8.0, 1: 30.0, 2: 32.0}))

    assert decision.counts == {0: 265, 1: 70, 2: 65}
    assert elche.cap_binding
    assert "epoch's 400 batches" in decision.reason
    elche.check()
    elche.set_max_total(0)
    elche.report_window(window({0: 8.0, 1: 30.0, 2: 32.0}))
    assert elche.counts == {0: 300, 1: 80, 2: 75}
    assert not elche.cap_binding


rates_of_ranks = st.dictionaries(
    st.integers(0, 9), st.one_of(st.just(0.0), st.floats(1e-4, 1e6)), min_size=2, max_size=6
)


@given(
    initial=rates_of_ranks,
    changes=st.lists(st.lists(st.floats(0.0, 1e5), min_size=6, max_size=6), max_size=8),
    anchor=st.integers(1, 50),
    max_total=st.integers(0, 300),
    max_batch_diff=st.one_of(st.none(), st.integers(0, 10)),
    deaths=st.lists(st.integers(0, 9), max_size=4),
)
def test_whatever_is_reported_counts_stay_lawful(initial, changes, anchor, max_total, max_batch_diff, deaths):
    elche = ElChe(initial, initial_anchor=anchor, max_batch_diff=max_batch_diff)
    elche.set_max_total(max_total)
    script = iter(deaths)
    for values in [list(initial.values()), *changes]:
        before = elche.counts
        decision = elche.report_window(window(dict(zip(before, values, strict=False))))
        elche.check()
        assert decision.counts == elche.counts
        assert decision.counts.keys() == before.keys()
        assert decision.changed == (decision.counts != before)
        assert all(count >= 1 for count in decision.counts.values())
        assert decision.reason.endswith(".")
        if elche.calibrated and max_total:
            assert sum(decision.counts.values()) <= max(max_total, len(before)) or not decision.changed
        victim = next(script, None)
        if victim in elche.counts and len(elche.counts) > 1:
            elche.drop(victim)
            elche.check()
            assert victim not in elche.counts


@given(rates=st.dictionaries(st.integers(0, 9), st.floats(0.5, 30.0), min_size=2, max_size=6))
def test_calibrated_ranks_take_about_the_same_time(rates):
    """The point of it all: nobody waits for long at the reduce."""
    elche = calibrated(rates, initial_anchor=50)
    pace = elche.anchor_wall_ms()

    for rank, ms in rates.items():
        assert abs(elche.counts[rank] * ms - pace) <= ms / 2 + 1e-6


# ---------------------------------------------------------------------------------------------- the check


def test_check_sees_every_broken_law():
    def broken(spoil) -> ElChe:
        elche = calibrated({0: 10.0, 1: 25.0})
        spoil(elche)
        return elche

    spoilers = {
        "below 1": lambda e: e._counts.update({0: 0}),
        "outside 1": lambda e: setattr(e, "_anchor", 0),
        "different ranks": lambda e: e._rates.drop(0),
        "not in the cohort": lambda e: setattr(e, "_anchor_rank", 9),
        "exceeds the epoch": lambda e: (setattr(e, "_cap_binding", True), setattr(e, "_max_total", 3)),
    }
    for message, spoil in spoilers.items():
        with pytest.raises(AssertionError, match=message):
            broken(spoil).check()


def test_rates_know_only_their_ranks():
    rates = Rates([0, 1])
    rates.observe(window({0: 10.0, 7: 3.0}))

    assert rates.by_rank() == {0: 10.0, 1: 0.0}
    assert rates.smoothed(7) == 0.0


@pytest.mark.parametrize(
    ("ms", "batches", "smoothed"),
    [
        (20.0, 1, 20.0),  # a window of one batch is a reading
        (0.5, 2, 0.25),  # so is one of less than a millisecond
        (20.0, 0, 0.0),
        (0.0, 5, 0.0),
        (math.inf, 5, 0.0),
    ],
)
def test_what_counts_as_a_reading(ms, batches, smoothed):
    rates = Rates([0])

    rates.observe(replace(window({0: 1.0}), ms={0: ms}, batches={0: batches}))

    assert rates.smoothed(0) == smoothed
