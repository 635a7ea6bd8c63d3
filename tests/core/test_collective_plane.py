"""The collective plane of the core: who makes a session, who is in it, and what becomes of a round when one is lost."""

from __future__ import annotations

from typing import Any

import pytest
from rehearsal import Rehearsal

from backend.core.collective import (
    BROKEN_SECONDS,
    GENERATOR_SECONDS,
    JOIN_SECONDS,
    MAX_BROKEN,
    Collectives,
)
from backend.core.config import RunConfig
from backend.core.march import March
from backend.core.session import Session, disagreement, on_the_controllers_host
from backend.core.vocabulary import Effect, Lagged, RankSaid, RoundFinished, SendRank, WriteCheckpoint
from simulation.played import PlayedHost
from wire.collectives import MAX_ID_BYTES
from wire.messages import (
    AbortSession,
    Evaluate,
    Message,
    NewSession,
    RankProgress,
    RequestLocalState,
    RequestSessionId,
    SessionIdGenerated,
    SessionJoined,
    SessionLost,
    Shutdown,
    StartChunk,
    SyncAck,
    SyncCommitted,
    Synced,
    SyncNow,
    SyncRefused,
)

OF_SESSIONS = RequestSessionId | NewSession | AbortSession | SyncNow | SyncCommitted


class Attended(Rehearsal):
    """Agents tell what their ranks' counters say."""

    def progress(self, host: PlayedHost) -> list[RankProgress]:
        return [RankProgress(played.rank, played.state, played.steps, 0.0) for played in host.ranks]

    @property
    def march(self) -> March:
        assert self.cohort.march is not None
        return self.cohort.march

    @property
    def session(self) -> Session:
        assert isinstance(self.march.plane, Collectives)
        return self.march.plane.session

    def sent(self, kind: type[Message], since: float = 0.0) -> list[tuple[int, Any]]:
        """Messages of a kind to ranks, in order."""
        return [
            (item.rank, item.message)
            for when, what, item in self.log
            if what == "effect" and when >= since and isinstance(item, SendRank) and isinstance(item.message, kind)
        ]

    def ask(self, kind: type[Message]) -> Any:
        """The newest message of a kind."""
        return self.sent(kind)[-1][1]

    def say(self, *arguments: Any) -> Any:
        """As the theatre does; or, with a rank's number and a message, at once."""
        if isinstance(arguments[0], int):
            return self.feed(RankSaid(*arguments))
        return super().say(*arguments)

    def dead(self) -> dict[int, str]:
        return {row["rank"]: row["reason"] for row in self.rows("deaths")}

    def texts(self, kind: str) -> list[str]:
        return [row["text"] for row in self.rows("events") if row["kind"] == kind]


def cohort(*hosts: tuple[float, ...], samples: int = 600, **changes: Any) -> Attended:
    """Hosts joined; nothing has happened yet."""
    world = sum(len(ms) for ms in hosts)
    values = {"mode": "nccl_cadence", "batch_size": 1, "initial_anchor": 2, "quorum": world, "target": world} | changes
    play = Attended(RunConfig("odometer.py:Odometer", **values), samples=samples)
    for index, ms in enumerate(hosts):
        play.join(f"host-{index}", *ms)
    return play


def training(*hosts: tuple[float, ...], **changes: Any) -> Attended:
    """In the first window: the initial broadcast is over."""
    play = cohort(*hosts, **changes)
    until(play, lambda: play.cohort.phase == "training")
    assert play.session.state == "live"
    return play


def deaf(play: Attended, *kinds: type[Message]) -> None:
    """Ranks hear nothing of these kinds any more: the test answers for them."""
    play.intercept = lambda effect: isinstance(effect, SendRank) and isinstance(effect.message, kinds)


def summing(ranks: int = 3, **changes: Any) -> Attended:
    """A round was asked for, and the test says what ranks report."""
    play = cohort(*[(10.0,)] * ranks, **changes)
    deaf(play, SyncNow, SyncCommitted, AbortSession, RequestSessionId, NewSession)
    play.run(until=0.052)
    in_session(play)
    until(play, lambda: bool(play.sent(SyncNow)))
    return play


def in_session(play: Attended, *ranks: int) -> None:
    """Name the session that is asked for, and have its ranks join."""
    generation = play.session.generation
    assert play.session.generator is not None
    play.say(play.session.generator, SessionIdGenerated(generation, b"here"))
    for rank in ranks or play.session.ranks:
        play.say(rank, SessionJoined(generation, "test on lo"))


