"""What only a rank holds comes back as it was: the next batches are the same to the bit."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from rank_rig import JOBS, plan, start_rank
from torch import nn

from wire.errands import PART_BYTES, PARTS_AHEAD
from wire.messages import FetchState, LocalState, RankReady, RequestLocalState, SavedState, Shutdown, StateTaken
from worker.handover import Fetching
from worker.job import Job
from worker.local_state import capture, restore
from worker.trainer import Trainer


class Noisy(Job):
    """Dropout, noise from every generator, a schedule, and an optimizer of the parameter's name."""

    @dataclass
    class Params:
        optimizer: str = "Adam"
        schedule: bool = True
        lr: float = 0.05

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        kind = getattr(torch.optim, self.params.optimizer)
        extra = {"momentum": 0.9} if self.params.optimizer == "SGD" else {}
        return kind(model.parameters(), lr=self.params.lr, **extra)

    def build_scheduler(self, optimizer: Any, total_steps: int) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5) if self.params.schedule else None

    def training_step(self, model: nn.Module, batch: Any) -> torch.Tensor:
        noise = random.random() + float(np.random.rand())
        return (model(batch) + noise).square().mean()


def trainer(tmp_path: Path, seed: int = 1, **params: Any) -> Trainer:
    return Trainer(Noisy(Noisy.Params(**params)), tmp_path, torch.device("cpu"), seed=seed, total_steps=40)


def work(one: Trainer, clock: int, batches: int) -> list[float | None]:
    losses = []
    for n in range(batches):
        one.advance(clock + n)
        losses.append(one.step(torch.linspace(0, 1, 24).reshape(6, 4) * (n + 1)))
    return losses


def local(one: Trainer) -> dict[str, torch.Tensor]:
    return {name: t for name, t in one.model.state_dict().items() if not t.is_floating_point()}


def body(one: Trainer) -> bytearray:
    snapshot, error = capture(one, local(one))
    assert error == ""
    parts = list(snapshot.cut())
    assert len(parts) == snapshot.parts
    whole = bytearray(b"".join(parts))
    assert len(whole) == snapshot.size
    return whole


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adamax"])
@pytest.mark.parametrize("schedule", [True, False])
def test_a_restored_rank_goes_on_to_the_bit(tmp_path: Path, optimizer: str, schedule: bool) -> None:
    first = trainer(tmp_path, optimizer=optimizer, schedule=schedule)
    work(first, 0, 7)
    saved, model = body(first), {name: t.clone() for name, t in first.model.state_dict().items()}
    straight = work(first, 7, 5)

    again = trainer(tmp_path, seed=99, optimizer=optimizer, schedule=schedule)
    floats = {name: t for name, t in model.items() if t.is_floating_point()}  # what the consensus brings
    again.model.load_state_dict(floats, strict=False)
    assert restore(saved, again, own=True) == []
    assert local(again)["1.num_batches_tracked"] == 7
    again.advance(7)
    assert work(again, 7, 5) == straight
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), first.model.parameters(), strict=True))


def test_it_is_a_plain_safetensors_body(tmp_path: Path) -> None:
    one = trainer(tmp_path)
    work(one, 0, 2)
    tensors = safetensors.torch.load(bytes(body(one)))
    assert {"rng.torch", "model.1.num_batches_tracked"} < tensors.keys()
    assert sum(name.startswith("optimizer.") for name in tensors) == 18, "two moments and a step for six parameters"


def test_another_ranks_state_brings_its_moments_and_not_its_dice(tmp_path: Path) -> None:
    one, two = trainer(tmp_path), trainer(tmp_path)
    work(one, 0, 3)
    saved = body(one)
    torch.manual_seed(5)
    dice = torch.get_rng_state()
    assert restore(saved, two, own=False) == []
    assert torch.equal(torch.get_rng_state(), dice)
    assert float(two.optimizer.state[next(two.model.parameters())]["step"]) == 3.0


def test_another_optimizer_begins_anew_and_says_so(tmp_path: Path) -> None:
    one, two = trainer(tmp_path, optimizer="Adam"), trainer(tmp_path, optimizer="SGD")
    work(one, 0, 3)
    (note,) = restore(body(one), two, own=False)
    assert "SGD" in note
    assert "Adam" in note
    assert len(two.optimizer.state) == 0


def test_rates_follow_the_job_as_it_is_now_when_its_parameters_changed(tmp_path: Path) -> None:
    one = trainer(tmp_path, schedule=False, lr=0.05)
    work(one, 0, 2)
    one.optimizer.param_groups[0]["lr"] = 0.007  # the job lowered it by hand
    saved = body(one)
    same, other = trainer(tmp_path, schedule=False, lr=0.05), trainer(tmp_path, schedule=False, lr=0.5)
    assert restore(saved, same, own=True) == []
    assert same.learning_rate() == 0.007
    assert restore(saved, other, own=True) == []
    assert other.learning_rate() == 0.5


