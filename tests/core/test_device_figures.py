"""What hosts tell of their GPUs reaches the run's view, by rank; what nobody tells stays out of it."""

from __future__ import annotations

from rehearsal import Rehearsal

from backend.core.config import RunConfig
from backend.core.views import cohort_view
from simulation.played import PlayedHost
from wire.messages import Device, RankProgress, WorldFormed

FIGURES = ("device_utilisation", "device_bytes", "device_peak_bytes", "device_total_bytes")


class Watched(Rehearsal):
    """The host named gpu tells of its device, the other one has none to tell of."""

    def progress(self, host: PlayedHost) -> list[RankProgress]:
        told = {"device_utilisation": 0, "device_bytes": 41 << 30, "device_peak_bytes": 38 << 30}
        return [
            RankProgress(one.rank, one.state, one.steps, 0.0, **(told if host.name == "gpu" else {}))
            for one in host.ranks
        ]


def test_each_rank_shows_its_own_gpu_and_the_dead_only_its_size() -> None:
    config = RunConfig("odometer.py:Odometer", batch_size=1, quorum=2, target=2, precision="bf16")
    play = Watched(config, samples=4000)
    gpu = Device(id="cuda:3", type="cuda", name="H200", memory_bytes=141 << 30)
    play.join("gpu", 10.0, devices=[gpu])
    play.join("cpu", 10.0)
    play.run(until=5.0)

    def figures(rank: int) -> list[int | None]:
        view = cohort_view(play.cohort, play.now)
        return [view["ranks"][rank][name] for name in FIGURES]

    assert figures(0) == [0, 41 << 30, 38 << 30, 141 << 30], "idle is a figure"
    assert figures(1) == [None] * 4
    play.kill(0)
    play.run(until=8.0)
    assert figures(0) == [None, None, None, 141 << 30]


def test_every_rank_is_told_the_runs_precision() -> None:
    play = Watched(RunConfig("odometer.py:Odometer", batch_size=1, quorum=2, target=2, precision="bf16"), samples=60)
    heard = []
    play.intercept = lambda effect: bool(heard.append(effect))
    play.join("a", 10.0)
    play.join("b", 10.0)
    play.run(until=3.0)
    plans = [
        m.plan.precision for m in (getattr(effect, "message", None) for effect in heard) if isinstance(m, WorldFormed)
    ]
    assert plans == ["bf16", "bf16"]
