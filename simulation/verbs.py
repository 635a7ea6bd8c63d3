"""``python -m simulation faults`` and ``mutants``: ordeals by the thousand, and whether they would find a bug."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from simulation.bugs import MUTANTS, SURVIVORS
from simulation.campaign import Tally, campaign, play
from simulation.mutants import Mutant
from simulation.ordeals import draw
from simulation.shrink import shrink_failure
from simulation.trial import hold

ENOUGH_SEEDS = 2000
"""that a mutant must survive before it counts as one"""


def faults(arguments: list[str]) -> int:
    """Seeded ordeals, every law after every event. Exit status 1 when one broke or a probe was missed."""
    parser = argparse.ArgumentParser(prog="python -m simulation faults", description=faults.__doc__)
    parser.add_argument("--seeds", type=_seeds, default=(0, ENOUGH_SEEDS), metavar="A:B", help="from A up to B")
    parser.add_argument("--workers", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--show", action="store_true", help="print the ordeal of the first seed and what became of it")
    options = parser.parse_args(arguments)
    first, stop = options.seeds
    if options.show:
        return _show(first)
    tally, seconds = campaign(first, stop, options.workers)
    found = tally.as_json() | {
        "first": first,
        "stop": stop,
        "workers": options.workers,
        "seconds": seconds,
        "seeds_per_minute": 60 * tally.seeds / seconds,
        "python": platform.python_version(),
    }
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    if tally.failures:
        return _broken(tally.failures[0][0])
    print("\n".join(_lines(tally, seconds)))
    return 0 if not tally.missed or tally.seeds < ENOUGH_SEEDS else 1


def mutants(arguments: list[str]) -> int:
    """Plants each known bug and looks for it. Exit status 1 when one survives without an explanation."""
    parser = argparse.ArgumentParser(prog="python -m simulation mutants", description=mutants.__doc__)
    parser.add_argument("--seeds", type=int, default=ENOUGH_SEEDS, help="at most (default: %(default)s)")
    parser.add_argument("--only", action="append", metavar="NAME", choices=[each.name for each in MUTANTS])
    parser.add_argument("--json", type=Path, help="write the score to this file")
    options = parser.parse_args(arguments)
    rows = [look_for(each, options.seeds) for each in MUTANTS if not options.only or each.name in options.only]
    found = [row for row in rows if row["seed"] is not None]
    unexplained = [row["name"] for row in rows if row["seed"] is None and not row["why"]]
    for row in rows:
        where = f"seed {row['seed']}: {row['sentence']}" if row["seed"] is not None else f"survives: {row['why']}"
        print(f"{row['name']:32} {where}"[:160])
    print(f"{len(found)} of {len(rows)} mutants found; survivors without an explanation: {unexplained or 'none'}")
    if options.json is not None:
        score = {"mutants": len(rows), "found": len(found), "unexplained": unexplained, "rows": rows}
        options.json.write_text(json.dumps(score, indent=2) + "\n")
    return 1 if unexplained else 0


def look_for(bug: Mutant, seeds: int) -> dict[str, Any]:
    """Whether the ordeals find a planted bug: the first seed that does, or none, and in how many seconds."""
    began = time.perf_counter()
    with bug.planted():
        tally = play(0, seeds, most_failures=1, among=bug.among)
    seed, failure = tally.failures[0] if tally.failures else (None, None)
    return {
        "name": bug.name,
        "story": bug.story,
        "seed": seed,
        "sentence": failure.sentence[:200] if failure else "",
        "why": SURVIVORS.get(bug.name, "") if failure is None else "",
        "seconds": time.perf_counter() - began,
    }


def _broken(seed: int) -> int:
    trial = hold(draw(seed))
    assert trial.failure is not None, f"seed {seed} does not break twice"
    print(f"Seed {seed} breaks: {trial.failure.sentence}\n  {trial.failure.place}\n\nShrunk:\n")
    small = hold(shrink_failure(trial.script, trial.failure))
    print(small.script.text())
    print(small.transcript())
    print(f"Again: python -m simulation faults --seeds {seed}:{seed + 1} --show")
    return 1


def _show(seed: int) -> int:
    trial = hold(draw(seed))
    print(trial.script.text())
    print(trial.transcript(10_000))
    return 1 if trial.failure else 0


def _lines(tally: Tally, seconds: float) -> Iterable[str]:
    phases = ", ".join(f"{count} {phase}" for phase, count in tally.phases.most_common())
    yield (
        f"{tally.seeds} ordeals, {tally.faults} faults, {tally.events} events and {tally.virtual_seconds / 3600:.1f} "
        f"virtual hours in {seconds:.1f} s ({60 * tally.seeds / seconds:,.0f} a minute): no law broke ({phases})"
    )
    yield f"{len(tally.probes)} sites reached" + (f"; missed: {', '.join(tally.missed)}" if tally.missed else "")


def _seeds(text: str) -> tuple[int, int]:
    first, _, stop = text.partition(":")
    try:
        bounds = int(first), int(stop)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B") from error
    if not 0 <= bounds[0] < bounds[1]:
        raise argparse.ArgumentTypeError(f"{text} holds no seed")
    return bounds


VERBS = {"faults": faults, "mutants": mutants}
