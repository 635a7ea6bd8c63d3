"""What is expected of a run before it starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backend.core.config import RunConfig
from backend.core.outlook import arena_bytes
from backend.core.preview import GUESSED_MS, Outlook, Preview, RankHint, assumed_round_seconds, preview
from wire.messages import TensorSpec

CONFIG = RunConfig(job="odometer.py:Odometer", batch_size=1)


def outlook(*ms: float | None, samples: int = 100_000, measured: bool = False, **changes: object) -> Outlook:
    hints = tuple(RankHint(rank, cost, measured, host=rank) for rank, cost in enumerate(ms))
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    return Outlook(hints, config, samples, model_bytes=4_000_000, round_seconds=0.05)


def counts(found: Preview) -> list[int]:
    return [rank.batches for rank in found.ranks]


def test_allotments_follow_the_speeds() -> None:
    found = preview(outlook(10.0, 20.0, 40.0))
    fast, middle, slow = counts(found)
    assert (fast, middle) == (4 * slow, 2 * slow)
    assert [rank.share for rank in found.ranks] == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    expected = found.expectation
    assert expected is not None
    assert expected.anchor_rank == 2
    assert expected.window_batches == 7 * slow
    assert expected.window_seconds == pytest.approx(slow * 0.04 + 0.05)
    assert expected.idle_share < 0.001
    assert expected.efficiency == pytest.approx(1.0 - expected.round_share - expected.idle_share, abs=0.001)
    assert expected.gain == pytest.approx(1.75 * expected.efficiency)
    assert expected.epoch_seconds == pytest.approx(100_000 / expected.batches_per_second)


def test_one_batch_each_keeps_the_fast_waiting() -> None:
    found = preview(outlook(10.0, 40.0, mode="cpu_sync"))
    assert counts(found) == [1, 1]
    assert [rank.idle_share for rank in found.ranks] == pytest.approx([0.03 / 0.09, 0.0], abs=0.001)
    assert found.expectation is not None
    assert found.expectation.anchor == 1
    assert found.expectation.round_share == pytest.approx(0.05 / 0.09, abs=0.001)


def test_where_rounds_overlap_work_only_packing_and_loading_stop_it() -> None:
    beside, between = (preview(outlook(10.0, 40.0, mode=mode)).expectation for mode in ("cpu_async", "cpu_cadence"))
    assert beside is not None and between is not None
    assert beside.round_seconds == between.round_seconds == 0.05
    # 4 MB twice at the speed of memory in each window, and the last round of the epoch as a whole
    stopped = beside.windows * 0.002 + 0.048
    assert beside.round_share == pytest.approx(stopped / beside.epoch_seconds)
    assert beside.efficiency > between.efficiency


def test_forced_counts_are_kept() -> None:
    assert counts(preview(outlook(10.0, 10.0, fixed_counts=(3, 1)))) == [3, 1]


def test_a_window_is_no_longer_than_an_epoch() -> None:
    found = preview(outlook(10.0, 20.0, samples=12))
    assert found.expectation is not None
    assert (found.expectation.windows, found.expectation.window_batches) == (1, 12)


@pytest.mark.parametrize("samples", [1, 2, 7, 41, 2001, 99_999])
@pytest.mark.parametrize("mode", ["cpu_cadence", "cpu_sync"])
def test_an_epoch_holds_every_batch(samples: int, mode: str) -> None:
    found = preview(outlook(3.0, 5.0, 64.0, samples=samples, mode=mode))
    assert found.expectation is not None
    done = found.expectation.batches_per_second * found.expectation.epoch_seconds
    assert done == pytest.approx(samples)
    assert found.expectation.windows >= 1
    assert 0.0 < found.expectation.efficiency <= 1.0


class TestWhatItRestsOn:
    def test_measured(self) -> None:
        found = preview(outlook(10.0, 20.0, measured=True))
        assert not found.guess
        assert not found.round_assumed
        assert {rank.source for rank in found.ranks} == {"measured"}
        assert found.reason == "Of the 2 ranks' speeds 2 are measured."

    def test_nothing_known_counts_as_equal(self) -> None:
        found = preview(outlook(None, None, None))
        assert found.guess
        assert {(rank.ms_per_batch, rank.source) for rank in found.ranks} == {(GUESSED_MS, "guessed")}
        assert len(set(counts(found))) == 1
        assert found.reason == (
            "Of the 3 ranks' speeds 3 are guessed. Until a batch is timed all count as equally fast, 50 ms a batch."
        )

    def test_the_unknown_count_as_the_middle_of_the_known(self) -> None:
        found = preview(outlook(10.0, None, 20.0, 400.0))
        assert found.guess
        assert found.ranks[1].ms_per_batch == 20.0
        assert "3 are declared by their hosts and 1 is guessed" in found.reason
        assert "those guessed count as fast as the middle one of the others, 20 ms a batch" in found.reason

    def test_a_round_that_was_never_timed_is_assumed(self) -> None:
        known = outlook(10.0, 20.0)
        assumed = replace(known, round_seconds=None)
        found = preview(assumed)
        assert found.round_assumed
        assert found.expectation is not None
        # 4 MB for each of two hosts over the controller's 125 MB/s, and the last slice once more
        assert found.expectation.round_seconds == pytest.approx(0.064 + 0.0084 + 0.004, abs=0.001)
        assert "links of 1000 Mbit/s" in found.reason

    def test_ranks_of_one_host_share_its_line(self) -> None:
        def round_seconds(*hosts: int) -> float:
            hints = tuple(RankHint(rank, 10.0, host=host) for rank, host in enumerate(hosts))
            return assumed_round_seconds(Outlook(hints, CONFIG, 100, 4_000_000))

        assert round_seconds(0, 0, 0) < round_seconds(0, 1, 2)


class TestNothingToExpect:
    @pytest.mark.parametrize(
        ("known", "reason"),
        [
            (outlook(), "No rank has joined yet; a run shares its work among two or more."),
            (outlook(10.0), "Only one rank has joined yet; a run shares its work among two or more."),
            (outlook(10.0, 10.0, samples=0), "The dataset's size is not known yet."),
            (outlook(10.0, 10.0, fixed_counts=(1, 2, 3)), "The forced counts name 3 ranks, and 2 are here."),
        ],
    )
    def test_it_says_why(self, known: Outlook, reason: str) -> None:
        found = preview(known)
        assert found.expectation is None
        assert found.ranks == ()
        assert found.reason == reason


def test_the_arena_holds_what_is_averaged_once() -> None:
    layout = [
        TensorSpec("w", "params", "float16", [10, 3], 0),
        TensorSpec("tied", "params", "float16", [10, 3], -1, alias_of="w"),
        TensorSpec("scalar", "params", "float32", [], 30),
        TensorSpec("mean", "buffers", "float32", [5], 31),
        TensorSpec("steps", "local", "int64", [7], -1),
    ]
    assert arena_bytes(layout) == 4 * (30 + 1 + 5)
