"""Ordeals on trial: seeded faults over real links, every law after every event, and what the seeds must reach."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulation.__main__ import main
from simulation.bugs import MUTANTS, SURVIVORS
from simulation.campaign import campaign, endure
from simulation.mutants import Mutant
from simulation.ordeals import STRIKES, draw
from simulation.script import Script
from simulation.shrink import shrink_failure
from simulation.trial import hold
from simulation.verbs import look_for

SEEDS = 2000


@pytest.mark.timeout(400)
def test_no_ordeal_breaks_a_law_and_they_reach_every_site() -> None:
    """One test: sites are counted over all seeds, and tests that share nothing may run in different processes."""
    tally, _ = campaign(0, SEEDS, workers=2)
    assert tally.failures == []
    assert sum(tally.phases.values()) == SEEDS, "every run reaches its end"
    assert tally.missed == []
    assert tally.faults > 2 * SEEDS
    assert set(tally.phases) == {"done", "failed", "interrupted"}


def test_a_seed_is_an_ordeal() -> None:
    assert draw(7).text() == draw(7).text() != draw(8).text()
    assert all(Script.parse(draw(seed).text()) == draw(seed) for seed in range(50))
    acts = {act.words[0] for seed in range(400) for act in draw(seed).acts}
    assert len(acts) >= len(STRIKES)
    assert all(draw(seed).config().problems() == [] for seed in range(200))


def test_the_same_ordeal_goes_the_same_way() -> None:
    for seed in (3, 11, 102):
        first, again = hold(draw(seed)), hold(draw(seed))
        assert first.log.entries == again.log.entries
        assert first.failure is again.failure is None


# ------------------------------------------------------------------------------------------------ planted bugs

FOUND = [bug for bug in MUTANTS if bug.name not in SURVIVORS]


def named(name: str) -> Mutant:
    return next(bug for bug in MUTANTS if bug.name == name)


@pytest.mark.parametrize("bug", FOUND, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Mutant) -> None:
    assert look_for(bug, SEEDS)["seed"] is not None, bug.story


def test_mutants_have_names_and_survivors_reasons() -> None:
    names = [bug.name for bug in MUTANTS]
    assert len(names) == len(set(names)) >= 20
    assert SURVIVORS.keys() <= set(names)
    assert all(len(why) > 20 for why in SURVIVORS.values())
    assert len(FOUND) / len(MUTANTS) >= 0.9


def test_a_planted_bug_is_gone_afterwards() -> None:
    for bug in MUTANTS:
        before = vars(bug.where).get(bug.what), getattr(bug.where, bug.what)
        with bug.planted():
            assert getattr(bug.where, bug.what) is not before[1]
        assert (vars(bug.where).get(bug.what), getattr(bug.where, bug.what)) == before


def test_a_failing_ordeal_shrinks_to_what_it_needs() -> None:
    with named("forgets_the_dead").planted():
        failing = next(trial for trial in map(hold, map(draw, range(100))) if trial.failure)
        assert failing.failure is not None
        small = shrink_failure(failing.script, failing.failure)
        assert len(small.acts) <= 2
        assert small.ranks <= 3
        again = hold(Script.parse(small.text()))
        assert again.failure is not None and again.failure.place == failing.failure.place
        assert "!!! AssertionError" in again.transcript()
    assert hold(small).failure is None


# ------------------------------------------------------------------------------------------- the command line


def test_a_campaign_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "faults.json"
    assert main(["faults", "--seeds", "10:30", "--json", str(file)]) == 0
    assert "20 ordeals" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert (found["first"], found["stop"], found["seeds"], found["failures"]) == (10, 30, 20, [])
    assert found["seeds_per_minute"] > 0
    assert found["probes"]["clean exit after shutdown"] > 0


def test_workers_share_the_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "--seeds", "0:40", "--workers", "2"]) == 0
    assert "40 ordeals" in capsys.readouterr().out


def test_a_broken_law_is_printed_shrunk(capsys: pytest.CaptureFixture[str]) -> None:
    with named("says_no_goodbye").planted():
        assert main(["faults", "--seeds", "0:5"]) == 1
    printed = capsys.readouterr().out
    assert "Seed 0 breaks: AssertionError: L9" in printed
    assert "faults --seeds 0:1 --show" in printed
    assert main(["faults", "--seeds", "0:1", "--show"]) == 0
    assert "wires=1" in capsys.readouterr().out


def test_a_mutation_score_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mutants.json"
    only = ["--only", "divides_by_too_much", "--only", "times_with_nan"]
    assert main(["mutants", "--seeds", "20", *only, "--json", str(file)]) == 0
    score = json.loads(file.read_text())
    assert (score["mutants"], score["found"], score["unexplained"]) == (2, 1, [])
    assert "1 of 2 mutants found" in capsys.readouterr().out


@pytest.mark.parametrize("seeds", ["5", "9:3", "a:b"])
def test_seeds_that_are_none_are_refused(seeds: str) -> None:
    with pytest.raises(SystemExit):
        main(["faults", "--seeds", seeds])


def test_an_ordeal_tells_what_it_reached() -> None:
    endured = [endure(draw(seed)) for seed in range(30)]
    assert all(trial.failure is None for trial, _ in endured)
    assert sum(hits["clean exit after shutdown"] for _, hits in endured) > 10
    trial = next(trial for trial, hits in endured if hits["death of a process"])
    assert trial.theatre.rows("deaths")
