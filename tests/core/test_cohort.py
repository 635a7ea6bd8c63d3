"""The cohort end to end on a virtual clock: exact averages, every sample once, deaths that are seen through."""

from __future__ import annotations

import pytest
from rehearsal import Rehearsal, lose_relay

from backend.core.config import RunConfig
from backend.core.vocabulary import CloseLink, Effect, End, HostSaid, Lagged, OpenRound, RankSaid, SendRelay
from simulation.played import Packed, PlayedRank
from simulation.props import VERSIONS
from wire.messages import Device, Hello, ProbeReport, RankReady, RequestParams, RoundCommitted


def config(**changes: object) -> RunConfig:
    values: dict[str, object] = {
        "job": "odometer.py:Odometer",
        "batch_size": 1,
        "start_mode": "manual",
        "initial_anchor": 2,
    }
    return RunConfig(**(values | changes))  # type: ignore[arg-type]


def formed(*hosts: tuple[float, ...], samples: int = 60, **changes: object) -> Rehearsal:
    """Hosts joined, Start pressed, training."""
    world = sum(len(ms) for ms in hosts)
    play = Rehearsal(config(quorum=max(2, world), **changes), samples=samples)
    for index, ms in enumerate(hosts):
        play.join(f"host-{index}", *ms)
    play.run(until=0.01)
    assert play.operate("start") == []
    return play


def samples_seen(play: Rehearsal, epoch: int) -> list[int]:
    """Every sample id that any rank trained on in the epoch, a dead rank's lost work included."""
    return sorted(
        sample
        for rank in play.ranks.values()
        for seen_epoch, offset, size in rank.seen
        if seen_epoch == epoch
        for sample in range(offset, offset + size)
    )


@pytest.mark.parametrize(
    ("hosts", "counts", "expected"),
    [
        (((1.0, 1.0),), (3, 1), 2.5),
        (((1.0,), (1.0,)), (3, 1), 2.5),
        (((1.0,), (1.0,)), (4, 1), 3.4),
        (((1.0, 1.0), (1.0,)), (6, 2, 1), 41 / 9),
        (((1.0,), (1.0,)), (5, 5), 5.0),
    ],
)
def test_a_window_averages_by_the_work_really_done(
    hosts: tuple[tuple[float, ...], ...], counts: tuple[int, ...], expected: float
) -> None:
    play = formed(*hosts, samples=sum(counts), fixed_counts=counts).run()
    assert play.end and play.end.phase == "done"
    assert play.consensus == [(-1, 0.0), (0, pytest.approx(expected))]
    assert [rank.w for rank in play.ranks.values()] == [pytest.approx(expected)] * len(counts)


@pytest.mark.parametrize("gamma", [0.0, 0.5, -1.0])
def test_gamma_weighs_the_average(gamma: float) -> None:
    play = formed((1.0,), (1.0,), samples=4, fixed_counts=(3, 1), gamma=gamma).run()
    exact = (3 ** (1 + gamma) + 1) / (3**gamma + 1)
    assert play.consensus[-1] == (0, pytest.approx(exact))


@pytest.mark.parametrize("speeds", [(5.0, 5.0), (5.0, 10.0, 20.0), (3.0, 5.0, 8.0, 13.0, 40.0)])
@pytest.mark.parametrize("samples", [97, 256])
@pytest.mark.parametrize("mode", ["cpu_cadence", "cpu_sync", "cpu_async"])
def test_every_sample_is_trained_exactly_once_an_epoch(speeds: tuple[float, ...], samples: int, mode: str) -> None:
    play = formed(*((ms,) for ms in speeds), samples=samples, batch_size=4, epochs=3, mode=mode).run()
    assert play.end and play.end.phase == "done", play.end
    for epoch in range(3):
        assert samples_seen(play, epoch) == list(range(samples))
    assert [row["samples_accepted"] for row in play.rows("epochs") if "samples_accepted" in row] == [samples] * 3


def test_allotments_follow_speed() -> None:
    play = formed((5.0,), (10.0,), (20.0,), samples=2000, epochs=2, max_anchor=2).run()
    assert play.cohort.march is not None
    assert play.cohort.march.training.scheduler.counts == {0: 8, 1: 4, 2: 2}
    view = play.cohort.snapshot(play.now)
    assert view["throughput"]["efficiency"] > 0.8
    assert [rank["anchor"] for rank in view["ranks"]] == [False, False, True]
    assert "sets the pace" in view["decision"]