def test_an_optimizer_that_keeps_what_cannot_be_saved_costs_only_its_own_state(tmp_path: Path) -> None:
    one = trainer(tmp_path)
    work(one, 0, 1)
    one.optimizer.state[next(one.model.parameters())]["friend"] = object()
    snapshot, error = capture(one, local(one))
    assert error == "the optimizer's state: it holds a object"
    (note,) = restore(bytearray(b"".join(snapshot.cut())), trainer(tmp_path), own=True)
    assert "no optimizer state was saved" in note


@pytest.mark.parametrize("spoilt", [b"", b"\xff" * 40, b"\x02\0\0\0\0\0\0\0{}"])
def test_what_is_no_state_is_not_taken_up(tmp_path: Path, spoilt: bytes) -> None:
    (note,) = restore(bytearray(spoilt), trainer(tmp_path), own=True)
    assert "begins anew" in note


# ------------------------------------------------------------------------------------------------- in parts


def test_fetching_keeps_a_few_parts_ahead_whatever_their_order() -> None:
    fetching, parts = Fetching(), 30
    waiting = fetching.first()
    assert waiting == [FetchState(part=0)]
    asked: list[int] = []
    while not fetching.done:
        request = waiting.pop(-1)
        asked.append(request.part)
        waiting += fetching.take(SavedState(request.part, parts, bytes([request.part]), own=False))
        assert len(waiting) <= PARTS_AHEAD
    assert sorted(asked) == list(range(parts))
    assert fetching.body == bytes(range(parts))
    assert not fetching.own


def test_nothing_saved_is_an_answer() -> None:
    fetching = Fetching()
    fetching.first()
    assert fetching.take(SavedState(0, 0, b"")) == []
    assert fetching.done
    assert fetching.body is None


WIDE = """
import torch
from torch import nn
from odometer import Odometer

class Wide(Odometer):
    def build_model(self):
        model = super().build_model()
        model.register_buffer("table", torch.arange(%d))
        return model
"""


def test_a_rank_sends_no_more_than_it_was_granted_and_trains_on_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "odometer.py").write_text((JOBS / "odometer.py").read_text())
    (tmp_path / "wide.py").write_text(WIDE % (PART_BYTES // 8 * 12))
    from wire.messages import BatchDone, ChunkDone, StartChunk

    rig = start_rank(tmp_path, plan("wide.py:Wide", total_samples=64), job_dir=tmp_path)
    rig.send(RequestLocalState(checkpoint=1), StartChunk(0, 0, 8, 2, 0))
    heard = [rig.relay.receive() for _ in range(PARTS_AHEAD + 3)]
    parts = [message for message in heard if isinstance(message, LocalState)]
    assert [part.part for part in parts] == list(range(PARTS_AHEAD)), "then it waits for a grant"
    assert sum(isinstance(message, BatchDone | ChunkDone) for message in heard) == 3, "and its news goes on"
    assert parts[0].elapsed_ms > 0.0
    for part in range(parts[0].parts):
        rig.send(StateTaken(checkpoint=1, part=part))
    rest = [rig.expect(LocalState) for _ in range(parts[0].parts - PARTS_AHEAD)]
    assert rest[-1].part == parts[0].parts - 1
    rig.send(Shutdown(reason=""))
    rig.end()


def test_a_resumed_rank_fetches_its_state_before_it_is_ready(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    rig = start_rank(first, plan("odometer.py:Odometer", total_samples=64, params={"momentum": 0.9}))
    from wire.messages import StartChunk

    rig.train(StartChunk(0, 0, 8, 2, 0))
    rig.send(RequestLocalState(checkpoint=1))
    saved = rig.expect(LocalState)
    rig.send(Shutdown(reason=""))
    rig.end()

    def resumed(options: Any) -> Any:
        from dataclasses import replace

        return replace(options, resumed=True)

    again = start_rank(
        second,
        plan("odometer.py:Odometer", total_samples=64, params={"momentum": 0.9}),
        ready=False,
        options=resumed,
    )
    assert again.expect(FetchState) == FetchState(part=0)
    again.send(SavedState(0, 1, saved.data))
    assert again.expect(RankReady).notes == []
    optimizer = again.workload.trainer.optimizer
    (state,) = optimizer.state.values()
    assert float(state["momentum_buffer"]) == pytest.approx(-1.9)
    again.send(Shutdown(reason=""))
    again.end()


def test_a_rank_that_is_fetching_can_be_told_to_leave(tmp_path: Path) -> None:
    from dataclasses import replace

    rig = start_rank(
        tmp_path,
        plan("odometer.py:Odometer", total_samples=64),
        ready=False,
        options=lambda options: replace(options, resumed=True),
    )
    rig.expect(FetchState)
    rig.send(Shutdown(reason="the cohort could not form"))
    leave = rig.end()
    assert getattr(leave, "reason", "") == "the cohort could not form"
