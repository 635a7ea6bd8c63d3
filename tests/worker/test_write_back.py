"""Write-back policies on tensors: formulas, precision, sections, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from worker.arena import Arena, ArenaError
from worker.arena_file import ArenaFile
from worker.write_back import WriteBack


def arena_of(model: nn.Module, directory: Path, *, overlap: bool = True) -> tuple[Arena, ArenaFile, torch.Tensor]:
    """The model's arena, its values' file, and the consensus, which is ``directory / "consensus"``."""
    arena = Arena.for_model(model, overlap=overlap)
    out = arena.create_out(directory / "out")
    consensus = ArenaFile.create(directory / "consensus", arena.elements)
    return arena, out, torch.from_numpy(consensus.values)


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0, 4.0], dtype=dtype))
        self.register_buffer("mean", torch.tensor([8.0]))


@pytest.mark.parametrize(
    ("write_back", "expected"),
    [
        (WriteBack("overwrite"), [10.0, 20.0, 30.0]),
        (WriteBack("blend", 0.5), [6.5, 12.5, 18.5]),
        (WriteBack("blend", 0.25), [4.75, 8.75, 12.75]),
        (WriteBack("blend", 1.0), [10.0, 20.0, 30.0]),
        (WriteBack("delta"), [12.0, 23.0, 33.0]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_parameters_follow_the_policy_and_buffers_are_overwritten(
    tmp_path: Path, write_back: WriteBack, expected: list[float], dtype: torch.dtype
) -> None:
    model = Model(dtype)
    arena, _, consensus = arena_of(model, tmp_path)
    arena.pack()
    with torch.no_grad():
        model.w += torch.tensor([2.0, 3.0, 3.0], dtype=dtype)
        model.mean.fill_(99.0)
    consensus.copy_(torch.tensor([10.0, 20.0, 30.0, 5.0]))
    moved = arena.adopt(tmp_path / "consensus", ahead=write_back)
    assert model.w.tolist() == expected
    assert model.mean.tolist() == [5.0]
    assert consensus.tolist() == [10.0, 20.0, 30.0, 5.0], "the staged consensus belongs to all ranks of the host"
    packed, agreed = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([10.0, 20.0, 30.0])
    assert moved.divergence == pytest.approx(float((agreed - packed).norm() / agreed.norm()), rel=1e-6)
    assert (moved.pre_norm, moved.post_norm) == pytest.approx((float(packed.norm()), float(agreed.norm())), rel=1e-6)


def test_every_pack_remembers_anew(tmp_path: Path) -> None:
    model = Model()
    arena, out, consensus = arena_of(model, tmp_path)
    for _ in range(3):
        arena.pack()
        with torch.no_grad():
            model.w += 1.0
        consensus.copy_(torch.from_numpy(out.values))
        arena.adopt(tmp_path / "consensus", ahead=WriteBack("delta"))
    assert model.w.tolist() == [4.0, 5.0, 7.0]


def test_progress_survives_a_round_that_changes_nothing(tmp_path: Path) -> None:
    model = Model()
    arena, _, _ = arena_of(model, tmp_path)
    arena.pack()
    with torch.no_grad():
        model.w += 1.0
    moved = arena.adopt(params=False, buffers=False, ahead=WriteBack("overwrite"))
    assert model.w.tolist() == [2.0, 3.0, 5.0]
    assert moved.divergence == 0.0


def test_without_a_snapshot_nobody_can_be_ahead(tmp_path: Path) -> None:
    arena, _, _ = arena_of(Model(), tmp_path)
    with pytest.raises(ArenaError, match="there is no snapshot"):
        arena.adopt(tmp_path / "consensus", ahead=WriteBack("delta"))


def test_where_values_live_in_the_arena_nobody_can_be_ahead(tmp_path: Path) -> None:
    arena, _, _ = arena_of(Model(), tmp_path, overlap=False)
    arena.pack()
    with pytest.raises(ArenaError, match="there is no snapshot"):
        arena.adopt(tmp_path / "consensus", ahead=WriteBack("delta"))


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="'average' is no write-back policy"):
        WriteBack("average")
