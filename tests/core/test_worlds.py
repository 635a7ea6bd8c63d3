"""Random worlds: speeds, sizes, batches, deaths. Whatever happens, no invariant breaks and the run ends for a
reason."""

from __future__ import annotations

import random

import pytest
from rehearsal import Rehearsal

from backend.core.config import RunConfig

SEEDS = 200


def play_world(seed: int) -> Rehearsal:
    """One world, all of it drawn from the seed."""
    dice = random.Random(seed)
    hosts = [
        [dice.choice([1.0, 2.0, 3.5, 8.0, 20.0, 64.0]) for _ in range(dice.randint(1, 3))]
        for _ in range(dice.randint(2, 5))
    ]
    world = sum(map(len, hosts))
    config = RunConfig(
        job="odometer.py:Odometer",
        batch_size=dice.choice([1, 3, 8]),
        epochs=dice.randint(1, 3),
        mode=dice.choice(["cpu_cadence", "cpu_sync", "cpu_async"]),
        initial_anchor=dice.choice([1, 2, 10]),
        start_mode="auto",
        quorum=world,
        target=world,
        max_failure=dice.choice([None, None, 2, 0.5]),
    )
    play = Rehearsal(config, samples=dice.randint(world, 400), reduce_seconds=dice.choice([0.0, 0.002, 0.1]))
    for number, ms in enumerate(hosts):
        play.join(f"host-{number}", *ms)
    for _ in range(dice.randint(0, 3)):
        when, what = dice.uniform(0.05, 3.0), dice.choice(["kill", "unplug", "freeze", "stop"])
        victim, name = dice.randrange(world), f"host-{dice.randrange(len(hosts))}"
        play.at(when, lambda what=what, victim=victim, name=name: strike(play, what, victim, name))
    return play.run(until=5000)


def strike(play: Rehearsal, what: str, rank: int, name: str) -> None:
    """One fault, if it can still happen."""
    if play.end is not None:
        return
    if what == "kill" and rank in play.ranks and play.ranks[rank].alive:
        play.kill(rank)
    elif what == "unplug" and play.hosts[name].alive:
        play.unplug(name)
    elif what == "freeze":
        play.freeze(name)
    elif what == "stop":
        play.operate("stop")


@pytest.mark.parametrize("block", range(10))
def test_no_world_breaks_an_invariant(block: int) -> None:
    for seed in range(block, SEEDS, 10):
        play = play_world(seed)
        assert play.end is not None, f"seed {seed}: nothing ended it by {play.now:.0f} s, phase {play.cohort.phase}"
        assert play.end.reason, f"seed {seed}"
        ends = [row for row in play.rows("runs") if row.get("phase") in ("done", "failed")]
        assert len(ends) == 1, f"seed {seed}: the run ended {len(ends)} times"
        accepted = [row["samples_accepted"] for row in play.rows("epochs") if "samples_accepted" in row]
        assert all(samples == play.samples for samples in accepted), f"seed {seed}: {accepted} of {play.samples}"
        march = play.cohort.march
        dead = march.world.dead() if march else []
        assert sorted(row["rank"] for row in play.rows("deaths")) == dead, f"seed {seed}"
        if play.end.phase == "done" and not play.end.reason.startswith("Stopped"):
            assert len(accepted) == play.config.epochs, f"seed {seed}"
