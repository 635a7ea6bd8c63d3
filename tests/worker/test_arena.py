"""Layout, pack and adopt: every kind of tensor that a model can hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from worker.arena import AdoptResult, Arena, ArenaError, model_layout
from worker.arena_file import ArenaFile


class Zoo(nn.Module):
    """One of each: tied, 0-d, empty, half, double, transposed, integer, bool, complex, not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(3.0))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.f16 = nn.Parameter(torch.tensor([1.5, -2.5], dtype=torch.float16))
        self.brain = nn.Parameter(torch.tensor([0.5], dtype=torch.bfloat16))
        self.f64 = nn.Parameter(torch.tensor([[1.0, 2.0]], dtype=torch.float64))
        self.turned = nn.Parameter(torch.arange(6, dtype=torch.float32).reshape(2, 3).t())
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("wide", torch.ones(1).expand(4))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("phase", torch.tensor([1j]))
        self.register_buffer("cache", torch.ones(5), persistent=False)


def built(model: nn.Module, directory: Path) -> tuple[Arena, np.ndarray, np.ndarray]:
    """The model's arena, its contribution and the consensus as a relay would have made it."""
    arena = Arena.for_model(model)
    out = arena.create_out(directory / "rank0.out")
    consensus = ArenaFile.create(directory / "consensus", arena.elements)
    arena.open_consensus(directory / "consensus")
    return arena, out.values, consensus.values


def sections(model: nn.Module) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for spec in model_layout(model):
        found.setdefault(spec.section, []).append(spec.name)
    return found


# ---------------------------------------------------------------------------------------------------- layout


def test_layout_of_everything() -> None:
    layout = {spec.name: spec for spec in model_layout(Zoo())}
    assert sections(Zoo()) == {
        "params": [
            "scalar", "empty", "f16", "brain", "f64", "turned", "embed.weight", "head.weight", "norm.weight",
            "norm.bias",
        ],
        "buffers": ["wide", "norm.running_mean", "norm.running_var"],
        "local": ["mask", "phase", "norm.num_batches_tracked"],
    }  # fmt: skip
    offsets = [layout[name].offset for name in layout if layout[name].offset >= 0]
    assert offsets == [0, 1, 1, 3, 4, 6, 12, 18, 20, 22, 26, 28]
    assert (layout["scalar"].shape, layout["empty"].shape, layout["turned"].shape) == ([], [0, 4], [3, 2])
    assert [layout[name].dtype for name in ("f16", "brain", "f64")] == ["float16", "bfloat16", "float64"]
    assert (layout["head.weight"].alias_of, layout["head.weight"].offset) == ("embed.weight", -1)
    assert layout["norm.num_batches_tracked"].offset == -1


def test_names_are_those_of_the_state_dict() -> None:
    assert sorted(spec.name for spec in model_layout(Zoo())) == sorted(Zoo().state_dict())


def test_a_shared_module_is_one_storage_under_two_names() -> None:
    norm = nn.BatchNorm1d(2)
    arena = Arena.for_model(nn.Sequential(norm, norm))
    assert (arena.params_elements, arena.buffers_elements) == (4, 4)
    assert {spec.name: spec.alias_of for spec in arena.layout}["1.num_batches_tracked"] == "0.num_batches_tracked"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda: nn.Linear(4, 3), id="shape"),
        pytest.param(lambda: nn.Linear(3, 4).double(), id="dtype"),
        pytest.param(lambda: nn.Linear(3, 4, bias=False), id="fewer tensors"),
        pytest.param(lambda: nn.Sequential(nn.Linear(3, 4)), id="names"),
    ],
)
def test_layout_hash_tells_models_apart(change: Callable[[], nn.Module]) -> None:
    assert Arena.for_model(nn.Linear(3, 4)).layout_hash == Arena.for_model(nn.Linear(3, 4)).layout_hash
    assert Arena.for_model(change()).layout_hash != Arena.for_model(nn.Linear(3, 4)).layout_hash


def test_layout_hash_sees_ties() -> None:
    tied, loose = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    tied[1].weight = tied[0].weight
    assert Arena.for_model(tied).layout_hash != Arena.for_model(loose).layout_hash


REFUSED = [
    pytest.param(nn.LazyLinear(3), "weight is not initialised", id="lazy"),
    pytest.param(nn.ParameterDict({"z": torch.zeros(2, dtype=torch.complex64)}), "z is torch.complex64", id="complex"),
    pytest.param(nn.ParameterDict({"s": torch.eye(2).to_sparse()}), "s has layout torch.sparse_coo", id="sparse"),
    pytest.param(nn.Linear(2, 2, device="meta"), "weight is on the meta device", id="meta"),
]


@pytest.mark.parametrize(("model", "reason"), REFUSED)
def test_what_cannot_be_averaged_is_refused_by_name(model: nn.Module, reason: str) -> None:
    with pytest.raises(ArenaError, match=reason):
        Arena.for_model(model)


# ---------------------------------------------------------------------------------------------- pack and adopt


