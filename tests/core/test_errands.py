"""Who goes on errands, and what they cost (behaviour C21, F16)."""

import math

import pytest

from backend.core.config import RunConfig
from backend.core.desks import EvaluationDesk
from backend.core.errands import Errands
from backend.core.saving import CheckpointDesk
from backend.core.world import HostSeat, World
from wire.messages import Device, EvalResult, LocalState, Versions

VERSIONS = Versions(marchline="0.1.0", wire=1, python="3.11.7")


def world(ranks: int) -> World:
    devices = tuple(Device(id=f"cpu:{n}", type="cpu") for n in range(ranks))
    return World([HostSeat(0, "a", "10.0.0.1", 1, tuple(range(ranks)), devices, VERSIONS, None)])


PACE = {0: 20.0, 1: 10.0, 2: 10.0, 3: 0.0}


def test_the_fastest_goes_and_keeps_going():
    pace = dict(PACE)
    cohort = world(4)
    errands = Errands(cohort, lambda rank: pace[rank])
    assert errands.rank() == 1
    pace[0] = 1.0
    assert errands.rank() == 1  # the role is sticky

    cohort.remove(1, "dead")
    assert errands.rank() == 0
    for rank in (0, 2, 3):
        cohort.remove(rank, "dead")
    assert errands.rank() is None
    assert errands.slack_ms(("evaluation",)) == {}


def test_before_anything_is_timed_the_lowest_rank_goes():
    assert Errands(world(3), lambda rank: 0.0).rank() == 0


@pytest.mark.parametrize(
    ("costs", "slack"),
    [
        ((), {}),
        ((200.0,), {1: 200.0}),
        ((200.0, 300.0), {1: 230.0}),
        ((200.0, 300.0, 300.0), {1: 251.0}),
        ((200.0, math.nan, math.inf, -5.0), {1: 200.0}),
        ((0.0,), {}),
    ],
)
def test_the_cost_is_a_running_average(costs, slack):
    errands = Errands(world(4), PACE.__getitem__)
    for ms in costs:
        errands.paid("evaluation", ms)

    assert errands.slack_ms(("evaluation",)) == pytest.approx(slack)


def test_errands_of_several_kinds_add_up():
    errands = Errands(world(4), PACE.__getitem__)
    errands.paid("evaluation", 200.0)
    errands.paid("checkpoint", 50.0)

    assert errands.slack_ms(("evaluation", "checkpoint")) == {1: 250.0}
    assert errands.slack_ms(("checkpoint",)) == {1: 50.0}
    assert errands.slack_ms(()) == {}


def test_what_everybody_is_sent_for_adds_to_what_the_role_costs():
    errands = Errands(world(3), PACE.__getitem__)
    errands.paid("evaluation", 200.0)
    errands.paid("checkpoint", 50.0)

    assert errands.slack_ms(("evaluation",), everybody=("checkpoint",)) == {0: 50.0, 1: 250.0, 2: 50.0}


def test_the_desks_keep_the_account():
    cohort = world(4)
    errands = Errands(cohort, PACE.__getitem__)
    scoring, saving = EvaluationDesk(errands), CheckpointDesk(RunConfig(job="j.py:J"), cohort, errands)
    scoring.ask(0, 1)
    scoring.result(2, EvalResult(epoch=0, metrics={}, elapsed_ms=9.0))  # nobody asked rank 2
    scoring.result(1, EvalResult(epoch=0, metrics={}, elapsed_ms=120.0, error="out of memory"))
    assert errands.slack_ms(("evaluation",)) == {1: 120.0}  # a failure takes time too

    saving.begin("why", {}, 10.0)
    saving.local_state(2, LocalState(checkpoint=1, part=0, parts=2, data=b"a", elapsed_ms=30.0), 11.1)
    saving.local_state(2, LocalState(checkpoint=1, part=1, parts=2, data=b"b"), 11.25)
    assert errands.slack_ms(("checkpoint",)) == {1: 30.0}  # copying, not sending: that goes on beside the batches
