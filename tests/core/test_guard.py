"""The convergence guard: what it measures, when it objects, what a checkpoint keeps of it (behaviour K1 to K5)."""

import json
import math

import pytest
from guard_kit import ack, report

from backend.core.config import RunConfig
from backend.core.guard import GrowthGuard, LevelGuard, NoGuard, divergence_report, guard_for
from backend.core.verdicts import NudgeDown, Stable, SuppressGrowth

# ------------------------------------------------------------------------------------------- the report


def test_the_divergence_is_the_largest_delta():
    found = divergence_report({0: ack(0.1), 1: ack(0.3), 2: ack(math.nan)}, {0: 4, 1: 9, 2: 0})

    assert found.divergence == 0.3
    assert found.deltas == {0: 0.1, 1: 0.3}
    assert (found.batches, found.k_max) == (13, 9)


def test_nobody_reported():
    found = divergence_report({}, {})

    assert (found.divergence, found.batches, found.k_max) == (0.0, 0, 0)
    assert found.cosine(0) is None
    assert found.magnitude_shift(0) is None


def test_angle_and_length_from_the_norms():
    """Two replicas (4, 3) and (4, -3) average to (4, 0): delta 3/4, cosine 4/5, and a norm of 5 shrinks to 4."""
    found = divergence_report({0: ack(0.75, 5.0, 4.0), 1: ack(0.75, 5.0, 4.0)}, {0: 1, 1: 1})

    assert found.cosine(0) == pytest.approx(0.8)
    assert found.magnitude_shift(0) == 1.0


@pytest.mark.parametrize(("delta", "cosine"), [(0.0, 1.0), (2.0, -1.0), (2.0000001, -1.0), (1.0, 0.5)])
def test_the_cosine_keeps_to_its_range(delta, cosine):
    found = divergence_report({0: ack(delta, 1.0, 1.0)}, {0: 1})

    assert found.cosine(0) == pytest.approx(cosine)


@pytest.mark.parametrize(("pre", "post"), [(0.0, 1.0), (1.0, 0.0)])
def test_no_angle_to_nothing(pre, post):
    assert divergence_report({0: ack(0.5, pre, post)}, {0: 1}).cosine(0) is None


def test_norms_are_used_only_if_every_rank_has_one():
    found = divergence_report({0: ack(0.1, 5.0), 1: ack(0.1, math.inf)}, {0: 1, 1: 1})

    assert found.pre_norms == {}
    assert found.cosine(0) is None


# ------------------------------------------------------------------------------------------------- level


@pytest.mark.parametrize(
    ("values", "kind", "words"),
    [
        ([0.2], Stable, "has seen 1 of the 3 rounds"),
        ([0.2, 0.3], Stable, "has seen 2 of the 3 rounds"),
        ([0.01, 0.02, 0.06], SuppressGrowth, "0.06 apart, above the guard's 0.05 and rising for 3 rounds"),
        ([0.01, 0.02, 0.05], Stable, "0.05 apart, within the guard's 0.05"),
        ([0.06, 0.06, 0.07], Stable, "above the guard's 0.05, but not rising for 3 rounds"),
        ([0.06, 0.05, 0.07], Stable, "not rising"),
        ([0.9, 0.1, 0.06, 0.07, 0.08], SuppressGrowth, "rising"),
        ([0.06, 0.07, 0.08, 0.08], Stable, "not rising"),
        ([0.0, 0.0, 0.0], Stable, "0 apart, within"),
    ],
)
def test_the_level_guard(values, kind, words):
    guard = LevelGuard()
    for value in values:
        verdict = guard.judge(report(value))

    assert type(verdict) is kind
    assert words in verdict.reason
    assert verdict.reason.endswith(".")


def test_the_level_guards_threshold_is_the_operators():
    config = RunConfig(job="a.py:A", guard="level", guard_threshold=0.3)
    guard = guard_for(config)
    verdicts = [guard.judge(report(value)) for value in (0.1, 0.2, 0.29, 0.31)]

    assert [type(verdict) for verdict in verdicts] == [Stable, Stable, Stable, SuppressGrowth]


def test_relaxing_up_needs_evidence():
    """Silence is no stability (M35): neither too few rounds nor a divergence above the threshold relax anything."""
    guard = LevelGuard(relax_up=True)
    relaxed = [getattr(guard.judge(report(value)), "relax_up", None) for value in (0.01, 0.01, 0.01, 0.2, 0.1)]

    assert relaxed == [False, False, True, False, False]
    assert not any(LevelGuard().judge(report(0.01)).relax_up for _ in range(4))


# ------------------------------------------------------------------------------------------------ growth


def grown(rate: float, rounds: int, k_max: int = 10, start: float = 1e-3) -> list[float]:
    """Divergences that grow by this rate per batch."""
    return [start * math.exp(rate * k_max * number) for number in range(rounds)]


