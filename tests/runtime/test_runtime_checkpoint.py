"""Checkpoints: plain PyTorch loads them strictly, and a failure leaves the older ones and nothing half-written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from bundles import Layout, noon, spec
from torch import nn

from backend.core.vocabulary import CheckpointWritten, WriteCheckpoint
from backend.runtime import tensor_file
from backend.runtime.bundle import MANIFEST, MODEL, OUTER, CheckpointPlace, read_manifest, verify
from backend.runtime.checkpoint import CheckpointWriter, Committed
from backend.runtime.tensor_file import TensorFileError


class Net(nn.Module):
    """A tied weight, several dtypes, float and integer buffers, a scalar and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)
        self.half = nn.Linear(3, 2).to(torch.bfloat16)
        self.small = nn.Parameter(torch.randn(4, dtype=torch.float16))
        self.wide = nn.Parameter(torch.randn(2, 2, dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.zeros(0, 3))


def layout_and_arena(model: nn.Module) -> tuple[Layout, np.ndarray, dict[str, torch.Tensor]]:
    """The wire's layout of a model, its consensus arena, and its local tensors."""
    params = dict(model.named_parameters(remove_duplicate=False))
    owner: dict[int, str] = {}
    layout, pieces, local, offset = [], [], {}, 0
    sections: dict[str, list[str]] = {"params": [], "buffers": [], "local": []}
    for name, tensor in model.state_dict().items():
        section = "params" if name in params else "buffers"
        sections[section if tensor.is_floating_point() else "local"].append(name)
    for section, names in sections.items():
        for name in names:
            tensor = model.state_dict()[name]
            key = tensor.data_ptr() if tensor.numel() else id(name)
            alias = owner.get(key, "")
            owner.setdefault(key, name)
            averaged = section != "local" and not alias
            dtype = str(tensor.dtype).removeprefix("torch.")
            spec = {"name": name, "section": section, "dtype": dtype, "shape": list(tensor.shape)}
            layout.append(spec | {"offset": offset if averaged else -1, "alias_of": alias})
            if averaged:
                pieces.append(tensor.float().flatten().numpy())
                offset += tensor.numel()
            elif section == "local":
                local[name] = tensor
    return layout, np.concatenate(pieces), local


Wanted = tuple[WriteCheckpoint, bytes]


def effect(layout: Layout, local: bytes, number: int = 1, keep: int = -1) -> Wanted:
    manifest = {"layout": layout, "round": 4, "loss": float("nan")}
    return WriteCheckpoint(number, "test", (0,) if local else (), manifest, keep), local


def saved_state(local: dict[str, torch.Tensor]) -> bytes:
    """A rank's own state with these local tensors of the model, and one that is not the model's."""
    named = {f"model.{name}": tensor for name, tensor in local.items()}
    return safetensors.torch.save(named | {"rng.torch": torch.zeros(8, dtype=torch.uint8)})


def write(
    place: CheckpointPlace, what: Wanted, arena: np.ndarray | None, momentum: np.ndarray | None = None
) -> CheckpointWritten:
    """As a run does: begin, take rank 0's state in two parts, complete."""
    wanted, local = what
    writer = CheckpointWriter(place, noon, {"job_hash": "j"})
    writer.open(wanted.checkpoint, Committed(arena, momentum))
    half = len(local) // 2
    for data in (local[:half], local[half:]):
        if local:
            writer.keep(wanted.checkpoint, 0, data)
    return writer.write(wanted)


@pytest.fixture
def place(tmp_path: Path) -> CheckpointPlace:
    return CheckpointPlace(tmp_path, 3)


def test_plain_pytorch_loads_it_strictly_with_its_own_dtypes_and_values(place: CheckpointPlace) -> None:
    torch.manual_seed(1)
    model = Net()
    layout, arena, local = layout_and_arena(model)
    written = write(place, effect(layout, saved_state(local)), arena)
    assert written.error == ""
    assert written.path == "runs/3/checkpoints/1/model.safetensors"
    state = safetensors.torch.load_file(place.data_dir / written.path)
    fresh = Net()
    assert fresh.load_state_dict(state, strict=True).missing_keys == []
    for name, tensor in model.state_dict().items():
        assert state[name].dtype == tensor.dtype, name
        assert state[name].shape == tensor.shape, name
        # The arena is f32: doubles come back rounded to it, everything else exactly.
        assert torch.equal(state[name], tensor.float().to(tensor.dtype)), name
    assert torch.equal(state["head.weight"], state["embed.weight"])


def test_values_are_rounded_as_the_framework_rounds_them(place: CheckpointPlace) -> None:
    values = torch.tensor([1.00390625, 1.01171875, -3.3e38, 1e-40, 65520.0, 0.1], dtype=torch.float32)
    layout = [
        {"name": name, "section": "params", "dtype": name, "shape": [6], "offset": 0, "alias_of": ""}
        for name in ("bfloat16", "float16", "float8_e5m2")
    ]
    written = write(place, effect(layout, b""), values.numpy())
    assert written.error == ""
    state = safetensors.torch.load_file(place.data_dir / written.path)
    assert torch.equal(state["bfloat16"], values.to(torch.bfloat16))
    assert torch.equal(state["float16"], values.to(torch.float16))
    assert torch.equal(state["float8_e5m2"].float()[:2], values.to(torch.float8_e5m2).float()[:2])


def test_the_manifest_is_complete_and_true(place: CheckpointPlace) -> None:
    layout, arena, local = layout_and_arena(Net())
    written = write(place, effect(layout, saved_state(local)), arena)
    directory = (place.data_dir / written.path).parent
    assert sorted(entry.name for entry in directory.iterdir()) == [
        "arena.safetensors",
        MANIFEST,
        MODEL,
        "rank0.safetensors",
    ]
    manifest = read_manifest(directory)
    body = (directory / MODEL).read_bytes()
    for name in ("arena.safetensors", MODEL, "rank0.safetensors"):
        data = (directory / name).read_bytes()
        assert manifest["files"][name] == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert (manifest["states"], manifest["job_hash"]) == ([0], "j")
    assert (written.bytes, written.sha256) == (len(body), hashlib.sha256(body).hexdigest())
    assert (manifest["checkpoint"], manifest["reason"], manifest["round"]) == (1, "test", 4)
    assert manifest["at"] == "2026-11-29T12:00:00.123Z"
    assert manifest["loss"] is None, "JSON has no NaN"
    assert manifest["missing_local_tensors"] == []


def test_the_outer_momentum_lies_beside_the_model_and_comes_back_to_the_bit(place: CheckpointPlace) -> None:
    momentum = np.random.default_rng(5).standard_normal(2).astype(np.float32)
    written = write(place, effect(spec(), b""), np.zeros(3, np.float32), momentum)
    assert written.error == ""
    directory = (place.data_dir / written.path).parent
    assert sorted(entry.name for entry in directory.iterdir()) == [MANIFEST, MODEL, OUTER]
    body = (directory / OUTER).read_bytes()
    assert torch.equal(safetensors.torch.load(body)["momentum"], torch.from_numpy(momentum))
    assert verify(directory)["files"].keys() == {MODEL, OUTER}


def test_a_run_without_outer_optimizer_has_no_outer_file(place: CheckpointPlace) -> None:
    written = write(place, effect(spec(), b""), np.zeros(2, np.float32))
    directory = (place.data_dir / written.path).parent
    assert read_manifest(directory)["files"].keys() == {MODEL}


def test_tensors_start_at_multiples_of_their_own_size(place: CheckpointPlace) -> None:
    layout, arena, local = layout_and_arena(Net())
    written = write(place, effect(layout, saved_state(local)), arena)
    body = (place.data_dir / written.path).read_bytes()
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length])
    widths = {"F64": 8, "I64": 8, "F32": 4, "F16": 2, "BF16": 2, "BOOL": 1}
    for name, placed in header.items():
        if name != "__metadata__":
            assert (8 + length + placed["data_offsets"][0]) % widths[placed["dtype"]] == 0, name


