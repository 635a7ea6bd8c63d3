"""Layout, pack and adopt: every kind of tensor that a model can hold."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor, nn

from worker.arena import AdoptResult, Arena, ArenaError, model_layout
from worker.arena_file import ArenaFile, ConsensusFiles


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


class Built(NamedTuple):
    """A model's arena, its values' file and a consensus as a relay would have made it."""

    arena: Arena
    out: np.ndarray
    consensus: np.ndarray
    path: Path

    def adopt(self, **options: Any) -> AdoptResult:
        return self.arena.adopt(self.path, **options)


def built(model: nn.Module, directory: Path, *, overlap: bool = False) -> Built:
    arena = Arena.for_model(model, overlap=overlap)
    out = arena.create_out(directory / "rank0.out")
    consensus = ArenaFile.create(directory / "consensus.0", arena.elements)
    return Built(arena, out.values, consensus.values, consensus.path)


BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])


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

VALUES = [3.0, 1.5, -2.5, 0.5, 1.0, 2.0, 0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
"""the zoo's first twelve: rows of the transposed tensor come last"""


@BOTH
def test_the_file_holds_plain_values_in_f32(tmp_path: Path, overlap: bool) -> None:
    built_ = built(Zoo(), tmp_path, overlap=overlap)
    built_.arena.pack()
    assert built_.out[:12].tolist() == VALUES
    assert built_.out[22:].tolist() == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]


@BOTH
def test_a_round_trip_returns_every_tensor_as_it_was(tmp_path: Path, overlap: bool) -> None:
    model = Zoo()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    arena, out, consensus, path = built(model, tmp_path, overlap=overlap)
    addresses = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    arena.pack()
    consensus[:] = out
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9)
        model.norm.running_mean.fill_(9)
    arena.adopt(path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
        assert (tensor.dtype, tensor.shape) == (before[name].dtype, before[name].shape), name
        assert tensor.data_ptr() == addresses[name], f"{name} must be loaded in place"
    assert model.head.weight is model.embed.weight


@BOTH
def test_adopt_works_on_leaves_that_need_gradients_and_keeps_them(tmp_path: Path, overlap: bool) -> None:
    model = nn.Linear(2, 1)
    this = built(model, tmp_path, overlap=overlap)
    model(torch.ones(2)).backward()
    this.arena.pack()
    this.consensus[:] = 4
    this.adopt()
    assert model.weight.requires_grad
    assert model.weight.is_leaf
    assert model.weight.grad is not None
    assert model.weight.tolist() == [[4.0, 4.0]]


@BOTH
def test_autograd_hears_of_an_adoption(tmp_path: Path, overlap: bool) -> None:
    """A graph that was kept across a round must not be walked back with the new values."""
    model = nn.Linear(2, 1)
    this = built(model, tmp_path, overlap=overlap)
    loss = model(model(torch.ones(2)).expand(2)).square().sum()
    this.arena.pack()
    this.adopt()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(("params", "buffers"), [(True, False), (False, True), (False, False)])
def test_a_section_without_work_keeps_what_it_holds(tmp_path: Path, params: bool, buffers: bool) -> None:
    model = nn.BatchNorm1d(2)
    this = built(model, tmp_path)
    this.arena.pack()
    this.consensus[:] = 5
    result = this.adopt(params=params, buffers=buffers)
    assert model.weight.tolist() == ([5.0, 5.0] if params else [1.0, 1.0])
    assert model.running_mean.tolist() == ([5.0, 5.0] if buffers else [0.0, 0.0])
    if not params:
        assert result.divergence == 0.0
        assert result.pre_norm == result.post_norm == pytest.approx(math.sqrt(2))


def test_without_work_there_is_no_file_to_read(tmp_path: Path) -> None:
    arena = built(nn.BatchNorm1d(2), tmp_path).arena
    arena.pack()
    assert arena.adopt("", params=False, buffers=False).consensus_hash == ""


@BOTH
def test_replaced_buffers_are_followed(tmp_path: Path, overlap: bool) -> None:
    """User code often writes ``self.mean = 0.9 * self.mean + ...``, which makes a new tensor each step."""
    model = nn.Module()
    model.register_buffer("mean", torch.zeros(2))
    this = built(model, tmp_path, overlap=overlap)
    model.mean = model.mean + 3
    this.arena.pack()
    assert this.out.tolist() == [3.0, 3.0]
    this.consensus[:] = 8
    this.adopt()
    assert model.mean.tolist() == [8.0, 8.0]


def test_a_changed_model_is_refused(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    arena = built(model, tmp_path).arena
    model["b"].weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ArenaError, match=r"b\.weight no longer shares its storage with a\.weight"):
        arena.pack()
    model["b"].weight = model["a"].weight = nn.Parameter(torch.ones(3, 2))
    with pytest.raises(ArenaError, match=r"a\.weight was float32 \[2, 2\] .* is float32 \[3, 2\] now"):
        arena.pack()
    del model["b"]
    model["a"].weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ArenaError, match=r"b\.weight is gone"):
        arena.pack()


