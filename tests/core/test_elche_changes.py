"""What outlives a window: deaths, saved schedules, forced counts, and which scheduler a run gets (behaviour C19)."""

import json
from dataclasses import replace

import pytest
from elche_windows import calibrated, window

from backend.core.config import RunConfig
from backend.core.elche import ElChe
from backend.core.elche_fixed import FixedCounts
from backend.core.scheduling import scheduler_for

# ------------------------------------------------------------------------------------------------ deaths


def test_the_death_of_a_fast_rank_changes_nothing_for_the_others():
    elche = calibrated({0: 20.0, 1: 40.0, 2: 80.0})

    decision = elche.drop(0)

    assert decision.counts == elche.counts == {1: 20, 2: 10}
    assert decision.changed
    assert decision.reason.startswith("Rank 0 left the cohort. Rank 2 sets the pace at 80.0 ms a batch and keeps 10")
    elche.check()


def test_the_death_of_the_anchor_elects_another_at_once():
    elche = calibrated({0: 20.0, 1: 40.0, 2: 80.0}, max_batch_diff=1)

    decision = elche.drop(2)

    assert decision.anchor_rank == 1
    assert decision.counts == {0: 20, 1: 10}  # in one move: the step limit is for noise, not for deaths


def test_a_death_before_calibration():
    elche = ElChe([0, 1, 2])

    decision = elche.drop(1)

    assert decision.counts == {0: 10, 2: 10}
    assert decision.anchor_rank is None
    assert decision.reason == "Rank 1 left the cohort. The others keep their allotments."


def test_a_death_while_the_anchor_is_silent_moves_nobody():
    elche = ElChe([0, 1, 2])
    elche.restore(elche.state() | {"anchor_rank": 1, "smoothed_ms_per_batch": {"0": 5.0, "1": 0.0, "2": 9.0}})
    assert elche.counts == {0: 10, 1: 10, 2: 10}

    assert elche.drop(2).counts == {0: 10, 1: 10}
    assert elche.anchor_rank == 1


def test_one_survivor_goes_on_and_even_it_may_go():
    elche = calibrated({0: 20.0, 1: 40.0})
    elche.drop(1)
    assert elche.counts == {0: 10}
    assert elche.report_window(window({0: 20.0})).counts == {0: 10}
    elche.check()

    decision = elche.drop(0)

    assert decision.counts == {}
    assert decision.anchor_rank is None
    assert "No rank is left" in decision.reason
    elche.check()


@pytest.mark.parametrize("scheduler", [ElChe([0, 1]), FixedCounts({0: 3, 1: 1})])
def test_only_scheduled_ranks_can_be_dropped(scheduler):
    with pytest.raises(ValueError, match="rank 5 is not scheduled"):
        scheduler.drop(5)


def test_the_recent_share_forgets_the_dead():
    elche = ElChe([0, 1, 2])
    assert elche.recent_share() == {0: 1 / 3, 1: 1 / 3, 2: 1 / 3}
    elche.report_window(window({0: 20.0, 1: 40.0, 2: 80.0}))
    assert elche.recent_share() == {0: 40 / 70, 1: 20 / 70, 2: 10 / 70}

    elche.drop(0)

    assert elche.recent_share() == {1: 20 / 30, 2: 10 / 30}


def test_the_recent_share_covers_ten_windows():
    elche = ElChe([0, 1])
    elche.report_window(window({0: 10.0, 1: 30.0}))  # 30 and 10
    for _ in range(9):
        elche.report_window(window({0: 12.0, 1: 30.0}))
    share_with_the_first = elche.recent_share()[0]
    elche.report_window(window({0: 12.0, 1: 30.0}))

    assert elche.counts == {0: 25, 1: 10}
    # mean rates 10, 11, 11.3, 11.5, 11.6 and then 12: counts 30, four times 27 (the dead zone), then 25
    assert share_with_the_first == 263 / 363
    assert elche.recent_share()[0] == 258 / 358


def test_the_anchors_window_in_milliseconds():
    assert ElChe([0, 1]).anchor_wall_ms() == 0.0
    assert calibrated({0: 20.0, 1: 40.0}).anchor_wall_ms() == 400.0


# ------------------------------------------------------------------------------------------- saved state


def test_a_saved_schedule_is_taken_up_again():
    before = calibrated({0: 8.0, 1: 30.0, 2: 32.0}, reports=6)
    state = json.loads(json.dumps(before.state()))

    after = ElChe([0, 1, 2])
    after.restore(state)

    assert after.counts == before.counts == {0: 38, 1: 10, 2: 9}
    assert (after.anchor, after.anchor_rank, after.phase, after.calibrations) == (10, 1, "stable", 6)
    assert after.calibrated
    assert after.state() == state
    after.check()
    after.report_window(window({0: 24.0, 1: 30.0, 2: 32.0}))
    assert after.smoothed(0) == 16.0  # the saved mean counts as one reading


def test_a_saved_schedule_replaces_what_was_measured():
    elche = calibrated({0: 100.0, 1: 30.0}, reports=3)

    elche.restore(calibrated({0: 8.0, 1: 30.0}).state())

    assert (elche.smoothed(0), elche.counts) == (8.0, {0: 38, 1: 10})
    assert elche.recent_share() == {0: 38 / 48, 1: 10 / 48}


