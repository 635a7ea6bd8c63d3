"""Public cases whose right values depend on what is averaged and what travels: real loops, the reduce's arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_rig import Cohort, RankRig, chunk_of, plan, start_rank
from torch import Tensor

from wire import ranges


def cohort_of(job: str, directory: Path, ranks: int = 2, mode: str = "cpu_cadence", **params: object) -> Cohort:
    plans = plan(job, total_samples=256, params={"samples": 256} | params, mode=mode)
    cohort = Cohort([start_rank(directory, plans, rank) for rank in range(ranks)])
    cohort.reduce(-1, initial=True)
    return cohort


def tensor(rig: RankRig, name: str) -> Tensor:
    return dict(rig.workload.trainer.model.named_parameters())[name].detach()


class Thawing:
    """Two ranks with equal work, ``each`` batches a window."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, **params: object) -> None:
        self.cohort = cohort_of("thawing.py:Thawing", directory, **params)
        self.start = tensor(self.cohort.ranks[0], "trunk").clone()
        self._patch = monkeypatch
        self._window = 0

    def window(self, each: int) -> None:
        for rank, rig in enumerate(self.cohort.ranks):
            self._patch.setenv("RANK", str(rank))
            rig.train(chunk_of(each, offset=32 * rank, epoch=self._window))
        self.cohort.reduce(self._window)
        self._window += 1

    def travelled(self) -> list[int]:
        """Elements that each rank's host would have had to stream in the last window."""
        elements = self.cohort.ranks[0].elements
        return [elements - ranges.elements(snapshot.still) for snapshot in self.cohort.snapshots]

    @property
    def trunks(self) -> list[Tensor]:
        return [tensor(rig, "trunk") for rig in self.cohort.ranks]

    @property
    def heads(self) -> set[float]:
        return {value for rig in self.cohort.ranks for value in tensor(rig, "head").tolist()}


@pytest.mark.parametrize("mode", ["cpu_cadence", "cpu_async"])
def test_frozen_weights_do_not_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Case J09: 10 M frozen floats and 10 that learn; a window's upload is 40 bytes, not 40 MB."""
    this = Thawing(tmp_path, monkeypatch, wide=10_000_000, mode=mode)
    for window in range(3):
        this.window(2)
        assert this.travelled() == [10, 10]
        assert this.heads == {2.0 * (window + 1)}
    assert all(trunk.numpy().tobytes() == this.start.numpy().tobytes() for trunk in this.trunks)
    this.cohort.leave()


def test_a_frozen_layer_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case J10, first job."""
    this = Thawing(tmp_path, monkeypatch)
    for _ in range(3):
        this.window(5)
    assert all(torch.equal(trunk, this.start) for trunk in this.trunks)
    assert not any(rig.workload.trainer.model.trunk.requires_grad for rig in this.cohort.ranks)
    assert this.heads == {15.0}
    this.cohort.leave()


def test_a_layer_that_thaws_everywhere_moves_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case J10, second job: at batch 10 of 20."""
    this = Thawing(tmp_path, monkeypatch, thaw_at=10)
    for window, (moved, travels) in enumerate([(0, 10), (0, 10), (5, 18), (10, 18)]):
        this.window(5)
        assert all(torch.allclose(trunk, this.start + moved, atol=1e-5) for trunk in this.trunks), window
        assert this.travelled() == [travels, travels], window
    assert this.heads == {20.0}
    this.cohort.leave()


def test_a_layer_that_thaws_on_one_rank_becomes_the_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case J10, third job: the other rank contributes that it did not move; the hashes of both agree."""
    this = Thawing(tmp_path, monkeypatch, thaw_at=10, thaw_rank=0)
    for window, (moved, travels) in enumerate([(0, [10, 10]), (0, [10, 10]), (2.5, [18, 10]), (5.0, [18, 10])]):
        this.window(5)
        assert all(torch.allclose(trunk, this.start + moved, atol=1e-5) for trunk in this.trunks), window
        assert this.travelled() == travels, window
    assert torch.equal(*this.trunks)
    this.cohort.leave()


@pytest.mark.parametrize("mode", ["cpu_cadence", "cpu_async"])
def test_a_window_without_work_changes_no_bit(tmp_path: Path, mode: str) -> None:
    """Case N01."""
    cohort = cohort_of("odometer.py:Odometer", tmp_path, mode=mode)
    cohort.window({0: chunk_of(2), 1: chunk_of(1, offset=32)}, 0)
    before = tensor(cohort.ranks[0], "w").numpy().tobytes()
    acks = cohort.reduce(1)
    assert all(tensor(rig, "w").numpy().tobytes() == before for rig in cohort.ranks)
    assert [(ack.divergence, ack.params_hash) for ack in acks] == [(0.0, ""), (0.0, "")]
    cohort.window({0: chunk_of(1, epoch=1)}, 2)
    assert tensor(cohort.ranks[1], "w").item() == pytest.approx(5 / 3 + 1)
    cohort.leave()


@pytest.mark.parametrize("mode", ["cpu_cadence", "cpu_async"])
def test_equal_elements_stay_equal_in_every_consensus(tmp_path: Path, mode: str) -> None:
    """Case N08; the job itself looks before every batch. ``test_e2e_reduce`` does it with processes."""
    cohort = cohort_of("even.py:Even", tmp_path, mode=mode, elements=200_000)
    for number in range(20):
        chunks = {0: chunk_of(number % 3 + 1, epoch=number), 1: chunk_of(1, offset=64, epoch=number)}
        cohort.window(chunks, number)
        assert cohort.base is not None
        assert cohort.base[:200_000].min() == cohort.base[:200_000].max()
    cohort.leave()