def test_local_tensors_that_nobody_can_hand_over_are_named_in_the_manifest(place: CheckpointPlace) -> None:
    layout, arena, _ = layout_and_arena(Net())
    written = write(place, effect(layout, b""), arena)
    assert written.error == ""
    manifest = json.loads((place.data_dir / written.path).with_name(MANIFEST).read_text())
    assert manifest["missing_local_tensors"] == ["mask", "norm.num_batches_tracked"]
    state = safetensors.torch.load_file(place.data_dir / written.path)
    assert Net().load_state_dict(state, strict=False).unexpected_keys == []


def test_a_tied_local_tensor_is_saved_under_both_names(place: CheckpointPlace) -> None:
    layout = [
        {"name": "a", "section": "local", "dtype": "int64", "shape": [2], "offset": -1, "alias_of": ""},
        {"name": "b", "section": "local", "dtype": "int64", "shape": [2], "offset": -1, "alias_of": "a"},
    ]
    body = saved_state({"a": torch.tensor([4, 5])})
    written = write(place, effect(layout, body), np.zeros(0, np.float32))
    assert written.error == ""
    state = safetensors.torch.load_file(place.data_dir / written.path)
    assert state["a"].tolist() == state["b"].tolist() == [4, 5]


LOCAL = {"section": "local", "dtype": "int64", "offset": -1}


