"""Random worlds on trial: no invariant breaks, planted faults are found, and what fails is shrunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from backend.core import training as training_module
from backend.core.cycle import Cycle
from backend.core.march import March
from backend.core.training import Training
from backend.core.work import EpochPool
from simulation.__main__ import main
from simulation.script import Script
from simulation.shrink import shrink, shrink_failure
from simulation.trial import hold
from simulation.worlds import MOST_BATCHES, draw

SEEDS = 200
BLOCKS = 8


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_world_breaks_an_invariant(block: int) -> None:
    for seed in range(block, SEEDS, BLOCKS):
        trial = hold(draw(seed))
        assert trial.failure is None, f"seed {seed}: {trial.failure}\n{trial.script.text()}"


def test_the_worlds_are_as_wide_as_they_should_be() -> None:
    worlds = [draw(seed) for seed in range(400)]
    assert {world.ranks for world in worlds} >= {2, 3, 64}
    assert all(2 <= world.ranks <= 64 for world in worlds)
    assert any(max(ms) / min(ms) >= 64 for world in worlds for ms in [[m for host in world.hosts for m in host.ms]])
    acts = {act.words[0] for world in worlds for act in world.acts}
    assert acts >= {
        "kill",
        "quit",
        "deaf",
        "pause",
        "speed",
        "unplug",
        "freeze",
        "relay",
        "poison",
        "stop",
        "abort",
        "lag",
        "lr",
    }
    batches = [-(-int(world.run["samples"]) // int(world.run["batch_size"])) for world in worlds]
    assert max(batches) > MOST_BATCHES // 2
    assert any(count <= world.ranks for count, world in zip(batches, worlds, strict=True)), "an epoch below a window"
    tails = [int(world.run["samples"]) % int(world.run["batch_size"]) for world in worlds]
    assert 1 in tails
    assert all(world.config().problems() == [] for world in worlds)


def test_a_seed_is_a_world() -> None:
    assert draw(7).text() == draw(7).text() != draw(8).text()
    assert Script.parse(draw(7).text()) == draw(7)


def test_the_same_world_goes_the_same_way() -> None:
    for seed in (3, 11):
        assert hold(draw(seed)).log.entries == hold(draw(seed)).log.entries


# ---------------------------------------------------------------------------------------------- planted faults


def forgets_the_dead(pool: EpochPool, rank: int) -> list[Any]:
    """A dead rank's samples are gone."""
    pool._in_flight.pop(rank, None)
    pool._delivered.pop(rank, None)
    return []


def keeps_what_the_dead_did(training: Training, rank: int) -> list[Any]:
    """What a rank delivered before it died counts, though no sum has it."""
    if training.pool is not None:
        training.pool.accept([rank])
    return REAL_RANK_DIED(training, rank)


def never_retries(cycle: Cycle, hosts: dict[int, tuple[int, ...]], reason: str) -> list[Any]:
    """An attempt in which somebody died goes on waiting."""
    return []


def deals_while_it_ends(march: March, number: int, now: float) -> None:
    """A round that closes after the end began deals another window."""
    march.ending, ending = None, march.ending
    try:
        REAL_AFTER_ROUND(march, number, now)
    finally:
        march.ending = march.ending or ending


def one_batch_too_many(*arguments: Any, **keywords: Any) -> dict[int, int]:
    """The last window of an epoch asks for more than there is."""
    plan = REAL_WINDOW_PLAN(*arguments, **keywords)
    return {rank: 0 for rank in plan} if sum(plan.values()) % 7 == 3 else plan


REAL_AFTER_ROUND = March._after_round
REAL_RANK_DIED = Training.rank_died
REAL_WINDOW_PLAN = training_module.window_plan
MUTANTS: list[tuple[object, str, Callable[..., Any]]] = [
    (EpochPool, "forfeit", forgets_the_dead),
    (Training, "rank_died", keeps_what_the_dead_did),
    (Cycle, "retry", never_retries),
    (March, "_after_round", deals_while_it_ends),
    (training_module, "window_plan", one_batch_too_many),
]


def first_failure(seeds: Iterable[int]) -> Any:
    return next((trial for trial in map(hold, map(draw, seeds)) if trial.failure is not None), None)


@pytest.mark.parametrize(("where", "what", "mutant"), MUTANTS, ids=[mutant.__name__ for _, _, mutant in MUTANTS])
def test_a_planted_fault_is_found(
    where: object, what: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, what, mutant)
    assert first_failure(range(SEEDS)) is not None


def test_a_failure_is_shrunk_to_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(EpochPool, "forfeit", forgets_the_dead)
    trial = first_failure(range(21, SEEDS))  # shrinking the one before it plays hundreds of stalls
    small = shrink_failure(trial.script, trial.failure)

    assert small.ranks <= 3
    assert len(small.acts) == 1
    failure = hold(small).failure
    assert failure is not None and failure.place == trial.failure.place
    assert hold(Script.parse(small.text())).failure == failure

    seed = trial.script.run["dice"]
    assert main(["--seeds", "3", "--seed", seed]) == 1
    printed = capsys.readouterr().out
    assert f"Seed {seed} breaks: {trial.failure.sentence}" in printed
    assert small.text() in printed
    assert f"--seeds 1 --seed {seed}" in printed
    assert "!!! " in printed


def test_shrinking_keeps_what_fails_and_nothing_else() -> None:
    script = draw(2)
    script = replace(script, run=script.run | {"samples": "640"})

    small = shrink(script, lambda world: int(world.run["samples"]) >= 100 and world.ranks >= 2)

    assert small.ranks == 2
    assert small.acts == []
    assert small.run["samples"] == "100"
    assert (small.run["quorum"], small.run["target"]) == ("2", "2")
    assert all(host.options == {} for host in small.hosts)


def test_many_worlds_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "5", "--seed", "300"]) == 0
    assert "5 worlds from seed 300" in capsys.readouterr().out