def test_files_must_exist_and_fit(tmp_path: Path) -> None:
    arena = Arena.for_model(nn.Linear(2, 2))
    for call in (arena.pack, arena.adopt):
        with pytest.raises(ArenaError, match="call create_out first"):
            call()
    arena.create_out(tmp_path / "rank0.out")
    with pytest.raises(ArenaError, match=r"consensus\.0 cannot be opened"):
        arena.adopt(tmp_path / "consensus.0")
    ArenaFile.create(tmp_path / "consensus.0", 7)
    with pytest.raises(ArenaError, match="28 bytes, 6 elements take 24"):
        arena.adopt(tmp_path / "consensus.0")
    with pytest.raises(ArenaError, match="no regular file of this user"):
        arena.adopt("/dev/zero")


def test_a_model_without_tensors(tmp_path: Path) -> None:
    this = built(nn.ReLU(), tmp_path)
    assert this.arena.pack() == []
    assert this.out.size == 0
    assert this.adopt(hashed=False) == AdoptResult(0.0, 0.0, 0.0)


# ------------------------------------------------------------------------------------------------ living there


class Views(nn.Module):
    """Storages that are shared in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Parameter(torch.ones(4))
        self.twin = nn.Parameter(self.tied.data)
        self.whole = nn.Parameter(torch.ones(4))
        self.part = nn.Parameter(self.whole.data[:2])
        self.seen = nn.Parameter(torch.ones(4))
        self.register_buffer("window", self.seen.data[1:], persistent=False)
        self.hidden = nn.Parameter(torch.ones(4))
        self.note = [self.hidden.data.view(2, 2)]
        self.plain = nn.Parameter(torch.ones(4))
        self.sparse_stride = nn.Parameter(torch.ones(4, 2)[:, 0])


def test_plain_tensors_live_in_the_file_and_shared_ones_do_not(tmp_path: Path) -> None:
    model = Views()
    arena, out, _, _ = built(model, tmp_path)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(10.0 + number)
    slots = {spec.name: out[spec.offset : spec.offset + 4].tolist() for spec in arena.layout if spec.offset >= 0}
    assert slots.pop("tied") == [11.0] * 4, "its twin was filled last"
    assert slots.pop("plain") == [16.0] * 4
    assert all(10.0 + n not in values for values in slots.values() for n in range(8)), slots
    assert model.tied.data_ptr() == model.twin.data_ptr()
    assert model.whole[:2].tolist() == model.part.tolist() == [13.0, 13.0]
    assert model.seen[1:].tolist() == model.window.tolist()
    assert model.note[0].flatten().tolist() == model.hidden.tolist()
    arena.pack()
    assert out[arena.layout[-1].offset :][:4].tolist() == [17.0] * 4


def test_an_optimizer_goes_on_with_parameters_that_moved_in(tmp_path: Path) -> None:
    torch.manual_seed(1)
    models = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    this = built(models[0], tmp_path)
    for step in range(4):
        batch = torch.randn(16, 8)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        this.arena.pack()
        this.consensus[:] = this.out
        this.adopt()
        expected = torch.cat(
            [
                tensor.flatten()
                for tensor in [*models[1].parameters(), *models[1].buffers()]
                if tensor.is_floating_point()
            ]
        )
        assert torch.allclose(torch.from_numpy(this.out), expected, rtol=1e-5, atol=1e-7), step


def test_in_overlap_training_goes_on_beside_the_file(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    this = built(model, tmp_path, overlap=True)
    model.weight.data.fill_(1)
    this.arena.pack()
    model.weight.data.fill_(2)
    assert this.out.tolist() == [1.0] * 4


def test_a_storage_that_the_job_replaced_is_copied_and_loaded(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    this = built(model, tmp_path)
    model.weight.data = torch.full((2, 2), 7.0)
    this.arena.pack()
    assert this.out[:4].tolist() == [7.0] * 4
    this.consensus[:] = 5
    assert this.adopt().pre_norm > 14
    assert model.weight.tolist() == [[5.0, 5.0]] * 2
    assert this.out.tolist() == [7.0] * 4 + [5.0] * 2, "only the bias lives there"
    with torch.no_grad():
        model.weight.data = model.weight.data.t()
    this.arena.pack()
    assert this.out[:4].tolist() == [5.0] * 4


def test_copies_of_a_tensor_are_not_copies_of_the_arena(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.BatchNorm1d(2))
    built(model, tmp_path)
    assert copy.deepcopy(model[1].running_mean).untyped_storage().nbytes() == 8
    torch.save(model[1].state_dict(), tmp_path / "head.pt")
    assert (tmp_path / "head.pt").stat().st_size < 10_000


# ------------------------------------------------------------------------------------------------- frozen parts


class Trunk(nn.Module):
    """A frozen trunk, in f32 and bf16, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 2).requires_grad_(False)
        self.part = nn.Parameter(torch.tensor([0.5, -0.0], dtype=torch.bfloat16), requires_grad=False)
        self.head = nn.Linear(2, 1)
        self.register_buffer("scale", torch.ones(2))


