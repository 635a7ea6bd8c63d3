"""Syncs among real loops over gloo, scripted: what is averaged, what an aborted attempt leaves, what a rank says."""

import logging
import os
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from collective_rig import cohort, consensus
from rank_rig import RankRig
from torch import nn

from wire.messages import (
    AbortSession,
    DeclareDead,
    NewSession,
    RequestSessionId,
    SessionIdGenerated,
    SessionLost,
    Shutdown,
    SyncRefused,
)
from worker.control import Leave
from worker.meeting import MeetingPoint

SECOND = 1.0


def bits(rig: RankRig) -> bytes:
    flat = rig.workload.flat
    assert flat is not None
    return flat.vector.numpy().tobytes()


def wait_for(condition, seconds: float = 60.0) -> None:
    """Until a rank's own thread has come so far."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.002)


@pytest.mark.parametrize(
    ("counts", "gamma", "moved"),
    [
        ((3, 1), 1.0, 2.5),
        ((4, 1), 0.0, 2.5),
        ((6, 2, 1), 1.0, 41 / 9),
        ((3, 0), 1.0, 3.0),
        ((3, 0), 0.0, 3.0),
        ((4, 1), -1.0, 2 / 1.25),
    ],
)
def test_a_window_moves_the_odometer_by_the_work_weighted_mean(
    tmp_path: Path, counts: tuple[int, ...], gamma: float, moved: float
) -> None:
    ranks = cohort(tmp_path, len(counts), gamma=gamma)
    ranks.begin()
    for number in range(2):
        acks = ranks.round(number, counts)
        expected = [moved * (number + 1)] * len(counts)
        assert ranks.odometers() == (expected if float(moved).is_integer() else pytest.approx(expected, rel=1e-6))
        assert len(set(ranks.odometers())) == 1
        assert len({ack.params_hash for ack in acks}) == 1 and acks[0].params_hash
    ranks.leave()


def test_three_to_one_is_exact_and_the_report_says_how_it_came_about(tmp_path: Path) -> None:
    ranks = cohort(tmp_path, 2)
    (joined, _) = ranks.session()
    assert joined.transport == "gloo on lo"
    ranks.reduce(-1, initial=True)
    ranks.train(0, (3, 1))
    reports = ranks.sync(0)
    assert ranks.odometers() == [3.0, 1.0]  # nothing is adopted before the commit
    assert [(one.steps, one.total_steps, one.mass, one.moved_bytes) for one in reports] == [
        (3, 4, 4.0, 4),
        (1, 4, 4.0, 4),
    ]
    acks = ranks.commit(0)
    assert ranks.odometers() == [2.5, 2.5]
    assert [(ack.pre_norm, ack.post_norm, ack.divergence) for ack in acks] == [
        (3.0, 2.5, pytest.approx(0.2)),
        (1.0, 2.5, pytest.approx(0.6)),
    ]
    assert all(ack.reduce_ms >= ack.load_ms > 0 for ack in acks)
    ranks.leave()


def test_movers_count_alike_for_buffers_and_idle_ranks_not_at_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = cohort(tmp_path, 3, "batchnorm.py:BatchNorm")
    ranks.begin()
    models = [rig.workload.trainer.model for rig in ranks.ranks]
    ranks.train(0, (3, 1, 0))
    for model, mean in zip(models, (1.0, 3.0, float("nan")), strict=True):
        model.running_mean.fill_(mean)
    with caplog.at_level(logging.DEBUG, "worker.collective"):
        ranks.sync(0)
    ranks.commit(0)
    entered = [record.getMessage() for record in caplog.records if "enter" in record.getMessage()]
    elements = ranks.ranks[0].workload.flat.vector.numel()
    for number, what in enumerate(("COUNT of 6", f"PARAM and BUFFER of {elements}"), start=1):
        assert entered.count(f"round 0.0 session 0 #{number}: enter {what}") == 3
    assert len(entered) == 6
    assert [float(model.running_mean) for model in models] == [2.0, 2.0, 2.0]
    assert [int(model.num_batches_tracked) for model in models] == [3, 1, 0]
    ranks.leave()


def test_an_idle_cohort_counts_once_and_keeps_what_each_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranks = cohort(tmp_path, 2)
    ranks.begin()
    ranks.round(0, (2, 2))
    with caplog.at_level(logging.DEBUG, "worker.collective"):
        (report, _) = ranks.sync(1)
        assert (report.total_steps, report.mass, report.moved_bytes) == (0, 0.0, 0)
        (ack, _) = ranks.commit(1)
    entered = [record.getMessage() for record in caplog.records if "enter" in record.getMessage()]
    assert entered == ["round 1.0 session 0 #1: enter COUNT of 4"] * 2
    assert (ack.divergence, ack.pre_norm, ack.post_norm, ack.params_hash) == (0.0, 2.0, 2.0, "")
    assert ranks.odometers() == [2.0, 2.0]
    ranks.leave()


def test_who_is_not_finite_stops_all_and_is_left_out_of_the_next_attempt(tmp_path: Path) -> None:
    ranks = cohort(tmp_path, 3)
    ranks.begin()
    ranks.round(0, (1, 1, 1))
    ranks.train(1, (3, 1, 4))
    with torch.no_grad():
        ranks.ranks[2].workload.trainer.model.w.fill_(float("-inf"))
    ranks.ask(1)
    assert ranks.ranks[2].expect(SyncRefused) == SyncRefused(1, 0, element=0, value="-inf")
    reports = ranks.sync(1, 1, excluded=[2])
    assert [one.steps for one in reports] == [3, 1, 0]
    ranks.commit(1, 1)
    assert ranks.odometers() == [3.5, 3.5, 3.5]
    ranks.round(2, (1, 1, 1))
    assert ranks.odometers() == [4.5, 4.5, 4.5]
    ranks.leave()


def test_excluded_among_idle_ranks_goes_back_to_the_consensus(tmp_path: Path) -> None:
    ranks = cohort(tmp_path, 2)
    ranks.begin()
    ranks.round(0, (2, 2))
    ranks.train(1, (0, 1))
    with torch.no_grad():
        ranks.ranks[1].workload.trainer.model.w.fill_(float("nan"))
    ranks.ask(1)
    ranks.ranks[1].expect(SyncRefused)
    ranks.sync(1, 1, excluded=[1])
    ranks.commit(1, 1)
    assert ranks.odometers() == [2.0, 2.0]
    ranks.leave()


def test_a_sum_that_is_aborted_has_changed_nothing_and_the_next_session_sums_right(tmp_path: Path) -> None:
    ranks = cohort(tmp_path, 3)
    ranks.begin()
    ranks.round(0, (1, 1, 1))
    ranks.train(1, (3, 1, 5))
    before = [bits(rig) for rig in ranks.ranks]
    ranks.ask(1, ranks=[0, 1])  # the third never comes
    wait_for(lambda: all(rig.reading().state == "reducing" for rig in ranks.ranks[:2]))
    began = time.monotonic()
    ranks.abort()
    ranks.nonsense()  # they hear again
    assert time.monotonic() - began < SECOND
    joined = ranks.session([0, 1])
    assert [one.transport for one in joined] == ["gloo on lo"] * 2
    assert [bits(rig) for rig in ranks.ranks] == before
    assert [one.steps for one in ranks.sync(1, 1)] == [3, 1]
    ranks.commit(1, 1)
    assert ranks.odometers() == [3.5, 3.5, 6.0]
    ranks.ranks[2].send(Shutdown(reason="out"))
    ranks.ranks.pop().end()
    ranks.leave()


def test_a_sum_that_was_complete_but_not_committed_is_made_again(tmp_path: Path) -> None:
    """Somebody died between the sum and the commit; the last consensus is still what a checkpoint would hold."""
    ranks = cohort(tmp_path, 2)
    ranks.begin()
    ranks.round(0, (1, 1))
    ranks.train(1, (3, 1))
    ranks.sync(1)
    assert consensus(ranks.ranks[0]) == [1.0]
    ranks.abort()
    ranks.session([0])
    ranks.sync(1, 1)
    ranks.commit(1, 1)
    assert ranks.odometers() == [4.0, 2.0]
    assert consensus(ranks.ranks[0]) == [4.0]
    ranks.leave()


def test_a_session_that_cannot_be_is_named(tmp_path: Path) -> None:
    (rig,) = cohort(tmp_path, 1).ranks
    rig.send(NewSession(0, b"nonsense", [0]))
    assert "none of gloo's" in rig.expect(SessionLost).reason
    rig.send(NewSession(1, MeetingPoint("127.0.0.1", 1, "key").as_bytes(), [0]))
    lost = rig.expect(SessionLost)
    assert lost.generation == 1 and "can the hosts reach each other" in lost.reason
    rig.send(NewSession(2, b"{}", [4, 5]))
    assert "no place for rank 0" in rig.expect(SessionLost).reason
    rig.send(AbortSession(9, "of which it never heard"))
    rig.send(Shutdown(reason="over"))
    assert isinstance(rig.end(), Leave)


@pytest.mark.parametrize(
    "word",
    [AbortSession(0, "nobody came"), Shutdown(reason="stopped"), DeclareDead(rank=0, reason="hung"), None],
    ids=["abort", "shutdown", "fence", "link"],
)
def test_a_rank_that_waits_for_others_to_join_hears_what_matters(tmp_path: Path, word: object) -> None:
    (rig,) = cohort(tmp_path, 1).ranks
    rig.send(RequestSessionId(0))
    rig.send(NewSession(0, rig.expect(SessionIdGenerated).id, [0, 1]))
    wait_for(lambda: rig.reading().state == "reducing")
    began = time.monotonic()
    if isinstance(word, AbortSession):
        rig.send(word)
        wait_for(lambda: rig.reading().state == "idle")
        rig.send(Shutdown(reason="over"))
    elif word is None:
        rig.relay.close()
    else:
        rig.send(word)  # type: ignore[arg-type]
    rig.end()
    assert time.monotonic() - began < SECOND


def test_ranks_learn_of_a_peer_that_is_gone_without_being_told(tmp_path: Path) -> None:
    ranks = cohort(tmp_path, 2)
    ranks.begin()
    ranks.train(0, (3, 1))
    ranks.ask(0, ranks=[0])
    wait_for(lambda: ranks.ranks[0].reading().state == "reducing")
    ranks.ranks[1].send(Shutdown(reason="gone"))
    lost = ranks.ranks[0].expect(SessionLost)
    assert lost.generation == 0 and "gloo says" in lost.reason
    ranks.ranks.pop().end()
    ranks.session([0])
    ranks.sync(0, 1)
    ranks.commit(0, 1)
    assert ranks.odometers() == [3.0]
    ranks.leave()


class Mixed(nn.Module):
    """Tied weights, another dtype, a frozen one, and buffers of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3, bias=False)
        self.two = nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight
        self.low = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.full((2,), 7.0), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))


