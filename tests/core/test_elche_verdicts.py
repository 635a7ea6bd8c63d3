"""What verdicts do to the anchor: growth, its latch, nudges, relaxing up (behaviour C9 to C12; M14, M15, M17)."""

import math

import pytest
from elche_windows import ran
from hypothesis import given
from hypothesis import strategies as st

from backend.core.elche import ElChe
from backend.core.elche_growth import GrowthLatch, pressure
from backend.core.verdicts import NudgeDown, Stable, SuppressGrowth

RATES = {0: 10.0, 1: 25.0}
STABLE = Stable("All is well.")
OBJECTION = SuppressGrowth("The replicas drift apart.")


def nudge(factor: float) -> NudgeDown:
    return NudgeDown(factor, "The learning rate fell from 0.1 to 0.01 in one round")


def play(elche: ElChe, *verdicts, sync_ms: float = 60.0, rates=None):
    """One report for each verdict; the last decision."""
    for verdict in verdicts:
        elche.report_window(ran(elche.counts, rates or RATES, sync_ms=sync_ms))
        decision = elche.apply(verdict)
        elche.check()
    return decision


def warm(reports: int = 1, **knobs) -> ElChe:
    """Calibrated, and never under pressure so far."""
    elche = ElChe(RATES, **knobs)
    play(elche, *[STABLE] * reports, sync_ms=0.0)
    return elche


# ---------------------------------------------------------------------------------------------- pressure


@pytest.mark.parametrize(
    ("ms", "fill_ms", "sync_ms", "phase", "overhead", "fires", "wanted"),
    [
        (25.0, 0.0, 60.0, "warmup", 60 / 310, True, 20),  # more than twice the target: capped at twice
        (25.0, 0.0, 25.0, "warmup", 25 / 275, False, 19),  # 0.0909 waits in warmup
        (25.0, 0.0, 25.0, "stable", 25 / 275, True, 19),
        (25.0, 0.0, 25.0, "mature", 25 / 275, True, 19),
        (25.0, 10.0, 15.0, "stable", 25 / 275, True, 19),
        (25.0, -5.0, 25.0, "stable", 25 / 275, True, 19),
        (25.0, 0.0, 13.0, "stable", 13 / 263, False, 10),
    ],
)
def test_the_pressure(ms, fill_ms, sync_ms, phase, overhead, fires, wanted):
    cost = pressure(10, ms, fill_ms=fill_ms, sync_ms=sync_ms, target=0.05, phase=phase)

    assert cost.overhead == pytest.approx(overhead)
    assert cost.fires == fires
    assert cost.wanted(10) == wanted


@pytest.mark.parametrize(
    ("ms", "fill_ms", "sync_ms"),
    [(0.0, 0.0, 60.0), (25.0, 0.0, 0.0), (25.0, -1.0, -1.0), (25.0, 0.0, math.inf), (25.0, math.nan, math.inf)],
)
def test_no_pressure_without_a_rate_or_a_cost(ms, fill_ms, sync_ms):
    assert pressure(10, ms, fill_ms=fill_ms, sync_ms=sync_ms, target=0.05, phase="stable") is None


def test_the_first_report_never_proposes():
    elche = ElChe(RATES)

    decision = play(elche, STABLE, sync_ms=5000.0)

    assert (decision.anchor, elche.phase) == (10, "warmup")


@pytest.mark.parametrize(("target", "anchor"), [(0.01, 20), (0.09, 20), (0.10, 10), (0.5, 10), (0.0, 20), (7.0, 10)])
def test_the_target_is_the_operators(target, anchor):
    """60 ms on a window of 250 ms is an overhead of 19 %, which in warmup must be twice the target. Targets outside 1
    to 50 % are clamped."""
    elche = warm(overhead_target=target)

    assert play(elche, *[STABLE] * 1).anchor == anchor


def test_growth_stops_at_the_ceiling_and_says_so():
    elche = warm(max_anchor=15)

    assert play(elche, STABLE).anchor == 15
    decision = play(elche, STABLE, sync_ms=600.0)

    assert decision.anchor == 15
    assert decision.reason.endswith(
        "The last round cost 62 % of the window (target 5 %), but the anchor stays at 15 batches: it is at its ceiling."
    )


def test_growth_never_lands_below_the_floor():
    elche = warm(min_anchor=10)
    play(elche, nudge(0.1), sync_ms=0.0)
    assert elche.anchor == 1  # a nudge goes below the floor
    play(elche, *[STABLE] * 5, sync_ms=0.0)

    assert play(elche, STABLE, sync_ms=60.0).anchor == 10  # twice the anchor would be 2