def test_the_layout_says_what_was_frozen_and_its_hash_does_not(tmp_path: Path) -> None:
    arena = Arena.for_model(Trunk())
    assert [spec.name for spec in arena.layout if spec.frozen] == ["part", "trunk.weight", "trunk.bias"]
    assert Arena.for_model(Trunk().requires_grad_(True)).layout_hash == arena.layout_hash


@BOTH
def test_frozen_parameters_that_equal_the_consensus_are_still(tmp_path: Path, overlap: bool) -> None:
    model = Trunk()
    this = built(model, tmp_path, overlap=overlap)
    assert this.arena.pack() == [], "there is no consensus yet"
    this.consensus[:] = this.out
    this.adopt()
    assert this.arena.pack() == [(0, 10)]
    model.trunk.weight.data[0, 0] = math.nextafter(float(model.trunk.weight[0, 0]), 2.0) + 1e-6
    assert this.arena.pack() == [(0, 2), (8, 10)], "what moved all the same travels"
    model.trunk.bias.requires_grad_(True)
    assert this.arena.pack() == [(0, 2)], "an equal parameter that learns is not looked at"


def test_the_sign_of_zero_is_a_difference(tmp_path: Path) -> None:
    model = Trunk()
    this = built(model, tmp_path)
    this.arena.pack()
    this.consensus[:] = this.out
    this.adopt()
    model.part.data[1] = 0.0
    assert this.arena.pack() == [(2, 10)]


# ------------------------------------------------------------------------------------------------ norms and hash