def test_each_window_is_timed_afresh() -> None:
    """A window's first batch carries the fill and stays out of its rate, in every window (behaviour D2, M18)."""
    play = formed((5.0,), (10.0,), samples=300)
    steps: list[int] = []
    play.at(0.5, lambda: steps.extend(play.cohort.march.training.ledger.steps(rank) for rank in (0, 1)))  # type: ignore[union-attr]
    play.run()
    planned = max(max(row["planned"].values()) for row in play.rows("rounds"))
    assert 0 < max(steps) <= planned


def test_nobody_idles_longer_than_the_slowest_batch() -> None:
    """Inside a full window all ranks finish within one batch of the anchor."""
    play = formed((5.0,), (10.0,), (20.0,), samples=700, epochs=1, max_anchor=2).run()
    full = [row for row in play.rows("rounds") if row["planned"] == {0: 8, 1: 4, 2: 2}]
    assert len(full) > 10
    assert all(row["seconds"] < 2 * 0.020 + 0.020 for row in full)


class TestDeaths:
    def test_survivors_go_on_and_the_dead_ranks_samples_are_trained_again(self) -> None:
        play = formed((10.0,), (10.0,), (10.0,), samples=90, epochs=1)
        play.at(0.25, lambda: play.kill(2))
        play.run()
        assert play.end and play.end.phase == "done"
        (death,) = play.rows("deaths")
        assert (death["rank"], death["signal"], death["host_name"]) == (2, "SIGKILL", "host-2")
        assert death["returned_samples"] > 0
        assert [row["samples_accepted"] for row in play.rows("epochs") if "samples_accepted" in row] == [90]
        assert set(samples_seen(play, 0)) == set(range(90))

    def test_a_contributor_that_dies_while_the_sum_is_open_is_in_neither_sum_nor_divisor(self) -> None:
        play = Rehearsal(config(quorum=3, fixed_counts=(3, 1, 2)), samples=6, reduce_seconds=1.0)
        for name in "abc":
            play.join(name, 1.0)
        play.run(until=0.01)
        play.operate("start")
        play.at(1.5, lambda: play.kill(2))
        play.run()
        assert play.end and play.end.phase == "done"
        assert play.consensus[1] == (0, pytest.approx(2.5))  # ranks 0 and 1 only: (9 + 1) / 4
        assert play.rows("rounds")[0]["attempt"] == 1
        assert [row["samples_accepted"] for row in play.rows("epochs") if "samples_accepted" in row] == [6]

    def test_a_rank_that_dies_between_commit_and_adoption_keeps_its_accepted_work(self) -> None:
        play = formed((1.0,), (1.0,), samples=8, fixed_counts=(3, 1))
        seen: list[bool] = []

        def kill_at_commit(effect: Effect) -> bool:
            commits = isinstance(effect, SendRelay) and isinstance(effect.message, RoundCommitted)
            if commits and effect.message.round == 0 and not seen:  # type: ignore[union-attr]
                seen.append(True)
                play.ranks[1].alive = False
                play.at(play.now, lambda: play.kill(1))
            return False

        play.intercept = kill_at_commit
        play.run()
        assert play.end and play.end.phase == "done"
        assert play.consensus[1] == (0, pytest.approx(2.5))
        assert play.rows("deaths")[0]["returned_samples"] == 0
        assert [row["samples_accepted"] for row in play.rows("epochs") if "samples_accepted" in row] == [8]

    def test_a_silent_host_is_lost_at_the_timeout(self) -> None:
        play = formed((50.0,), (50.0,), samples=4000, epochs=1)
        play.at(3.0, lambda: play.freeze("host-1"))
        play.run(until=60)
        (death,) = play.rows("deaths")
        assert "no sign of life for 30 s" in death["reason"]
        assert death["rank"] == 1

    @pytest.mark.parametrize("how", ["unplug", "relay"])
    def test_a_lost_host_takes_all_its_ranks(self, how: str) -> None:
        play = formed((10.0, 10.0), (10.0,), samples=200)
        play.at(0.3, lambda: play.unplug("host-0") if how == "unplug" else lose_relay(play, "host-0"))
        play.run()
        assert play.end and play.end.phase == "done"
        assert [row["rank"] for row in play.rows("deaths")] == [0, 1]
        assert [row["samples_accepted"] for row in play.rows("epochs") if "samples_accepted" in row] == [200]

    def test_all_dead_is_a_failure_with_its_reason(self) -> None:
        play = formed((10.0,), (10.0,), samples=200)
        play.at(0.3, lambda: (play.kill(0), play.kill(1)))
        play.run()
        assert play.end and play.end.phase == "failed"
        assert "All 2 ranks are dead" in play.end.reason

    def test_a_round_that_nobody_is_left_to_finish_counts_for_nothing(self) -> None:
        play = Rehearsal(config(fixed_counts=(3, 1)), samples=40, reduce_seconds=1.0)
        for name in "ab":
            play.join(name, 1.0)
        play.run(until=0.01)
        play.operate("start")
        play.at(3.5, lambda: (play.kill(0), play.kill(1)))
        play.run()
        assert play.end and play.end.reason.startswith("AllRanksLost")
        rounds = [row["round"] for row in play.rows("rounds")]
        assert rounds == list(range(len(rounds))) and rounds
        (saved,) = play.rows("checkpoints")
        assert saved["round"] == rounds[-1], "what is saved is the consensus of the last one that was closed"
        assert [row["rounds_done"] for row in play.rows("runs") if "rounds_done" in row][-1] == len(rounds)

    def test_a_run_may_refuse_any_death(self) -> None:
        play = formed((10.0,), (10.0,), samples=200, max_failure=1)
        play.at(0.3, lambda: play.kill(0))
        play.run()
        assert play.end and play.end.phase == "failed"
        assert "limit" in play.end.reason
        assert play.rows("checkpoints"), "the work up to the last round is saved"

    def test_a_death_while_forming_fails_the_run_with_the_cause(self) -> None:
        play = formed((10.0,), (10.0,))
        play.run(until=0.02)
        play.kill(1, code=1, signal="", exception="ModuleNotFoundError", message="No module named 'helper'")
        assert play.end and play.end.phase == "failed"
        assert "ModuleNotFoundError: No module named 'helper'" in play.end.reason

    def test_exit_zero_before_the_end_is_a_death(self) -> None:
        play = formed((10.0,), (10.0,), samples=200)
        play.at(0.3, lambda: play.kill(0, code=0, signal=""))
        play.run()
        assert "exited with code 0 before the run was over" in play.rows("deaths")[0]["reason"]

    def test_a_clean_exit_after_shutdown_is_no_death(self) -> None:
        play = formed((10.0,), (10.0,), samples=20).run()
        assert play.end and play.end.phase == "done"
        assert play.rows("deaths") == []