def until(play: Attended, condition: Any, most: float = 1000.0) -> None:
    """Let time pass until something is so, one moment after the other."""
    end = play.now + most
    while not condition() and play.end is None and play.now < end:
        moments = (play.stage.next_at, play.cohort.next_deadline())
        play.run(until=1e-6 + min(at for at in moments if at is not None))
    assert condition(), f"not within {most} s"


def report(play: Attended, rank: int, steps: int, total: int, mass: float | None = None) -> None:
    order = play.ask(SyncNow)
    mass = float(total) if mass is None else mass
    play.say(rank, Synced(order.round, order.attempt, steps, total, mass, 4, 1.0))


def acknowledge(play: Attended, rank: int) -> None:
    number = play.march.cycle.open.round  # type: ignore[union-attr]
    values = dict.fromkeys(("divergence", "pre_norm", "post_norm"), 0.0)
    costs = dict.fromkeys(("pack_ms", "load_ms", "wait_ms", "reduce_ms"), 0.0)
    play.say(rank, SyncAck(round=number, params_hash="same", **values, **costs))


# ------------------------------------------------------------------------------------------------- a whole run


@pytest.mark.parametrize("mode", ["nccl_sync", "nccl_cadence"])
@pytest.mark.parametrize("hosts", [((10.0, 10.0),), ((10.0,), (20.0, 40.0)), ((5.0,), (5.0,), (5.0,), (50.0,))])
def test_a_run_is_trained_to_its_end_in_one_session(mode: str, hosts: tuple[tuple[float, ...], ...]) -> None:
    play = cohort(*hosts, mode=mode, samples=97, epochs=2)
    play.run()
    assert play.end and (play.end.phase, play.end.reason) == ("done", "All 2 epochs are trained")
    assert play.session.rebuilds == 0
    assert [row["samples_accepted"] for row in play.rows("epochs") if "samples_accepted" in row] == [97, 97]
    assert len({rank.w for rank in play.ranks.values()}) == 1
    assert len({message.generation for _, message in play.sent(SyncNow)}) == 1


@pytest.mark.parametrize(("counts", "gamma", "expected"), [((3, 1), 1.0, 2.5), ((3, 1), 0.0, 2.0), ((5, 5), 0.5, 5.0)])
def test_the_average_is_of_the_work_really_done(counts: tuple[int, int], gamma: float, expected: float) -> None:
    play = cohort((1.0,), (1.0,), samples=sum(counts), fixed_counts=counts, gamma=gamma)
    play.run()
    assert play.consensus == [(-1, 0.0), (0, pytest.approx(expected))]
    assert play.rows("rounds")[0]["realized"] == dict(enumerate(counts))


def test_the_initial_broadcast_waits_for_a_session() -> None:
    play = cohort((10.0,), (10.0,))
    deaf(play, RequestSessionId)
    play.run(until=0.5)
    assert play.session.state == "naming"
    assert not play.texts("cohort_formed")
    assert "makes the identity of session 0" in play.cohort.snapshot(play.now)["decision"]


# ------------------------------------------------------------------------------------------------- the generator