def test_pack_scales_each_section_by_its_mass(tmp_path: Path) -> None:
    model = Zoo()
    arena, out, _ = built(model, tmp_path)
    arena.pack(3.0, 0.5)
    assert out[:6].tolist() == [9.0, 4.5, -7.5, 1.5, 3.0, 6.0]
    assert out[6:12].tolist() == [0.0, 9.0, 3.0, 12.0, 6.0, 15.0], "rows of the transposed tensor"
    assert out[22:].tolist() == [0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 0.5, 0.5]


def test_half_precision_is_scaled_in_f32(tmp_path: Path) -> None:
    model = nn.ParameterDict({"h": torch.tensor([1.0009765625, 60000.0], dtype=torch.float16)})
    arena, out, _ = built(model, tmp_path)
    arena.pack(1000.0, 1.0)
    assert out.tolist() == [1000.9765625, 6e7]


@pytest.mark.parametrize(("mass", "mover", "written"), [(0.0, 0.0, ""), (2.0, 0.0, "params"), (0.0, 1.0, "buffers")])
def test_no_mass_writes_nothing(tmp_path: Path, mass: float, mover: float, written: str) -> None:
    model = nn.BatchNorm1d(2)
    model.weight.data.fill_(math.nan)
    arena, out, _ = built(model, tmp_path)
    out[:] = 77
    arena.pack(mass, mover)
    assert (out[:4] != 77).any() == (written == "params")
    assert (out[4:] != 77).any() == (written == "buffers")


def test_a_round_trip_returns_every_tensor_as_it_was(tmp_path: Path) -> None:
    model = Zoo()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    addresses = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    arena, out, consensus = built(model, tmp_path)
    arena.pack(1.0, 1.0)
    consensus[:] = out
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9)
        model.norm.running_mean.fill_(9)
    arena.adopt()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
        assert (tensor.dtype, tensor.shape) == (before[name].dtype, before[name].shape), name
        assert tensor.data_ptr() == addresses[name], f"{name} must be loaded in place"
    assert model.head.weight is model.embed.weight


def test_adopt_works_on_leaves_that_need_gradients_and_keeps_them(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    arena, _, consensus = built(model, tmp_path)
    model(torch.ones(2)).backward()
    consensus[:] = 4
    arena.adopt()
    assert model.weight.requires_grad
    assert model.weight.is_leaf
    assert model.weight.grad is not None
    assert model.weight.tolist() == [[4.0, 4.0]]


@pytest.mark.parametrize(("params", "buffers"), [(True, False), (False, True), (False, False)])
def test_a_section_without_work_keeps_what_it_holds(tmp_path: Path, params: bool, buffers: bool) -> None:
    model = nn.BatchNorm1d(2)
    arena, _, consensus = built(model, tmp_path)
    consensus[:] = 5
    result = arena.adopt(params=params, buffers=buffers)
    assert model.weight.tolist() == ([5.0, 5.0] if params else [1.0, 1.0])
    assert model.running_mean.tolist() == ([5.0, 5.0] if buffers else [0.0, 0.0])
    if not params:
        assert result.divergence == 0.0
        assert result.pre_norm == result.post_norm == pytest.approx(math.sqrt(2))


def test_replaced_buffers_are_followed(tmp_path: Path) -> None:
    """User code often writes ``self.mean = 0.9 * self.mean + ...``, which makes a new tensor each step."""
    model = nn.Module()
    model.register_buffer("mean", torch.zeros(2))
    arena, out, consensus = built(model, tmp_path)
    model.mean = model.mean + 3
    arena.pack(1.0, 1.0)
    assert out.tolist() == [3.0, 3.0]
    consensus[:] = 8
    arena.adopt()
    assert model.mean.tolist() == [8.0, 8.0]


def test_a_changed_model_is_refused(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    arena, _, _ = built(model, tmp_path)
    model["b"].weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ArenaError, match=r"b\.weight no longer shares its storage with a\.weight"):
        arena.pack(1.0, 1.0)
    model["b"].weight = model["a"].weight = nn.Parameter(torch.ones(3, 2))
    with pytest.raises(ArenaError, match=r"a\.weight was float32 \[2, 2\] .* is float32 \[3, 2\] now"):
        arena.pack(1.0, 1.0)
    del model["b"]
    model["a"].weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ArenaError, match=r"b\.weight is gone"):
        arena.pack(1.0, 1.0)


def test_files_must_exist_and_fit(tmp_path: Path) -> None:
    arena = Arena.for_model(nn.Linear(2, 2))
    with pytest.raises(ArenaError, match="call create_out first"):
        arena.pack(1.0, 1.0)
    with pytest.raises(ArenaError, match="call open_consensus first"):
        arena.adopt()
    arena.open_consensus(tmp_path / "consensus")
    with pytest.raises(ArenaError, match="consensus cannot be opened"):
        arena.adopt()
    ArenaFile.create(tmp_path / "consensus", 7)
    with pytest.raises(ArenaError, match="28 bytes, 6 elements take 24"):
        arena.adopt()


