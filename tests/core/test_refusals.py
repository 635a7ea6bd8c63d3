"""Contributions that are not finite: who is left out, what is lost, and when the run goes on without a rank."""

from __future__ import annotations

from typing import Any

import pytest
from rehearsal import Rehearsal
from test_cohort import formed

from backend.core.refusals import IN_A_ROW, locate, spot
from backend.core.vocabulary import Effect, NonFiniteValue, RoundBroken, RoundFinished, SendRank, SendRelay
from backend.core.work import EpochPool, Range
from simulation.script import Script
from simulation.theatre import Theatre
from simulation.trial import Trial, hold
from wire.messages import DeclareDead, RequestParams, TensorSpec

LAYOUT = [
    TensorSpec(name="embed.weight", section="params", dtype="float32", shape=[3, 4], offset=0),
    TensorSpec(name="head.weight", section="params", dtype="float32", shape=[3, 4], offset=-1, alias_of="embed.weight"),
    TensorSpec(name="empty", section="params", dtype="float32", shape=[0, 7], offset=12),
    TensorSpec(name="scale", section="params", dtype="float32", shape=[], offset=12),
    TensorSpec(name="norm.running_var", section="buffers", dtype="float32", shape=[2, 1, 2], offset=13),
    TensorSpec(name="batches", section="local", dtype="int64", shape=[1]),
]


@pytest.mark.parametrize(
    ("element", "words"),
    [
        (0, "embed.weight[0, 0]"),
        (7, "embed.weight[1, 3]"),
        (11, "embed.weight[2, 3]"),
        (12, "scale"),
        (13, "norm.running_var[0, 0, 0]"),
        (16, "norm.running_var[1, 0, 1]"),
        (17, "element 17, which is no tensor's"),
        (-1, "element -1, which is no tensor's"),
    ],
)
def test_an_element_has_a_tensor_and_an_index(element: int, words: str) -> None:
    assert spot(LAYOUT, element) == words


def test_every_element_of_a_tensor_has_its_own_index() -> None:
    assert len({str(locate(LAYOUT, element)) for element in range(17)}) == 17


# --------------------------------------------------------------------------------------------------- the pool


def test_lost_samples_are_neither_dealt_again_nor_accepted() -> None:
    pool = EpochPool(0, samples=11, batch_size=4)
    for rank in (0, 1):
        piece = pool.take(1, rank)
        assert piece is not None
        pool.deliver(rank, piece.offset, piece.size)
    assert pool.lose(1, 1, "non-finite") == 4
    pool.check()
    assert pool.accept([0, 1]) == {0: 4, 1: 0}
    assert pool.uncovered() == [Range(8, 3)], "what a resumed run has to do"
    assert pool.remaining_batches == 1
    assert pool.forfeit(1) == []
    rest = pool.take(5, 1)
    assert rest == Range(8, 3)
    pool.deliver(1, 8, 3)
    pool.accept([1])
    pool.check()
    assert pool.is_done
    assert (pool.accepted_samples, pool.lost_samples) == (7, 4)
    assert [lost.row() for lost in pool.lost] == [{"offset": 4, "size": 4, "rank": 1, "reason": "non-finite"}]


def test_only_the_first_batches_are_lost_of_a_rank_that_works_ahead() -> None:
    pool = EpochPool(0, samples=40, batch_size=4)
    pool.take(3, 0)
    pool.take(3, 0)
    assert pool.lose(0, 4, "non-finite") == 16
    assert pool.in_flight_ranges(0) == [Range(16, 8)]
    assert pool.lose(0, 99, "non-finite") == 8, "all that it holds"
    assert pool.lose(0, 1, "non-finite") == 0
    pool.check()


# ----------------------------------------------------------------------------------------------- the cohort


def trial(*acts: str, ranks: int = 2, **run: object) -> Trial:
    """One rank a host and two batches each a window, and what goes wrong. The oracle checks every law."""
    counts = ",".join(["2"] * ranks)
    settings: dict[str, object] = {"samples": 24, "batch_size": 1, "quorum": ranks, "target": ranks}
    settings |= {"fixed_counts": counts} | run
    lines = ["run " + " ".join(f"{key}={value}" for key, value in settings.items())]
    lines += [f"host h{rank} 10" for rank in range(ranks)]
    played = hold(Script.parse("\n".join([*lines, *acts])))
    assert played.failure is None, played.transcript()
    return played


def outcome(play: Theatre) -> tuple[str, str]:
    assert play.end is not None
    return play.end.phase, play.end.reason


def lost(play: Theatre) -> list[dict[str, Any]]:
    return [piece for row in play.rows("epochs") for piece in row.get("samples_lost", ())]


