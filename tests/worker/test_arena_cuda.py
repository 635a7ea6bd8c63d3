"""Pack and adopt with parameters on a GPU: same figures as on the CPU, in place, on the training stream."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from worker.arena import Arena
from worker.arena_file import ArenaFile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


def model(device: str) -> nn.Module:
    torch.manual_seed(3)
    built = nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200), nn.Linear(200, 10).to(torch.bfloat16))
    return built.to(device)


def reduced(device: str, directory: Path) -> tuple[Arena, nn.Module, tuple[float, ...], list[float]]:
    """One round of one rank, as everybody's relay and plane would do it: divide by the mass, stage, adopt."""
    directory.mkdir()
    built = model(device)
    arena = Arena.for_model(built)
    out = arena.create_out(directory / "rank0.out")
    consensus = ArenaFile.create(directory / "consensus", arena.elements)
    arena.open_consensus(directory / "consensus")
    arena.pack(3.0, 1.0)
    consensus.values[:] = out.values * 0.25
    result = arena.adopt()
    return arena, built, (result.divergence, result.pre_norm, result.post_norm), out.values.tolist()


def test_figures_are_those_of_the_cpu(tmp_path: Path) -> None:
    cpu, _, cpu_norms, cpu_out = reduced("cpu", tmp_path / "cpu")
    gpu, built, gpu_norms, gpu_out = reduced("cuda:0", tmp_path / "gpu")
    assert gpu.layout_hash == cpu.layout_hash
    assert gpu_out == cpu_out
    assert gpu_norms == pytest.approx(cpu_norms, rel=1e-6)
    assert gpu.tensors_hash() == cpu.tensors_hash()
    assert all(parameter.is_cuda and parameter.is_leaf for parameter in built.parameters())
    assert all(tensor.device.type == "cpu" for tensor in gpu.local_state().values())


def test_pack_sees_the_optimizer_step_before_it(tmp_path: Path) -> None:
    """M20: no snapshot of a parameter that the stream has not finished writing."""
    built = nn.Linear(4096, 4096, bias=False, device="cuda:0")
    arena = Arena.for_model(built)
    out = arena.create_out(tmp_path / "rank0.out")
    with torch.no_grad():
        for step in range(50):
            built.weight.fill_(float(step))
            for _ in range(20):
                built.weight.add_(built.weight @ torch.zeros_like(built.weight))
            arena.pack(2.0, 1.0)
            assert out.values.min() == out.values.max() == 2.0 * step