def test_a_model_without_tensors(tmp_path: Path) -> None:
    arena, out, _ = built(nn.ReLU(), tmp_path)
    arena.pack(1.0, 1.0)
    assert out.size == 0
    assert arena.adopt() == AdoptResult(0.0, 0.0, 0.0)


# ------------------------------------------------------------------------------------------- norms, hash, local


def test_divergence_is_the_move_relative_to_the_consensus(tmp_path: Path) -> None:
    model = nn.ParameterDict({"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([[12.0]], dtype=torch.float64)})
    arena, _, consensus = built(model, tmp_path)
    consensus[:] = [3.0, 0.0, 4.0]
    result = arena.adopt()
    assert (result.pre_norm, result.post_norm) == (13.0, 5.0)
    assert result.divergence == pytest.approx(math.sqrt(16 + 64) / 5)


def test_divergence_leaves_buffers_out(tmp_path: Path) -> None:
    arena, out, consensus = built(nn.BatchNorm1d(3), tmp_path)
    arena.pack(1.0, 1.0)
    consensus[:] = out
    consensus[6:] = 100
    assert arena.adopt().divergence == 0.0


EXTREMES = [
    pytest.param([0.0, 0.0], [0.0, 0.0], 0.0, id="nothing anywhere"),
    pytest.param([3.0, 4.0], [0.0, 0.0], 1.0, id="consensus of zeros"),
    pytest.param([3e20, 4e20], [6e20, 8e20], 0.5, id="squares beyond f32"),
]


@pytest.mark.parametrize(("before", "after", "divergence"), EXTREMES)
def test_divergence_is_always_finite(
    tmp_path: Path, before: list[float], after: list[float], divergence: float
) -> None:
    arena, _, consensus = built(nn.ParameterDict({"w": torch.tensor(before)}), tmp_path)
    consensus[:] = after
    assert arena.adopt().divergence == pytest.approx(divergence)


def test_norms_of_long_tensors_are_exact_enough(tmp_path: Path) -> None:
    torch.manual_seed(0)
    values = torch.randn(300_000)
    arena, _, consensus = built(nn.ParameterDict({"w": values.clone()}), tmp_path)
    consensus[:] = 0.5 * values.numpy()
    result = arena.adopt()
    assert result.pre_norm == pytest.approx(float(values.double().norm()), rel=1e-6)
    assert result.divergence == pytest.approx(1.0, rel=1e-6)


def test_hash_is_equal_where_the_averaged_tensors_are(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(2)
    arena, _, _ = built(model, tmp_path)
    first = arena.tensors_hash()
    assert len(bytes.fromhex(first)) == 8
    model.num_batches_tracked += 5
    assert arena.tensors_hash() == first, "local tensors may differ between ranks"
    model.running_var[1] = 2
    second = arena.tensors_hash()
    assert second != first
    model.running_var[1] = 1
    model.weight.data[0] = math.nextafter(1.0, 2.0)
    assert arena.tensors_hash() == first, "a change below f32"
    model.weight.data[0] = 1.0000001
    assert arena.tensors_hash() not in (first, second)


def test_local_state_is_what_the_arena_leaves_out() -> None:
    model = Zoo()
    state = Arena.for_model(model).local_state()
    assert sorted(state) == ["mask", "norm.num_batches_tracked", "phase"]
    model.norm.num_batches_tracked += 1
    counter: Tensor = state["norm.num_batches_tracked"]
    assert (counter.item(), counter.dtype, tuple(counter.shape)) == (0, torch.int64, ())


# ------------------------------------------------------------------------------------------------------- files


def test_files_are_shared_private_and_reserved(tmp_path: Path) -> None:
    file = ArenaFile.create(tmp_path / "rank0.out", 1000)
    other = ArenaFile.open(tmp_path / "rank0.out", 1000)
    file.values[3] = 5
    assert other.values[3] == 5
    status = file.path.stat()
    assert (status.st_size, status.st_mode & 0o777) == (4000, 0o600)
    assert status.st_blocks * 512 >= 4000
    assert not other.values.flags.writeable
    file.unlink()
    file.unlink()
    assert not file.path.exists()
    assert other.values[3] == 5


def test_files_are_never_overwritten(tmp_path: Path) -> None:
    ArenaFile.create(tmp_path / "rank0.out", 1)
    with pytest.raises(ArenaError, match="exists already"):
        ArenaFile.create(tmp_path / "rank0.out", 1)


def test_links_are_not_followed(tmp_path: Path) -> None:
    ArenaFile.create(tmp_path / "real", 1)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ArenaError, match="link cannot be opened"):
        ArenaFile.open(tmp_path / "link", 1)


def test_a_full_file_system_is_an_error_with_a_name(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match=r"no room for \d+ bytes at .*rank0\.out"):
        ArenaFile.create(tmp_path / "rank0.out", 1 << 58)
    assert not (tmp_path / "rank0.out").exists()
