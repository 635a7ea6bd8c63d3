"""Exact values through the whole reduce: pack, fold, sum, divide, stage, adopt (cases ODO, J04, J05, J11, N01)."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from cohort_kit import Cohort
from torch import Tensor, nn

from backend.core.vocabulary import NonFiniteValue, RoundBroken, RoundFinished
from wire.mass import gamma_mass


class Car(nn.Module):
    """ODO: every local batch adds exactly 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    @torch.no_grad()
    def drive(self, steps: int) -> None:
        self.w += steps


async def cars(directory: Path, layout: dict[int, list[int]], shared: Collection[int] = ()) -> Cohort:
    return await Cohort.begun(layout, Car, directory, shared)


def drive(cohort: Cohort, counts: dict[int, int]) -> None:
    for rank, steps in counts.items():
        cohort.ranks[rank].model.drive(steps)
        cohort.ranks[rank].steps = steps


def odometer(cohort: Cohort) -> float:
    """What every living rank's odometer shows, which must be one and the same to the last bit."""
    shown = {host.ranks[rank].model.w.item() for host in cohort.hosts.values() for rank in host.fold.live}
    assert len(shown) == 1, shown
    return shown.pop()


def expected_odometer(counts: list[int], gamma: float) -> float:
    masses = [gamma_mass(n, gamma) for n in counts]
    return sum(n * mass for n, mass in zip(counts, masses, strict=True)) / sum(masses)


ODO = [
    pytest.param([3, 1], 1.0, 2.5, id="3:1"),
    pytest.param([4, 1], 1.0, 3.4, id="4:1"),
    pytest.param([6, 2, 1], 1.0, 41 / 9, id="6:2:1"),
    pytest.param([5, 5, 5, 5], 1.0, 5.0, id="equal"),
    pytest.param([3, 1], 0.0, 2.0, id="gamma 0 is the plain mean of movers"),
    pytest.param([2, 4, 0], 0.0, 3.0, id="gamma 0 leaves idle ranks out"),
    pytest.param([4, 1], 0.5, 3.0, id="gamma a half"),
    pytest.param([4, 2], -1.0, 8 / 3, id="gamma -1"),
    pytest.param([7, 0], 1.0, 7.0, id="one idle"),
]


PATHS = [pytest.param((), id="streamed"), pytest.param((0, 1, 2, 3), id="in place"), pytest.param((1,), id="mixed")]
"""hosts that share their memory"""


@pytest.mark.parametrize("shared", PATHS)
@pytest.mark.parametrize(("counts", "gamma", "value"), ODO)
async def test_odometer(tmp_path: Path, counts: list[int], gamma: float, value: float, shared: tuple[int, ...]) -> None:
    assert value == pytest.approx(expected_odometer(counts, gamma))
    cohort = await cars(tmp_path, {host: [host] for host in range(len(counts))}, set(shared) & set(range(len(counts))))
    drive(cohort, dict(enumerate(counts)))
    await cohort.window(gamma=gamma)
    assert odometer(cohort) == pytest.approx(value, rel=1.2e-7)


@pytest.mark.parametrize("gamma", [1.0, 0.5, 0.0, -1.0])
async def test_folding_on_hosts_does_not_change_the_value(tmp_path: Path, gamma: float) -> None:
    counts = dict(enumerate([6, 2, 1, 0, 9, 4]))
    cohort = await cars(tmp_path, {0: [0, 1, 2], 1: [3], 2: [4, 5]})
    drive(cohort, counts)
    await cohort.window(gamma=gamma)
    assert odometer(cohort) == pytest.approx(expected_odometer(list(counts.values()), gamma), rel=2.4e-7)


async def test_rounds_add_up_and_all_ranks_agree(tmp_path: Path) -> None:
    cohort = await cars(tmp_path, {0: [0], 1: [1]})
    for round_, (counts, value) in enumerate([([3, 1], 2.5), ([1, 3], 5.0), ([2, 2], 7.0)]):
        drive(cohort, dict(enumerate(counts)))
        moved = await cohort.window(round_)
        assert odometer(cohort) == value
        assert len({rank.adopted for rank in cohort.ranks.values()}) == 1
        assert {result.post_norm for result in moved.values()} == {value}


