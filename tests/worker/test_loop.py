"""The training loop against a scripted relay: what is trained, weighed, adopted, timed and told."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from rank_rig import JOBS, Cohort, RankRig, chunk_of, plan, start_rank

from wire.messages import (
    BatchDone,
    ChunkDone,
    DeclareDead,
    EvalResult,
    Evaluate,
    Exiting,
    LocalState,
    RankReady,
    RequestLocalState,
    RequestParams,
    Rewind,
    RoundCommitted,
    Shutdown,
    SnapshotReady,
    StartChunk,
    SyncAck,
    Update,
)
from worker.control import IllegalMessage, Leave
from worker.rank_link import LinkLost

ODO = "odometer.py:Odometer"


def odometers(tmp_path: Path, count: int, **changes: object) -> Cohort:
    samples = 256
    plans = plan(ODO, total_samples=samples, params={"samples": samples}, **changes)
    return Cohort([start_rank(tmp_path, plans, rank) for rank in range(count)])


def odometer(rig: RankRig) -> float:
    return float(rig.workload.trainer.model.w.detach())


@pytest.mark.parametrize(
    ("counts", "gamma", "moved"),
    [
        ((3, 1), 1.0, 2.5),
        ((3, 1), 0.0, 2.0),
        ((4, 1), 1.0, 3.4),
        ((6, 2, 1), 1.0, 41 / 9),
        ((5, 5), 1.0, 5.0),
        ((3, 0), 1.0, 3.0),
        ((3, 0), 0.0, 3.0),
        ((4, 1), -1.0, 2 / 1.25),
    ],
)
def test_a_window_moves_the_odometer_by_the_work_weighted_mean(
    tmp_path: Path, counts: tuple[int, ...], gamma: float, moved: float
) -> None:
    cohort = odometers(tmp_path, len(counts), gamma=gamma)
    cohort.reduce(-1, initial=True)
    for number in range(3):
        chunks = {rank: chunk_of(n, offset=rank * 32, epoch=number) for rank, n in enumerate(counts) if n}
        cohort.window(chunks, number)
        assert [odometer(rig) for rig in cohort.ranks] == pytest.approx([moved * (number + 1)] * len(counts), rel=1e-6)
    cohort.leave()


def test_an_attempt_that_was_aborted_neither_loses_nor_doubles_work(tmp_path: Path) -> None:
    cohort = odometers(tmp_path, 2)
    cohort.reduce(-1, initial=True, attempts=2)
    cohort.window({0: chunk_of(3), 1: chunk_of(1, offset=64)}, 0, attempts=3)
    assert odometer(cohort.ranks[0]) == 2.5
    cohort.window({0: chunk_of(1, epoch=1), 1: chunk_of(1, offset=64, epoch=1)}, 1)
    assert odometer(cohort.ranks[1]) == 3.5
    cohort.leave()


def test_everybody_starts_from_rank_zero(tmp_path: Path) -> None:
    plans = plan("sized.py:Sized", total_samples=32)
    cohort = Cohort([start_rank(tmp_path, plans, rank) for rank in range(2)])
    with torch.no_grad():
        cohort.ranks[1].workload.trainer.model.weight.fill_(7.0)
    start = cohort.ranks[0].workload.trainer.model.weight.clone()
    cohort.reduce(-1, initial=True)
    for rig in cohort.ranks:
        assert torch.equal(rig.workload.trainer.model.weight, start)
    cohort.leave()


@pytest.mark.parametrize("mode", ["cpu_sync", "cpu_async"])
def test_a_commit_that_went_with_its_controller_is_not_adopted(tmp_path: Path, mode: str) -> None:
    """The consensus lay in the memory of a process that is gone: the rank holds the round before, says so, and goes
    on from whatever the next controller brings."""
    cohort = odometers(tmp_path, 2, mode=mode)
    cohort.reduce(-1, initial=True)
    (before, _) = cohort.window({0: chunk_of(2), 1: chunk_of(2, offset=64)}, 0)
    for number, rig in enumerate(cohort.ranks):
        rig.train(chunk_of(3, offset=16 + 64 * number))
        rig.send(RequestParams(round=1, attempt=0, initial=False))
        assert rig.expect(SnapshotReady).steps == 3
        gone = RoundCommitted(1, 0, realized=True, buffers_realized=True, consensus="/proc/4194305/fd/9")
        rig.send(gone, Rewind(reason="gone"))
        ready = rig.expect(RankReady)
        assert (ready.held_round, ready.held_hash, odometer(rig)) == (0, before.params_hash, 2.0)
    cohort.reduce(-1, initial=True)
    cohort.window({0: chunk_of(3, offset=16), 1: chunk_of(3, offset=80)}, 2)
    assert [odometer(rig) for rig in cohort.ranks] == [5.0, 5.0]
    cohort.leave()


def test_a_round_without_work_keeps_what_each_rank_holds(tmp_path: Path) -> None:
    cohort = odometers(tmp_path, 2)
    cohort.reduce(-1, initial=True)
    cohort.window({0: chunk_of(2), 1: chunk_of(2, offset=64)}, 0)
    acks = cohort.reduce(1)
    assert [odometer(rig) for rig in cohort.ranks] == [2.0, 2.0]
    assert [ack.divergence for ack in acks] == [0.0, 0.0]
    assert acks[0].pre_norm == acks[0].post_norm == 2.0
    cohort.leave()


def test_batches_tell_time_work_and_loss(tmp_path: Path) -> None:
    rig = start_rank(tmp_path, plan("constant.py:Constant", total_samples=64, params={"nan_at": 1}))
    batches = rig.train(StartChunk(epoch=0, offset=0, size=10, batches=3, global_step=0))
    assert [batch.loss for batch in batches] == [1.5, None, 1.5]
    assert [batch.samples for batch in batches] == [4, 4, 2]
    assert [batch.steps for batch in batches] == [1, 2, 3]
    assert all(batch.batch_ms > 0 and batch.data_ms > 0 for batch in batches)
    rig.send(Shutdown(reason="enough"))
    assert rig.expect(Exiting).steps == 3
    assert rig.end() == Leave("enough", fenced=False)
    assert rig.reading().state == "exited"


class HandClock:
    """A clock that only sleeping moves, a millisecond more than asked for now and then."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds / 2 if len(self.slept) % 2 else seconds


