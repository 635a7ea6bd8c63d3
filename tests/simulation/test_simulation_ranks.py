"""A played rank does what the worker does: trains, packs, adopts and answers, at the pace it was given."""

from __future__ import annotations

import random

import pytest

from backend.core.config import RunConfig
from backend.core.round_cost import Line, RoundCost
from simulation.figures import Meter
from simulation.network import Network
from simulation.pace import Pace
from simulation.played import Batch, Packed, PlayedHost, PlayedRank
from simulation.rounds import PlayedPlane
from simulation.stage import Stage
from wire.messages import BatchDone, ChunkDone, Message, RequestParams, StartChunk

FREE = RoundCost(0.0, float("inf"))


class Bench:
    """A rank alone with a controller that only listens."""

    def __init__(self, pace: Pace, *, overlap: bool = False, cost: RoundCost = FREE) -> None:
        self.stage = Stage()
        self.meter = Meter(self.stage)
        self.cost = cost
        self.config = RunConfig(job="odometer.py:Odometer", mode="cpu_async" if overlap else "cpu_cadence")
        self.batch_size = 2
        self.overlap = overlap
        self.network = Network(self.stage, PlayedPlane(self.stage, cost, 1.0, lambda event: None))
        self.score_seconds = 0.0
        self.heard: list[tuple[float, Message]] = []
        self.packed: list[tuple[float, int, int]] = []
        """when, attempt, steps"""
        self.adopted: list[tuple[float, float]] = []
        host = PlayedHost("a", 1, [pace], line=Line(float("inf"), 0.0))
        self.rank = PlayedRank(0, host, pace, self)

    def say(self, played: PlayedRank, message: Message, when: float) -> None:
        self.stage.at(when, lambda: self.heard.append((self.stage.now, message)))

    def contribute(self, played: PlayedRank, request: RequestParams, packed: Packed) -> None:
        self.packed.append((self.stage.now, request.attempt, packed.steps))

    def acknowledge(self, played: PlayedRank, packed: Packed, when: float) -> None:
        self.adopted.append((when, played.w))

    def survives(self, played: PlayedRank, batch: Batch) -> bool:
        return True

    def trained(self, played: PlayedRank, batch: Batch) -> None:
        played.seen.append(batch)

    def exited(self, played: PlayedRank) -> None:
        played.alive = False

    def run(self, until: float = 100.0) -> None:
        while self.stage.next_at is not None and self.stage.next_at <= until:
            self.stage.step()
        self.stage.now = until

    def times(self, kind: type[Message]) -> list[float]:
        return [when for when, message in self.heard if isinstance(message, kind)]