class TestGenerator:
    def test_the_lowest_of_equals_is_asked_first(self) -> None:
        play = cohort((10.0,), (10.0,))
        play.run(until=0.06)
        assert play.sent(RequestSessionId) == [(0, RequestSessionId(0))]

    def test_the_fastest_is_asked_once_speeds_are_known(self) -> None:
        play = training((40.0,), (40.0,), (10.0,), samples=2000)
        play.run(until=2.0)
        play.kill(0)
        play.run(until=4.0)
        assert play.sent(RequestSessionId)[1:] == [(2, RequestSessionId(1))]

    @pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
    def test_a_rank_on_the_controllers_host_goes_before_a_faster_one(self, address: str) -> None:
        play = training((10.0,), (10.0,), (40.0,), samples=2000)
        play.run(until=2.0)
        play.march.world.hosts[2].address = address
        play.kill(0)
        play.run(until=4.0)
        assert play.sent(RequestSessionId)[1:] == [(2, RequestSessionId(1))]

    @pytest.mark.parametrize("address", ["10.0.0.127", "127", "2001:db8::1", ""])
    def test_others_are_not_on_it(self, address: str) -> None:
        assert not on_the_controllers_host(address)

    def test_who_is_silent_for_5_s_is_passed_over_and_its_late_answer_ignored(self) -> None:
        play = cohort((10.0,), (10.0,))
        deaf(play, RequestSessionId, NewSession)
        play.run(until=0.06)
        asked_at = play.session.deadline
        play.run(until=0.06 + GENERATOR_SECONDS)
        assert play.sent(RequestSessionId) == [(0, RequestSessionId(0)), (1, RequestSessionId(1))]
        assert asked_at == pytest.approx(0.051 + GENERATOR_SECONDS)
        play.say(0, SessionIdGenerated(0, b"late"))
        play.say(0, SessionIdGenerated(1, b"not asked"))
        assert play.sent(NewSession) == []
        play.say(1, SessionIdGenerated(1, b"here"))
        assert play.sent(NewSession) == [(rank, NewSession(1, b"here", [0, 1])) for rank in (0, 1)]

    def test_time_in_which_the_controller_was_away_is_given_on_top(self) -> None:
        play = cohort((10.0,), (10.0,))
        deaf(play, RequestSessionId)
        play.run(until=4.0)
        play.feed(Lagged(3.0))
        play.run(until=7.5)
        assert len(play.sent(RequestSessionId)) == 1
        play.run(until=8.5)
        assert len(play.sent(RequestSessionId)) == 2

    @pytest.mark.parametrize("identity", [b"", b"x" * (MAX_ID_BYTES + 1)])
    def test_an_identity_that_is_none_passes_it_over(self, identity: bytes) -> None:
        play = cohort((10.0,), (10.0,))
        deaf(play, RequestSessionId, NewSession)
        play.run(until=0.06)
        play.say(0, SessionIdGenerated(0, identity))
        assert play.sent(RequestSessionId)[-1] == (1, RequestSessionId(1))
        assert f"{len(identity)} bytes" in play.texts("session_failed")[0]

    def test_one_that_cannot_says_so_and_the_next_one_is_asked_at_once(self) -> None:
        play = cohort((10.0,), (10.0,))
        deaf(play, RequestSessionId)
        play.run(until=0.06)
        play.say(1, SessionLost(0, "not its business"))
        assert len(play.sent(RequestSessionId)) == 1
        play.say(0, SessionLost(0, "no network"))
        assert play.sent(RequestSessionId)[-1] == (1, RequestSessionId(1))

    def test_its_death_is_the_next_ones_turn(self) -> None:
        play = training((10.0,), (10.0,), (10.0,))
        deaf(play, RequestSessionId)
        play.kill(2)
        until(play, lambda: play.session.state == "naming")
        play.kill(0)
        assert play.sent(RequestSessionId)[-1] == (1, RequestSessionId(2))

    def test_another_ones_death_changes_only_who_is_told_of_the_session(self) -> None:
        play = training(*[(10.0,)] * 4)
        deaf(play, RequestSessionId, NewSession)
        play.kill(3)
        until(play, lambda: play.session.state == "naming")
        play.kill(2)
        assert (play.session.state, play.session.generation, play.session.generator) == ("naming", 1, 0)
        play.say(0, SessionIdGenerated(1, b"here"))
        assert play.sent(NewSession)[-2:] == [(rank, NewSession(1, b"here", [0, 1])) for rank in (0, 1)]

    def test_nobody_left_while_forming_fails_the_run_by_its_name(self) -> None:
        play = cohort((10.0,), (10.0,))
        deaf(play, RequestSessionId)
        play.run(until=30.0)
        assert play.end and play.end.phase == "failed"
        assert play.end.reason.startswith("The cohort could not form: no rank is left to make a session")
        assert "rank 0 (host-0/cpu:0), rank 1 (host-1/cpu:0) tried" in play.end.reason

    def test_nobody_left_later_saves_and_stops(self) -> None:
        play = training((10.0,), (10.0,), (10.0,))
        deaf(play, RequestSessionId)
        until(play, lambda: play.march.cycle.next_round > 1)
        play.kill(2)
        play.run(until=60.0)
        assert play.end and play.end.reason.startswith("RendezvousExhausted: no rank is left to make a session")
        (saved,) = play.rows("checkpoints")
        assert saved["round"] == play.rows("rounds")[-1]["round"]
        assert play.now < 2 * GENERATOR_SECONDS + 2.0

    def test_who_failed_may_try_again_once_somebody_died(self) -> None:
        """The dead may have been the reason."""
        play = training(*[(10.0,)] * 4)
        deaf(play, RequestSessionId)
        play.kill(3)
        until(play, lambda: play.session.generator == 1)
        assert play.session.tried == [0]
        play.kill(1)
        assert play.sent(RequestSessionId)[-1] == (0, RequestSessionId(3))


# --------------------------------------------------------------------------------------------------- rendezvous


