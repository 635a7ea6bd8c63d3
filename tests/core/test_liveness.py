"""Who is alive, how many deaths are tolerated, and the reasons a run ends for (behaviour J1 to J6)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.liveness import Liveness, SaveReason, failure_limit, tolerance


def watching(*hosts: int, timeout: float = 30.0) -> Liveness:
    liveness = Liveness(timeout)
    for host in hosts:
        liveness.add(host, 0.0)
    return liveness


# ------------------------------------------------------------------------------------------------ silence


def test_a_silent_host_is_late_exactly_at_its_timeout():
    liveness = watching(0, 1)
    liveness.heard(1, 10.0)

    assert liveness.next_deadline() == 30.0
    assert liveness.late(29.9) == []
    assert liveness.late(30.0) == [0]
    assert liveness.late(40.0) == [0, 1]


def test_any_frame_is_life_and_an_old_one_takes_none():
    liveness = watching(0)
    liveness.heard(0, 20.0)
    liveness.heard(0, 15.0)

    assert liveness.next_deadline() == 50.0
    assert liveness.silence(0, 26.0) == 6.0


def test_a_host_that_left_is_not_lost_later():
    liveness = watching(0, 1)

    liveness.remove(0)
    liveness.heard(0, 25.0)  # a zombie's frame

    assert liveness.late(1000.0) == [1]
    assert liveness.hosts == [1]
    assert liveness.silence(0, 40.0) == 40.0  # still told to the operator
    liveness.remove(0)
    liveness.remove(1)
    assert liveness.next_deadline() is None


def test_a_host_that_was_never_there():
    liveness = watching(0)
    liveness.heard(9, 5.0)

    assert liveness.silence(9, 50.0) == 0.0
    assert liveness.hosts == [0]


def test_the_controllers_own_lag_kills_nobody():
    liveness = watching(0, 1)
    liveness.heard(1, 10.0)

    sentence = liveness.lagged(40.0)

    assert liveness.late(45.0) == []
    assert liveness.next_deadline() == 70.0
    assert sentence.startswith("The controller was away for 40.0 s")
    liveness.heard(0, 46.0)  # heard again: the allowance is spent
    assert liveness.late(76.0) == [0]
    assert liveness.late(80.0) == [0, 1]


def test_no_lag_gives_nothing():
    liveness = watching(0)

    liveness.lagged(-5.0)

    assert liveness.next_deadline() == 30.0


# ---------------------------------------------------------------------------------------------- tolerance


@pytest.mark.parametrize(
    ("max_failure", "world", "limit"),
    [
        (None, 8, None),
        (1.0, 8, 1),
        (3.0, 8, 3),
        (1.5, 8, 2),
        (0.0, 8, 0),
        (0.5, 8, 4),
        (0.5, 3, 2),
        (0.34, 3, 2),
        (0.07, 100, 7),  # 0.07 * 100 is above 7 in binary
        (-1.0, 8, 0),
        (0.999, 4, 4),
    ],
)
def test_the_failure_limit(max_failure, world, limit):
    assert failure_limit(world, max_failure) == limit


@pytest.mark.parametrize(
    ("dead", "world", "max_failure", "collective", "reason"),
    [
        pytest.param(0, 3, None, False, None, id="all alive"),
        pytest.param(2, 3, None, False, None, id="one CPU survivor goes on"),
        pytest.param(3, 3, None, False, SaveReason.ALL_RANKS_LOST, id="nobody is left"),
        pytest.param(1, 3, None, True, None, id="two NCCL survivors go on"),
        pytest.param(2, 3, None, True, SaveReason.SINGLE_SURVIVOR, id="one NCCL survivor cannot"),
        pytest.param(3, 3, None, True, SaveReason.ALL_RANKS_LOST, id="nobody is left to survive"),
        pytest.param(1, 4, 2, False, None, id="below the count"),
        pytest.param(2, 4, 2, False, SaveReason.MAX_FAILURE_EXCEEDED, id="at the count"),
        pytest.param(1, 4, 0.5, False, None, id="below the share"),
        pytest.param(2, 4, 0.5, False, SaveReason.MAX_FAILURE_EXCEEDED, id="at the share"),
        pytest.param(1, 4, 0, False, SaveReason.MAX_FAILURE_EXCEEDED, id="no death is tolerated"),
        pytest.param(0, 4, 0, False, None, id="and none happened"),
        pytest.param(4, 4, 2, False, SaveReason.MAX_FAILURE_EXCEEDED, id="the limit comes before the CPU floor"),
        pytest.param(2, 3, 2, True, SaveReason.MAX_FAILURE_EXCEEDED, id="and before the NCCL floor"),
    ],
)
def test_tolerance(dead, world, max_failure, collective, reason):
    found = tolerance(dead, world, max_failure, collective=collective)

    assert (found.stop, found.save_reason) == (reason is not None, reason)
    assert found.reason.endswith(".")


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (tolerance(1, 3, None), "1 of 3 ranks is dead; the other 2 go on."),
        (tolerance(2, 3, None), "2 of 3 ranks are dead; the last one goes on."),
        (tolerance(3, 3, None), "All 3 ranks are dead; nobody is left to train."),
        (tolerance(2, 4, 0.5), "2 of 4 ranks are dead, and the run's limit of 0.5 ends it at 2."),
        (tolerance(1, 4, 0), "1 of 4 ranks is dead, and the run tolerates no death."),
        (
            tolerance(2, 3, None, collective=True),
            "2 of 3 ranks are dead; a collective needs at least two ranks, and one is left.",
        ),
    ],
)
def test_what_the_operator_reads(found, sentence):
    assert found.reason == sentence


@given(
    world=st.integers(2, 64),
    max_failure=st.one_of(st.none(), st.floats(0.0, 70.0)),
    collective=st.booleans(),
)
def test_more_deaths_never_revive_a_run(world, max_failure, collective):
    stops = [tolerance(dead, world, max_failure, collective=collective).stop for dead in range(world + 1)]

    assert stops == sorted(stops)
    assert stops[0] is False
    assert stops[-1] is True


# -------------------------------------------------------------------------------------------- the reasons


@pytest.mark.parametrize(
    ("reason", "byte", "label"),
    [
        (SaveReason.GRACEFUL_SHUTDOWN, 0, "GracefulShutdown"),
        (SaveReason.MAX_FAILURE_EXCEEDED, 1, "MaxFailureExceeded"),
        (SaveReason.SINGLE_SURVIVOR, 2, "SingleSurvivor"),
        (SaveReason.ALL_RANKS_LOST, 3, "AllRanksLost"),
        (SaveReason.REDUCE_STALL, 4, "ReduceStall"),
        (SaveReason.CHECKPOINT, 5, "Checkpoint"),
        (SaveReason.TRAIN_STALL, 6, "TrainStall"),
        (SaveReason.RENDEZVOUS_EXHAUSTED, 7, "RendezvousExhausted"),
    ],
)
def test_reasons_keep_their_byte_and_name(reason, byte, label):
    assert (int(reason), reason.label) == (byte, label)
    assert SaveReason(byte) is reason
    assert reason.ends_run == (label != "Checkpoint")


def test_there_are_no_other_reasons():
    assert len(SaveReason) == 10