@pytest.mark.parametrize(
    ("rate", "verdicts"),
    [
        (-0.01, [Stable] * 9),
        (0.0009, [Stable] * 9),
        (0.002, [Stable] * 3 + [SuppressGrowth] + [Stable] * 2 + [SuppressGrowth] + [Stable] * 2),
        (0.02, [Stable] * 3 + [NudgeDown] + [Stable] * 2 + [NudgeDown] + [Stable] * 2),
    ],
)
def test_the_growth_guard_fires_after_three_events(rate, verdicts):
    """The first value has nothing to be compared with; a constant rate is its own average from the first pair on."""
    guard = GrowthGuard()

    assert [type(guard.judge(report(value))) for value in grown(rate, 9)] == verdicts
    assert guard.rate == pytest.approx(rate)


def test_the_average_is_corrected_for_its_start():
    """Two events of rates 0.02 and 0: 0.9 of the first's tenth, over 1 - 0.81."""
    guard = GrowthGuard()
    assert guard.rate is None
    for value in (1e-3, 1e-3 * math.exp(0.2), 1e-3 * math.exp(0.2)):
        guard.judge(report(value))

    assert guard.rate == pytest.approx(0.9 * 0.1 * 0.02 / 0.19)


def test_the_streaks_are_independent():
    """Events 1 and 2 are beyond suppression only, 3 to 5 are beyond both: at 3 suppression fires, at 5 the nudge does,
    its streak untouched by the other's firing."""
    guard = GrowthGuard()
    guard.judge(report(1e-3))
    value, verdicts = 1e-3, []
    for rate in (0.005, 0.005, 0.12, 0.05, 0.05):
        value *= math.exp(rate * 10)
        verdicts.append(type(guard.judge(report(value))))

    assert verdicts == [Stable, Stable, SuppressGrowth, Stable, NudgeDown]


def test_a_nudge_halves_the_window():
    guard = GrowthGuard()
    verdict = [guard.judge(report(value)) for value in grown(0.02, 4)][-1]

    assert verdict == NudgeDown(
        0.5, "The divergence changes by 0.02 in its logarithm per batch, more than 0.01 for 3 rounds"
    )
    assert verdict.reason.endswith("for 3 rounds, so the anchor is to shrink to 50 % of itself.")


@pytest.mark.parametrize(("gap", "k_max"), [(0.0, 10), (1e-8, 10), (None, 0)])
def test_a_round_that_says_nothing_leaves_the_streaks_alone(gap, k_max):
    """A divergence at the floor also forgets the one before; a round without batches does not."""
    guard = GrowthGuard()
    values = grown(0.002, 4)
    for value in values[:3]:
        guard.judge(report(value))
    silent = guard.judge(report(values[3] if gap is None else gap, k_max=k_max))
    assert type(silent) is Stable
    assert "do not show" in silent.reason

    verdicts = [type(guard.judge(report(value))) for value in grown(0.002, 2, start=values[3])]

    assert SuppressGrowth in verdicts


def test_the_growth_guard_relaxes_only_when_it_sees_calm():
    guard = GrowthGuard(relax_up=True)
    relaxed = [guard.judge(report(value)).relax_up for value in (0.01, 0.01, 0.01005)]

    assert relaxed == [False, True, True]
    assert not guard.judge(report(0.5)).relax_up


# ------------------------------------------------------------------------------------- none, and the choice


@pytest.mark.parametrize(("name", "kind"), [("level", LevelGuard), ("growth", GrowthGuard), ("none", NoGuard)])
def test_the_configuration_chooses(name, kind):
    assert type(guard_for(RunConfig(job="a.py:A", guard=name))) is kind


def test_no_guard_never_objects_and_never_relaxes():
    assert NoGuard().judge(report(9.0)) == Stable("No guard watches the divergence.")


# --------------------------------------------------------------------------------------------- saved state


@pytest.mark.parametrize("kind", [LevelGuard, GrowthGuard, NoGuard])
def test_a_restored_guard_goes_on_as_if_nothing_had_happened(kind):
    values = [0.01, 0.012, 0.03, 0.06, 0.05, 0.09, 0.2, 0.3]
    straight, before, after = kind(), kind(), kind()
    expected = [straight.judge(report(value)) for value in values]
    told = [before.judge(report(value)) for value in values[:4]]
    assert after.restore(json.loads(json.dumps(before.state())))

    assert told + [after.judge(report(value)) for value in values[4:]] == expected
    assert after.state() == straight.state()


def test_another_guards_history_is_not_taken_up():
    level, growth = LevelGuard(), GrowthGuard()
    level.judge(report(0.1))
    before = growth.state()

    assert not growth.restore(level.state())
    assert not level.restore(before)
    assert not NoGuard().restore(before)
    assert not level.restore({})
    assert growth.state() == before
    assert level.state()["history"] == [0.1]


@pytest.mark.parametrize(
    ("guard", "change"),
    [
        (LevelGuard(), {"history": None}),
        (LevelGuard(), {"history": [0.1, "much"]}),
        (LevelGuard(), {"history": [math.inf]}),
        (GrowthGuard(), {"streaks": [1]}),
        (GrowthGuard(), {"streaks": {"nudge": 1}}),
        (GrowthGuard(), {"average": None}),
        (GrowthGuard(), {"events": True}),
        (GrowthGuard(), {"previous": "much"}),
    ],
)
def test_a_broken_history_is_refused(guard, change):
    before = guard.state()
    with pytest.raises(ValueError, match="the saved guard"):
        guard.restore(before | change)
    assert guard.state() == before
