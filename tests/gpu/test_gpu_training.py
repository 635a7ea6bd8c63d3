"""Training on a real GPU: precision, batches made ahead, what is saved and seen of it, and no memory left."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agent_rig import agent
from rank_rig import chunk_of, plan, start_rank
from tiny_controller import tiny_controller
from torch import Tensor, nn

from wire.messages import BatchDone, ChunkDone, HostHeartbeat, RankExited, RankFailed, RankReady, RunEnded, Shutdown
from worker.data import SampleFeed
from worker.device_watch import DeviceWatch
from worker.devices import find_devices
from worker.job import Job, NoParams
from worker.local_state import capture, restore
from worker.read_ahead import ReadAhead, Upload
from worker.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
DEVICE = torch.device("cuda:0")
BYTES = {"f32": 4, "bf16": 2, "fp16": 2}


class Samples:
    """Noisy samples: each is drawn anew from the host's generator, as augmentation does."""

    def __init__(self, size: int = 96, width: int = 32) -> None:
        table = torch.Generator().manual_seed(5)
        self.x = torch.randn(size, width, generator=table)
        self.y = torch.randint(0, 4, (size,), generator=table)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index] + 0.1 * torch.randn(self.x.shape[1]), "y": (self.y[index], index)}


class Dropping(Job):
    """A classifier with dropout on the GPU; ``host_noise`` draws from the host's generator in the step as well."""

    host_noise = False

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 4))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train_dataset(self) -> Any:
        return Samples()

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        assert batch["x"].is_cuda
        out = model(batch["x"] + (float(torch.rand(())) if self.host_noise else 0.0))
        self.element_size = out.element_size()
        return nn.functional.cross_entropy(out, batch["y"][0])


def trainer(tmp_path: Path, precision: str = "f32", job: Job | None = None, seed: int = 1) -> Trainer:
    return Trainer(job or Dropping(NoParams()), tmp_path, DEVICE, seed=seed, total_steps=500, precision=precision)


def batch(size: int = 48) -> Any:
    samples = Samples()
    return {"x": samples.x[:size].to(DEVICE), "y": (samples.y[:size].to(DEVICE), None)}


# ------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("precision", BYTES)
def test_a_job_learns_in_every_precision_and_its_parameters_stay_f32(tmp_path: Path, precision: str) -> None:
    one, given = trainer(tmp_path, precision), batch()
    losses = [one.step(given) for _ in range(120)]
    assert one.job.element_size == BYTES[precision]
    assert losses[-1] is not None and losses[0] is not None
    assert losses[-1] < 0.6 * losses[0]
    assert {parameter.dtype for parameter in one.model.parameters()} == {torch.float32}


class Overflowing(Dropping):
    factor = 1.0

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        return super().training_step(model, batch) * self.factor


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflowing_step_is_left_out_and_the_scale_is_saved(tmp_path: Path, fused: bool) -> None:
    class Chosen(Overflowing):
        def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.AdamW(model.parameters(), lr=3e-3, fused=fused)

    one, given = trainer(tmp_path, "fp16", Chosen(NoParams())), batch()
    one.step(given)
    before = [parameter.clone() for parameter in one.model.parameters()]
    was = one.precision.state()
    one.job.factor = 1e36
    assert one.step(given) is not None, "the loss is told as it is"
    now = one.precision.state()
    assert was is not None and now is not None
    assert now["scale"] == was["scale"] / 2
    assert all(torch.equal(a, b) for a, b in zip(before, one.model.parameters(), strict=True))
    one.advance(2)

    snapshot, error = capture(one, {})
    assert error == ""
    again = trainer(tmp_path, "fp16", Chosen(NoParams()), seed=9)
    assert restore(bytearray(b"".join(snapshot.cut())), again, own=True) == []
    assert again.precision.state() == now
    one.job.factor = 1.0
    assert one.step(given) is not None


@pytest.mark.parametrize("precision", BYTES)
def test_a_restored_rank_goes_on_to_the_bit_dropout_included(tmp_path: Path, precision: str) -> None:
    one, given = trainer(tmp_path, precision), batch()
    for _ in range(7):
        one.step(given)
    snapshot, _ = capture(one, {})
    model = {name: tensor.clone() for name, tensor in one.model.state_dict().items()}
    straight = [one.step(given) for _ in range(6)]
    again = trainer(tmp_path, precision, seed=77)
    again.model.load_state_dict(model)  # what the consensus brings
    torch.cuda.manual_seed(1234)
    assert restore(bytearray(b"".join(snapshot.cut())), again, own=True) == []
    assert [again.step(given) for _ in range(6)] == straight
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), again.model.parameters(), strict=True))


# ---------------------------------------------------------------------------------------------- batches ahead


def seeded() -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)


def feed(ahead: ReadAhead | None) -> SampleFeed:
    return SampleFeed(Samples(), Dropping(NoParams()).collate, seed=1, batch_size=8, ahead=ahead)


def test_batches_made_ahead_are_those_of_one_after_the_other_and_lie_on_the_gpu() -> None:
    """While the GPU is busy: a batch that were read before its copy is over would differ."""
    seeded()
    plain = [(given, samples) for given, samples in feed(None).batches(0, 0, 90)]
    seeded()
    ahead = ReadAhead(Upload(DEVICE))
    load = torch.randn(2048, 2048, device=DEVICE)
    count = 0
    for (given, samples), (wanted, wanted_samples) in zip(feed(ahead).batches(0, 0, 90), plain, strict=True):
        for _ in range(20):
            load = torch.tanh(load @ load)
        assert samples == wanted_samples
        assert given["x"].is_cuda
        assert given["y"][1].is_cuda
        assert torch.equal(given["x"].cpu(), wanted["x"])
        assert torch.equal(given["y"][0].cpu(), wanted["y"][0])
        assert torch.equal(given["y"][1].cpu(), wanted["y"][1])
        count += 1
    assert count == math.ceil(90 / 8)
    assert ahead.in_line is False


