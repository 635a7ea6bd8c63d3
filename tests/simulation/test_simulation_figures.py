"""What the simulator measures: idle time, efficiency, rounds; and how ElChe follows devices that change their pace."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from simulation.figures import Figures, Meter
from simulation.script import Act, HostLine, Script
from simulation.stage import Stage
from simulation.theatre import Theatre

FOLLOWED_WITHIN = 3
"""windows (issue 3)"""
RATIOS = [(1.0, 2.5), (1.0, 2.0, 4.0), (1.0, 2.0, 4.0, 8.0)]


def played(
    ms: Iterable[float], *, acts: Iterable[Act] = (), options: dict[str, float] | None = None, **run: object
) -> Theatre:
    """One host for each rank, played to the end."""
    hosts = [HostLine(f"host-{rank}", [pace], dict(options or {})) for rank, pace in enumerate(ms)]
    values = {"quorum": len(hosts), "target": len(hosts), "batch_size": 1, "samples": 20_000, "settle": 10} | run
    script = Script({key: str(value) for key, value in values.items()}, hosts, list(acts))
    play = script.theatre(check=False)
    script.put_on(play)
    play.run(1e6)
    assert play.end is not None and play.end.phase == "done", play.end
    return play


def figures_of(play: Theatre) -> Figures:
    assert play.meter.figures is not None
    return play.meter.figures


@pytest.mark.parametrize("jitter", [0.0, 0.05])
@pytest.mark.parametrize("ratio", RATIOS, ids=lambda ratio: ":".join(f"{part:g}" for part in ratio))
def test_nobody_idles_besides_the_round(ratio: tuple[float, ...], jitter: float) -> None:
    play = played([10.0 * part for part in ratio], options={"jitter": jitter}, reduce=0.02, initial_anchor=100)
    figures = figures_of(play)
    assert figures.idle_worst <= 0.02, figures.idle
    assert figures.efficiency == pytest.approx(1.0 - figures.round_share - figures.idle_mean, abs=0.01)


@pytest.mark.parametrize("ratio", RATIOS, ids=lambda ratio: ":".join(f"{part:g}" for part in ratio))
@pytest.mark.parametrize(("target", "efficiency"), [(0.05, 0.945), (0.04, 0.95)])
def test_a_window_is_as_long_as_its_round_is_worth(ratio: tuple[float, ...], target: float, efficiency: float) -> None:
    """25 MB over gigabit. The overhead target bounds the round's share; the dead zone lets it exceed that by a tenth,
    so that the default target gives 0.945 and not 0.95."""
    links = {"model_mb": 25.0, "uplink_mbit": 1000.0}
    figures = figures_of(played([10.0 * part for part in ratio], samples=60_000, overhead_target=target, **links))
    assert figures.efficiency >= efficiency
    assert figures.idle_worst <= 0.02
    assert figures.round_share <= 1.1 * target


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_new_pace_is_followed(rank: int, factor: float) -> None:
    """From the first whole window at the new pace on, ElChe has FOLLOWED_WITHIN windows; then the next one is even."""
    ms = [10.0, 20.0, 40.0]
    change = Act(16.0, ["speed", str(rank), repr(ms[rank] * factor)])
    play = played(ms, acts=[change], options={"jitter": 0.02}, reduce=0.02, samples=9000)
    rounds = [row for row in play.rows("rounds") if _begins(play, row) > change.at]
    followed = rounds[FOLLOWED_WITHIN]["compute_seconds"].values()
    assert max(followed) <= 1.1 * min(followed), rounds[FOLLOWED_WITHIN]


def _begins(play: Theatre, row: dict[str, object]) -> float:
    """When the window of a round was dealt."""
    formed = 0.154  # hellos, probes, the broadcast of rank 0's parameters
    before = [other["seconds"] for other in play.rows("rounds") if other["round"] < row["round"]]
    return formed + sum(before)


def test_a_lock_step_wastes_what_the_fast_could_do() -> None:
    figures = figures_of(played([10.0, 20.0, 40.0], mode="cpu_sync", reduce=0.0, samples=3000))
    assert figures.idle == pytest.approx({0: 30 / 43, 1: 20 / 43, 2: 0.0}, abs=0.01)
    assert figures.efficiency == pytest.approx(3 * 1000 / 43 / 175, rel=0.02)


def test_a_pause_is_nobodys_idleness_but_the_others() -> None:
    paused = played([10.0, 10.0], acts=[Act(5.0, ["pause", "0", "2.0"])], reduce=0.0, samples=4000)
    figures = figures_of(paused)
    assert figures.idle[0] == pytest.approx(0.0, abs=0.002)
    assert figures.idle[1] == pytest.approx(2.0 / figures.seconds, rel=0.1)


def test_the_data_and_the_first_batch_cost_what_they_cost() -> None:
    even: dict[str, object] = {"fixed_counts": "20,20", "reduce": 0.01, "samples": 4000}
    plain = figures_of(played([10.0, 10.0], **even))
    data = figures_of(played([10.0, 10.0], options={"data_ms": 10.0}, **even))
    fill = figures_of(played([10.0, 10.0], options={"fill_ms": 100.0}, **even))
    assert data.efficiency >= plain.efficiency, "a solo rank waits for its data as well"
    assert fill.efficiency < plain.efficiency - 0.05, "a solo rank has no windows to begin"


def test_rounds_cost_what_links_and_bytes_say() -> None:
    slow = played([10.0, 10.0], model_mb=12.5, uplink_mbit=100.0, latency_ms=50.0, samples=2000, initial_anchor=50)
    seconds = slow.rows("rounds")[-1]["reduce_seconds"]
    # 12.5 MB for each of two hosts over the controller's 12.5 MB/s; two ways of 50 ms; a last slice; memory
    assert seconds == pytest.approx(2.0 + 0.1 + (1 << 20) / 12.5e6 + 2 * 12.5e6 / 4e9, rel=1e-6)


class TestMeter:
    def ranks(self) -> tuple[Stage, Meter]:
        stage = Stage()
        meter = Meter(stage)
        for rank in (0, 1):
            meter.join(rank, 10.0)
        meter.begin()
        return stage, meter

    def test_who_waits_while_another_works_is_idle(self) -> None:
        stage, meter = self.ranks()
        meter.works(0)
        meter.works(1)
        stage.now = 1.0
        meter.batch(0, 1.0, 1.0)
        meter.rests(0)
        stage.now = 3.0
        meter.batch(1, 3.0, 3.0)
        meter.rests(1)
        stage.now = 4.0
        meter.note()
        figures = meter.figures
        assert figures is not None
        assert figures.idle == {0: 0.5, 1: 0.0}
        assert figures.round_share == 0.25
        assert figures.efficiency == pytest.approx(2 / (4.0 + 4.0 / 3.0))

    def test_packing_while_others_work_is_the_rounds(self) -> None:
        stage, meter = self.ranks()
        meter.works(0)
        meter.works(1)
        meter.round_work(0, 0.5)
        stage.now = 2.0
        meter.batch(0, 1.5, 1.5)
        meter.batch(1, 2.0, 2.0)
        meter.note()
        assert meter.figures is not None
        assert meter.figures.idle == {0: 0.0, 1: 0.0}

    def test_nothing_is_expected_of_the_dead(self) -> None:
        stage, meter = self.ranks()
        meter.works(0)
        stage.now = 1.0
        meter.batch(0, 1.0, 1.0)
        meter.gone(1)
        stage.now = 2.0
        meter.batch(0, 1.0, 1.0)
        meter.note()
        assert meter.figures is not None
        # rank 1 lived 1 s at its nominal 10 ms, rank 0 two seconds at a batch a second
        assert meter.figures.efficiency == pytest.approx(2 / (2 + 100))
        assert meter.figures.idle == {0: 0.0, 1: 1.0}

    def test_before_it_begins_nothing_is_measured(self) -> None:
        stage = Stage()
        meter = Meter(stage)
        stage.now = 1.0
        meter.note()
        assert meter.figures is None