def test_other_dtypes_and_tied_weights_are_averaged_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.trainer._build_model", lambda *_: Mixed())
    ranks = cohort(tmp_path, 2)
    ranks.begin()
    models = [rig.workload.trainer.model for rig in ranks.ranks]
    addresses = [model.low.data_ptr() for model in models]
    for number in range(2):
        for rig, value in zip(ranks.ranks, (1.0, 2.0), strict=True):
            rig.workload.trainer.step = lambda batch: 0.0  # type: ignore[method-assign]
            model = rig.workload.trainer.model
            with torch.no_grad():
                model.one.weight.fill_(value)
                model.low.fill_(value)
                model.mean.fill_(value)
                model.number.fill_(int(value))
        ranks.round(number, (1, 3))
        for model in models:
            assert torch.equal(model.one.weight, torch.full((3, 3), 1.75))
            assert model.two.weight is model.one.weight
            assert torch.equal(model.low, torch.full((5,), 1.75, dtype=torch.bfloat16))
            assert torch.equal(model.frozen, torch.full((2,), 7.0))
            assert torch.equal(model.mean, torch.full((3,), 1.5))
        assert [int(model.number) for model in models] == [1, 2]
    assert [model.low.data_ptr() for model in models] == addresses
    ranks.leave()


def test_many_rounds_leave_nothing_behind(tmp_path: Path) -> None:
    """500 of them in a thorough run."""
    ranks = cohort(tmp_path, 2)
    ranks.begin()

    def rounds(numbers: range) -> tuple[int, int, int]:
        for number in numbers:
            ranks.round(number, (1, 1))
        process = psutil.Process()
        return process.memory_info().rss, process.num_fds(), process.num_threads()

    more = 500 if os.environ.get("MARCHLINE_TEST_THOROUGH") else 100
    before = rounds(range(50))
    after = rounds(range(50, 50 + more))
    for start in range(50 + more, 50 + 6 * more, more):
        if after[1:] == before[1:]:
            break
        before, after = after, rounds(range(start, start + more))  # a thread of a test before this one went, or came
    assert after[0] - before[0] < 4 << 20
    assert after[1:] == before[1:]
    ranks.leave()
