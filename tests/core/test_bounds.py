"""Every wait of a march ends in a named outcome, with its work accounted for and the last consensus saved."""

from __future__ import annotations

from typing import Any

import pytest
from rehearsal import Rehearsal

from backend.core.config import RunConfig
from backend.core.vocabulary import (
    Effect,
    Lagged,
    OpenRound,
    RankSaid,
    RoundBroken,
    SendRank,
    SendRelay,
    WriteCheckpoint,
)
from simulation.played import PlayedHost
from simulation.props import LOCAL_TENSOR, ONE_NUMBER
from wire.messages import Evaluate, RankProgress, RequestLocalState, RoundCommitted, StartChunk, SyncAck


class Attended(Rehearsal):
    """Agents tell what their ranks' counters say."""

    def progress(self, host: PlayedHost) -> list[RankProgress]:
        return [RankProgress(played.rank, played.state, played.steps, 0.0) for played in host.ranks]


def formed(*hosts: tuple[float, ...], samples: int = 400, local: bool = False, **changes: Any) -> Rehearsal:
    """Hosts joined, training."""
    world = sum(len(ms) for ms in hosts)
    values = {"batch_size": 1, "initial_anchor": 2, "quorum": world, "target": world} | changes
    layout = [*ONE_NUMBER, LOCAL_TENSOR] if local else None
    play = Attended(RunConfig("odometer.py:Odometer", **values), samples=samples, layout=layout)
    for index, ms in enumerate(hosts):
        play.join(f"host-{index}", *ms)
    return play


def loses(play: Rehearsal, rank: int, most: int = 1) -> list[Effect]:
    """So many chunks of a rank get lost."""
    swallowed: list[Effect] = []

    def lose(effect: Effect) -> bool:
        lost = isinstance(effect, SendRank) and isinstance(effect.message, StartChunk) and effect.rank == rank
        if not lost or len(swallowed) >= most:
            return False
        swallowed.append(effect)
        return True

    play.intercept = lose
    return swallowed


def dead(play: Rehearsal) -> list[int]:
    return [row["rank"] for row in play.rows("deaths")]


class TestProgress:
    @pytest.mark.parametrize("mode", ["cpu_cadence", "cpu_sync", "cpu_async"])
    def test_a_lost_plan_is_issued_again_and_costs_nobody(self, mode: str) -> None:
        play = formed((10.0,), (10.0,), mode=mode)
        swallowed = loses(play, 1)
        play.run(until=1000)
        assert len(swallowed) == 1
        assert play.end and play.end.phase == "done"
        assert play.events().count("plan_issued_again") == 1
        assert dead(play) == []
        assert play.now < 25.0

    def test_a_rank_that_is_merely_slow_is_left_alone(self) -> None:
        play = formed((10.0,), (40_000.0,), samples=20)
        play.run(until=2000)
        assert play.end and play.end.phase == "done"
        assert "plan_issued_again" not in play.events()

    @pytest.mark.parametrize("mode", ["cpu_cadence", "cpu_async"])
    def test_a_rank_that_hangs_counts_as_dead_and_the_others_go_on(self, mode: str) -> None:
        play = formed((10.0, 10.0), (10.0,), samples=2000, mode=mode)
        play.at(1.0, lambda: play.ranks[1].stop())
        play.run(until=1000)
        (death,) = play.rows("deaths")
        assert (death["rank"], death["device"]) == (1, "cpu:1")
        assert "TrainStall: no batch within 300 s" in death["reason"]
        assert play.end and play.end.phase == "done"
        assert 300.0 < play.now < 320.0
        assert [row["samples_accepted"] for row in play.rows("epochs") if "samples_accepted" in row] == [2000]

    def test_when_all_hang_the_run_is_saved_and_stopped(self) -> None:
        play = formed((10.0,), (10.0,), samples=2000)
        play.at(1.0, lambda: [rank.stop() for rank in play.ranks.values()])
        play.run(until=1000)
        assert play.end and play.end.phase == "failed"
        assert play.end.reason.startswith("TrainStall: no batch within 300 s")
        assert "rank 0 (host-0/cpu:0), rank 1 (host-1/cpu:0)" in play.end.reason
        assert dead(play) == []
        assert len(play.rows("checkpoints")) == 1

    def test_a_run_that_tolerates_no_death_is_saved_and_stopped(self) -> None:
        play = formed((10.0,), (10.0,), (10.0,), samples=2000, max_failure=1)
        play.at(1.0, lambda: play.ranks[1].stop())
        play.run(until=1000)
        assert play.end and play.end.reason.startswith("TrainStall: ")
        assert "waiting for rank 1 (host-1/cpu:0)" in play.end.reason
        assert len(play.rows("checkpoints")) == 1

    def test_who_woke_up_again_changes_nothing(self) -> None:
        play = formed((10.0, 10.0), (10.0,), samples=60_000)
        play.at(1.0, lambda: play.ranks[1].stop())
        play.at(310.0, lambda: play.ranks[1].go_on())
        play.run(until=320.0)
        assert dead(play) == [1]
        assert play.cohort.march is not None
        before = play.cohort.march.world.ranks[1].steps
        play.run(until=330.0)
        assert play.cohort.march.world.ranks[1].steps == before

    def test_an_evaluation_has_its_time_on_top(self) -> None:
        play = formed((10.0,), (10.0,), samples=40, epochs=2)

        def evaluate_long(effect: Effect) -> bool:
            if isinstance(effect, SendRank) and isinstance(effect.message, Evaluate) and effect.message.epoch == 0:
                play.ranks[effect.rank].stop()
                play.at(play.now + 500.0, lambda: play.ranks[effect.rank].go_on())
            return False

        play.intercept = evaluate_long
        play.run(until=3000)
        assert play.end and play.end.phase == "done"
        assert play.now > 500.0