def test_divergence_is_the_move_relative_to_the_consensus(tmp_path: Path) -> None:
    model = nn.ParameterDict({"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([[12.0]], dtype=torch.float64)})
    this = built(model, tmp_path)
    this.arena.pack()
    this.consensus[:] = [3.0, 0.0, 4.0]
    result = this.adopt()
    assert (result.pre_norm, result.post_norm) == (13.0, 5.0)
    assert result.divergence == pytest.approx(math.sqrt(16 + 64) / 5)
    assert model["b"].tolist() == [[4.0]]


def test_divergence_leaves_buffers_out(tmp_path: Path) -> None:
    this = built(nn.BatchNorm1d(3), tmp_path)
    this.arena.pack()
    this.consensus[:] = this.out
    this.consensus[6:] = 100
    assert this.adopt().divergence == 0.0


EXTREMES = [
    pytest.param([0.0, 0.0], [0.0, 0.0], 0.0, id="nothing anywhere"),
    pytest.param([3.0, 4.0], [0.0, 0.0], 1.0, id="consensus of zeros"),
    pytest.param([3e20, 4e20], [6e20, 8e20], 0.5, id="squares beyond f32"),
]


@pytest.mark.parametrize(("before", "after", "divergence"), EXTREMES)
def test_divergence_is_always_finite(
    tmp_path: Path, before: list[float], after: list[float], divergence: float
) -> None:
    this = built(nn.ParameterDict({"w": torch.tensor(before)}), tmp_path)
    this.arena.pack()
    this.consensus[:] = after
    assert this.adopt().divergence == pytest.approx(divergence)


@BOTH
def test_norms_of_long_tensors_are_exact_enough(tmp_path: Path, overlap: bool) -> None:
    torch.manual_seed(0)
    values = torch.randn(600_001)
    this = built(nn.ParameterDict({"w": values.clone()}), tmp_path, overlap=overlap)
    this.arena.pack()
    this.consensus[:] = 0.5 * values.numpy()
    result = this.adopt()
    assert result.pre_norm == pytest.approx(float(values.double().norm()), rel=1e-6)
    assert result.divergence == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("model", [Zoo, lambda: nn.BatchNorm1d(2), lambda: nn.Linear(700, 700)])
def test_the_hash_is_that_of_the_consensus_as_it_was_read(tmp_path: Path, model: Callable[[], nn.Module]) -> None:
    """However the tensors lie: in the arena, beside it, in other types."""
    for overlap in (False, True):
        directory = tmp_path / str(overlap)
        directory.mkdir()
        this = built(model(), directory, overlap=overlap)
        this.arena.pack()
        this.consensus[:] = np.linspace(0, 1, this.consensus.size)
        assert this.adopt().consensus_hash == xxhash.xxh3_64_hexdigest(this.consensus.tobytes())
        assert this.adopt(hashed=False).consensus_hash == ""


class Large(nn.Module):
    """Parameters of several blocks, not all of them at home in the arena, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Parameter(torch.randn(300_000))
        self.short = nn.Parameter(torch.randn(7).to(torch.float16))
        self.turned = nn.Parameter(torch.randn(301, 500).t())
        self.last = nn.Parameter(torch.randn(200_001))
        self.register_buffer("mean", torch.randn(100))


@pytest.mark.parametrize("stops", [[600_000], [1, 131_072, 131_073, 400_000, 700_000]], ids=["once", "often"])
def test_looking_ahead_changes_nothing_but_when_it_is_done(tmp_path: Path, stops: list[int]) -> None:
    results = []
    for name in ("plain", "ahead"):
        directory = tmp_path / name
        directory.mkdir()
        model = Large()
        this = built(model, directory)
        this.arena.pack()
        for number, stop in enumerate(stops):
            if name == "ahead":
                this.consensus[:stop] = np.linspace(0, 1, this.consensus.size)[:stop]
                this.arena.look_ahead(this.path, stop, fresh=number == 0)
        this.consensus[:] = np.linspace(0, 1, this.consensus.size)
        results.append((this.adopt(looked=name == "ahead"), torch.cat([*map(flat, model.parameters())])))
    (plain, tensors), (ahead, tensors_ahead) = results
    assert ahead.consensus_hash == plain.consensus_hash
    assert ahead.divergence == pytest.approx(plain.divergence, rel=1e-6)
    assert (ahead.pre_norm, ahead.post_norm) == pytest.approx((plain.pre_norm, plain.post_norm), rel=1e-6)
    assert torch.equal(tensors, tensors_ahead)


def flat(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float32).reshape(-1)


def test_what_was_looked_at_of_another_attempt_is_forgotten(tmp_path: Path) -> None:
    this = built(Large(), tmp_path)
    this.arena.pack()
    this.arena.look_ahead(this.path, 500_000, fresh=True)
    this.consensus[:] = 1.0
    assert this.adopt(looked=False).consensus_hash == xxhash.xxh3_64_hexdigest(this.consensus.tobytes())
    this.arena.pack()
    this.consensus[:] = 2.0
    this.arena.look_ahead(this.path, 500_000, fresh=True)
    this.consensus[:] = 3.0
    this.arena.look_ahead(this.path, 500_000, fresh=True)
    assert this.adopt(looked=True).consensus_hash == xxhash.xxh3_64_hexdigest(this.consensus.tobytes())


@pytest.mark.parametrize(("params", "buffers"), [(True, True), (True, False), (False, True)])
def test_the_hash_sees_the_realized_sections_only(tmp_path: Path, params: bool, buffers: bool) -> None:
    this = built(nn.BatchNorm1d(1), tmp_path)
    this.arena.pack()
    before = this.adopt(params=params, buffers=buffers).consensus_hash
    for index, seen in ((0, params), (3, buffers)):
        this.consensus[index] += 1.0
        after = this.adopt(params=params, buffers=buffers).consensus_hash
        assert (after != before) == seen
        before = after


def test_the_path_may_lead_to_another_file_each_time(tmp_path: Path) -> None:
    """The controller's memory is reached as /proc/<pid>/fd/<n>, and <n> comes back for the next buffer."""
    model = nn.Linear(2, 2)
    arena = built(model, tmp_path).arena
    link = tmp_path / "n"
    for value in range(5):
        file = ArenaFile.create(tmp_path / f"buffer{value}", arena.elements)
        file.values[:] = value
        link.unlink(missing_ok=True)
        link.symlink_to(file.path)
        arena.pack()
        arena.adopt(link)
        assert model.weight.tolist() == [[float(value)] * 2] * 2


def test_few_mappings_are_kept(tmp_path: Path) -> None:
    files = ConsensusFiles(1000, kept=3)
    for number in range(6):
        ArenaFile.create(tmp_path / f"buffer{number}", 1000)
        assert not files.read(str(tmp_path / f"buffer{number}")).flags.writeable
    mapped = Path("/proc/self/maps").read_text()
    assert [number for number in range(6) if str(tmp_path / f"buffer{number}") in mapped] == [3, 4, 5]


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


@pytest.mark.parametrize("overlap", [False, True])
def test_going_back_takes_the_last_consensus_again_to_the_bit(tmp_path: Path, overlap: bool) -> None:
    """Whatever was trained, packed or seen of the next round since, on every kind of tensor."""
    model = Zoo()
    one = built(model, tmp_path, overlap=overlap)
    with pytest.raises(ArenaError, match="none to go back to"):
        one.arena.rewind()
    one.arena.pack()
    one.consensus[:] = np.arange(one.arena.elements, dtype=np.float32)
    expected = one.adopt().consensus_hash
    held = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
        model.norm.running_mean += 3
    one.arena.pack()
    assert one.arena.rewind() == expected
    assert all(torch.equal(tensor, held[name]) for name, tensor in model.state_dict().items())
