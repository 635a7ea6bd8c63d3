"""cpu_async on a virtual clock: exact averages under each write-back policy, budgets, rounds that overlap with work,
late news, false claims, deaths and stops."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from rehearsal import Rehearsal

from backend.core.config import RunConfig
from backend.core.elche_fixed import FixedCounts
from backend.core.lookahead import OVERSHOOT_CEILING, Overshoot, finish_together
from backend.core.timing import WindowReport
from backend.core.vocabulary import RankSaid
from simulation.oracle import Oracle
from simulation.played import Packed, PlayedRank
from simulation.script import HostLine, Script
from simulation.watch import Watcher
from wire.mass import gamma_mass
from wire.messages import BatchDone, ChunkDone, Message, RequestParams

ALPHA = 0.25


class Ahead(Rehearsal):
    """Remembers at which of its steps each rank packed and adopted; may let a rank's news come late, or lie."""

    def __init__(self, config: RunConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.packed_at: dict[int, list[int]] = defaultdict(list)
        self.adopted_at: dict[int, list[int]] = defaultdict(list)
        self.news_delay: dict[int, float] = {}
        self.lies: dict[int, int] = {}
        self.oracle = Oracle(self)

    def say(self, played: PlayedRank, message: Message, when: float) -> None:
        super().say(played, message, when + self.news_delay.get(played.rank, 0.0))

    def contribute(self, played: PlayedRank, request: RequestParams, packed: Packed) -> None:
        if not request.initial and request.attempt == 0:
            before = self.packed_at[played.rank]
            before.append((before[-1] if before else 0) + packed.steps)
            packed.steps += self.lies.pop(played.rank, 0)
        super().contribute(played, request, packed)

    def acknowledge(self, played: PlayedRank, packed: Packed, when: float) -> None:
        if packed.round >= 0:
            self.adopted_at[played.rank].append(played.steps)
        super().acknowledge(played, packed, when)

    def training(self) -> Any:
        assert self.cohort.march is not None
        return self.cohort.march.training


def play(*ms: float, samples: int = 400, reduce_seconds: float = 0.05, **changes: Any) -> Ahead:
    """One host a rank, started, in cpu_async."""
    values: dict[str, Any] = {
        "job": "odometer.py:Odometer",
        "batch_size": 1,
        "mode": "cpu_async",
        "start_mode": "auto",
        "quorum": len(ms),
        "target": len(ms),
        "initial_anchor": 4,
    }
    ahead = Ahead(RunConfig(**(values | changes)), samples=samples, reduce_seconds=reduce_seconds)
    for rank, pace in enumerate(ms):
        ahead.join(f"host-{rank}", pace)
    return ahead


def rounds(ahead: Ahead) -> list[dict[str, Any]]:
    return ahead.rows("rounds")


def accepted(ahead: Ahead) -> list[int]:
    return [row["samples_accepted"] for row in ahead.rows("epochs") if "samples_accepted" in row]


def expected_consensus(ahead: Ahead, policy: str, gamma: float) -> list[float]:
    """From nothing but who did how many batches when: each batch is worth 1."""
    value, found = 0.0, []
    holds = {rank: 0.0 for rank in ahead.ranks}
    before = {rank: 0 for rank in ahead.ranks}
    for number, row in enumerate(rounds(ahead)):
        packed = {rank: ahead.packed_at[rank][number] for rank in holds}
        snapshots = {rank: holds[rank] + packed[rank] - before[rank] for rank in holds}
        masses = {rank: gamma_mass(row["realized"][rank], gamma) for rank in holds}
        value = sum(masses[rank] * snapshots[rank] for rank in holds) / sum(masses.values())
        found.append(value)
        for rank in holds:
            extra = ahead.adopted_at[rank][number] - packed[rank]
            kept = {
                "overwrite": value,
                "blend": (1 - ALPHA) * (snapshots[rank] + extra) + ALPHA * value,
                "delta": value + extra,
            }
            holds[rank] = kept[policy] if extra else value
            before[rank] = packed[rank] + extra
    return found


# ------------------------------------------------------------------------------------------------ exactness


@pytest.mark.parametrize("policy", ["overwrite", "blend", "delta"])
@pytest.mark.parametrize("gamma", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("speeds", [(5.0, 12.5), (10.0, 20.0, 40.0)])
def test_every_consensus_is_what_the_batches_say(policy: str, gamma: float, speeds: tuple[float, ...]) -> None:
    alpha = ALPHA if policy == "blend" else 0.5
    ahead = play(*speeds, write_back=policy, blend_alpha=alpha, gamma=gamma, max_anchor=6).run()
    ahead.oracle.finish()
    expected = expected_consensus(ahead, policy, gamma)
    assert [value for number, value in ahead.consensus if number >= 0] == pytest.approx(expected, rel=1e-9)
    overlapped = sum(
        adopted > packed
        for rank in ahead.ranks
        for adopted, packed in zip(ahead.adopted_at[rank], ahead.packed_at[rank], strict=True)
    )
    assert overlapped > len(expected), "most rounds overlapped with work"
    assert len({rank.w for rank in ahead.ranks.values()}) == 1, (
        "after the last round, for which all waited, all are equal"
    )


def test_delta_loses_no_finished_batch() -> None:
    """Every round adds the mass-weighted mean of what its snapshots held: the end is known from the records alone."""
    ahead = play(10.0, 20.0, 40.0, samples=700, max_anchor=5).run()
    realized = [list(row["realized"].values()) for row in rounds(ahead)]
    assert sum(map(sum, realized)) == 700
    exact = sum(sum(n * n for n in batches) / sum(batches) for batches in realized)
    assert ahead.consensus[-1][1] == pytest.approx(exact, rel=1e-12)
    assert [rank.w for rank in ahead.ranks.values()] == pytest.approx([exact] * 3, rel=1e-12)


def test_what_came_after_the_snapshot_is_the_next_windows() -> None:
    """Subtract, do not zero (F11): what a rank has done minus what rounds accepted, whenever a round closes."""
    ahead = play(5.0, 20.0, samples=600, max_anchor=5, epochs=2)
    heard: dict[int, int] = defaultdict(int)
    total: dict[int, int] = defaultdict(int)
    carried: list[int] = []

    class Count(Watcher):
        def event(self, now: float, event: Any) -> None:
            if isinstance(event, RankSaid) and isinstance(event.message, BatchDone):
                heard[event.rank] += 1

        def effect(self, now: float, effect: Any) -> None:
            if getattr(effect, "table", "") == "rounds":
                for rank, steps in effect.row["realized"].items():
                    total[rank] += steps
                    carried.append(ahead.training().steps(rank))
                    assert carried[-1] == heard[rank] - total[rank]

        def trained(self, rank: int, batch: Any) -> None: ...

        def committed(self, number: int, result: Any, batches: Any) -> None: ...

    ahead.watchers.append(Count())  # type: ignore[arg-type]
    ahead.run()
    ahead.oracle.finish()
    assert max(carried) > 1
    assert dict(total) == {rank.rank: rank.steps for rank in ahead.ranks.values()}
    assert accepted(ahead) == [600, 600]


def test_news_that_comes_after_the_sum_is_neither_lost_nor_doubled() -> None:
    """BatchDone and the contribution travel on different links; here the former is half a second slower."""
    ahead = play(5.0, 10.0, samples=500, reduce_seconds=0.0, max_anchor=5, epochs=2)
    ahead.news_delay[1] = 0.5
    late: list[int] = []
    check = ahead.cohort.check

    def look() -> None:
        check()
        training = ahead.training() if ahead.cohort.march else None
        if training is not None:
            late.append(training._committed.get(1, 0) - training.steps(1))

    ahead.cohort.check = look  # type: ignore[method-assign]
    ahead.run()
    ahead.oracle.finish()
    assert max(late) > 0, "a round was committed before the news of its batches was there"
    assert accepted(ahead) == [500, 500]
    assert [value for number, value in ahead.consensus if number >= 0] == pytest.approx(
        expected_consensus(ahead, "delta", 1.0)
    )


def test_windows_grow_from_the_smallest_and_every_batch_is_counted_once() -> None:
    """Case N08: rounds back to back, two speeds, a first window of one batch. Nothing stands still, nothing is counted
    twice, and the window grows within ten rounds."""
    ahead = play(1.0, 3.0, samples=20_000, initial_anchor=1, reduce_seconds=0.002, max_anchor=40)
    ahead.run()
    ahead.oracle.finish()
    rows = rounds(ahead)
    assert max(row["anchor"] for row in rows[:10]) > 1
    assert len(rows) > 100
    logged = {rank.rank: rank.steps for rank in ahead.ranks.values()}
    assert {rank: sum(row["realized"][rank] for row in rows) for rank in logged} == logged
    assert sum(logged.values()) == 20_000
    assert max(row["seconds"] for row in rows) < 2.0


# -------------------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize("overshoot", [0, 1, 3, 50])
def test_nobody_works_further_ahead_than_it_may(overshoot: int) -> None:
    ahead = play(5.0, 10.0, samples=600, fixed_counts=(6, 3), max_overshoot=overshoot, reduce_seconds=0.2).run()
    ahead.oracle.finish()
    most = {0: 6 + overshoot, 1: 3 + overshoot}
    full = rounds(ahead)[:-3]
    assert len(full) > 3
    for row in full:
        assert all(row["planned"][rank] <= batches <= most[rank] for rank, batches in row["realized"].items()), row
    beyond = max(row["realized"][0] for row in full)
    assert beyond == 6 if overshoot == 0 else beyond > 6


def test_without_lookahead_the_pace_is_that_of_cadence() -> None:
    seconds = {}
    for mode, changes in {"cpu_async": {"max_overshoot": 0}, "cpu_cadence": {}}.items():
        ahead = play(5.0, 10.0, samples=300, fixed_counts=(6, 3), mode=mode, **changes).run()
        seconds[mode] = ahead.now
        assert {tuple(row["realized"].values()) for row in rounds(ahead)[:-1]} == {(6, 3)}
    assert seconds["cpu_async"] == pytest.approx(seconds["cpu_cadence"], rel=0.01)


def test_a_long_round_costs_nobody_time() -> None:
    """The round takes as long as the window; waiting for it would double the time."""
    seconds = {
        mode: play(10.0, 20.0, samples=1500, max_anchor=10, reduce_seconds=0.2, mode=mode).run().now
        for mode in ("cpu_async", "cpu_cadence")
    }
    assert seconds["cpu_async"] < 0.6 * seconds["cpu_cadence"]


def test_the_overshoot_follows_round_and_pace_within_its_ceiling_and_holds_while_somebody_objects() -> None:
    scheduler = FixedCounts({0: 10, 1: 3})
    scheduler.report_window(
        WindowReport(
            ms={0: 100.0, 1: 90.0},
            batches={0: 10, 1: 3},
            fill_ms={0: 0.0, 1: 0.0},
            sync_ms=0.0,
            scale="compute",
            compute_seconds={},
            data_seconds={},
        )
    )
    assert (scheduler.smoothed(0), scheduler.smoothed(1)) == (10.0, 30.0)
    ahead = Overshoot(None, (0, 1))
    assert (ahead.of(0), ahead.of(1)) == (1, 1), "nothing is known yet"
    for round_ms, stable, expected in [
        (95.0, True, (10, 4)),
        (1.0, True, (1, 1)),
        (95.0, False, (1, 1)),
        (95.0, True, (10, 4)),
        (50.0, False, (5, 2)),
        (0.0, True, (5, 2)),
        (1e6, True, (10 * OVERSHOOT_CEILING, 3 * OVERSHOOT_CEILING)),
    ]:
        ahead.learn(round_ms, stable, scheduler)
        assert (ahead.of(0), ahead.of(1)) == expected, (round_ms, stable)
    fixed = Overshoot(7, (0, 1))
    fixed.learn(1e6, True, scheduler)
    assert fixed.of(1) == 7


@pytest.mark.parametrize(
    ("total", "room", "undone", "pace", "expected"),
    [
        (4, {0: 9, 1: 9}, {0: 0, 1: 0}, {0: 3, 1: 1}, {0: 3, 1: 1}),
        (4, {0: 9, 1: 9}, {0: 6, 1: 0}, {0: 3, 1: 1}, {0: 2, 1: 2}),
        (4, {0: 1, 1: 9}, {0: 0, 1: 0}, {0: 3, 1: 1}, {0: 1, 1: 3}),
        (1, {0: 9, 1: 9}, {0: 0, 1: 0}, {0: 2, 1: 2}, {0: 1, 1: 0}),
        (9, {0: 2, 1: 0}, {0: 0, 1: 5}, {0: 2, 1: 2}, {0: 2, 1: 0}),
    ],
)
def test_the_rest_of_an_epoch_is_dealt_so_that_all_finish_it_together(
    total: int, room: dict[int, int], undone: dict[int, int], pace: dict[int, int], expected: dict[int, int]
) -> None:
    assert finish_together(total, room, undone, pace) == expected


@pytest.mark.parametrize("speeds", ["1,2.5", "1,2,4", "1,2,4,8"])
def test_devices_are_used_to_the_full(speeds: str) -> None:
    """Issue 3's figure, with the default settings, a 25 MB model and links of 1 Gbit/s: at least 0.97."""
    ms = [10.0 * float(speed) for speed in speeds.split(",")]
    run = {
        "mode": "cpu_async",
        "batch_size": 1,
        "samples": 30_000,
        "model_mb": 25.0,
        "uplink_mbit": 1000.0,
        "settle": 10,
    }
    hosts = [HostLine(f"host-{index}", [pace]) for index, pace in enumerate(ms)]
    values = {key: str(value) for key, value in run.items()} | {"quorum": str(len(ms)), "target": str(len(ms))}
    script = Script(values, hosts)
    theatre = script.theatre(check=False)
    script.put_on(theatre)
    theatre.run(1e6)
    assert theatre.end is not None and theatre.end.phase == "done"
    assert theatre.meter.figures is not None and theatre.meter.figures.efficiency >= 0.97


# ------------------------------------------------------------------------------------------- what goes wrong


def test_a_death_returns_exactly_what_no_committed_round_holds() -> None:
    ahead = play(5.0, 10.0, 20.0, samples=600, max_anchor=5)
    ahead.at(1.0, lambda: ahead.kill(0))
    ahead.run()
    ahead.oracle.finish()
    assert accepted(ahead) == [600]
    (death,) = ahead.rows("deaths")
    held = sum(row["realized"].get(0, 0) for row in rounds(ahead))
    assert death["returned_samples"] > 0
    assert ahead.ranks[0].steps - held <= death["returned_samples"], "what it had begun came back as well"


@pytest.mark.parametrize("when", [0.85, 0.9, 0.95, 1.0, 1.05, 1.1])
def test_a_death_while_the_round_is_summed_leaves_the_others_at_work(when: float) -> None:
    ahead = play(5.0, 10.0, 20.0, samples=600, max_anchor=5, reduce_seconds=0.3)
    ahead.at(when, lambda: ahead.kill(1))
    ahead.run()
    ahead.oracle.finish()
    assert ahead.end and ahead.end.phase == "done"
    assert accepted(ahead) == [600]


@pytest.mark.parametrize("lie", [100, -4])
def test_a_contribution_that_cannot_be_what_was_done_costs_its_host_and_is_not_summed(lie: int) -> None:
    """More than was dealt, or less than was reported before the round was opened."""
    ahead = play(5.0, 10.0, samples=300, max_anchor=5)
    ahead.at(0.5, lambda: ahead.lies.update({1: lie}))
    ahead.run()
    assert ahead.end and ahead.end.phase == "done"
    (death,) = ahead.rows("deaths")
    assert death["rank"] == 1
    assert "its contribution was refused: it holds" in death["reason"]
    assert accepted(ahead) == [300]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (BatchDone(batch_ms=1.0, data_ms=0.0, steps=99, samples=1, loss=None), "did all that it was dealt"),
        (ChunkDone(epoch=0, offset=0, size=1), "its oldest chunk is none"),
    ],
)
def test_a_rank_that_reports_work_that_it_was_not_given_is_out(message: Message, reason: str) -> None:
    ahead = play(5.0, 500.0, samples=40, fixed_counts=(4, 4), max_overshoot=0)
    ahead.run(until=1.5)
    assert ahead.training().steps(0) == 4
    ahead.feed(RankSaid(0, message))
    (death,) = ahead.rows("deaths")
    assert death["rank"] == 0
    assert reason in death["reason"]
    ahead.run()
    assert accepted(ahead) == [40]


@pytest.mark.parametrize("when", [0.3, 0.5, 0.51, 0.52, 0.55, 0.6])
def test_a_stop_lets_ranks_finish_what_they_hold_and_accepts_all_of_it(when: float) -> None:
    ahead = play(5.0, 10.0, samples=5000, max_anchor=5)
    ahead.at(when, lambda: ahead.operate("stop"))
    ahead.run()
    ahead.oracle.finish()
    assert ahead.end and ahead.end.phase == "done" and ahead.end.reason.startswith("Stopped by")
    trained = sum(rank.steps for rank in ahead.ranks.values())
    assert trained == sum(sum(row["realized"].values()) for row in rounds(ahead)) < 5000


def test_replicas_may_differ_but_the_consensus_may_not() -> None:
    ahead = play(5.0, 10.0, samples=300)
    ahead.flaw = (1, 2)
    ahead.run()
    assert ahead.end and ahead.end.phase == "failed"
    assert "Replicas differ after round 2" in ahead.end.reason