class TestRounds:
    def test_a_round_that_never_closes_is_saved_and_stopped(self) -> None:
        play = formed((10.0,), (10.0,))
        play.intercept = lambda effect: isinstance(effect, OpenRound) and effect.round == 2
        play.run(until=1000)
        assert play.end and play.end.phase == "failed"
        assert play.end.reason.startswith("ReduceStall: round 2 did not close within 300 s")
        assert [row["reason"] for row in play.rows("checkpoints")] == [play.end.reason]

    def test_the_rank_that_does_not_take_part_is_named(self) -> None:
        play = formed((10.0,), (10.0,), (10.0,), samples=2000)
        play.intercept = lambda effect: stopped_at_open(play, effect, rank=1, number=2)
        play.run(until=1000)
        assert play.end and play.end.reason == (
            "ReduceStall: round 2 did not close within 300 s; waiting for rank 1 (host-1/cpu:0)"
        )

    @pytest.mark.parametrize("mode", ["cpu_cadence", "cpu_async"])
    def test_a_committed_round_counts_whoever_has_not_adopted_it(self, mode: str) -> None:
        play = formed((10.0,), (10.0,), samples=2000, mode=mode)
        play.intercept = lambda effect: committed_unheard(play, effect, number=2, rank=1)
        play.run(until=1000)
        assert play.end and play.end.reason.startswith("ReduceStall: round 2")
        assert "waiting for rank 1" in play.end.reason
        assert play.rows("rounds")[-1]["round"] == 2
        march = play.cohort.march
        assert march is not None and march.training.pool is not None
        assert march.training.samples_done == march.training.pool.accepted_samples

    def test_an_end_does_not_wait_for_ever_behind_a_committed_round(self) -> None:
        """Found by the simulator: a death ended the run while a rank that hangs had not adopted the round."""
        play = formed((10.0,), (10.0,), (10.0,), samples=2000, max_failure=1)
        play.intercept = lambda effect: committed_unheard(play, effect, number=2, rank=1, kill=2)
        play.run(until=2000)
        assert play.end and play.end.phase == "failed"
        assert play.end.reason.startswith("MaxFailureExceeded: ")
        assert "ReduceStall: round 2 did not close" in play.end.reason
        assert len(play.rows("checkpoints")) == 1

    def test_a_sum_that_fails_is_tried_again(self) -> None:
        play = formed((10.0,), (10.0,))
        broken = breaks(play, number=1, times=2)
        play.run(until=1000)
        assert broken == [(1, 0), (1, 1)]
        assert play.end and play.end.phase == "done"
        assert [row["attempt"] for row in play.rows("rounds")][:3] == [0, 2, 0]

    def test_the_same_failure_three_times_is_saved_and_stopped(self) -> None:
        play = formed((10.0,), (10.0,))
        breaks(play, number=1, times=9)
        play.run(until=1000)
        assert play.end and play.end.phase == "failed"
        assert play.end.reason == "RepeatedFailure: round 1 cannot be summed: MemoryError(), 3 times in a row"
        assert len(play.rows("checkpoints")) == 1

    def test_without_a_first_round_there_is_nothing_to_save(self) -> None:
        play = formed((10.0,), (10.0,))
        breaks(play, number=-1, times=9)
        play.run(until=1000)
        assert play.end and play.end.reason.startswith("The cohort could not form: round -1 cannot be summed")