class TestJoining:
    def test_a_session_counts_once_everybody_has_joined(self) -> None:
        play = cohort((10.0,), (10.0,), (10.0,))
        deaf(play, RequestSessionId, NewSession)
        play.run(until=0.06)
        in_session(play, 0, 2)
        assert play.session.state == "joining"
        assert "waiting for rank 1 (host-1/cpu:0) to join session 0" in play.cohort.snapshot(play.now)["decision"]
        play.say(1, SessionJoined(7, "another one"))
        assert play.session.state == "joining"
        play.say(1, SessionJoined(0, "x" * 500))
        assert play.session.state == "live"
        view = play.cohort.snapshot(play.now)["session"]
        assert (view["generation"], view["state"], view["rebuilds"]) == (0, "live", 0)
        assert view["reason"] == "the cohort forms"
        assert view["transports"]["0"] == "test on lo" and len(view["transports"]["1"]) == 120

    def test_a_death_voids_it_and_the_others_are_told_at_once(self) -> None:
        play = training(*[(10.0,)] * 4)
        deaf(play, RequestSessionId, NewSession)
        play.kill(3)
        until(play, lambda: play.session.state == "naming")
        in_session(play, 0)
        play.kill(1)
        assert play.sent(AbortSession, play.now) == [(rank, AbortSession(1, "rank 1 died")) for rank in (0, 2)]
        assert play.sent(RequestSessionId)[-1] == (0, RequestSessionId(2))
        play.say(2, SessionJoined(1, "of the one before"))
        assert play.session.joined == {}

    def test_who_cannot_join_ends_it_and_after_a_moment_another_one_is_made(self) -> None:
        play = training(*[(10.0,)] * 3)
        play.ranks[1].syncing.outcast = 1
        play.kill(2)
        until(play, lambda: play.session.state == "broken")
        at = play.now
        assert play.session.tried == [0]
        assert {rank for rank, _ in play.sent(AbortSession, at - 0.02)} == {0, 1}
        assert "broke: rank 1 (host-1/cpu:0): no route to host" in play.texts("session_failed")[-1]
        until(play, lambda: play.session.state == "live")
        assert play.sent(RequestSessionId)[-1] == (1, RequestSessionId(2))
        assert BROKEN_SECONDS <= play.now - at + 0.02 < BROKEN_SECONDS + 0.1
        play.run(until=play.now + 0.3)
        assert play.march.phase == "training" and play.session.tried == []

    def test_a_second_word_of_the_same_loss_changes_nothing(self) -> None:
        play = summing()
        play.say(0, SessionLost(0, "a peer closed its connection"))
        deadline = play.session.deadline
        play.run(until=play.now + 0.5)
        play.say(1, SessionLost(0, "a peer closed its connection"))
        assert play.session.deadline == deadline
        assert len(play.texts("session_failed")) == 1

    def test_the_news_of_a_death_explains_a_session_that_broke(self) -> None:
        play = summing()
        play.say(0, SessionLost(0, "a peer closed its connection"))
        play.kill(2)
        assert play.march.cycle.open and play.march.cycle.open.failures == 0
        assert play.sent(RequestSessionId)[-1] == (0, RequestSessionId(1))
        in_session(play)
        assert play.session.rebuilds == 1
        assert play.sent(SyncNow)[-1] == (1, SyncNow(0, 1, 1))

    def test_who_does_not_even_try_to_join_is_dead(self) -> None:
        """Its counter says that it idles: ranks that try say otherwise, and give up a little later by themselves."""
        play = training(*[(10.0,)] * 4)
        play.kill(3)
        until(play, lambda: play.session.state == "naming")
        play.ranks[2].stop()
        play.run(until=play.now + JOIN_SECONDS + 2.0)
        assert play.dead()[2] == "RendezvousStall: it did not join session 1 within 50 s"
        assert play.session.ranks == (0, 1)
        assert play.march.phase == "training" and play.end is None

    def test_when_nobody_gets_on_the_session_is_at_fault_and_nobody_dies(self) -> None:
        play = training(*[(10.0,)] * 3)
        deaf(play, NewSession)
        play.kill(2)
        until(play, lambda: play.session.state == "joining")
        for rank in (0, 1):
            play.ranks[rank].syncing.inside = (b"", "join")  # their counters say that they try
        play.run(until=play.now + JOIN_SECONDS + 0.5)
        assert list(play.dead()) == [2]
        assert "did not join within 50 s" in play.texts("session_failed")[-1]
        assert play.session.tried == [0]

    def test_each_that_joins_gives_the_others_more_time(self) -> None:
        play = cohort(*[(10.0,)] * 3, forming_seconds=500.0)
        deaf(play, RequestSessionId, NewSession)
        play.run(until=0.06)
        in_session(play, 0)
        play.run(until=40.0)
        play.say(1, SessionJoined(0, "late"))
        assert play.session.deadline == pytest.approx(40.0 + JOIN_SECONDS)

    def test_a_death_while_the_cohort_forms_fails_the_run(self) -> None:
        play = cohort(*[(10.0,)] * 3)
        deaf(play, NewSession)
        play.run(until=0.1)
        assert play.session.state == "joining"
        play.kill(1)
        assert play.end and play.end.reason.startswith("The cohort could not form: rank 1")
        assert {rank for rank, _ in play.sent(Shutdown)} == {0, 2}

    def test_a_forming_that_takes_too_long_says_what_it_waits_for(self) -> None:
        play = cohort((10.0,), (10.0,), forming_seconds=20.0)
        deaf(play, NewSession)
        play.run(until=60.0)
        assert play.end and play.end.reason.startswith("The cohort did not form within 20 s. Every rank is ready;")
        assert play.end.reason.endswith("waiting for rank 0 (host-0/cpu:0), rank 1 (host-1/cpu:0) to join session 0.")


