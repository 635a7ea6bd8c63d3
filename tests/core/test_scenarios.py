"""Failure stories as text: each file under tests/scenarios is a script (simulation/script.py) above ``---`` and what
the core did below it.

``pytest tests/core/test_scenarios.py --rewrite`` records them anew; read the diff before you commit it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rehearsal import Rehearsal

from simulation.script import Script
from simulation.transcript import render

SCENARIOS = sorted((Path(__file__).parent.parent / "scenarios").glob("*.txt"))
SEPARATOR = "---\n"


def perform(script: Script) -> Rehearsal:
    """Play a script."""
    samples, reduce_seconds = int(script.number("samples", 60)), script.number("reduce", 0.002)
    play = Rehearsal(script.config(), samples=samples, reduce_seconds=reduce_seconds)
    script.put_on(play)
    play.run(script.until)
    return play


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    text, _, recorded = path.read_text().partition(SEPARATOR)
    script = Script.parse(text)
    told = render(perform(script).log, script.show)
    if request.config.getoption("--rewrite"):
        path.write_text(text + SEPARATOR + told)
        return
    assert told == recorded


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 10
