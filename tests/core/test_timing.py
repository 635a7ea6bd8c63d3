"""The window ledger: costs on two scales, and the choice between them (behaviour D)."""

import math

import pytest

from backend.core.timing import WindowLedger, delivered_capable


def ledger_of(batches: dict[int, list[tuple[float, float]]]) -> WindowLedger:
    """A ledger that saw these (batch_ms, data_ms) pairs by rank."""
    ledger = WindowLedger(batches)
    for rank, pairs in batches.items():
        for batch_ms, data_ms in pairs:
            ledger.record_batch(rank, batch_ms, data_ms, None, 32)
    return ledger


def test_first_batch_carries_the_fill_and_stays_out_of_the_delivered_rate():
    ledger = ledger_of({0: [(10, 5), (8, 2), (8, 2)]})  # the example of D4

    report = ledger.report([0], coherent_capable=False, sync_ms=0.0)

    assert report.ms == {0: 26.0}
    assert report.batches == {0: 3}
    assert ledger.delivered(0) == (20.0, 2)
    assert ledger.fill_excess_ms(0) == 5.0
    assert report.fill_ms == {0: 5.0}
    assert report.compute_seconds == {0: 0.026}
    assert report.data_seconds == {0: 0.009}


@pytest.mark.parametrize(
    ("pairs", "fill"),
    [
        ([], 0.0),
        ([(10, 5)], 0.0),  # one batch has no rate to compare with
        ([(4, 1), (8, 2)], 0.0),  # a fast first batch is no negative fill
        ([(20, 0), (0, 0)], 0.0),  # a rate of nothing is no rate
    ],
)
def test_fill_is_never_negative_and_needs_a_rate(pairs, fill):
    assert ledger_of({0: pairs}).fill_excess_ms(0) == fill


def test_a_window_of_one_batch_has_no_delivered_sample():
    ledger = ledger_of({0: [(10, 5)], 1: [(10, 5), (10, 5)]})

    assert not ledger.has_delivered_sample(0)
    assert ledger.has_delivered_sample(1)
    assert not ledger.has_delivered_sample(7)


@pytest.mark.parametrize(
    ("batches", "capable", "scale", "ms", "counts"),
    [
        pytest.param(
            {0: [(9, 1), (8, 2), (8, 4)], 1: [(20, 0), (20, 5)]},
            True,
            "delivered",
            {0: 22.0, 1: 25.0},
            {0: 2, 1: 1},
            id="all movers have a rate",
        ),
        pytest.param(
            {0: [(9, 1), (8, 2)], 1: [(20, 0)]},
            True,
            "compute",
            {0: 17.0, 1: 20.0},
            {0: 2, 1: 1},
            id="one mover without a rate drops everybody to compute",
        ),
        pytest.param(
            {0: [(9, 1), (8, 2)], 1: []},
            True,
            "delivered",
            {0: 10.0, 1: 0.0},
            {0: 1, 1: 0},
            id="an idle rank feeds nothing and harms nobody",
        ),
        pytest.param(
            {0: [(9, 1), (8, 2)], 1: [(20, 0), (20, 0)]},
            False,
            "compute",
            {0: 17.0, 1: 40.0},
            {0: 2, 1: 2},
            id="a sync mode is never capable",
        ),
    ],
)
def test_one_scale_for_the_whole_cohort(batches, capable, scale, ms, counts):
    report = ledger_of(batches).report(batches, coherent_capable=capable, sync_ms=60.0)

    assert (report.scale, report.ms, report.batches, report.sync_ms) == (scale, ms, counts, 60.0)


def test_the_report_covers_only_the_ranks_asked_for():
    ledger = ledger_of({0: [(9, 1), (9, 1)], 1: [(20, 0)]})  # rank 1 would spoil coherence, but is dead

    report = ledger.report([0], coherent_capable=True, sync_ms=0.0)

    assert report.scale == "delivered"
    assert report.ms.keys() == report.batches.keys() == report.fill_ms.keys() == {0}


def test_which_modes_ride_the_delivered_scale():
    capable = [m for m in ("cpu_sync", "cpu_cadence", "cpu_async", "nccl_sync", "nccl_cadence") if delivered_capable(m)]

    assert capable == ["cpu_cadence", "cpu_async", "nccl_cadence"]


def test_per_batch_wall_sorts_a_rank_without_work_last():
    ledger = ledger_of({0: [(10, 5), (14, 5)], 1: []})

    assert ledger.per_batch_wall_ms(0) == 12.0
    assert ledger.per_batch_wall_ms(1) == math.inf