class Liar(Rehearsal):
    """Rank 1 declares another number of steps than it reported, in the second round."""

    claims = 0

    def contribute(self, played: PlayedRank, request: RequestParams, packed: Packed) -> None:
        if (played.rank, request.round, request.attempt) == (1, 1, 0):
            packed.steps = self.claims
        super().contribute(played, request, packed)


class TestClaims:
    @pytest.mark.parametrize("claims", [0, 1, 99])
    def test_a_contribution_that_is_not_what_was_reported_costs_its_host_and_nobody_else(self, claims: int) -> None:
        """Samples that a rank trained and no round accepts would be nobody's, and the epoch would never end."""
        play = Liar(config(quorum=2, min_anchor=2), samples=60)
        play.claims = claims
        for name in ("a", "b"):
            play.join(name, 10.0)
        play.run(until=0.01)
        play.operate("start")
        play.run()
        assert play.end and play.end.phase == "done"
        (death,) = play.rows("deaths")
        assert death["rank"] == 1
        assert f"it holds {claims} batches of rank 1, which reported" in death["reason"]
        assert [row["samples_accepted"] for row in play.rows("epochs") if "samples_accepted" in row] == [60]


class TestLag:
    def test_a_controller_that_stood_still_does_not_hold_it_against_its_hosts(self) -> None:
        play = formed((50.0,), (50.0,), samples=4000)
        play.at(3.0, lambda: play.freeze("host-1"))
        play.at(20.0, lambda: play.feed(Lagged(12.0)))
        play.run(until=40.0)
        assert play.rows("deaths") == []
        play.run(until=50.0)
        assert [row["rank"] for row in play.rows("deaths")] == [1]
        assert "controller_lagged" in play.events()