def test_the_round_is_summed_without_the_refused_rank() -> None:
    play = trial("when commit 0 nan 1").theatre
    assert outcome(play) == ("done", "The epoch is trained, but 2 samples are lost to values that are not finite")
    rounds = play.rows("rounds")
    assert rounds[1]["realized"] == {0: 2, 1: 0}
    assert [row["samples"] for row in rounds] == [4, 2, 4, 4, 4, 4]
    assert lost(play) == [{"offset": 6, "size": 2, "rank": 1, "reason": "non-finite"}]
    assert play.ranks[0].w == play.ranks[1].w == 12.0, "six windows of two batches each"
    event = next(row for row in play.rows("events") if row["kind"] == "non_finite")
    said = {"ranks": [1], "host": "h1", "devices": ["cpu:0"], "tensor": "w", "index": [0], "value": "nan"}
    assert (event["level"], event["data"]) == ("warning", said | {"samples": {1: 2}})
    view = play.cohort.snapshot(play.now)
    assert [rank["exclusions"] for rank in view["ranks"]] == [0, 1]
    assert view["samples_lost"] == 2


def test_the_loss_of_a_round_is_that_of_the_ranks_in_it() -> None:
    rounds = trial("when commit 0 nan 1", samples=12).theatre.rows("rounds")
    # The played loss is one over the rank's steps, so after two batches each: 1/3 and 1/4, rank 0's only.
    assert rounds[1]["loss"] == pytest.approx((1 / 3 + 1 / 4) / 2)
    everybody = trial("when commit 0 nan 1", "when commit 0 nan 0", samples=12).theatre.rows("rounds")
    assert everybody[1]["loss"] is None


def test_a_round_in_which_everybody_is_refused_heals_everybody() -> None:
    play = trial("when commit 0 nan 0", "when commit 0 nan 1").theatre
    assert outcome(play) == ("done", "The epoch is trained, but 4 samples are lost to values that are not finite")
    assert play.rows("rounds")[1]["mass"] == 0.0
    assert [rank.w for rank in play.ranks.values()] == [10.0, 10.0]


def test_the_policy_stop_ends_the_run_with_the_last_consensus_saved() -> None:
    play = trial("when commit 0 nan 1", non_finite="stop").theatre
    assert outcome(play) == ("failed", "NonFinite: Round 1 cannot be summed: rank 1 (h1/cpu:0) contributed nan in w[0]")
    assert len(play.rows("checkpoints")) == 1
    assert play.rows("deaths") == []


def test_a_rank_that_is_refused_too_often_in_a_row_is_dead_and_the_others_go_on() -> None:
    played = trial("when commit 0 nan 2 1000", ranks=3, samples=48)
    play = played.theatre
    assert outcome(play)[0] == "done"
    (death,) = play.rows("deaths")
    assert death["reason"] == "3 of its contributions in a row were not finite, the last one in w[0]"
    assert death["returned_samples"] == 0, "what made it diverge three times is not given to the others"
    assert len(lost(play)) == IN_A_ROW
    notices = [e for _, _, e in played.log.entries if isinstance(e, SendRelay) and isinstance(e.message, DeclareDead)]
    assert [effect.host for effect in notices] == [0, 1, 2], "its own relay too, for its process lives on"


def test_a_contribution_in_between_starts_the_count_anew() -> None:
    play = trial(*(f"when commit {number} nan 1" for number in (0, 1, 3, 4, 6)), samples=60).theatre
    assert outcome(play)[0] == "done"
    assert play.rows("deaths") == []
    assert play.cohort.snapshot(play.now)["ranks"][1]["exclusions"] == 5


def test_when_nobody_recovers_the_run_fails_and_says_why() -> None:
    play = trial("when commit 0 nan 0 1000", "when commit 0 nan 1 1000", samples=60).theatre
    phase, reason = outcome(play)
    assert phase == "failed"
    assert reason.startswith("AllRanksLost: All 2 ranks are dead") and "contributed nan in w[0]" in reason


def test_a_run_that_accepted_nothing_is_not_done() -> None:
    phase, reason = outcome(trial("when commit -1 nan 0", "when commit -1 nan 1", samples=4).theatre)
    assert phase == "failed"
    assert reason == "Not one sample was accepted. The last refusal: rank 1 (h1/cpu:0) contributed nan in w[0]"


def test_what_a_rank_did_ahead_of_its_refused_snapshot_is_lost_too_and_the_rest_of_its_chunk_counts() -> None:
    play = trial("when commit 0 nan 0", mode="cpu_async", max_overshoot=8, reduce=0.03, samples=60).theatre
    assert outcome(play)[0] == "done"
    restart = next(row for row in play.rows("events") if row["kind"] == "rank_restarted")
    assert restart["data"]["samples"] > 0
    (first, *_) = lost(play)
    refused = next(row for row in play.rows("events") if row["kind"] == "non_finite")
    assert sum(piece["size"] for piece in lost(play)) == refused["data"]["samples"][0] + restart["data"]["samples"]
    assert first["rank"] == 0