def test_callback_cost_leaves_both_scales_and_stops_at_zero():
    ledger = ledger_of({0: [(10, 0), (10, 0), (10, 0)]})

    ledger.absorb_callback_cost(0, 15.0)
    once = (ledger.report([0], coherent_capable=False, sync_ms=0.0).ms[0], ledger.delivered(0)[0])
    ledger.absorb_callback_cost(0, 1000.0)
    ledger.absorb_callback_cost(0, math.nan)
    ledger.absorb_callback_cost(9, 5.0)

    assert once == (15.0, 5.0)
    assert ledger.report([0], coherent_capable=False, sync_ms=0.0).ms == {0: 0.0}
    assert ledger.delivered(0) == (0.0, 2)


def test_resets_are_split():
    ledger = WindowLedger()
    for _ in range(3):
        ledger.record_batch(0, 10.0, 1.0, 2.0, 32)

    ledger.reset_steps()
    assert (ledger.steps(0), ledger.samples(0)) == (0, 0)
    assert ledger.delivered(0) == (22.0, 2)
    assert ledger.mean_loss([0]) == 2.0

    ledger.record_batch(0, 50.0, 1.0, None, 16)
    ledger.reset_timing()
    assert (ledger.steps(0), ledger.samples(0)) == (1, 16)
    assert ledger.delivered(0) == (0.0, 0)
    assert ledger.mean_loss([0]) is None
    assert ledger.report([0], coherent_capable=False, sync_ms=0.0).ms == {0: 0.0}


def test_a_new_window_has_a_new_first_batch():
    ledger = ledger_of({0: [(10, 0), (10, 0)]})
    ledger.reset_steps()
    ledger.reset_timing()
    for batch_ms in (30.0, 12.0, 12.0):
        ledger.record_batch(0, batch_ms, 0.0, None, 32)

    assert ledger.delivered(0) == (24.0, 2)
    assert ledger.fill_excess_ms(0) == 18.0


def test_a_late_batch_carries_its_own_divisor_into_the_next_window():
    ledger = ledger_of({0: [(10, 0), (10, 0)]})
    ledger.reset_steps()
    ledger.record_batch(0, 10.0, 0.0, None, 32)  # leaked past the steps reset (D12)

    report = ledger.report([0], coherent_capable=False, sync_ms=0.0)

    assert report.ms[0] / report.batches[0] == 10.0


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([], None),
        ([None], None),
        ([math.nan, math.inf], None),
        ([1.0, math.nan, 3.0], 2.0),
        ([1e308, 1e308], None),  # the sum overflows: absent, not infinite
    ],
)
def test_loss_is_absent_rather_than_wrong(losses, expected):
    ledger = WindowLedger([0])
    for loss in losses:
        ledger.record_batch(0, 1.0, 0.0, loss, 1)

    assert ledger.mean_loss([0]) == expected


def test_loss_is_weighted_by_batches():
    ledger = WindowLedger()
    for rank, loss, batches in ((0, 1.0, 3), (1, 5.0, 1)):
        for _ in range(batches):
            ledger.record_batch(rank, 1.0, 0.0, loss, 1)

    assert ledger.mean_loss([0, 1]) == 2.0
    assert ledger.mean_loss([1]) == 5.0


@pytest.mark.parametrize("bad", [(-1.0, 0.0), (math.nan, 0.0), (1.0, math.inf), (1.0, -5.0)])
def test_an_impossible_duration_counts_as_work_but_not_as_a_rate(bad):
    ledger = ledger_of({0: [(10, 0), bad, (10, 0)]})

    report = ledger.report([0], coherent_capable=False, sync_ms=0.0)

    assert ledger.steps(0) == 3
    assert (report.ms, report.batches) == ({0: 20.0}, {0: 2})
    assert ledger.delivered(0) == (10.0, 1)


def test_an_unmeasured_first_batch_is_no_fill():
    ledger = ledger_of({0: [(math.nan, 0), (10, 0), (10, 0)]})

    assert ledger.fill_excess_ms(0) == 0.0
    assert ledger.delivered(0) == (20.0, 2)


def test_samples_are_counted_with_the_batches():
    ledger = WindowLedger([0])
    assert (ledger.steps(0), ledger.samples(0)) == (0, 0)
    ledger.record_batch(0, 1.0, 0.0, None, 32)
    ledger.record_batch(0, 1.0, 0.0, None, 7)

    assert (ledger.steps(0), ledger.samples(0)) == (2, 39)


def test_a_dropped_rank_stays_dropped():
    ledger = ledger_of({0: [(10, 0)], 1: [(10, 0)]})

    ledger.drop(1)
    ledger.record_batch(1, 10.0, 0.0, 1.0, 32)  # a zombie's batch

    assert ledger.steps(1) == 0
    assert ledger.mean_loss([0, 1]) is None
    assert ledger.movers_delivered_complete([1])