class TestScoring:
    """While a rank scores, which may take minutes, no session is made and no round is asked for."""

    def scoring(self) -> Attended:
        play = summing(4)
        play.march.evaluations.pending[0] = 1
        return play

    def test_no_session_is_made_before_the_score_is_there(self) -> None:
        play = self.scoring()
        play.kill(3)
        assert play.session.state == "none"
        play.run(until=play.now + 20.0)
        assert len(play.sent(RequestSessionId)) == 1
        play.march.evaluations.pending.clear()
        play.run(until=play.now + 1.5)
        assert play.sent(RequestSessionId)[-1] == (0, RequestSessionId(1))

    def test_an_identity_that_comes_after_somebody_was_sent_to_score_is_dropped(self) -> None:
        play = summing(4)
        play.kill(3)
        play.march.evaluations.pending[0] = 1
        in_session(play, 0)
        assert (play.session.state, play.sent(NewSession)[-1][1].generation) == ("none", 0)
        play.march.evaluations.pending.clear()
        play.run(until=play.now + 1.5)
        assert (play.session.state, play.session.generation) == ("naming", 2)

    def test_the_substitute_of_a_dead_scorer_scores_first(self) -> None:
        play = training(*[(10.0,)] * 3, samples=12, epochs=3)
        play.score_seconds = 100.0
        until(play, lambda: bool(play.sent(Evaluate)))
        scorer = play.sent(Evaluate)[-1][0]
        play.kill(scorer)
        play.run(until=play.now + 400.0)
        assert list(play.dead()) == [scorer], "nobody is taken to hang because it scores"
        assert play.end and play.end.phase == "done"


# ---------------------------------------------------------------------------------------------------- the rounds