@pytest.mark.parametrize(
    ("layout", "local", "named"),
    [
        (spec(dtype="complex128"), {}, "complex128"),
        (spec(offset=7), {}, "7 to 9, the arena has 8"),
        (spec(offset=-1), {}, "w lies at"),
        (spec(alias_of="elsewhere"), {}, "elsewhere"),
        (spec() + spec(), {}, "w is there twice"),
        (spec(shape="two"), {}, "layout"),
        (spec(**LOCAL), {"w": torch.zeros(3, dtype=torch.int64)}, "w is I64"),
        (spec(**LOCAL), {"w": torch.zeros(2)}, "w is F32"),
        (spec(**LOCAL), {"x": torch.zeros(2, dtype=torch.int64)}, "doesn't have: x"),
        (spec(**LOCAL), {"w": torch.zeros(2, dtype=torch.int64), "../../etc/passwd": torch.zeros(1)}, "passwd"),
        (
            spec(**LOCAL) + spec(name="v", **LOCAL),
            {"w": torch.zeros(2, dtype=torch.int64)},
            "left out local tensors: v",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name_and_leaves_nothing(
    place: CheckpointPlace, layout: Layout, local: dict[str, torch.Tensor], named: str
) -> None:
    written = write(place, effect(layout, saved_state(local) if local else b""), np.zeros(8, np.float32))
    assert named in written.error
    assert (written.path, written.bytes) == ("", 0)
    assert list(place.root.glob("*")) + list(place.root.glob(".*")) == []


@pytest.mark.parametrize("bad", [b"\xff" * 64, b"", (8).to_bytes(8, "little") + b"[" * 8, b"deep"])
def test_one_rank_that_hands_over_nonsense_spoils_nobody_elses_checkpoint(place: CheckpointPlace, bad: bytes) -> None:
    if bad == b"deep":
        bad = (100_000).to_bytes(8, "little") + b"[" * 100_000
    writer = CheckpointWriter(place, noon)
    writer.open(1, Committed(np.zeros(2, np.float32)))
    writer.keep(1, 0, bad)
    writer.keep(1, 1, saved_state({"w": torch.tensor([3, 4])}))
    written = writer.write(WriteCheckpoint(1, "test", (0, 1), {"layout": spec(**LOCAL), "round": 4, "loss": None}, -1))
    assert written.error == ""
    assert safetensors.torch.load_file(place.model(1))["w"].tolist() == [3, 4]


def test_a_body_that_is_no_safetensors_is_refused(place: CheckpointPlace) -> None:
    written = write(place, effect(spec(**LOCAL), b"\xff" * 64), np.zeros(2, np.float32))
    assert "no safetensors file" in written.error


def test_without_a_round_there_is_nothing_to_save(place: CheckpointPlace) -> None:
    assert "nothing to save" in write(place, effect(spec(), b""), None).error


@pytest.mark.parametrize("failing", ["fsync", "rename"])
def test_a_disk_that_fails_leaves_the_older_checkpoint_and_no_half_of_a_new_one(
    place: CheckpointPlace, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    first = write(place, effect(spec(), b"", number=1), np.zeros(2, np.float32))

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the-disk")

    if failing == "fsync":
        monkeypatch.setattr(os, "fsync", broken)
    else:
        monkeypatch.setattr(Path, "rename", broken)
    second = write(place, effect(spec(), b"", number=2), np.zeros(2, np.float32))
    monkeypatch.undo()
    assert second.error == "No space left on device (the-disk)"
    assert [entry.name for entry in place.root.iterdir()] == ["1"]
    body = (place.data_dir / first.path).read_bytes()
    assert hashlib.sha256(body).hexdigest() == first.sha256
    assert write(place, effect(spec(), b"", number=2), np.zeros(2, np.float32)).error == ""


def test_everything_is_on_the_disk_before_the_name_is_and_the_manifest_is_last(
    place: CheckpointPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(handle: int) -> None:
        steps.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{handle}')).name.split('.')[0] or 'directory'}")
        fsync(handle)

    def renamed(path: Path, target: Path) -> Path:
        steps.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    assert write(place, effect(spec(), b""), np.zeros(2, np.float32)).error == ""
    assert steps == ["fsync model", "fsync manifest", "fsync directory", "rename", "fsync checkpoints"]


def test_a_tensor_unlike_its_entry_is_refused(tmp_path: Path) -> None:
    entry = tensor_file.Entry("w", "float32", (2, 2), lambda: b"\0" * 12)
    with pytest.raises(TensorFileError, match="w has 12 bytes, its dtype and shape say 16"):
        tensor_file.write(tmp_path / "model", [entry])


def test_a_number_is_used_once(place: CheckpointPlace) -> None:
    assert write(place, effect(spec(), b""), np.zeros(2, np.float32)).error == ""
    assert "exists already" in write(place, effect(spec(), b""), np.ones(2, np.float32)).error


def test_what_a_crash_left_is_swept(place: CheckpointPlace) -> None:
    write(place, effect(spec(), b""), np.zeros(2, np.float32))
    (place.root / ".2.deadbeef").mkdir()
    (place.root / ".2.deadbeef" / MODEL).write_bytes(b"half")
    place.sweep()
    assert [entry.name for entry in place.root.iterdir()] == ["1"]
    CheckpointPlace(place.data_dir, 99).sweep()
