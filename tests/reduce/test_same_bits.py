"""The same contributions give the same bits: any arrival order, any cuts, streamed or read in place, whole or without
what lay still."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plane_kit import ELEMENTS, PARAMS, Bench, arenas, chunks, covered, declared, oracle, share_of, shared

from backend.reduce.outer import Nesterov
from wire import ranges
from wire.arithmetic import F32, FloatArray
from wire.messages import Contribution

HOSTS = {7: (0,), 1: (1, 5), 4: (2, 3), 2: (4,)}


@dataclass
class Work:
    """What every rank holds when the round begins."""

    base: FloatArray
    values: dict[int, FloatArray]
    contributions: dict[int, Contribution]
    encoding: int

    @classmethod
    def random(cls, seed: int, encoding: int = 0, round_: int = 0, base: FloatArray | None = None) -> Work:
        dice, rng = random.Random(seed), np.random.default_rng(seed)
        base = rng.standard_normal(ELEMENTS).astype(F32) if base is None else base
        base[rng.random(ELEMENTS) < 0.1] = -0.0
        values, contributions = {}, {}
        for host, ranks in HOSTS.items():
            cut = sorted(dice.sample(range(ELEMENTS + 1), 4))
            still = dice.choice([[], [(cut[0], cut[1]), (cut[2], cut[3])], [(0, ELEMENTS)]])
            for rank in ranks:
                moved = base + rng.standard_normal(ELEMENTS).astype(F32) * np.float32(0.01)
                values[rank] = np.where(covered(still) | (rng.random(ELEMENTS) < 0.2), base, moved)
            masses = {rank: dice.choice([0.0, 1.0, 3.0, dice.uniform(1e-3, 1e3)]) for rank in ranks}
            if host == 1:
                masses[1] = 2.5  # somebody works
            for rank, mass in masses.items():
                if not mass:
                    values[rank][:] = np.nan  # idle ranks are not read
            steps = {rank: int(mass > 0) for rank, mass in masses.items()}
            contributions[host] = declared(steps, round_, masses=masses, still=still)
        return cls(base, values, contributions, encoding)

    def shares(self) -> dict[int, tuple[Contribution, FloatArray]]:
        return {
            host: (contribution, share_of(contribution, self.base, self.values, self.encoding))
            for host, contribution in self.contributions.items()
            if any(contribution.masses.values())
        }

    def expected(self) -> FloatArray:
        return oracle(self.base, self.shares(), self.encoding)


async def play(bench: Bench, work: Work, dice: random.Random, directory: Path | None, mapped: set[int]) -> None:
    """One round in an order that the dice choose; ``mapped`` hosts share their memory."""
    queues: dict[int, list[Any]] = {}
    shares = work.shares()
    round_ = work.contributions[1].round
    for host, contribution in work.contributions.items():
        queues[host] = [contribution]
        if host in mapped:
            assert directory is not None
            arenas_of = {rank: work.values[rank] for rank in HOSTS[host]}
            bench.plane.share(host, shared(directory / str(host), arenas_of))
        elif host in shares:
            cut = {"still": contribution.still, "encoding": work.encoding, "dice": dice, "round_": round_}
            queues[host] += chunks(shares[host][1], dice.randint(1, 40), **cut)
    bench.open(HOSTS, round_, encoding=work.encoding)
    while waiting := [host for host, queue in queues.items() if queue]:
        host = dice.choice(waiting)
        item = queues[host].pop(0)
        if isinstance(item, Contribution):
            bench.plane.contribution(host, item)
        else:
            bench.plane.chunk(host, *item)
        if dice.random() < 0.2:
            await asyncio.sleep(0)
    await bench.finished()


async def bench_for(dice: random.Random, work: Work) -> Bench:
    tuning = {
        "slice_elements": dice.randint(1, 30),
        "mapped_elements": dice.randint(1, 50),
        "threads": dice.randint(1, 4),
    }
    bench = Bench(tuning)
    await bench.start_from(work.base, *HOSTS)
    return bench


@pytest.mark.parametrize("encoding", [0, 1])
async def test_100_arrival_orders_and_cuts(encoding: int) -> None:
    work = Work.random(1, encoding)
    expected = work.expected().tobytes()
    for seed in range(100):
        dice = random.Random(seed)
        bench = await bench_for(dice, work)
        await play(bench, work, dice, None, set())
        assert bench.consensus.tobytes() == expected
        for host, receiver in bench.hosts.items():
            assert receiver.new.tobytes() == expected, f"seed {seed}, host {host}"
            offsets = [header.offset for header in receiver.headers]
            assert offsets == sorted(offsets), "slices go out in order"
        bench.plane.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), encoding=st.integers(0, 1), mapped=st.sets(st.sampled_from(sorted(HOSTS))))
def test_streamed_or_read_in_place(
    tmp_path_factory: pytest.TempPathFactory, seed: int, encoding: int, mapped: set[int]
) -> None:
    async def scene() -> None:
        dice, work = random.Random(seed), Work.random(seed, encoding)
        bench = await bench_for(dice, work)
        await play(bench, work, dice, tmp_path_factory.mktemp("arenas"), mapped)
        expected = work.expected().tobytes()
        assert bench.consensus.tobytes() == expected
        for host, receiver in bench.hosts.items():
            assert receiver.new.tobytes() == expected, f"host {host}"
            assert (receiver.coming is not None and receiver.coming.path != "") == (host in mapped)
            assert host not in mapped or not receiver.headers
        bench.plane.close()

    asyncio.run(scene())


@pytest.mark.parametrize("mapped", [set(), set(HOSTS), {1, 4}])
async def test_many_rounds_on_two_buffers(tmp_path: Path, mapped: set[int]) -> None:
    dice, work = random.Random(3), Work.random(3)
    bench = await bench_for(dice, work)
    for round_ in range(10):
        work = Work.random(100 + round_, round_ % 2, round_, work.base.copy())
        # The base has its -0.0 put in by the dice above, so everybody starts the round from that.
        bench.plane._ledger.consensus.values[:] = work.base  # type: ignore[union-attr]
        for receiver in bench.hosts.values():
            receiver.base = work.base.copy()
        if bench.plane._ledger._before is not None:
            bench.plane._ledger._before.stale = [(0, ELEMENTS)]
        directory = tmp_path / str(round_)
        directory.mkdir()
        await play(bench, work, dice, directory, mapped)
        work.base = work.expected()
        bench.commit()
        assert bench.consensus.tobytes() == work.base.tobytes()
        for receiver in bench.hosts.values():
            assert receiver.base.tobytes() == work.base.tobytes()
    bench.plane.close()


@pytest.mark.parametrize("mapped", [False, True])
async def test_leaving_out_what_lay_still_changes_no_bit(tmp_path: Path, mapped: bool) -> None:
    for seed in range(10):
        work = Work.random(seed)
        for host, contribution in work.contributions.items():
            for rank in HOSTS[host]:
                if contribution.masses[rank]:
                    quiet = covered(contribution.still)
                    work.values[rank] = np.where(quiet, work.base, work.values[rank])
        whole = Work(
            work.base,
            work.values,
            {host: declared(c.steps, masses=c.masses) for host, c in work.contributions.items()},
            work.encoding,
        )
        results = []
        for number, each in enumerate((work, whole)):
            dice = random.Random(seed)
            bench = await bench_for(dice, each)
            directory = tmp_path / f"{seed}-{number}"
            directory.mkdir()
            await play(bench, each, dice, directory, set(HOSTS) if mapped else set())
            results.append(bench.consensus.tobytes())
            bench.plane.close()
        assert results[0] == results[1]


@pytest.mark.parametrize("mapped", [False, True])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 32), encoding=st.integers(0, 1))
def test_a_model_that_nobody_changed_keeps_every_bit(
    tmp_path_factory: pytest.TempPathFactory, mapped: bool, seed: int, encoding: int
) -> None:
    async def scene() -> None:
        dice, work = random.Random(seed), Work.random(seed, encoding)
        for values in work.values.values():
            if not np.isnan(values).all():
                values[:] = work.base
        bench = await bench_for(dice, work)
        await play(bench, work, dice, tmp_path_factory.mktemp("arenas"), set(HOSTS) if mapped else set())
        assert bench.consensus.tobytes() == work.base.tobytes()
        bench.plane.close()

    asyncio.run(scene())


@pytest.mark.parametrize("encoding", [0, 1])
async def test_the_outer_optimizer_moves_what_nobody_moves_any_more(encoding: int) -> None:
    """Momentum goes on where a round finds nothing; what never moved is still left out."""
    bench = Bench(outer=Nesterov(0.5, 0.9))
    (base,) = arenas(1)
    await bench.start_from(base, 0)
    rng = np.random.default_rng(1)
    steps = [[(20, ELEMENTS)], [(0, ELEMENTS)], [(30, 50)], [(0, ELEMENTS)]]
    stills = [[(20, PARAMS), (PARAMS, ELEMENTS)], [(20, ELEMENTS)], [(30, 50)], [(30, 50), (PARAMS, ELEMENTS)]]
    momentum = np.zeros(PARAMS, F32)
    for round_, (still, quiet) in enumerate(zip(steps, stills, strict=True)):
        contribution = declared({0: 2}, round_, still=still)
        values = np.where(covered(still), base, base + rng.standard_normal(ELEMENTS).astype(F32))
        share = share_of(contribution, base, {0: values}, encoding)
        bench.open({0: (0,)}, round_, encoding=encoding)
        bench.plane.contribution(0, contribution)
        for chunk in chunks(share, round_=round_, still=still, encoding=encoding):
            bench.plane.chunk(0, *chunk)
        await bench.finished()
        coming = bench.hosts[0].coming
        assert coming is not None
        assert coming.still == ranges.normalized(quiet)
        update = share.copy()
        update[:PARAMS] *= np.float32(0.5)
        momentum = momentum * np.float32(0.9) + update[:PARAMS]
        update[:PARAMS] = np.float32(0.5) * (update[:PARAMS] + np.float32(0.9) * momentum)
        new = bench.hosts[0].new
        np.testing.assert_allclose(new, base - update, rtol=0.02 if encoding else 1e-5, atol=0.02 if encoding else 1e-6)
        assert bench.consensus.tobytes() == new.tobytes()
        kept = bench.plane.outer_momentum
        assert kept is not None
        assert kept.tobytes() == momentum.tobytes()
        bench.commit()
        base = bench.hosts[0].base
    bench.plane.close()