class TestSums:
    def test_nobody_adopts_before_everybody_has_the_sum(self) -> None:
        play = summing()
        report(play, 0, 2, 6)
        report(play, 1, 2, 6)
        report(play, 1, 2, 6)
        assert play.sent(SyncCommitted) == []
        report(play, 2, 2, 6)
        assert play.sent(SyncCommitted) == [(rank, SyncCommitted(0, 0)) for rank in range(3)]
        assert play.march.cycle.phase == "committed"

    def test_reports_of_another_attempt_count_nowhere(self) -> None:
        play = summing()
        for stale in (Synced(0, 1, 2, 6, 6.0, 4, 1.0), Synced(1, 0, 2, 6, 6.0, 4, 1.0)):
            for rank in range(3):
                play.say(rank, stale)
        assert play.sent(SyncCommitted) == []

    @pytest.mark.parametrize(
        ("total", "mass", "says"),
        [
            (7, 6.0, "rank 1 counted 7 batches where its session did 6"),
            (6, 7.0, "rank 1 divided by 7 where the batches of its session weigh 6"),
            (6, float("nan"), "rank 1 divided by nan"),
            (6, float("inf"), "rank 1 divided by inf"),
        ],
    )
    def test_ranks_that_differ_sum_again_and_in_the_end_the_run_is_saved(
        self, total: int, mass: float, says: str
    ) -> None:
        play = summing()
        for attempt in range(3):
            assert play.ask(SyncNow).attempt == attempt
            report(play, 0, 2, 6)
            report(play, 2, 2, 6)
            report(play, 1, 2, total, mass)
            assert play.sent(SyncCommitted) == []
        assert says in play.texts("round_failed")[-1]
        assert play.march.ending and play.march.ending.reason.startswith("RepeatedFailure: round 0 cannot be summed")
        assert {rank for rank, _ in play.sent(AbortSession)} == {0, 1, 2}

    @pytest.mark.parametrize(("gamma", "mass"), [(1.0, 4.0), (0.0, 2.0), (-1.0, 4 / 3), (2.0, 10.0)])
    def test_the_divisor_is_what_the_batches_weigh(self, gamma: float, mass: float) -> None:
        reports = {rank: Synced(0, 0, steps, 4, mass * (1 + 1e-12), 4, 1.0) for rank, steps in ((0, 3), (1, 1), (2, 0))}
        assert disagreement(reports, gamma) == ""
        assert "weigh" in disagreement(reports, gamma + 0.5)

    def test_a_rank_that_claims_more_than_it_was_given_costs_its_host(self) -> None:
        play = summing()
        for rank, steps in ((0, 2), (1, 50), (2, 2)):
            report(play, rank, steps, 54)
        assert "50 batches of rank 1" in play.dead()[1]
        assert play.sent(SyncCommitted) == []
        in_session(play)
        assert play.sent(SyncNow)[-2:] == [(rank, SyncNow(0, 1, 1)) for rank in (0, 2)]

    def test_a_death_in_a_sum_costs_one_session_and_nobodys_work(self) -> None:
        play = summing()
        report(play, 0, 2, 6)
        play.kill(2)
        assert play.sent(AbortSession) == [(rank, AbortSession(0, "rank 2 died")) for rank in (0, 1)]
        report(play, 1, 2, 6)
        assert play.sent(SyncCommitted) == []
        in_session(play)
        assert play.sent(SyncNow)[-2:] == [(rank, SyncNow(0, 1, 1)) for rank in (0, 1)]
        report(play, 0, 2, 4)
        report(play, 1, 2, 4)
        assert play.sent(SyncCommitted) == [(rank, SyncCommitted(0, 1)) for rank in (0, 1)]
        assert play.session.rebuilds == 1

    def test_a_death_after_the_commit_takes_no_sum_back(self) -> None:
        play = summing()
        for rank in range(3):
            report(play, rank, 2, 6)
        play.kill(2)
        assert play.march.cycle.phase == "committed"
        assert play.session.state == "none"
        assert len(play.sent(RequestSessionId)) == 1, "a session is made for the next round, not before"
        acknowledge(play, 0)
        acknowledge(play, 1)
        assert play.rows("rounds")[0]["realized"] == {0: 2, 1: 2, 2: 2}

    def test_the_making_of_a_session_is_no_cost_of_a_round(self) -> None:
        """Ranks die while they train, so the next round begins with a session: no reason for longer windows."""
        play = training((10.0,), (10.0,), (10.0,))
        until(play, lambda: play.march.training.last_round_seconds is not None)
        play.kill(2)
        rounds = len(play.rows("rounds"))
        until(play, lambda: len(play.rows("rounds")) > rounds)
        assert play.session.rebuilds == 1 and play.rows("rounds")[-1]["attempt"] == 0
        assert play.march.training.last_round_seconds is None
        until(play, lambda: len(play.rows("rounds")) > rounds + 1)
        assert play.march.training.last_round_seconds is not None

    def test_a_broken_session_is_tried_again_a_few_times(self) -> None:
        play = cohort(*[(10.0,)] * 3)
        play.run(until=0.06)
        play.ranks[1].syncing.broken = MAX_BROKEN
        play.run(until=60.0)
        assert play.end and play.end.phase == "failed"
        failed = f"RepeatedFailure: round 0 failed in {MAX_BROKEN} sessions; the last time rank 1"
        assert play.end.reason.startswith(failed)
        assert play.dead() == {}

    def test_one_that_breaks_once_costs_a_session_only(self) -> None:
        play = cohort(*[(10.0,)] * 3, samples=60)
        play.run(until=0.06)
        play.ranks[1].syncing.broken = MAX_BROKEN - 1
        play.run()
        assert play.end and play.end.phase == "done" and play.dead() == {}
        assert play.session.rebuilds == MAX_BROKEN - 1
        assert play.rows("rounds")[0]["attempt"] == MAX_BROKEN - 1

    def test_a_round_in_which_all_are_left_out_is_without_work(self) -> None:
        play = summing()
        for rank in range(3):
            order = play.ask(SyncNow)
            play.say(rank, SyncRefused(order.round, order.attempt, element=0, value="nan"))
        for rank in range(3):
            report(play, rank, 0, 0)
        opened = play.march.cycle.open
        assert opened is not None and isinstance(opened.finished, RoundFinished)
        assert (opened.finished.realized, opened.finished.mass) == (False, 0.0)