def test_an_uncalibrated_state_restores_uncalibrated():
    elche = ElChe([0, 1])

    elche.restore(ElChe([0, 1]).state())

    assert not elche.calibrated
    assert (elche.calibrations, elche.counts) == (0, {0: 10, 1: 10})
    elche.report_window(window({0: 10.0, 1: 25.0}))
    assert elche.smoothed(0) == 10.0  # what was unknown is no reading of 0


@pytest.mark.parametrize(("saved", "anchor"), [(0, 1), (1, 1), (7, 7)])
def test_a_nudged_anchor_is_restored_as_low_as_it_was(saved, anchor):
    elche = ElChe([0, 1])

    elche.restore(elche.state() | {"anchor": saved, "smoothed_ms_per_batch": {"0": float("inf"), "1": 5.0}})

    assert (elche.anchor, elche.smoothed(0)) == (anchor, 0.0)
    elche.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"smoothed_ms_per_batch": {"0": 1.0}}, "saved schedule is of ranks"),
        ({"smoothed_ms_per_batch": {"0": 1.0, "1": 1.0, "2": 1.0}}, "saved schedule is of ranks"),
        ({"anchor_rank": 7}, "saved anchor rank 7"),
        ({"phase": "ripe"}, "saved phase 'ripe'"),
        ({"anchor": None}, "saved schedule cannot be read"),
        ({"smoothed_ms_per_batch": {"zero": 1.0}}, "saved schedule cannot be read"),
    ],
)
def test_a_state_of_another_cohort_is_refused_whole(change, message):
    elche = calibrated({0: 10.0, 1: 25.0})
    before = elche.state()

    with pytest.raises(ValueError, match=message):
        elche.restore(before | change)

    assert elche.state() == before
    assert elche.counts == {0: 25, 1: 10}


def test_a_state_that_lacks_a_part_is_refused():
    elche = ElChe([0, 1])
    state = elche.state()
    del state["phase"]

    with pytest.raises(ValueError, match="saved schedule cannot be read"):
        elche.restore(state)


def test_a_saved_anchor_above_the_ceiling_is_cut():
    elche = ElChe([0, 1], max_anchor=20)

    elche.restore(elche.state() | {"anchor": 500})

    assert elche.anchor == 20
    elche.check()


# ---------------------------------------------------------------------------------------- forced counts


def test_forced_counts_never_move_and_say_so():
    fixed = FixedCounts({1: 1, 0: 3})

    decision = fixed.report_window(window({0: 100.0, 1: 1.0}))

    assert decision.counts == fixed.counts == {0: 3, 1: 1}
    assert not decision.changed
    assert decision.reason == "The allotments are forced by the run's configuration."
    assert (fixed.anchor, fixed.anchor_rank, fixed.calibrated, fixed.forced) == (1, None, True, True)
    assert (fixed.smoothed(0), fixed.smoothed(1)) == (100.0, 1.0)
    fixed.set_max_total(1)
    assert fixed.counts == {0: 3, 1: 1}
    fixed.check()


def test_forced_counts_survive_a_death():
    fixed = FixedCounts({0: 3, 1: 1})

    decision = fixed.drop(1)

    assert decision.counts == {0: 3}
    assert decision.changed
    assert decision.reason == "Rank 1 left the cohort. The allotments are forced by the run's configuration."
    fixed.check()
    fixed.drop(0)
    assert fixed.anchor == 0


def test_forced_rates_are_saved():
    fixed, other = FixedCounts({0: 3, 1: 1}), FixedCounts({0: 3, 1: 1})
    fixed.report_window(window({0: 100.0, 1: 1.0}))

    other.restore(json.loads(json.dumps(fixed.state())))

    assert other.smoothed(0) == 100.0
    with pytest.raises(ValueError, match="saved schedule is of ranks"):
        FixedCounts({0: 3}).restore(fixed.state())


@pytest.mark.parametrize("counts", [{}, {0: 0}, {0: 3, 1: -1}])
def test_forced_counts_need_a_batch_for_every_rank(counts):
    with pytest.raises(ValueError, match="at least one batch"):
        FixedCounts(counts)


# ------------------------------------------------------------------------------------ which scheduler


CONFIG = RunConfig(job="jobs/digits.py:Digits")


def test_a_cadence_run_is_balanced_with_the_configured_knobs():
    config = replace(CONFIG, mode="cpu_cadence", initial_anchor=6, max_anchor=5, max_batch_diff=2)

    scheduler = scheduler_for(config, [0, 1])

    assert isinstance(scheduler, ElChe)
    assert not scheduler.forced
    assert scheduler.counts == {0: 5, 1: 5}


@pytest.mark.parametrize("mode", ["cpu_sync", "nccl_sync"])
def test_a_sync_run_does_one_batch_each(mode):
    scheduler = scheduler_for(replace(CONFIG, mode=mode), [0, 1, 2])

    decision = scheduler.report_window(window({0: 20.0, 1: 40.0, 2: 80.0}))

    assert decision.counts == {0: 1, 1: 1, 2: 1}
    assert scheduler.forced
    assert decision.reason == f"Every rank does one batch per window: {mode} averages after each."


def test_forced_counts_win_over_the_mode():
    scheduler = scheduler_for(replace(CONFIG, mode="cpu_sync", fixed_counts=(3, 1)), [0, 1])

    assert scheduler.counts == {0: 3, 1: 1}


@pytest.mark.parametrize("ranks", [[0], [0, 1, 2], [1, 2]])
def test_forced_counts_must_name_the_world(ranks):
    with pytest.raises(ValueError, match="fixed_counts forces 2 allotments"):
        scheduler_for(replace(CONFIG, fixed_counts=(3, 1)), ranks)