def test_a_step_lasts_as_long_as_the_emulated_device_takes(tmp_path: Path) -> None:
    clock = HandClock()
    rig = start_rank(
        tmp_path,
        plan(ODO, total_samples=64),
        options=lambda given: replace(given, emulate_ms_per_batch=40.0, clock=clock, sleep=clock.sleep),
    )
    (batch,) = rig.train(chunk_of(1))
    assert batch.batch_ms == pytest.approx(40.0)
    assert batch.data_ms == 0.0
    assert sum(clock.slept) == pytest.approx(0.060)
    rig.send(Shutdown(reason=""))
    rig.end()


def test_waiting_packing_and_loading_are_told_apart(tmp_path: Path) -> None:
    clock = HandClock()
    rig = start_rank(
        tmp_path, plan(ODO, total_samples=64), options=lambda given: replace(given, clock=clock, sleep=clock.sleep)
    )
    cohort = Cohort([rig])
    cohort.reduce(-1, initial=True)
    rig.train(chunk_of(1))
    clock.now += 2.0  # the others are slower
    rig.send(RequestParams(round=0, attempt=0, initial=False))
    rig.expect(SnapshotReady)
    clock.now += 0.5  # the sum travels
    rig.send(RoundCommitted(round=0, attempt=0, realized=False, buffers_realized=False))
    ack = rig.expect(SyncAck)
    assert (ack.wait_ms, ack.pack_ms, ack.load_ms, ack.reduce_ms) == (2000.0, 0.0, 0.0, 500.0)
    assert ack.lr == 1.0  # the odometer's optimizer
    clock.now += 1.0
    cohort.reduce(1)
    cohort.leave()