async def test_the_controller_keeps_the_consensus(tmp_path: Path) -> None:
    cohort = await cars(tmp_path, {0: [0], 1: [1]})
    drive(cohort, {0: 3, 1: 1})
    await cohort.window()
    kept = cohort.plane.consensus
    assert kept is not None
    assert kept.tolist() == [2.5]
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 1
    for round_ in (1, 2, 3):
        drive(cohort, {0: 1, 1: 1})
        await cohort.window(round_)
    assert kept.tolist() == [2.5], "a consensus that was handed out is never written again"


# ---------------------------------------------------------------------------------------- nobody, somebody dies


async def test_all_idle_keeps_every_bit(tmp_path: Path) -> None:
    cohort = await cars(tmp_path, {0: [0, 1], 1: [2]})
    drive(cohort, {0: 1, 1: 3, 2: 7})
    await cohort.window(0)
    before = [rank.model.w.item() for rank in cohort.ranks.values()]
    finished = await cohort.reduce(1)
    assert isinstance(finished, RoundFinished)
    assert (finished.realized, finished.buffers_realized, finished.mass) == (False, False, 0.0)
    assert (finished.bytes_up, finished.bytes_down) == (0, 0)
    assert finished.steps == {0: 0, 1: 0, 2: 0}
    moved = cohort.adopt(finished)
    assert [rank.model.w.item() for rank in cohort.ranks.values()] == before
    assert all(result.divergence == 0 and result.pre_norm == result.post_norm for result in moved.values())


@pytest.mark.parametrize("shared", [(), (0, 1)])
async def test_nan_in_an_idle_rank_does_not_leak(tmp_path: Path, shared: tuple[int, ...]) -> None:
    cohort = await cars(tmp_path, {0: [0, 1], 1: [2]}, shared)
    drive(cohort, {0: 3, 2: 1})
    cohort.ranks[1].model.w.data.fill_(math.nan)
    await cohort.window()
    assert odometer(cohort) == 2.5


@pytest.mark.parametrize("shared", [(), (0, 4)])
async def test_nan_in_a_working_rank_breaks_the_round(tmp_path: Path, shared: tuple[int, ...]) -> None:
    cohort = await cars(tmp_path, {0: [0], 4: [1, 2]}, shared)
    drive(cohort, {0: 3, 1: 1, 2: 1})
    cohort.ranks[2].model.w.data.fill_(math.nan)
    broken = await cohort.reduce()
    assert isinstance(broken, RoundBroken)
    assert broken.host == 4
    assert broken.reason == "rank 2 of host 4 contributed nan at element 0 (params)"
    assert broken.non_finite == NonFiniteValue(2, 0, "nan")
    assert cohort.plane.consensus is not None
    assert cohort.plane.consensus.tolist() == [0.0]


async def test_survivors_alone_after_a_death_mid_stream(tmp_path: Path) -> None:
    cohort = await Cohort.begun({0: [0], 1: [1, 2], 2: [3]}, lambda: nn.Linear(4, 4), tmp_path)
    for rank in cohort.ranks.values():
        rank.steps = rank.number + 1
        for parameter in rank.model.parameters():
            parameter.data.fill_(rank.steps)
    request = cohort.open(0)
    plans = {number: host.plan(request, 1.0) for number, host in cohort.hosts.items()}
    for number, plan in plans.items():
        cohort.plane.contribution(number, plan.contribution)
    for number in (0, 1, 2):  # two slices of each are summed and on their way down
        for header, payload in cohort.hosts[number].stream(plans[number])[:2]:
            cohort.plane.chunk(number, header, memoryview(payload))
    late = cohort.hosts[1].stream(plans[1])[2:]

    cohort.hosts[1].fold.dead(2)
    cohort.abort(0, 0)
    for header, payload in late:
        cohort.plane.chunk(1, header, memoryview(payload))
    finished = await cohort.reduce(0, attempt=1)

    assert isinstance(finished, RoundFinished)
    assert (finished.attempt, finished.steps, finished.mass) == (1, {0: 1, 1: 2, 3: 4}, 7.0)
    cohort.adopt(finished)
    for rank in (0, 1, 3):
        for parameter in cohort.ranks[rank].model.parameters():
            torch.testing.assert_close(parameter, torch.full_like(parameter, 21 / 7), rtol=2.4e-7, atol=0)
    assert cohort.plane.ignored == len(late)


