"""Pack and adopt with parameters on a GPU: same figures as on the CPU, in place, fenced on both sides."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from worker.arena import AdoptResult, Arena
from worker.arena_file import ArenaFile
from worker.device_staging import DeviceStaging
from worker.write_back import WriteBack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])


def model(device: str) -> nn.Module:
    torch.manual_seed(3)
    built = nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200), nn.Linear(200, 10).to(torch.bfloat16))
    built.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
    return built.to(device)


class Built:
    """A model on a device, its arena, and a consensus."""

    def __init__(self, built: nn.Module, directory: Path, *, overlap: bool = False) -> None:
        directory.mkdir(exist_ok=True)
        self.model = built
        self.arena = Arena.for_model(built, overlap=overlap)
        self.out = self.arena.create_out(directory / "rank0.out").values
        self.file = ArenaFile.create(directory / "consensus.0", self.arena.elements)

    def adopt(self, values: np.ndarray, ahead: WriteBack | None = None) -> AdoptResult:
        self.file.values[:] = values
        return self.arena.adopt(self.file.path, ahead=ahead)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.cpu() for name, tensor in self.model.state_dict().items()}


def same(one: AdoptResult, other: AdoptResult) -> None:
    """Norms are added up in another order where tensors lie apart."""
    assert one.consensus_hash == other.consensus_hash != ""
    figures = [(result.divergence, result.pre_norm, result.post_norm) for result in (one, other)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-6)


@BOTH
def test_figures_are_those_of_the_cpu(tmp_path: Path, overlap: bool) -> None:
    cpu, gpu = (Built(model(device), tmp_path / device[:3], overlap=overlap) for device in ("cpu", "cuda:0"))
    addresses = [parameter.data_ptr() for parameter in gpu.model.parameters()]
    assert gpu.arena.layout_hash == cpu.arena.layout_hash
    for _ in range(2):
        assert cpu.arena.pack() == gpu.arena.pack() == []
        assert gpu.out.tolist() == cpu.out.tolist()
        agreed = cpu.out * np.float32(0.25)
        same(gpu.adopt(agreed), cpu.adopt(agreed))
    for name, tensor in cpu.state().items():
        assert torch.equal(tensor, gpu.state()[name]), name
    assert all(parameter.is_cuda and parameter.is_leaf for parameter in gpu.model.parameters())
    assert [parameter.data_ptr() for parameter in gpu.model.parameters()] == addresses, "loaded in place"
    assert all(tensor.device.type == "cpu" for tensor in gpu.arena.local_state().values())


@pytest.mark.parametrize("policy", [WriteBack("overwrite"), WriteBack("blend", 0.25), WriteBack("delta")])
def test_write_back_gives_the_bits_of_the_cpu(tmp_path: Path, policy: WriteBack) -> None:
    cpu, gpu = (Built(model(device), tmp_path / device[:3], overlap=True) for device in ("cpu", "cuda:0"))
    for built in (cpu, gpu):
        built.arena.pack()
        with torch.no_grad():
            for parameter in built.model.parameters():
                parameter.mul_(1.5)
    agreed = cpu.out * np.float32(0.5)
    same(gpu.adopt(agreed, policy), cpu.adopt(agreed, policy))
    for name, tensor in cpu.state().items():
        assert torch.equal(tensor, gpu.state()[name]), name


def test_frozen_parameters_are_still_there_too(tmp_path: Path) -> None:
    built = Built(model("cuda:0"), tmp_path)
    built.model[0].requires_grad_(False)
    built.arena.pack()
    built.adopt(built.out.copy())
    assert built.arena.pack() == [(0, 300 * 200 + 200)]


def test_a_model_in_two_places_keeps_both(tmp_path: Path) -> None:
    """What lives in the arena on the CPU must survive the copy from the device."""
    parts = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50).to("cuda:0"), nn.Linear(50, 50))
    built = Built(parts, tmp_path)
    before = {name: tensor.clone() for name, tensor in built.state().items()}
    built.arena.pack()
    assert all(torch.equal(tensor, before[name]) for name, tensor in built.state().items())
    built.adopt(built.out * np.float32(2.0))
    assert all(torch.equal(tensor, 2 * before[name]) for name, tensor in built.state().items())


@BOTH
def test_pack_sees_the_optimizer_step_before_it(tmp_path: Path, overlap: bool) -> None:
    """M20: no snapshot of a parameter that the stream has not finished writing."""
    built = Built(nn.Linear(4096, 4096, bias=False, device="cuda:0"), tmp_path, overlap=overlap)
    weight = built.model.weight
    with torch.no_grad():
        for step in range(50):
            weight.fill_(float(step))
            for _ in range(20):
                weight.add_(weight @ torch.zeros_like(weight))
            built.arena.pack()
            assert built.out.min() == built.out.max() == step


@BOTH
def test_an_adoption_waits_for_the_batch_before_it_and_is_over_before_the_next(tmp_path: Path, overlap: bool) -> None:
    """M20, M21: the side stream neither overtakes the training stream nor is still at work when timing goes on."""
    built = Built(nn.Linear(4096, 4096, bias=False, device="cuda:0"), tmp_path, overlap=overlap)
    weight = built.model.weight
    with torch.no_grad():
        for step in range(20):
            built.arena.pack()
            for _ in range(20):
                weight.add_(weight @ torch.zeros_like(weight))
            weight.fill_(-1.0)
            built.adopt(np.full(built.out.size, step, np.float32))
            assert built.arena._staging is not None
            assert built.arena._staging._side.query(), "nothing is left on the device"
            assert weight.min() == weight.max() == step


def test_a_host_that_cannot_pin_its_arena_copies_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.device_staging.register", lambda owner, host: False)
    cpu, gpu = (Built(model(device), tmp_path / device[:3]) for device in ("cpu", "cuda:0"))
    for built in (cpu, gpu):
        built.arena.pack()
    assert gpu.out.tolist() == cpu.out.tolist()
    agreed = cpu.out * np.float32(0.25)
    same(gpu.adopt(agreed), cpu.adopt(agreed))
    assert all(torch.equal(tensor, gpu.state()[name]) for name, tensor in cpu.state().items())


def test_an_arena_in_shared_memory_is_pinned_as_it_is() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:  # a disk's pages are not pinned
        host = torch.from_numpy(ArenaFile.create(Path(directory) / "out", 1 << 20).values)
        staging = DeviceStaging(host, torch.device("cuda:0"), overlap=False)
        assert host.is_pinned()
        del staging
        assert not host.is_pinned(), "and let go with the staging"