def chunk(offset: int, size: int) -> StartChunk:
    return StartChunk(epoch=0, offset=offset, size=size, batches=-(-size // 2), global_step=0)


def ask(number: int, attempt: int = 0, initial: bool = False) -> RequestParams:
    return RequestParams(round=number, attempt=attempt, initial=initial)


def test_batches_take_their_time_and_the_last_may_be_short() -> None:
    bench = Bench(Pace(10.0))
    bench.rank.receive(chunk(4, 5))
    bench.run()
    assert bench.times(BatchDone) == pytest.approx([0.01, 0.02, 0.03])
    assert bench.times(ChunkDone) == pytest.approx([0.03])
    assert bench.rank.seen == [(0, 4, 2), (0, 6, 2), (0, 8, 1)]
    assert [message.samples for _, message in bench.heard if isinstance(message, BatchDone)] == [2, 2, 1]


def test_data_and_fill_are_data_time() -> None:
    bench = Bench(Pace(10.0, data_ms=2.0, fill_ms=30.0))
    bench.rank.receive(chunk(0, 4))
    bench.run()
    first, second = (message for _, message in bench.heard if isinstance(message, BatchDone))
    assert (first.batch_ms, first.data_ms) == (10.0, 32.0)
    assert (second.batch_ms, second.data_ms) == (10.0, 2.0)


def test_a_chunk_that_comes_early_waits() -> None:
    bench = Bench(Pace(10.0))
    bench.rank.receive(chunk(0, 2))
    bench.rank.receive(chunk(2, 2))
    bench.run()
    assert bench.times(ChunkDone) == pytest.approx([0.01, 0.02])


def test_a_request_is_heard_between_batches_and_training_waits_for_the_round() -> None:
    bench = Bench(Pace(10.0))
    bench.rank.receive(chunk(0, 8))
    bench.run(0.015)
    bench.rank.receive(ask(0))
    bench.run(0.1)
    assert bench.packed == [(pytest.approx(0.02), 0, 2)]
    assert len(bench.rank.seen) == 2
    bench.rank.adopt(10.0)
    bench.run(0.2)
    assert bench.times(ChunkDone) == [pytest.approx(0.12)]
    assert bench.rank.w == 12.0


def test_training_goes_on_beside_a_round_and_its_progress_is_kept() -> None:
    bench = Bench(Pace(10.0), overlap=True, cost=RoundCost(4e6, float("inf"), memory_bytes_per_second=1e9))
    bench.rank.receive(chunk(0, 8))
    bench.run(0.015)
    bench.rank.receive(ask(0))
    bench.run(0.03)
    bench.rank.adopt(100.0)
    bench.run(0.2)
    # packing after the second batch and loading after the third take 4 ms each
    assert bench.packed == [(pytest.approx(0.024), 0, 2)]
    assert bench.times(BatchDone) == pytest.approx([0.01, 0.02, 0.034, 0.048])
    assert bench.rank.w == 100.0 + 2.0
    bench.rank.receive(ask(1))
    bench.run(0.3)
    assert bench.packed[-1][2] == 2, "only what the first round did not have"


def test_another_attempt_gets_the_same_contribution() -> None:
    bench = Bench(Pace(10.0))
    bench.rank.receive(chunk(0, 4))
    bench.run(0.05)
    bench.rank.receive(ask(0))
    bench.rank.receive(ask(0, attempt=1))
    bench.run(0.1)
    assert [(attempt, steps) for _, attempt, steps in bench.packed] == [(0, 2), (1, 2)]


def test_nobody_worked_and_everybody_keeps_what_it_has() -> None:
    bench = Bench(Pace(10.0))
    bench.rank.receive(ask(0))
    bench.rank.adopt(None)
    assert bench.adopted == [(0.0, 0.0)]


def test_a_pause_lengthens_the_batch_at_hand_or_the_next_one() -> None:
    bench = Bench(Pace(10.0))
    bench.rank.receive(chunk(0, 2))
    bench.run(0.005)
    bench.rank.pause(1.0)
    bench.run(2.0)
    assert bench.times(BatchDone) == pytest.approx([1.01])
    bench.rank.pause(1.0)
    bench.run(2.5)
    bench.rank.receive(chunk(2, 2))
    bench.run(4.0)
    assert bench.times(BatchDone)[-1] == pytest.approx(3.01)


def test_the_dead_and_the_deaf_do_nothing() -> None:
    bench = Bench(Pace(10.0))
    bench.rank.receive(chunk(0, 4))
    bench.run(0.015)
    bench.rank.alive = False
    bench.run(0.1)
    assert len(bench.rank.seen) == 1
    deaf = Bench(Pace(10.0))
    deaf.rank.deaf = True
    deaf.rank.receive(chunk(0, 4))
    deaf.run()
    assert deaf.heard == []


class TestPace:
    def test_a_steady_pace_is_exact(self) -> None:
        assert Pace(10.0).batch(3.0, first=False).compute_ms == 10.0

    def test_jitter_is_around_the_pace_and_repeats(self) -> None:
        def costs() -> list[float]:
            pace = Pace(10.0, jitter=0.1, dice=random.Random(5))
            return [pace.batch(0.0, first=False).compute_ms for _ in range(2000)]

        drawn = costs()
        assert drawn == costs()
        assert sum(drawn) / len(drawn) == pytest.approx(10.0, rel=0.02)
        assert 5.0 < min(drawn) < 9.0 < 11.0 < max(drawn) < 20.0

    def test_drift_swings_around_the_pace(self) -> None:
        pace = Pace(10.0, drift=0.5, drift_seconds=40.0)
        assert [pace.batch(now, first=False).compute_ms for now in (0.0, 10.0, 20.0, 30.0)] == pytest.approx(
            [10.0, 15.0, 10.0, 5.0]
        )