async def test_a_host_without_survivors_leaves_the_sum(tmp_path: Path) -> None:
    cohort = await cars(tmp_path, {0: [0], 1: [1], 2: [2]})
    drive(cohort, {0: 6, 1: 2, 2: 1})
    request = cohort.open(0)
    plans = {number: host.plan(request, 1.0) for number, host in cohort.hosts.items()}
    cohort.plane.contribution(1, plans[1].contribution)
    cohort.abort(0, 0)
    del cohort.hosts[1]
    finished = await cohort.reduce(0, attempt=1)
    assert isinstance(finished, RoundFinished)
    cohort.adopt(finished)
    assert odometer(cohort) == pytest.approx(37 / 7)


# ------------------------------------------------------------------------------------------------ real models


async def test_batchnorm_buffers_average_over_equal_movers(tmp_path: Path) -> None:
    """J05: buffers ride with the mover mass, so mean 0.5 and variance 1.1855 whatever the step counts."""
    cohort = await Cohort.begun({0: [0], 1: [1]}, lambda: nn.BatchNorm1d(1, momentum=0.1), tmp_path)
    for rank, batch, steps in ((0, [[-1.0], [1.0]], 3), (1, [[9.0], [11.0]], 1)):
        for _ in range(steps):
            cohort.ranks[rank].model(torch.tensor(batch))
        cohort.ranks[rank].steps = steps
    local = [rank.model.running_var.item() for rank in cohort.ranks.values()]
    assert local == [pytest.approx(1.271), pytest.approx(1.1)]
    await cohort.window()
    for rank in cohort.ranks.values():
        assert rank.model.running_mean.item() == pytest.approx(0.5)
        assert rank.model.running_var.item() == pytest.approx(1.1855)
    kept = cohort.plane.consensus
    assert kept is not None
    assert kept.tolist() == [1.0, 0.0, pytest.approx(0.5), pytest.approx(1.1855)]


async def test_integer_buffers_stay_whole_and_local(tmp_path: Path) -> None:
    """J04: the counter keeps its type, its shape and each rank's own number; a strict load in plain torch passes."""
    cohort = await Cohort.begun({0: [0], 1: [1]}, lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), tmp_path)
    for rank, steps in ((0, 3), (1, 1)):
        for _ in range(steps):
            cohort.ranks[rank].model(torch.randn(4, 2))
        cohort.ranks[rank].steps = steps
    await cohort.window()
    for rank, steps in ((0, 3), (1, 1)):
        counter = cohort.ranks[rank].model.get_buffer("1.num_batches_tracked")
        assert (counter.dtype, tuple(counter.shape), counter.item()) == (torch.int64, (), steps)
    fresh = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    fresh.load_state_dict(model_file(cohort, rank=0), strict=True)
    for name, tensor in cohort.ranks[0].model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name


def model_file(cohort: Cohort, rank: int) -> dict[str, Tensor]:
    """What a checkpoint holds: the controller's consensus by name, and one rank's local tensors."""
    arena, flat = cohort.ranks[rank].arena, cohort.plane.consensus
    assert flat is not None
    tensors = arena.local_state()
    for spec in arena.layout:
        if spec.section != "local":
            size = math.prod(spec.shape)
            values = torch.from_numpy(flat[spec.offset : spec.offset + size].copy())
            tensors[spec.name] = values.reshape(spec.shape).to(getattr(torch, spec.dtype))
    return tensors