def test_the_same_order_on_every_rank_and_another_in_every_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = tmp_path / "ledger.txt"
    monkeypatch.setenv("RANK", "x")
    plans = plan("ledger.py:Ledger", total_samples=30, params={"samples": 30, "path": str(ledger)})
    cohort = Cohort([start_rank(tmp_path, plans, rank) for rank in range(2)])
    cohort.reduce(-1, initial=True)
    for epoch in range(3):
        half = StartChunk(epoch=epoch, offset=0, size=16, batches=4, global_step=0)
        rest = StartChunk(epoch=epoch, offset=16, size=14, batches=4, global_step=0)
        cohort.window({0: half, 1: rest}, epoch)
    cohort.leave()
    rows = [tuple(map(int, line.split()[::2])) for line in ledger.read_text().splitlines()]
    orders = [[sample for number, sample in rows if number == epoch] for epoch in range(3)]
    assert all(sorted(order) == list(range(30)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_running_statistics_are_averaged_and_counters_stay_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case J05: three batches around 0 on one rank, one around 10 on the other; movers count alike."""
    plans = plan("batchnorm.py:BatchNorm", total_samples=64)
    cohort = Cohort([start_rank(tmp_path, plans, rank) for rank in range(2)])
    cohort.reduce(-1, initial=True)
    for rank, batches in ((0, 3), (1, 1)):
        monkeypatch.setenv("RANK", str(rank))
        cohort.ranks[rank].train(chunk_of(batches, offset=rank * 16))
    cohort.reduce(0)
    for rig, batches in zip(cohort.ranks, (3, 1), strict=True):
        state = rig.workload.trainer.model.state_dict()
        assert float(state["running_mean"]) == pytest.approx(0.5)
        assert float(state["running_var"]) == pytest.approx(1.1855)
        assert state["num_batches_tracked"].dtype == torch.int64
        assert int(state["num_batches_tracked"]) == batches
    cohort.leave()


SCHEDULED = """
import torch
from worker import Job

class Scheduled(Job):
    rates = []

    def build_model(self):
        return torch.nn.Linear(1, 1)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def build_scheduler(self, optimizer, total_steps):
        self.total, self.optimizer = total_steps, optimizer
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_steps)

    def train_dataset(self):
        return range(400)

    def training_step(self, model, batch):
        self.rates.append(round(self.optimizer.param_groups[0]["lr"], 6))
        return model.weight.sum() * 0
"""


def test_the_learning_rate_follows_the_cohort_not_the_rank(tmp_path: Path) -> None:
    """Case J13: 100 steps in the run, whoever makes them; a clock that never runs back or past the end."""
    (tmp_path / "scheduled.py").write_text(SCHEDULED)
    rig = start_rank(tmp_path, plan("scheduled.py:Scheduled", total_samples=400), job_dir=tmp_path)
    job = rig.workload.trainer.job
    assert job.total == 100
    rig.train(chunk_of(2, step=0))
    rig.send(Update(round=0, global_step=50))
    rig.train(chunk_of(2, offset=8, step=50))
    rig.train(chunk_of(1, offset=16, step=20))
    rig.train(chunk_of(2, offset=24, step=99))
    assert job.rates == [1.0, 0.99, 0.5, 0.49, 0.48, 0.01, 0.01]
    rig.train(chunk_of(1, offset=32, step=500))
    assert job.rates[-1] == 0.01
    rig.send(Shutdown(reason=""))
    rig.end()


def test_a_rank_whose_first_chunk_comes_late_starts_at_the_cohorts_rate(tmp_path: Path) -> None:
    (tmp_path / "scheduled.py").write_text(SCHEDULED)
    rig = start_rank(tmp_path, plan("scheduled.py:Scheduled", total_samples=400), job_dir=tmp_path)
    rig.train(chunk_of(1, step=75))
    assert rig.workload.trainer.job.rates[-1] == 0.25
    rig.send(Shutdown(reason=""))
    rig.end()


def test_the_optimizers_state_survives_rounds(tmp_path: Path) -> None:
    source = SCHEDULED.replace("Scheduled", "Momentum").replace("1.0, 0.0, total", "1.0, 1.0, total")
    source = source.replace("lr=1.0)", "lr=1.0, momentum=0.5)").replace("model.weight.sum() * 0", "-model.weight.sum()")
    (tmp_path / "momentum.py").write_text(source)
    rig = start_rank(tmp_path, plan("momentum.py:Momentum", total_samples=400), job_dir=tmp_path)
    cohort = Cohort([rig])
    cohort.reduce(-1, initial=True)
    start = float(rig.workload.trainer.model.weight.detach())
    for number in range(3):
        cohort.window({0: chunk_of(1, offset=8 * number)}, number)
    assert float(rig.workload.trainer.model.weight.detach()) - start == pytest.approx(1 + 1.5 + 1.75, rel=1e-5)
    cohort.leave()


def test_evaluation_weighs_batches_and_leaves_the_model_in_training(tmp_path: Path) -> None:
    rig = start_rank(tmp_path, plan("constant.py:Constant", total_samples=64))
    rig.send(Evaluate(epoch=3))
    result = rig.expect(EvalResult)
    assert (result.epoch, result.error) == (3, "")
    assert result.metrics == {"loss": 1.5, "mean": pytest.approx(4.5)}
    assert rig.workload.trainer.model.training
    rig.send(Shutdown(reason=""))
    rig.end()


def test_a_job_without_evaluation_says_so(tmp_path: Path) -> None:
    rig = start_rank(tmp_path, plan(ODO, total_samples=64))
    rig.send(Evaluate(epoch=0))
    result = rig.expect(EvalResult)
    assert (result.metrics, result.error) == ({}, "the job has no eval_dataset")
    rig.send(Shutdown(reason=""))
    rig.end()


def test_an_evaluation_that_fails_costs_no_rank(tmp_path: Path) -> None:
    source = (JOBS / "constant.py").read_text().replace("batch.double().mean()", "batch.no_such_method()")
    (tmp_path / "failing.py").write_text(source)
    rig = start_rank(tmp_path, plan("failing.py:Constant", total_samples=64), job_dir=tmp_path)
    rig.send(Evaluate(epoch=0))
    error = rig.expect(EvalResult).error
    assert error.startswith("failing.py:")
    assert "no_such_method" in error
    assert len(rig.train(chunk_of(2))) == 2
    rig.send(Shutdown(reason=""))
    rig.end()


def test_local_tensors_travel_as_safetensors_in_parts(tmp_path: Path) -> None:
    source = (
        (JOBS / "batchnorm.py")
        .read_text()
        .replace(
            "return nn.BatchNorm1d(1, momentum=0.1)",
            "model = nn.BatchNorm1d(1, momentum=0.1)\n"
            "        model.register_buffer('table', torch.arange(100_000))\n        return model",
        )
    )
    (tmp_path / "wide.py").write_text(source)
    rig = start_rank(tmp_path, plan("wide.py:BatchNorm", total_samples=64), job_dir=tmp_path)
    rig.send(RequestLocalState(checkpoint=9))
    parts = [rig.expect(LocalState)]
    parts += [rig.expect(LocalState) for _ in range(parts[0].parts - 1)]
    assert [(part.checkpoint, part.part, part.parts) for part in parts] == [(9, n, 4) for n in range(4)]
    assert all(len(part.data) <= 256 * 1024 for part in parts)
    tensors = safetensors.torch.load(b"".join(part.data for part in parts))
    assert {name for name in tensors if name.startswith("model.")} == {"model.num_batches_tracked", "model.table"}
    assert torch.equal(tensors["model.table"], torch.arange(100_000))
    assert tensors["model.num_batches_tracked"].shape == ()
    rig.send(Shutdown(reason=""))
    rig.end()


def test_a_model_without_local_tensors_still_hands_over_its_generators(tmp_path: Path) -> None:
    rig = start_rank(tmp_path, plan(ODO, total_samples=64))
    rig.send(RequestLocalState(checkpoint=1))
    part = rig.expect(LocalState)
    assert (part.part, part.parts) == (0, 1)
    assert safetensors.torch.load(part.data).keys() == {"rng.torch"}
    rig.send(Shutdown(reason=""))
    rig.end()


def test_the_shared_counter_follows_the_loop(tmp_path: Path) -> None:
    rig = start_rank(tmp_path, plan(ODO, total_samples=64), ready=False)
    rig.expect(RankReady)
    rig.train(chunk_of(3))
    assert rig.reading().steps == 3
    rig.send(RequestParams(round=0, attempt=0, initial=False))
    rig.expect(SnapshotReady)
    assert rig.reading().state == "reducing"
    rig.send(RoundCommitted(round=0, attempt=0, realized=False, buffers_realized=False))
    rig.expect(SyncAck)
    assert rig.reading().state == "idle"
    rig.send(Shutdown(reason=""))
    rig.end()


BLOCKED = """
import threading
import torch
from worker import Job

class Blocked(Job):
    entered, gate = threading.Event(), threading.Event()

    def build_model(self):
        return torch.nn.Linear(1, 1)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def train_dataset(self):
        return range(400)

    def training_step(self, model, batch):
        self.entered.set()
        assert self.gate.wait(20)
        return model.weight.sum()
"""


def test_a_batch_that_never_ends_shows_as_working_and_ageing(tmp_path: Path) -> None:
    (tmp_path / "blocked.py").write_text(BLOCKED)
    rig = start_rank(tmp_path, plan("blocked.py:Blocked", total_samples=400), job_dir=tmp_path)
    job = rig.workload.trainer.job
    rig.send(chunk_of(2))
    assert job.entered.wait(20)
    first, second = rig.reading(), rig.reading()
    assert (first.state, first.steps) == ("working", 0)
    assert second.age_seconds > first.age_seconds
    rig.send(Shutdown(reason="stop"))
    job.gate.set()
    while isinstance(message := rig.relay.receive(), BatchDone | ChunkDone):
        pass  # how many depends on when the order to leave arrives
    assert isinstance(message, Exiting)
    assert rig.end() == Leave("stop", fenced=False)


@pytest.mark.parametrize(
    ("send", "ends"),
    [
        pytest.param(
            lambda rig: rig.send(DeclareDead(rank=0, reason="silent")), Leave("silent", fenced=True), id="fenced"
        ),
        pytest.param(lambda rig: rig.relay.close(), LinkLost, id="relay gone"),
        pytest.param(
            lambda rig: rig.send(RoundCommitted(round=4, attempt=0, realized=True, buffers_realized=True)),
            IllegalMessage,
            id="nonsense",
        ),
    ],
)
def test_whatever_else_ends_the_loop_is_no_clean_end(
    tmp_path: Path, send: Callable[[RankRig], None], ends: Leave | type[BaseException]
) -> None:
    rig = start_rank(tmp_path, plan(ODO, total_samples=64))
    send(rig)
    outcome = rig.end()
    assert isinstance(outcome, ends) if isinstance(ends, type) else outcome == ends
    assert rig.reading().state != "exited"


def test_told_to_leave_by_a_relay_that_is_gone_already_is_a_clean_end(tmp_path: Path) -> None:
    (tmp_path / "blocked.py").write_text(BLOCKED.replace("Blocked", "Gone"))
    rig = start_rank(tmp_path, plan("blocked.py:Gone", total_samples=400), job_dir=tmp_path)
    rig.send(chunk_of(1))
    assert rig.workload.trainer.job.entered.wait(20)
    rig.send(Shutdown(reason="the run failed"))
    rig.workload.trainer.job.gate.set()
    rig.expect(BatchDone)
    rig.relay.close()
    outcome = rig.end()
    assert outcome == Leave("the run failed", fenced=False) or isinstance(outcome, LinkLost)
