"""The LR/anchor meta-controller (behaviour K6)."""

import math

import pytest
from guard_kit import ack
from msgspec.structs import replace

from backend.core.meta import MetaController, first_known_lr
from backend.core.verdicts import NudgeDown, Stable, SuppressGrowth

CALM = Stable("All is well.")
OBJECTION = SuppressGrowth("The replicas drift apart.")
NUDGE = NudgeDown(0.5, "The divergence explodes")


def watch(*rounds, phase="stable"):
    """The answers to rounds of (lr, anchor, verdict)."""
    meta = MetaController()
    return [meta.observe(lr, anchor, verdict, phase) for lr, anchor, verdict in rounds]


# ------------------------------------------------------------------------------------------------- the cliff


@pytest.mark.parametrize(
    ("before", "after", "factor"),
    [(0.1, 0.01, 0.5), (0.1, 0.069, 0.5), (0.1, 0.071, None), (0.1, 0.2, None), (0.0, 0.0, None), (0.1, 0.0, 0.5)],
)
def test_a_learning_rate_that_falls_by_more_than_30_percent(before, after, factor):
    first, second = watch((before, 40, CALM), (after, 40, CALM))

    assert first is None
    assert (second.factor if second else None) == factor


def test_a_cliff_fires_once_and_says_why():
    answers = watch((0.1, 40, CALM), (0.01, 40, CALM), (0.01, 20, CALM))

    assert answers == [None, NudgeDown(0.5, "The learning rate fell from 0.1 to 0.01 in one round"), None]


def test_the_slope_at_the_end_of_a_schedule_is_no_cliff():
    """The last rounds of a cosine lose 31, 36, 44, 56, 75 and 100 % each, as every round before lost a little less."""
    rounds = 40
    rates = [0.05 * (1 + math.cos(math.pi * number / rounds)) for number in range(rounds + 1)]

    assert watch(*[(lr, 40, CALM) for lr in rates]) == [None] * (rounds + 1)


def test_every_step_of_a_staircase_is_a_cliff():
    rates = [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]

    answers = watch(*[(lr, 40, CALM) for lr in rates])

    assert [bool(answer) for answer in answers] == [False, False, True, False, True, False]


def test_a_steep_decay_is_told_once():
    rates = [0.1 * 0.6**number for number in range(6)]

    assert [bool(answer) for answer in watch(*[(lr, 40, CALM) for lr in rates])] == [False, True] + [False] * 4


def test_a_round_without_a_learning_rate_does_not_hide_the_cliff():
    answers = watch((0.1, 40, CALM), (None, 40, CALM), (0.01, 40, CALM))

    assert [bool(answer) for answer in answers] == [False, False, True]


def test_runs_without_a_learning_rate_are_left_alone():
    assert watch(*[(None, 40, CALM)] * 9) == [None] * 9


@pytest.mark.parametrize(
    ("anchors", "factor"),
    [
        ([40, 40, 40, 40, 40], 0.5),
        ([20, 20, 20, 20, 40], 0.5 - 0.5 * (40 - 24) / 24),  # it has just grown: shrink more
        ([40, 40, 40, 40, 20], 0.5 + 0.5 * 16 / 36),  # it has shrunk already
        ([1, 1, 1, 1, 400], 0.1),
        ([9, 400, 400, 400, 400, 1], 0.5 + 0.5 * (1601 / 5 - 1) / (1601 / 5)),  # the oldest is forgotten
        ([400, 400, 400, 400, 1], 0.95),
    ],
)
def test_the_anchors_trend_bends_the_factor(anchors, factor):
    if factor != 0.1:
        factor = min(factor, 0.95)
    rounds = [(0.1, anchor, CALM) for anchor in anchors[:-1]] + [(0.01, anchors[-1], CALM)]

    assert watch(*rounds)[-1].factor == pytest.approx(factor)


# ---------------------------------------------------------------------------------------------- objections


@pytest.mark.parametrize(("phase", "needed", "factor"), [("warmup", 5, 0.3), ("stable", 3, 0.5), ("mature", 2, 0.7)])
def test_sustained_objections_by_phase(phase, needed, factor):
    answers = watch(*[(None, 40, OBJECTION)] * needed, phase=phase)

    assert answers[:-1] == [None] * (needed - 1)
    assert answers[-1] == NudgeDown(factor, f"The guard objected {needed} rounds in a row")


def test_nudges_are_objections_and_a_calm_round_breaks_the_row():
    answers = watch(*[(None, 40, verdict) for verdict in (OBJECTION, NUDGE, CALM, NUDGE, OBJECTION, NUDGE)])

    assert [bool(answer) for answer in answers] == [False] * 5 + [True]


def test_both_at_once_multiply():
    rounds = [(0.1, 40, OBJECTION), (0.1, 40, OBJECTION), (0.01, 40, OBJECTION)]

    nudge = watch(*rounds)[-1]

    assert nudge.factor == 0.25
    assert nudge.cause == (
        "The learning rate fell from 0.1 to 0.01 in one round and the guard objected 3 rounds in a row"
    )


def test_both_at_once_stay_within_the_limits():
    rounds = [(0.1, 10, OBJECTION)] * 4 + [(0.01, 400, OBJECTION)]

    assert watch(*rounds, phase="warmup")[-1].factor == 0.1


def test_nothing_is_learnt_before_the_first_calibration():
    meta = MetaController()
    for _ in range(9):
        assert meta.observe(0.1, 40, OBJECTION, "probe") is None

    assert meta.observe(0.01, 40, OBJECTION, "warmup") is None


# ------------------------------------------------------------------------------------- the rate of a round


@pytest.mark.parametrize(
    ("rates", "known"),
    [({}, None), ({0: None}, None), ({1: 0.2, 0: 0.1}, 0.1), ({0: None, 1: math.nan, 2: 0.3}, 0.3)],
)
def test_the_first_known_learning_rate(rates, known):
    assert first_known_lr({rank: replace(ack(0.0), lr=lr) for rank, lr in rates.items()}) == known
