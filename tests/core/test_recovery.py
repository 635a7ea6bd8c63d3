"""What a death costs the others, and the last waits of a run: who waits, for whom, what ends it (cases F03, K12)."""

from __future__ import annotations

from typing import Any

import pytest
from rehearsal import Rehearsal
from test_cohort import config, formed, samples_seen

from backend.core.vocabulary import Effect, SendHost, SendRank, SendRelay
from wire.messages import DeclareDead, RoundCommitted, Shutdown, SyncAck


def death_of(play: Rehearsal) -> tuple[dict[str, Any], dict[str, float]]:
    """The one death on record, and the phases of its recovery as they were written down last."""
    (death,) = play.rows("deaths")
    updates = [row for row in play.rows("recoveries") if row["rank"] == death["rank"]]
    return death, (updates or [death])[-1]["recovery"]


class TestWhoWaited:
    def test_in_a_sum_every_contributor_waits(self) -> None:
        play = Rehearsal(config(quorum=3, fixed_counts=(2, 2, 2)), samples=12, reduce_seconds=1.0)
        for name in "abc":
            play.join(name, 10.0)
        play.run(until=0.01)
        play.operate("start")
        play.at(1.5, lambda: play.kill(2, seen_seconds_ago=0.1))
        play.run()
        death, recovery = death_of(play)
        assert death["waited"] == {0: pytest.approx(0.1), 1: pytest.approx(0.1)}, "not before it died"
        assert recovery["detect"] == pytest.approx(0.1)
        assert recovery["decide"] == 0.0, "the others are asked again at once"
        assert recovery["resume"] == pytest.approx(1.0, abs=0.1)
        assert 0.0 < recovery["first_step"] < 0.1

    def test_in_a_window_who_has_work_waits_for_nobody(self) -> None:
        play = formed((10.0,), (10.0,), samples=200, fixed_counts=(20, 20))
        play.at(0.3, lambda: play.kill(1))
        play.run()
        death, recovery = death_of(play)
        assert death["waited"] == {}
        assert recovery["decide"] > 0.0, "the round without it opens when the survivor's window is done"

    def test_a_silent_host_is_waited_for_until_its_timeout(self) -> None:
        play = formed((50.0,), (50.0,), samples=400)
        play.at(3.0, lambda: play.freeze("host-1"))
        play.run()
        death, recovery = death_of(play)
        assert death["world_size"] == 2
        assert recovery["detect"] == pytest.approx(30.0, abs=0.01)
        assert 29.0 < death["waited"][0] <= recovery["detect"]
        assert play.events().count("recovered") == 1

    def test_a_rank_that_hangs_is_waited_for_until_its_ceiling(self) -> None:
        play = formed((10.0,), (10.0,), samples=60, heartbeat_timeout_seconds=3.0, stall_seconds=30.0)
        play.at(0.3, lambda: play.ranks[1].stop())
        play.run()
        death, recovery = death_of(play)
        assert death["reason"].startswith("TrainStall")
        assert recovery["detect"] == pytest.approx(30.0, abs=0.1)
        assert death["waited"][0] == pytest.approx(30.0, abs=0.1)
        told = [item for _, _, item in play.log if isinstance(item, SendHost) and said(item, DeclareDead)]
        assert [item.message.rank for item in told] == [1], "its agent ends what is left of it"  # type: ignore[attr-defined]

    def test_who_finished_early_waits_since_then(self) -> None:
        play = formed((10.0,), (200.0,), samples=40, fixed_counts=(2, 5))
        play.at(0.9, lambda: play.kill(1, seen_seconds_ago=0.5))
        play.run()
        death, _ = death_of(play)
        assert death["waited"] == {0: pytest.approx(0.5)}

    def test_a_run_that_ends_with_the_death_has_found_it_and_no_more(self) -> None:
        play = formed((10.0,), (10.0,), samples=200, max_failure=1)
        play.at(0.3, lambda: play.kill(0, seen_seconds_ago=0.2))
        play.run()
        _, recovery = death_of(play)
        assert recovery == {"detect": 0.2}
        assert "recovered" not in play.events()

    def test_a_death_after_the_last_commit_is_got_over_without_another_batch(self) -> None:
        play = formed((1.0,), (1.0,), samples=4, fixed_counts=(3, 1))

        def kill_at_commit(effect: Effect) -> bool:
            last = isinstance(effect, SendRelay) and isinstance(effect.message, RoundCommitted)
            if last and effect.message.round == 0 and play.ranks[1].alive:  # type: ignore[union-attr]
                play.ranks[1].alive = False
                play.at(play.now, lambda: play.kill(1))
            return False

        play.intercept = kill_at_commit
        play.run()
        _, recovery = death_of(play)
        assert play.end and play.end.phase == "done"
        assert set(recovery) == {"detect", "decide", "resume"}

    def test_two_at_once_are_got_over_once_each(self) -> None:
        play = formed((10.0, 10.0), (10.0,), samples=300)
        play.at(0.3, lambda: play.unplug("host-0"))
        play.run()
        assert [row["rank"] for row in play.rows("recoveries")] == [0, 1]
        assert all(
            set(row["recovery"]) == {"detect", "decide", "resume", "first_step"} for row in play.rows("recoveries")
        )