class TestNotFinite:
    def test_who_is_refused_is_left_out_of_the_round_in_the_same_session(self) -> None:
        play = summing()
        play.say(1, SyncRefused(0, 0, element=0, value="nan"))
        assert play.sent(SyncNow)[-3:] == [(rank, SyncNow(0, 1, 0, excluded=rank == 1)) for rank in range(3)]
        assert play.sent(AbortSession) == []
        play.say(2, SyncRefused(0, 1, element=0, value="-inf"))
        assert play.sent(SyncNow)[-3:] == [(rank, SyncNow(0, 2, 0, excluded=rank > 0)) for rank in range(3)]
        report(play, 0, 2, 2)
        report(play, 1, 0, 2)
        report(play, 2, 0, 2)
        assert play.sent(SyncCommitted) == [(rank, SyncCommitted(0, 2)) for rank in range(3)]

    def test_one_that_works_all_the_same_costs_its_host(self) -> None:
        play = summing()
        play.say(1, SyncRefused(0, 0, element=0, value="nan"))
        for rank in range(3):
            report(play, rank, 2, 6)
        assert "rank 1, which is left out of this round" in play.dead()[1]

    def test_a_whole_run_with_one_that_turns_nan(self) -> None:
        play = cohort(*[(10.0,)] * 3, samples=60)
        play.run(until=0.2)
        play.ranks[1].spoiled = 1
        play.run()
        assert play.end and play.end.phase == "done" and "samples are lost" in play.end.reason
        assert len({rank.w for rank in play.ranks.values()}) == 1
        assert "rank_restarted" in play.events()
        assert play.session.rebuilds == 0

    def test_the_run_stops_where_it_is_told_to(self) -> None:
        play = summing(non_finite="stop")
        play.say(1, SyncRefused(0, 0, element=0, value="nan" * 99))
        assert play.march.ending and play.march.ending.reason.startswith("NonFinite: Round 0 cannot be summed")
        assert len(play.march.ending.reason) < 200
        assert {rank for rank, _ in play.sent(AbortSession)} == {0, 1, 2}


# ----------------------------------------------------------------------------------------------------- the ends


class TestEnds:
    def test_the_last_one_does_not_go_on_alone(self) -> None:
        play = training((10.0,), (10.0,))
        until(play, lambda: play.march.cycle.next_round > 1)
        play.kill(1)
        play.run()
        assert play.end and play.end.reason.startswith("SingleSurvivor: 1 of 2 ranks is dead")
        (saved,) = play.rows("checkpoints")
        assert saved["round"] == play.rows("rounds")[-1]["round"]

    def test_with_nobody_left_there_is_nothing_to_save_and_the_end_says_so(self) -> None:
        """The controller still holds the initial parameters, which are no consensus of any round."""
        play = training((10.0, 10.0), (10.0,), checkpoint_epochs=None)
        until(play, lambda: play.march.cycle.next_round > 1)
        play.at(play.now, lambda: [play.unplug(name) for name in ("host-1", "host-0")])
        play.run()
        assert play.end and play.end.phase == "failed"
        assert play.end.reason.endswith("nobody is left who could hand over the consensus")
        assert play.rows("checkpoints") == []

    def test_a_sum_that_never_ends_is_a_stall_and_all_are_got_out_of_it(self) -> None:
        play = training(*[(10.0,)] * 3, stall_seconds=300.0)
        until(play, lambda: play.march.cycle.next_round > 1 and play.march.cycle.collects)
        play.ranks[2].stop()
        play.run(until=play.now + 301.0)
        assert play.march.ending or play.end
        aborted = play.sent(AbortSession)
        assert {rank for rank, _ in aborted} == {0, 1, 2}
        play.run(until=play.now + 400.0)
        assert play.end and play.end.reason.startswith("ReduceStall: round")
        assert play.rows("checkpoints"), "what the others hold is saved"

    def test_the_controllers_absence_counts_on_top_of_the_ceiling(self) -> None:
        play = summing(stall_seconds=300.0)
        opened = play.now
        play.run(until=opened + 290.0)
        play.feed(Lagged(50.0))
        play.run(until=opened + 330.0)
        assert play.march.ending is None
        play.run(until=opened + 352.0)
        assert play.march.ending and play.march.ending.reason.startswith("ReduceStall")

    def test_nobody_is_told_to_leave_before_all_have_adopted(self) -> None:
        """A rank that leaves takes its communicator along, while others may still be in the last collective."""
        play = training(*[(10.0,)] * 3, samples=6)
        deaf(play, SyncCommitted)
        until(play, lambda: bool(play.sent(SyncCommitted)))
        acknowledge(play, 0)
        acknowledge(play, 2)
        play.run(until=play.now + 20.0)
        assert play.sent(Shutdown) == []
        acknowledge(play, 1)
        play.run(until=play.now + 1.0)
        assert {rank for rank, _ in play.sent(Shutdown)} == {0, 1, 2}

    @pytest.mark.parametrize("state", ["naming", "joining"])
    def test_abort_in_a_rendezvous_ends_at_once(self, state: str) -> None:
        play = summing(4)
        play.kill(3)
        if state == "joining":
            in_session(play, 0)
        assert play.session.state == state
        play.operate("abort", by="ada")
        assert play.end and play.end.reason == "Aborted by ada"
        told = {rank for rank, message in play.sent(AbortSession, play.now) if message.generation == 1}
        assert told == ({0, 1, 2} if state == "joining" else set())

    @pytest.mark.parametrize("state", ["naming", "joining", "summing"])
    def test_stop_finishes_the_round_first(self, state: str) -> None:
        play = training(*[(10.0,)] * 4, samples=6000)
        condition = {"summing": lambda: bool(play.sent(SyncNow))}.get(state, lambda: play.session.state == state)
        if state != "summing":
            play.kill(3)
        until(play, condition)
        play.operate("stop", by="ada")
        play.run()
        assert play.end and play.end.phase == "done" and play.end.reason.startswith("Stopped by ada after round 0")
        assert [row["round"] for row in play.rows("checkpoints")] == [0]