# ---------------------------------------------------------------------------------------------- the latch


def test_the_latch_opens_after_five_quiet_verdicts():
    latch = GrowthLatch()
    assert (latch.open, latch.missing) == (True, 0)
    latch.object()
    seen = []
    for _ in range(5):
        seen.append((latch.open, latch.missing))
        latch.quiet()
    assert seen == [(False, 5), (False, 4), (False, 3), (False, 2), (False, 1)]
    assert (latch.open, latch.missing) == (True, 0)


def test_an_objection_interrupts_the_count():
    latch = GrowthLatch()
    latch.object()
    for _ in range(4):
        latch.quiet()
    latch.object()
    for _ in range(4):
        latch.quiet()
    assert not latch.open


def test_an_objection_drops_the_proposal_and_holds_growth_for_five_rounds():
    elche = warm()

    decision = play(elche, OBJECTION)

    assert (decision.anchor, elche.growth_open) == (10, False)
    assert decision.reason.endswith(
        "The last round cost 19 % of the window (target 5 %), but the anchor stays at 10 batches: this round's verdict "
        "objects to it."
    )
    decision = play(elche, STABLE)
    assert decision.anchor == 10
    assert decision.reason.endswith("growth waits for 4 more rounds without an objection.")
    assert play(elche, STABLE, STABLE, STABLE).reason.endswith("growth waits for 1 more round without an objection.")
    decision = play(elche, STABLE)
    assert (decision.anchor, elche.growth_open) == (10, True)
    assert decision.reason.endswith("growth is free again from the next round on.")
    assert play(elche, STABLE).anchor == 20


def test_an_objection_without_pressure_says_nothing_about_growth():
    assert "anchor stays" not in play(warm(), OBJECTION, sync_ms=0.0).reason


# ------------------------------------------------------------------------------------------------- nudges


@pytest.mark.parametrize(
    ("factor", "anchor"),
    [(0.5, 20), (0.51, 21), (0.01, 4), (-3.0, 4), (1.0, 40), (9.0, 40), (math.nan, 40), (math.inf, 40)],
)
def test_a_nudge_shrinks_the_anchor_within_its_limits(factor, anchor):
    elche = warm(initial_anchor=40)

    decision = play(elche, nudge(factor), sync_ms=0.0)

    assert decision.anchor == anchor
    assert elche.counts[1] == anchor
    assert not elche.growth_open


def test_a_nudge_gives_its_reason():
    decision = play(warm(initial_anchor=40), nudge(0.5), sync_ms=0.0)

    assert decision.reason == (
        "The learning rate fell from 0.1 to 0.01 in one round, so the anchor shrinks from 40 to 20 batches: rank 1 "
        "sets the pace at 25.0 ms a batch and gets 20; rank 0 is 2.5 times as fast and gets 50."
    )
    assert decision.changed


def test_a_stale_proposal_does_not_undo_a_nudge():
    """The meta-controller nudges first, then the guard finds the round stable (M14)."""
    elche = warm(initial_anchor=40)
    elche.report_window(ran(elche.counts, RATES, sync_ms=900.0))  # proposes 80
    elche.apply(nudge(0.5))

    decision = elche.apply(STABLE)

    assert (decision.anchor, decision.counts) == (20, {0: 50, 1: 20})
    assert decision.reason.startswith("The learning rate fell")
    elche.report_window(ran(elche.counts, RATES, sync_ms=0.0))
    assert elche.apply(STABLE).anchor == 20


def test_two_nudges_in_a_round_are_both_told():
    elche = warm(initial_anchor=40)
    elche.report_window(ran(elche.counts, RATES))
    elche.apply(nudge(0.5))

    decision = elche.apply(NudgeDown(0.5, "The divergence explodes"))

    assert decision.anchor == 10
    assert decision.reason.startswith(
        "The learning rate fell from 0.1 to 0.01 in one round, so the anchor shrinks from 40 to 20 batches; "
        "the divergence explodes, so the anchor shrinks from 20 to 10 batches: rank 1"
    )


def test_a_nudge_before_anything_was_timed():
    elche = ElChe(RATES, initial_anchor=8)

    decision = elche.apply(nudge(0.5))

    assert (decision.anchor, decision.counts) == (4, {0: 4, 1: 4})
    assert decision.reason == (
        "The learning rate fell from 0.1 to 0.01 in one round, so the anchor shrinks from 8 to 4 batches."
    )