class TestLag:
    @pytest.mark.parametrize("stopped_at", [0.05, 1.0, 1.021])
    def test_a_night_of_sleep_ends_nothing(self, stopped_at: float) -> None:
        """A laptop that sleeps for eight hours wakes behind every deadline (F94)."""
        play = formed((10.0,), (10.0,), samples=2000)
        play.run(until=stopped_at)
        sleeps(play, 8 * 3600.0)
        play.run(until=8 * 3600.0 + 100.0)
        assert play.end and play.end.phase == "done", play.end
        assert dead(play) == []

    def test_an_end_has_its_time_too(self) -> None:
        play = formed((10.0,), (10.0,), samples=20)
        play.intercept = lambda effect: isinstance(effect, WriteCheckpoint)
        play.run(until=5.0)
        sleeps(play, 995.0)
        assert play.end is None
        play.run(until=2000.0)
        assert play.end and "was not written in time" in play.end.reason


class TestEnding:
    def test_a_checkpoint_is_written_without_the_state_of_a_rank_that_hangs(self) -> None:
        play = formed((10.0,), (10.0,), samples=20)
        unheard = RequestLocalState
        play.intercept = lambda effect: (
            isinstance(effect, SendRank) and isinstance(effect.message, unheard) and effect.rank == 1
        )
        play.run(until=1000)
        assert play.end and play.end.phase == "done"
        assert "state_missing" in play.events()
        assert len(play.rows("checkpoints")) == 1


# ------------------------------------------------------------------------------------------------- what strikes


def sleeps(play: Rehearsal, seconds: float) -> None:
    """The whole machine sleeps, controller and hosts: what was to happen happens so much later."""
    stage = play.stage
    stage.now += seconds
    stage._acts = [(when + seconds, *act) for when, *act in stage._acts]  # type: ignore[misc]
    for played in play.ranks.values():
        played._started_at += seconds
        played._held_until += seconds
    play.feed(Lagged(seconds))


def stopped_at_open(play: Rehearsal, effect: Effect, *, rank: int, number: int) -> bool:
    if isinstance(effect, OpenRound) and effect.round == number:
        play.ranks[rank].stop()
    return False


def committed_unheard(play: Rehearsal, effect: Effect, *, number: int, rank: int, kill: int | None = None) -> bool:
    """A rank hangs as the round is committed; another one is killed then."""
    commit = isinstance(effect, SendRelay) and isinstance(effect.message, RoundCommitted)
    if not commit or effect.message.round != number or play.ranks[rank].stopped:  # type: ignore[union-attr]
        return False
    play.ranks[rank].stop()
    if kill is not None:
        play.at(play.now, lambda: play.kill(kill))
    return False


def breaks(play: Rehearsal, *, number: int, times: int) -> list[tuple[int, int]]:
    """A round's sum fails so often."""
    broken: list[tuple[int, int]] = []

    def fail(effect: Effect) -> bool:
        if isinstance(effect, OpenRound) and effect.round == number and len(broken) < times:
            broken.append((effect.round, effect.attempt))
            key = (effect.round, effect.attempt)
            play.at(play.now + 0.1, lambda: play.feed(RoundBroken(*key, reason="MemoryError()")))
            return True
        return False

    play.intercept = fail
    return broken


def test_a_late_acknowledgement_of_the_dead_counts_for_nothing() -> None:
    play = formed((10.0,), (10.0,), (10.0,), samples=2000)
    play.run(until=1.0)
    play.kill(2)
    march = play.cohort.march
    assert march is not None
    before = march.cycle.open and dict(march.cycle.open.acks)
    ack = SyncAck(round=5, divergence=0, pre_norm=0, post_norm=0, params_hash="", pack_ms=0, load_ms=0, wait_ms=0,
                  reduce_ms=0)  # fmt: skip
    assert play.feed(RankSaid(2, ack)) == []
    assert (march.cycle.open and dict(march.cycle.open.acks)) == before
