"""The preview and the simulator foresee the same run."""

from __future__ import annotations

import pytest

from backend.core.config import MODES
from backend.core.preview import Outlook, RankHint, preview
from simulation.script import HostLine, Script
from simulation.theatre import Theatre


def simulated(ms: list[list[float]], samples: int, epochs: int = 3, **run: object) -> tuple[Script, Theatre]:
    """Played for so many epochs that ElChe has settled by the last one, which is compared."""
    ranks = sum(map(len, ms))
    values = {"quorum": ranks, "target": ranks, "samples": samples, "batch_size": 2, "epochs": epochs} | run
    hosts = [HostLine(f"host-{number}", paces) for number, paces in enumerate(ms)]
    script = Script({key: str(value) for key, value in values.items()}, hosts)
    play = script.theatre(check=False)
    script.put_on(play)
    play.run(1e6)
    assert play.end is not None and play.end.phase == "done"
    return script, play


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.startswith("cpu_")])
@pytest.mark.parametrize(
    "ms",
    [
        [[10.0], [25.0]],
        [[10.0], [20.0], [40.0]],
        [[10.0, 10.0], [20.0], [40.0, 80.0, 80.0]],
        [[7.0], [11.0], [13.0], [29.0]],
        [[5.0], [320.0]],
    ],
)
@pytest.mark.parametrize(("samples", "epochs"), [(999, 8), (8000, 3)])
def test_an_epoch_is_foreseen_within_five_percent(ms: list[list[float]], mode: str, samples: int, epochs: int) -> None:
    model = {"model_mb": 4.0, "uplink_mbit": 1000.0}
    script, play = simulated(ms, samples, epochs, mode=mode, **model)
    hints = [
        RankHint(rank, pace, measured=True, host=number)
        for rank, (number, pace) in enumerate((number, pace) for number, paces in enumerate(ms) for pace in paces)
    ]
    found = preview(Outlook(tuple(hints), script.config(), samples, model_bytes=4_000_000)).expectation
    assert found is not None

    last = next(row for row in play.rows("epochs") if row["epoch"] == epochs - 1 and "seconds" in row)
    rounds = [row for row in play.rows("rounds") if row["epoch"] == epochs - 1]
    assert found.epoch_seconds == pytest.approx(last["seconds"], rel=0.05)
    assert found.batches_per_second == pytest.approx(last["batches"] / last["seconds"], rel=0.05)
    if not play.overlap:  # there a round also waits for the batches at hand, which no preview can know
        assert found.windows == pytest.approx(len(rounds), rel=0.05, abs=1)
        assert found.round_seconds == pytest.approx(rounds[0]["reduce_seconds"], rel=0.05)


def test_allotments_are_those_of_the_last_full_window() -> None:
    script, play = simulated([[10.0], [20.0], [40.0]], 24_000, reduce=0.01)
    hints = tuple(RankHint(rank, ms, host=rank) for rank, ms in enumerate((10.0, 20.0, 40.0)))
    found = preview(Outlook(hints, script.config(), 24_000, 0, round_seconds=0.012))

    first = next(row for row in play.rows("rounds") if row["epoch"] == 2)
    assert {rank.rank: rank.batches for rank in found.ranks} == pytest.approx(first["planned"], rel=0.05)


def test_idle_time_is_foreseen_rank_by_rank() -> None:
    script, play = simulated([[10.0], [40.0]], 400, mode="cpu_sync", reduce=0.0, settle=20)
    hints = (RankHint(0, 10.0, host=0), RankHint(1, 40.0, host=1))
    # 2 ms are the round, and the last report of a chunk takes another one to be heard
    found = preview(Outlook(hints, script.config(), 400, 0, round_seconds=0.003))

    figures = play.meter.figures
    assert figures is not None
    assert {rank.rank: rank.idle_share for rank in found.ranks} == pytest.approx(figures.idle, rel=0.05, abs=1e-9)
    assert found.expectation is not None
    assert found.expectation.efficiency == pytest.approx(figures.efficiency, rel=0.05)
    assert found.expectation.round_share == pytest.approx(figures.round_share, rel=0.05)