def test_a_memory_kill_is_named_with_its_limit() -> None:
    play = formed((10.0,), (10.0,), samples=200)
    play.at(0.3, lambda: play.kill(1, memory_kills=1, memory_limit_bytes=1 << 30))
    play.run()
    death, _ = death_of(play)
    assert death["reason"] == "killed by SIGKILL: its host reached the memory limit of 1.00 GiB"
    assert (death["memory_kills"], death["memory_limit_bytes"]) == (1, 1 << 30)


class TestTheEndWaits:
    def test_a_stop_waits_for_a_window_that_takes_longer_than_the_heartbeat_timeout(self) -> None:
        """Its host's heartbeats say that it lives; nobody is told to leave before everybody holds the same."""
        play = formed((100_000.0,), (1000.0,), samples=50, fixed_counts=(1, 1))
        play.at(5.0, lambda: play.operate("stop", by="ada"))
        play.run()
        assert play.rows("deaths") == []
        assert play.end and play.end.reason == "Stopped by ada after round 0"
        order = [
            type(item.message).__name__
            for _, _, item in play.log
            if isinstance(getattr(item, "message", None), (RoundCommitted, SyncAck, Shutdown))
        ]
        last = order[-6:]
        assert last[:2] == ["RoundCommitted"] * 2 and last[2:4] == ["SyncAck"] * 2 and last[4:] == ["Shutdown"] * 2
        leave = next(now for now, _, item in play.log if isinstance(item, SendRank) and said(item, Shutdown))
        assert leave > 100.0

    def test_the_last_epoch_ends_settled_too(self) -> None:
        play = formed((10.0,), (10.0,), samples=20).run()
        leaves = [now for now, _, item in play.log if said(item, Shutdown)]
        adopted = [now for now, _, item in play.log if said(item, SyncAck)]
        assert min(leaves) >= max(adopted)


def said(item: object, kind: type) -> bool:
    return isinstance(getattr(item, "message", None), kind)


class TestAWorldOfOne:
    def test_the_survivor_trains_every_sample_and_no_round_is_a_zero_step(self) -> None:
        """Two join, one dies in its first window: the other one's odometer shows every batch of the epoch."""
        play = formed((100.0,), (100.0,), samples=10, fixed_counts=(2, 2))
        play.at(0.2, lambda: play.kill(1))
        play.run()
        assert play.end and play.end.phase == "done"
        assert play.ranks[0].w == pytest.approx(10.0)
        assert set(samples_seen(play, 0)) == set(range(10))
        assert all(row["realized"][0] > 0 and row["mass"] > 0 for row in play.rows("rounds"))
        assert [value for _, value in play.consensus] == sorted({value for _, value in play.consensus})
        assert [row["samples_accepted"] for row in play.rows("epochs") if "samples_accepted" in row] == [10]

    def test_nobody_trains_in_a_world_of_none(self) -> None:
        play = Rehearsal(config(quorum=2))
        refused = play.operate("start")
        assert refused and refused[0].code == "quorum_not_met"