@pytest.mark.parametrize("mode", ["cpu_cadence", "cpu_async"])
@pytest.mark.parametrize("act", ["kill 1", "kill 0", "unplug h1", "nan 0", "nan 2"])
@pytest.mark.parametrize("after", [0.0, 0.01, 0.03, 0.04, 0.07])
def test_what_goes_wrong_around_a_refusal_breaks_no_law(mode: str, act: str, after: float) -> None:
    world = {"mode": mode, "ranks": 3, "reduce": 0.03, "samples": 60}
    log = trial("when commit 0 nan 1", **world).log.entries  # type: ignore[arg-type]
    refused = next(now for now, _, item in log if isinstance(item, RoundBroken))
    play = trial("when commit 0 nan 1", f"at {refused + after:.4f} {act}", **world).theatre  # type: ignore[arg-type]
    assert outcome(play)[0] == "done"


# -------------------------------------------------------------------------- what the reduce plane may also say


def summing(*hosts: tuple[float, ...], number: int = 1) -> Rehearsal:
    """A cohort whose round ``number`` is open and not summed."""
    play = formed(*hosts, samples=24, fixed_counts=tuple(2 for ms in hosts for _ in ms))
    play.plane.fixed_seconds = 1.0
    while play.cohort.march is None or play.cohort.march.cycle.phase != "pending" or opened(play)[0] < number:
        play.run(until=play.now + 0.001)
    return play


def opened(play: Rehearsal) -> tuple[int, int]:
    march = play.cohort.march
    assert march is not None and march.cycle.open is not None
    return march.cycle.open.round, march.cycle.open.attempt


def refuse(play: Rehearsal, host: int | None, rank: int | None, value: str = "inf") -> list[Effect]:
    what = NonFiniteValue(rank, 0, value)
    return play.feed(RoundBroken(*opened(play), reason="not finite", host=host, non_finite=what))


def excluded(effects: list[Effect]) -> dict[int, bool]:
    requests = [e for e in effects if isinstance(e, SendRank) and isinstance(e.message, RequestParams)]
    return {effect.rank: effect.message.excluded for effect in requests}  # type: ignore[attr-defined]


def test_where_only_the_host_is_known_all_its_ranks_are_left_out() -> None:
    play = summing((10.0, 10.0), (10.0,))
    assert excluded(refuse(play, host=0, rank=None)) == {0: True, 1: True, 2: False}
    play.run()
    assert outcome(play)[0] == "done"
    assert play.rows("rounds")[1]["realized"] == {0: 0, 1: 0, 2: 2}
    text = next(row["text"] for row in play.rows("events") if row["kind"] == "non_finite")
    assert text.startswith("one of rank 0 (host-0/cpu:0), rank 1 (host-0/cpu:1) contributed inf in w[0]")


def test_a_host_that_is_to_contribute_nothing_and_is_not_finite_all_the_same_is_lost() -> None:
    play = summing((10.0,), (10.0,))
    refuse(play, host=1, rank=1)
    refuse(play, host=1, rank=1)
    assert [row["rank"] for row in play.rows("deaths")] == [1]
    play.run()
    assert outcome(play)[0] == "done"


def test_a_rank_that_contributes_although_it_is_left_out_is_not_believed() -> None:
    play = summing((10.0,), (10.0,))
    refuse(play, host=1, rank=1)
    number, attempt = opened(play)
    finished = RoundFinished(number, attempt, True, True, {0: 2, 1: 2}, 4.0, 4, 4, 0.0)
    play.feed(finished)
    (death,) = play.rows("deaths")
    assert "left out of this round" in death["reason"]


def test_a_sum_that_is_not_finite_though_every_part_is_ends_the_run() -> None:
    play = summing((10.0,), (10.0,))
    for _ in range(3):
        assert play.end is None
        refuse(play, host=None, rank=None)
    play.run()
    assert outcome(play)[0] == "failed"
    assert outcome(play)[1].startswith("RepeatedFailure: round 1 cannot be summed")


def test_initial_parameters_that_are_not_finite_end_the_run_whatever_the_policy() -> None:
    play = summing((10.0, 10.0), (10.0,), number=-1)
    refuse(play, host=0, rank=None, value="nan")
    what = "rank 0 (host-0/cpu:0) contributed nan in w[0]"
    assert outcome(play) == ("failed", f"The initial parameters cannot be handed out: {what}")


def test_news_of_an_attempt_that_is_over_changes_nothing() -> None:
    play = summing((10.0,), (10.0,))
    refuse(play, host=1, rank=1)
    number, attempt = opened(play)
    stale = RoundBroken(number, attempt - 1, "not finite", host=0, non_finite=NonFiniteValue(0, 0, "nan"))
    assert play.feed(stale) == []
    play.run()
    assert outcome(play)[0] == "done"
