"""The outer optimizer: the formula by hand and against oracles, and what must leave its momentum alone."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
import torch
from plane_kit import BUFFERS, ELEMENTS, PARAMS, Bench, arenas, chunks, declared, share_of

from backend.core.config import RunConfig
from backend.core.vocabulary import OpenRound, RoundFinished
from backend.reduce.outer import Nesterov, outer_optimizer

DILOCO = Nesterov(lr=0.7, momentum=0.9)


def bench_with(outer: Nesterov | None = DILOCO, **tuning: int) -> Bench:
    return Bench(tuning, outer)


async def play(
    bench: Bench, average: np.ndarray, round_: int, *, steps: int = 1, attempt: int = 0, initial: bool = False
) -> RoundFinished:
    """A round of one host whose rank holds ``average``; without steps nobody worked."""
    bench.plane.open(OpenRound(round_, attempt, {0: (0,)}, initial, PARAMS, BUFFERS))
    contribution = declared({0: steps}, round_, attempt)
    bench.plane.contribution(0, contribution)
    if steps:
        share = share_of(contribution, None if initial else bench.consensus, {0: average})
        for chunk in chunks(share, round_=round_, attempt=attempt):
            bench.plane.chunk(0, *chunk)
    finished = await bench.finished()
    if finished.realized:
        bench.commit()
    return finished


def consensus(bench: Bench) -> np.ndarray:
    assert bench.plane.consensus is not None
    return bench.plane.consensus.copy()


def momentum(bench: Bench) -> np.ndarray:
    assert bench.plane.outer_momentum is not None
    return bench.plane.outer_momentum.copy()


class Oracle:
    """The same arithmetic over the whole arena at once: f32 throughout, one operation at a time."""

    def __init__(self, lr: float, mu: float, start: np.ndarray) -> None:
        self.lr, self.mu = np.float32(lr), np.float32(mu)
        self.arena = start.copy()
        self.momentum = np.zeros(PARAMS, np.float32)

    def take(self, average: np.ndarray) -> None:
        self.step(self.arena - average)

    def step(self, update: np.ndarray) -> None:
        gradient = update[:PARAMS]
        self.momentum = self.mu * self.momentum + gradient
        outer = update.copy()
        outer[:PARAMS] = self.lr * (gradient + self.mu * self.momentum)
        self.arena = self.arena - outer


async def test_three_rounds_by_hand() -> None:
    """lr 0.7, momentum 0.9, every average one below the consensus that it started from: d is 1 each time."""
    bench = bench_with()
    await play(bench, np.full(ELEMENTS, 10, np.float32), -1, initial=True)
    assert (consensus(bench) == 10).all(), "the initial broadcast is no step"
    held = 10.0
    for number, (kept, moved) in enumerate([(1.0, 1.33), (1.9, 1.897), (2.71, 2.4073)]):
        await play(bench, np.full(ELEMENTS, held - 1, np.float32), number)
        assert momentum(bench) == pytest.approx(np.full(PARAMS, kept), rel=1e-6)
        assert consensus(bench)[:PARAMS] == pytest.approx(np.full(PARAMS, held - moved), rel=1e-6)
        assert (consensus(bench)[PARAMS:] == np.float32(held - 1)).all(), "buffers are averaged, not stepped"
        held = float(consensus(bench)[0])


@pytest.mark.parametrize(("lr", "mu"), [(0.7, 0.9), (1.0, 0.0), (1.0, 0.5), (0.3, 0.0), (2.0, 0.99)])
async def test_the_same_bits_as_the_oracle_whatever_the_slices(lr: float, mu: float) -> None:
    given = arenas(6)
    for seed in range(10):
        dice = random.Random(seed)
        bench = bench_with(Nesterov(lr, mu), slice_elements=dice.randint(1, 30), threads=dice.randint(1, 4))
        await play(bench, given[0], -1, initial=True)
        oracle = Oracle(lr, mu, given[0])
        for number, arena in enumerate(given[1:]):
            await play(bench, arena, number)
            oracle.take(arena)
            assert consensus(bench).tobytes() == oracle.arena.tobytes(), f"seed {seed}, round {number}"
            assert bench.hosts[0].base.tobytes() == oracle.arena.tobytes(), "what was streamed is what is kept"
            assert momentum(bench).tobytes() == oracle.momentum.tobytes()
        bench.plane.close()


async def test_it_is_the_step_that_torch_makes() -> None:
    given = arenas(8)
    bench = bench_with()
    await play(bench, given[0], -1, initial=True)
    weight = torch.from_numpy(given[0][:PARAMS].astype(np.float64)).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True)
    for number, arena in enumerate(given[1:]):
        await play(bench, arena, number)
        weight.grad = weight.detach() - torch.from_numpy(arena[:PARAMS].astype(np.float64))
        optimizer.step()
        np.testing.assert_allclose(consensus(bench)[:PARAMS], weight.detach().numpy(), rtol=0, atol=3e-3)


async def test_lr_one_without_momentum_is_no_outer_optimizer_at_all() -> None:
    given = arenas(5)
    plain, stepped = bench_with(None), bench_with(Nesterov(1.0, 0.0))
    for number, arena in enumerate(given, start=-1):
        for bench in (plain, stepped):
            await play(bench, arena, number, initial=number < 0)
        assert consensus(stepped).tobytes() == consensus(plain).tobytes()
    assert plain.plane.outer_momentum is None


async def test_every_host_gets_the_same_bits_of_a_weighted_round() -> None:
    start, first, second = arenas(3)
    bench = bench_with()
    await play(bench, start, -1, initial=True)
    bench.plane.open(OpenRound(0, 0, {0: (0,), 1: (1,), 2: (2,)}, False, PARAMS, BUFFERS))
    for host in (1, 2):
        bench.host(host).base = start
    for host, (steps, share) in enumerate([(3, first), (1, second), (0, None)]):
        bench.plane.contribution(host, declared({host: steps}))
        for header, payload in chunks(share) if share is not None else ():
            bench.plane.chunk(host, header, payload)
    await bench.finished()
    update = first + second
    update[:PARAMS] *= np.float32(1 / 4)
    update[PARAMS:] *= np.float32(1 / 2)
    oracle = Oracle(0.7, 0.9, start)
    oracle.step(update)
    assert {receiver.new.tobytes() for receiver in bench.hosts.values()} == {oracle.arena.tobytes()}
    assert sorted(bench.hosts) == [0, 1, 2], "idle hosts too"


async def test_a_round_without_work_steps_nowhere() -> None:
    start, first, second = arenas(3)
    bench = bench_with()
    await play(bench, start, -1, initial=True)
    await play(bench, first, 0)
    before, kept = consensus(bench), momentum(bench)
    assert not (await play(bench, first, 1, steps=0)).realized
    assert (consensus(bench).tobytes(), momentum(bench).tobytes()) == (before.tobytes(), kept.tobytes())
    oracle = Oracle(0.7, 0.9, start)
    for arena in (first, second):
        oracle.take(arena)
    await play(bench, second, 2)
    assert consensus(bench).tobytes() == oracle.arena.tobytes()


async def test_a_broadcast_is_no_step_whenever_it_comes() -> None:
    start, first, again = arenas(3)
    bench = bench_with()
    await play(bench, start, -1, initial=True)
    await play(bench, first, 0)
    kept = momentum(bench)
    await play(bench, again, -1, initial=True)
    assert (consensus(bench).tobytes(), momentum(bench).tobytes()) == (again.tobytes(), kept.tobytes())


async def test_an_abort_anywhere_in_the_stream_leaves_the_momentum_as_it_was() -> None:
    start, first, lost, second = arenas(4)
    oracle = Oracle(0.7, 0.9, start)
    for arena in (first, second):
        oracle.take(arena)
    for seed in range(30):
        dice = random.Random(seed)
        bench = bench_with(threads=4)
        await play(bench, start, -1, initial=True)
        await play(bench, first, 0)
        kept = momentum(bench) if seed % 2 else None  # a buffer that was lent is treated unlike one that was not
        bench.plane.open(OpenRound(1, 0, {0: (0,), 1: (1,)}, False, PARAMS, BUFFERS))
        bench.host(1).base = bench.consensus
        streams = [list(chunks(bench.consensus - arena, round_=1)) for arena in (second, lost)]
        for host in (0, 1):
            bench.plane.contribution(host, declared({host: 1}, 1))
        for index in range(dice.randint(0, len(streams[0]))):
            for host in (0, 1):
                bench.plane.chunk(host, *streams[host][index])
            for _ in range(dice.randint(0, 3)):
                await asyncio.sleep(0)
        bench.plane.abort(1, 0, "rank 1 died")
        while not bench.results.empty():
            bench.results.get_nowait()
        assert kept is None or momentum(bench).tobytes() == kept.tobytes()
        await play(bench, second, 1, attempt=1)
        assert consensus(bench).tobytes() == oracle.arena.tobytes(), seed
        assert momentum(bench).tobytes() == oracle.momentum.tobytes(), seed
        bench.plane.close()


async def test_an_abort_that_crosses_the_finish_takes_the_momentum_back_too() -> None:
    start, first, lost, second = arenas(4)
    bench = bench_with()
    await play(bench, start, -1, initial=True)
    await play(bench, first, 0)
    await play(bench, lost, 1)
    bench.plane.abort(1, 0, "rank 1 died, before anybody heard that the round was finished")
    await play(bench, second, 1, attempt=1)
    oracle = Oracle(0.7, 0.9, start)
    for arena in (first, second):
        oracle.take(arena)
    assert consensus(bench).tobytes() == oracle.arena.tobytes()
    assert momentum(bench).tobytes() == oracle.momentum.tobytes()


async def test_what_was_handed_out_is_never_written_again() -> None:
    given = arenas(5)
    bench = bench_with()
    await play(bench, given[0], -1, initial=True)
    await play(bench, given[1], 0)
    held = bench.plane.outer_momentum
    assert held is not None and not held.flags.writeable
    before = held.copy()
    for number, arena in enumerate(given[2:], start=1):
        await play(bench, arena, number)
    assert held.tobytes() == before.tobytes()


async def test_a_restored_run_goes_on_as_if_it_had_never_stopped() -> None:
    start, first, second, third = arenas(4)
    whole = bench_with()
    await play(whole, start, -1, initial=True)
    await play(whole, first, 0)
    saved, kept = consensus(whole), momentum(whole)
    resumed = bench_with()
    resumed.plane.restore_outer(kept)
    await play(resumed, saved, -1, initial=True)
    assert momentum(resumed).tobytes() == kept.tobytes(), "the broadcast hands it on"
    for number, arena in enumerate([second, third]):
        await play(whole, arena, number + 1)
        await play(resumed, arena, number)
        assert consensus(resumed).tobytes() == consensus(whole).tobytes()
        assert momentum(resumed).tobytes() == momentum(whole).tobytes()


async def test_a_restored_momentum_outlives_an_initial_broadcast_that_was_taken_back() -> None:
    start, kept = arenas(2)
    bench = bench_with()
    bench.plane.restore_outer(kept[:PARAMS])
    await play(bench, start, -1, initial=True)
    bench.plane.abort(-1, 0, "rank 1 died, before anybody heard that the round was finished")
    assert bench.plane.outer_momentum is None
    await play(bench, start, -1, attempt=1, initial=True)
    assert momentum(bench).tobytes() == kept[:PARAMS].tobytes()


async def test_what_cannot_be_restored_is_refused_by_name() -> None:
    good = np.zeros(PARAMS, np.float32)
    with pytest.raises(ValueError, match="no outer optimizer"):
        bench_with(None).plane.restore_outer(good)
    for bad, says in (
        (good.astype(np.float64), "one f32 vector, not float64"),
        (good.reshape(1, -1), "one f32 vector"),
        (np.full(PARAMS, np.inf, np.float32), "not finite"),
    ):
        with pytest.raises(ValueError, match=says):
            bench_with().plane.restore_outer(bad)
    bench = bench_with()
    bench.plane.restore_outer(np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=f"3 elements, the parameters {PARAMS}"):
        bench.open({0: (0,)}, -1)
    bench = bench_with()
    await play(bench, arenas(1)[0], -1, initial=True)
    with pytest.raises(ValueError, match="before the first round only"):
        bench.plane.restore_outer(good)


async def test_a_step_out_of_range_breaks_the_round_and_blames_nobody() -> None:
    bench = bench_with(Nesterov(10.0, 0.9))
    await play(bench, np.full(ELEMENTS, -1e38, np.float32), -1, initial=True)
    far = np.full(ELEMENTS, -2e38, np.float32)
    bench.open({0: (0,)})
    bench.plane.contribution(0, declared({0: 1}))
    for header, payload in chunks(far):
        bench.plane.chunk(0, header, payload)
    broken = await bench.broken()
    assert broken.host is None
    assert broken.reason == "the new consensus is inf at element 0 (params), though every contribution is finite"
    assert (consensus(bench) == np.float32(-1e38)).all()
    assert not momentum(bench).any()


def test_the_configuration_says_which() -> None:
    assert outer_optimizer(RunConfig(job="a.py:A")) is None
    assert outer_optimizer(RunConfig(job="a.py:A", outer_optimizer="nesterov", outer_lr=0.5)) == Nesterov(0.5, 0.9)