class TestOperator:
    def test_stop_finishes_the_window_saves_and_ends(self) -> None:
        play = formed((10.0,), (10.0,), samples=5000)
        play.at(1.0, lambda: play.operate("stop", by="ada"))
        play.run()
        assert play.end and play.end.phase == "done"
        assert play.end.reason.startswith("Stopped by ada after round")
        assert len(play.rows("checkpoints")) == 1

    def test_stop_twice_is_refused(self) -> None:
        play = formed((10.0,), (10.0,), samples=5000)
        play.run(until=1.0)
        assert play.operate("stop") == []
        assert [refused.code for refused in play.operate("stop")] == ["already_ending"]

    def test_abort_ends_at_once(self) -> None:
        play = formed((10.0,), (10.0,), samples=5000)
        play.run(until=1.0)
        play.operate("abort", by="ada")
        assert play.end and (play.end.phase, play.end.reason) == ("failed", "Aborted by ada")

    def test_commands_after_the_end_are_refused(self) -> None:
        play = formed((10.0,), (10.0,), samples=10).run()
        assert [refused.code for refused in play.operate("start")] == ["run_over"]

    def test_start_after_forming_is_refused(self) -> None:
        play = formed((10.0,), (10.0,), samples=500)
        play.run(until=0.5)
        assert [refused.code for refused in play.operate("start")] == ["window_closed"]


class TestBounds:
    def test_a_model_of_another_size_than_the_job_has_is_named_before_memory_is_asked_for(self) -> None:
        """The controller reserves what rank 0 says its parameters take."""
        play = formed((10.0,), (10.0,))
        play.run(until=0.02)
        play.feed(RankSaid(0, RankReady("L", 1 << 40, 0)))
        assert play.end and "1099511627776 parameter and 0 buffer elements, not of 1 and 0" in play.end.reason
        assert not [item for _, _, item in play.log if isinstance(item, OpenRound)]

    def test_a_rank_with_much_to_say_of_itself_fills_no_database(self) -> None:
        play = formed((10.0,), (10.0,))
        play.run(until=0.02)
        play.feed(RankSaid(0, RankReady("L", 1, 0, ["x" * 10_000] * 5000)))
        said = [row["text"] for row in play.rows("events") if row["kind"] == "state_not_restored"]
        assert len(said) == 20
        assert max(map(len, said)) < 600

    def test_forming_ends_with_who_was_missing(self) -> None:
        play = Rehearsal(config(quorum=2))
        play.join("a", 1.0)
        play.join("b", 1.0)
        play.run(until=0.01)
        play.spawns = False
        play.operate("start")
        play.run(until=400)
        assert play.end and "did not form within 120 s" in play.end.reason
        assert "a, b" in play.end.reason

    def test_a_reduce_that_never_closes_ends_as_a_reduce_stall(self) -> None:
        play = formed((10.0,), (10.0,), samples=500)
        play.intercept = lambda effect: isinstance(effect, OpenRound) and effect.round == 1
        play.run(until=1000)
        assert play.end and "ReduceStall: round 1" in play.end.reason

    def test_a_failed_checkpoint_makes_the_end_a_failure(self) -> None:
        play = formed((10.0,), (10.0,), samples=20)
        play.checkpoint_error = "No space left on device"
        play.run()
        assert play.end and play.end.phase == "failed"
        assert "No space left on device" in play.end.reason


def test_the_same_story_gives_the_same_effects() -> None:
    def tell() -> list[object]:
        play = formed((3.0,), (5.0, 9.0), samples=120, epochs=2)
        play.at(0.4, lambda: play.kill(1))
        play.run()
        return play.log

    assert tell() == tell()


def test_replicas_that_differ_end_the_run() -> None:
    play = formed((10.0,), (10.0,), samples=500)
    play.flaw = (1, 2)
    play.run()
    assert play.end and play.end.phase == "failed"
    assert "Replicas differ after round 2" in play.end.reason


class TestTheDoor:
    @pytest.mark.parametrize("repeats", ["Hello", "ProbeReport"])
    def test_a_member_that_begins_anew_on_its_link_gives_up_its_seat(self, repeats: str) -> None:
        """Its link is closed; were its seat kept, the world would form with it and wait for it in vain."""
        play = Rehearsal(config(quorum=2), samples=60)
        for name in ("anna", "bert", "crook"):
            play.join(name, 1.0)
        play.run(until=0.01)
        crook = play.hosts["crook"]
        hello = Hello(host="crook", devices=[Device(id="cpu:0", type="cpu")], versions=VERSIONS)
        message = hello if repeats == "Hello" else ProbeReport(layout=play.layout, dataset_size=60)
        effects = play.feed(HostSaid(crook.link, message, crook.address))
        assert CloseLink(crook.link, f"it sent {repeats} again before the world formed") in effects
        assert play.cohort.snapshot(play.now)["window"]["joined_ranks"] == 2
        assert play.operate("start") == []
        assert play.run().end == End("done", "The epoch is trained")