async def test_a_parameter_that_one_rank_did_not_use(tmp_path: Path) -> None:
    """J11, last variant: q moves to 0.89 on one rank, is untouched on the other, and becomes 0.945 on both."""

    def build() -> nn.Module:
        return nn.ParameterDict({"p": torch.ones(()), "q": torch.ones(())})

    cohort = await Cohort.begun({0: [0, 1]}, build, tmp_path)
    for number, rank in cohort.ranks.items():
        optimizer = torch.optim.SGD(rank.model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        loss = rank.model["p"] + (rank.model["q"] if number == 0 else 0)
        loss.backward()
        optimizer.step()
        rank.steps = 1
    await cohort.window()
    for rank in cohort.ranks.values():
        assert rank.model["q"].item() == pytest.approx(0.945)
        assert rank.model["p"].item() == pytest.approx(0.89)


async def test_tied_weights_count_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    cohort = await Cohort.begun({0: [0], 1: [1]}, Tied, tmp_path)
    for number, rank in cohort.ranks.items():
        rank.model.embed.weight.data.fill_(float(number))
        rank.steps = 3 - 2 * number
    await cohort.window()
    for rank in cohort.ranks.values():
        assert rank.arena.params_elements == 15
        assert rank.model.head.weight.data_ptr() == rank.model.embed.weight.data_ptr()
        torch.testing.assert_close(rank.model.head.weight, torch.full((5, 3), 0.25), rtol=0, atol=2.4e-7)


@pytest.mark.parametrize("encoding", [0, 1])
@pytest.mark.parametrize("shared", [(), (0, 1), (1,)])
async def test_a_model_that_nobody_changed_keeps_every_bit(
    tmp_path: Path, shared: tuple[int, ...], encoding: int
) -> None:
    cohort = await Cohort.begun({0: [0, 1], 1: [2]}, lambda: nn.Linear(20, 20), tmp_path, shared, encoding)
    with torch.no_grad():
        cohort.ranks[0].model.weight[0] = -0.0
    cohort.ranks[0].steps = 1
    await cohort.window(0)
    before = {name: bits(tensor) for name, tensor in cohort.ranks[2].model.state_dict().items()}
    for round_, counts in enumerate([(7, 13, 29), (1, 0, 3), (0, 0, 1000)], start=1):
        for number, steps in enumerate(counts):
            cohort.ranks[number].steps = steps
        await cohort.window(round_, gamma=0.37)
    for rank in cohort.ranks.values():
        assert {name: bits(tensor) for name, tensor in rank.model.state_dict().items()} == before


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(torch.int32).flatten().tolist()


@pytest.mark.parametrize("shared", [(), (0, 1), (1,)])
async def test_bf16_rounds_the_same_way_on_every_path_and_at_both_ends(tmp_path: Path, shared: tuple[int, ...]) -> None:
    torch.manual_seed(5)
    start = nn.Linear(9, 7).state_dict()

    def build() -> nn.Module:
        model = nn.Linear(9, 7)
        model.load_state_dict(start)
        return model

    results = {}
    for name, paths, encoding in (("streamed", (), 1), ("other", shared, 1), ("f32", shared, 0)):
        cohort = await Cohort.begun({0: [0, 1], 1: [2]}, build, tmp_path / f"{name}", paths, encoding)
        for round_ in range(4):
            for number, rank in cohort.ranks.items():
                rank.steps = number + 1
                generator = torch.Generator().manual_seed(10 * round_ + number)
                for parameter in rank.model.parameters():
                    parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
            await cohort.window(round_)
            assert len({rank.adopted for rank in cohort.ranks.values()}) == 1
        kept = cohort.plane.consensus
        assert kept is not None
        for rank in cohort.ranks.values():
            flat = torch.cat([parameter.detach().flatten() for parameter in rank.model.parameters()])
            assert bits(flat) == bits(torch.from_numpy(kept.copy()))
        results[name] = kept
    assert results["streamed"].tobytes() == results["other"].tobytes()
    assert results["streamed"].tobytes() != results["f32"].tobytes()
    assert results["streamed"] == pytest.approx(results["f32"], abs=2e-2)


@pytest.mark.parametrize("shared", [(), (0, 1)])
async def test_frozen_parameters_stay_at_home(tmp_path: Path, shared: tuple[int, ...]) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 1))
        model[0].requires_grad_(False)
        return model

    cohort = await Cohort.begun({0: [0], 1: [1]}, build, tmp_path, shared)
    frozen = bits(cohort.ranks[0].model[0].weight)
    for round_ in range(3):
        for rank in cohort.ranks.values():
            rank.steps = 1
            rank.model[1].weight.data += rank.number
        finished = await cohort.reduce(round_)
        assert isinstance(finished, RoundFinished)
        assert finished.bytes_up == finished.bytes_down == (0 if shared else 2 * 4 * 11)
        cohort.adopt(finished)
        assert {tuple(bits(rank.model[0].weight)) for rank in cohort.ranks.values()} == {tuple(frozen)}
        assert len({tuple(bits(rank.model[1].weight)) for rank in cohort.ranks.values()}) == 1
    cohort.ranks[1].model[0].weight.data += 1  # nobody forbids it: it then travels like any other
    cohort.ranks[1].steps = 1
    await cohort.window(3)
    after = {tuple(bits(rank.model[0].weight)) for rank in cohort.ranks.values()}
    assert len(after) == 1
    assert after != {tuple(frozen)}