def test_the_copies_come_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[bool] = []
    real = Tensor.to

    def to(self: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if not self.is_cuda and options.get("non_blocking"):
            pinned.append(self.is_pinned())
        return real(self, *arguments, **options)

    monkeypatch.setattr(Tensor, "to", to)
    assert len(list(feed(ReadAhead(Upload(DEVICE))).batches(0, 0, 40))) == 5
    assert pinned == [True] * 15


@pytest.mark.parametrize("host_noise", [False, True], ids=["the GPU's dice", "the host's dice too"])
def test_training_is_the_same_to_the_bit_with_batches_ahead(tmp_path: Path, host_noise: bool) -> None:
    def trained(ahead: ReadAhead) -> tuple[list[float | None], list[Tensor]]:
        one = trainer(tmp_path)
        one.job.host_noise = host_noise
        seeded()
        losses = []
        source = feed(ahead)
        for offset in (0, 48):
            losses += [one.step(one.move(given)) for given, _ in source.batches(0, offset, 48)]
        return losses, [parameter.detach().clone() for parameter in one.model.parameters()]

    in_line = ReadAhead(Upload(DEVICE))
    in_line.in_line = True
    losses, parameters = trained(in_line)
    ahead = ReadAhead(Upload(DEVICE))
    again, same = trained(ahead)
    assert again == losses
    assert all(torch.equal(a, b) for a, b in zip(parameters, same, strict=True))
    assert ahead.in_line is host_noise


def test_a_rank_on_a_gpu_has_its_batches_made_ahead(tmp_path: Path) -> None:
    plans = plan("odometer.py:Odometer", total_samples=256, params={"samples": 256}, precision="bf16")
    rig = start_rank(tmp_path, plans, device="cuda:0")
    rig.train(chunk_of(6))
    rig.train(chunk_of(6, offset=24))
    source = rig.workload.feed.ahead
    assert isinstance(source, ReadAhead)
    assert source.in_line is False
    assert rig.reading().device_peak_bytes > 0
    rig.send(Shutdown(reason=""))
    rig.end()


# ------------------------------------------------------------------------------------ what is seen, and the end of it


def test_the_library_tells_of_this_gpu() -> None:
    held = torch.zeros(1 << 28, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    (gpu, *_) = find_devices("all")
    watch = DeviceWatch([gpu], seconds=0.01)
    reading = watch.reading(gpu.device.id)
    while reading.used_bytes is None:  # until its first look
        reading = watch.reading(gpu.device.id)
    watch.close()
    assert reading.utilisation is not None and 0 <= reading.utilisation <= 100
    assert held.numel() < reading.used_bytes <= gpu.device.memory_bytes


GREEDY = """
import torch
from torch import nn
from worker import Job

class Greedy(Job):
    def build_model(self):
        return nn.Linear(4, 1)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_dataset(self):
        return [torch.ones(4) for _ in range(64)]

    batches = 0

    def training_step(self, model, batch):
        held = torch.ones(1 << 28, dtype=torch.uint8, device=batch.device)
        self.batches += 1
        if self.batches > 4:
            torch.empty(1 << 42, dtype=torch.uint8, device=batch.device)
        return model(batch).mean() + 0 * held[0]
"""


@pytest.mark.slow
async def test_a_rank_is_watched_and_one_without_memory_left_dies_by_name(tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text(GREEDY)
    job = "greedy.py:Greedy"
    options = ("--devices", "0", "--job-dir", str(tmp_path))
    async with tiny_controller() as controller, agent(controller.url, *options) as running:
        host = await controller.guest()
        await controller.admit(host, job, {}, beat=0.2)
        relay = await controller.form(host, plan(job, total_samples=64), device="cuda")
        await relay.expect(RankReady)
        await relay.send(chunk_of(4), rank=0)
        for _ in range(4):
            await relay.expect(BatchDone)
        await relay.expect(ChunkDone)
        while not (ranks := (await host.expect(HostHeartbeat)).ranks) or not ranks[0].device_peak_bytes:
            pass
        (progress,) = ranks
        assert progress.device_utilisation is not None and 0 <= progress.device_utilisation <= 100
        assert progress.device_peak_bytes >= 1 << 28
        assert progress.device_bytes is not None and progress.device_bytes > 1 << 28

        await relay.send(chunk_of(4, offset=16, step=4), rank=0)
        failed = await relay.expect(RankFailed)
        assert failed.exception == "OutOfMemoryError"
        name = torch.cuda.get_device_name(0)
        assert failed.message.startswith(f"{name} ran out of memory: this rank held 0.")
        assert "use a smaller batch_size, or leave this device out with --devices" in failed.message
        assert "Tried to allocate 4096.00 GiB" in failed.message
        cause = (await host.expect(RankExited)).cause
        assert (cause.code, cause.exception, cause.message) == (1, failed.exception, failed.message)
        assert "greedy.py" in cause.last_lines
        await host.send(RunEnded(phase="failed", reason="seen"))
        code, output = await running.ended()
    assert code == 1, output