def test_verdicts_on_a_round_without_timing_move_nothing_but_the_latch():
    elche = warm()
    before = elche.counts
    decision = play(elche, OBJECTION, rates={0: 0.0, 1: 0.0})

    assert decision.counts == before
    assert decision.reason == "No rank reported any timing in this window, so the allotments stay as they are."
    assert not elche.growth_open
    assert elche.recent_share() == {0: 25 / 35, 1: 10 / 35}


def test_the_dealt_counts_are_what_the_share_remembers():
    elche = warm()
    play(elche, STABLE)  # 25, 10 and then, after the growth, 50, 20

    assert elche.recent_share() == {0: 75 / 105, 1: 30 / 105}


# ----------------------------------------------------------------------------------------------- relax up


def test_relax_up_adds_a_batch_on_evidence():
    elche = warm(initial_anchor=40)

    decision = play(elche, Stable("The replicas are close.", relax_up=True), sync_ms=0.0)

    assert decision.anchor == 41
    assert decision.reason.startswith("The replicas stay close together, so the anchor grows from 40 to 41 batches: ")


@pytest.mark.parametrize(("limit", "anchor"), [(None, 11), (17, 11), (16, 10)])
def test_relax_up_keeps_the_fast_rank_within_reach(limit, anchor):
    """With one batch more the anchor does 11 and the other 28: 17 apart."""
    elche = warm(max_batch_diff=limit)

    assert play(elche, Stable("Close.", relax_up=True), sync_ms=0.0).anchor == anchor


def test_relax_up_ends_at_the_ceiling():
    elche = warm(max_anchor=10)

    decision = play(elche, Stable("Close.", relax_up=True), sync_ms=0.0)

    assert decision.anchor == 10
    assert "anchor grows" not in decision.reason


def test_relaxing_follows_a_growth_that_was_pending():
    assert play(warm(), Stable("Close.", relax_up=True)).anchor == 21


# --------------------------------------------------------------------------------------------- the window


def test_the_step_limit_holds_for_the_window_whatever_is_decided():
    """The report moves the counts, the verdict moves them again: together by no more than the limit."""
    elche = warm(max_batch_diff=3)

    decision = play(elche, STABLE, rates={0: 4.0, 1: 25.0})

    assert decision.anchor == 20
    assert decision.counts == {0: 28, 1: 13}
    assert "Counts move by at most 3 per window" in decision.reason


def test_the_cap_binds_while_it_hides_in_the_dead_zone():
    """Counts cut by less than the dead zone look as if they fitted; growth would have no effect all the same (M15)."""
    elche = ElChe(RATES)
    elche.set_max_total(34)
    play(elche, STABLE, sync_ms=0.0)
    assert (elche.counts, elche.cap_binding) == ({0: 25, 1: 9}, True)

    decision = play(elche, STABLE, STABLE, STABLE)

    assert (decision.anchor, elche.cap_binding) == (10, True)
    assert sum(decision.counts.values()) <= 34
    assert "epoch's 34 batches" in decision.reason


@given(
    rates=st.dictionaries(st.integers(0, 9), st.floats(0.5, 64.0), min_size=2, max_size=6),
    rounds=st.lists(
        st.tuples(
            st.floats(0.0, 5000.0),
            st.sampled_from([STABLE, OBJECTION, nudge(0.3), nudge(math.nan), Stable("Close.", relax_up=True)]),
        ),
        max_size=30,
    ),
    max_total=st.integers(0, 2000),
    max_batch_diff=st.one_of(st.none(), st.integers(1, 10)),
    target=st.floats(0.01, 0.5),
)
def test_whatever_is_judged_the_schedule_stays_lawful(rates, rounds, max_total, max_batch_diff, target):
    elche = ElChe(rates, max_batch_diff=max_batch_diff, overhead_target=target, max_anchor=200)
    elche.set_max_total(max_total)
    for sync_ms, verdict in rounds:
        before, anchor, calibrated = elche.counts, elche.anchor, elche.calibrated
        elche.report_window(ran(before, rates, sync_ms=sync_ms))
        decision = elche.apply(verdict)
        elche.check()
        assert decision.counts == elche.counts
        assert decision.changed == (decision.counts != before)
        # At most twice as long, never short of the floor, which only a nudge may undercut, and one more (C9, C10).
        assert decision.anchor <= max(2 * anchor, 10) + 1
        assert decision.reason.endswith(".")
        if decision.anchor != anchor:
            assert f"from {anchor} to " in decision.reason
            assert f" to {decision.anchor} batch" in decision.reason
        if isinstance(verdict, SuppressGrowth):
            assert decision.anchor == anchor
        if calibrated and max_batch_diff and not elche.cap_binding:
            assert all(abs(decision.counts[rank] - before[rank]) <= max_batch_diff for rank in before)