class TestBearer:
    """Whoever hands over the consensus, which the controller does not have."""

    def saving(self, **changes: Any) -> Attended:
        play = training(*[(10.0,)] * 3, samples=60, **changes)
        deaf(play, RequestLocalState)
        until(play, lambda: bool(play.sent(RequestLocalState)))
        return play

    def bearers(self, play: Attended) -> list[int]:
        return [rank for rank, message in play.sent(RequestLocalState) if message.consensus]

    def written(self, play: Attended) -> list[WriteCheckpoint]:
        return [item for _, _, item in play.log if isinstance(item, WriteCheckpoint)]

    def test_one_rank_bears_it_and_the_bundle_names_it(self) -> None:
        play = training(*[(10.0,)] * 3, samples=60)
        play.run()
        assert self.bearers(play) == [0]
        assert [write.consensus_of for write in self.written(play)] == [0]

    def test_its_death_at_the_end_makes_another_one_the_bearer(self) -> None:
        play = self.saving()
        play.intercept = lambda effect: False
        play.kill(0)
        play.run()
        assert play.end and play.end.phase == "done"
        assert [write.consensus_of for write in self.written(play)] == [1]
        assert "died before it had handed over the consensus" in play.texts("checkpoint_failed")[0]

    def test_its_silence_at_the_end_makes_another_one_the_bearer(self) -> None:
        play = self.saving(stall_seconds=300.0)

        def swallow(effect: Effect) -> bool:
            asks = isinstance(effect, SendRank) and isinstance(effect.message, RequestLocalState)
            return asks and effect.rank == 0  # type: ignore[union-attr]

        play.intercept = swallow
        play.run(until=play.now + 1000.0)
        assert self.bearers(play) == [0, 1]
        assert [write.consensus_of for write in self.written(play)] == [1]
        assert play.end and play.end.phase == "done"

    def test_when_all_are_silent_the_end_is_a_failure_that_says_so(self) -> None:
        play = self.saving(stall_seconds=300.0)
        play.run(until=play.now + 2000.0)
        assert self.bearers(play) == [0, 1, 2]
        assert play.end and play.end.phase == "failed" and "who could hand over the consensus" in play.end.reason
        assert self.written(play) == []

    def test_its_death_in_the_middle_of_the_run_costs_that_checkpoint_and_the_next_round_saves(self) -> None:
        play = training(*[(10.0,)] * 3, samples=600, checkpoint_rounds=2, checkpoint_epochs=None)
        deaf(play, RequestLocalState)
        until(play, lambda: bool(play.sent(RequestLocalState)))
        play.intercept = lambda effect: False
        play.kill(self.bearers(play)[0])
        play.run()
        assert play.end and play.end.phase == "done"
        assert play.texts("checkpoint_failed")
        rounds = [row["round"] for row in play.rows("checkpoints")]
        assert rounds[0] == 2, "the round after the one whose checkpoint failed"

    def test_who_scores_bears_nothing_if_another_one_can(self) -> None:
        play = training(*[(10.0,)] * 3, samples=60, epochs=2, checkpoint_epochs=1)
        play.run()
        scorer = play.sent(Evaluate)[0][0]
        assert scorer not in self.bearers(play)[:1]


def test_plans_wait_for_no_session() -> None:
    """A death in the middle of a window: the others train on, and the session is made when the round needs it."""
    play = training(*[(50.0,)] * 3)
    play.kill(2)
    assert play.session.state == "none"
    assert play.sent(StartChunk) and len(play.sent(RequestSessionId)) == 1
    until(play, lambda: play.session.state == "live")
    assert play.session.ranks == (0, 1)
