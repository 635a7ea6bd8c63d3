"""Many ordeals, one seed after another, on as many cores as one likes: what broke, what was reached, how fast."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from simulation.ordeal import Ordeal
from simulation.ordeals import draw
from simulation.probes import NAMES, Probes
from simulation.script import Script
from simulation.trial import Failure, Trial, hold

PORTION = 500
"""seeds that a worker takes at once"""


@dataclass
class Tally:
    """What a range of seeds came to."""

    seeds: int = 0
    events: int = 0
    faults: int = 0
    """acts of the scripts"""
    virtual_seconds: float = 0.0
    phases: Counter[str] = field(default_factory=Counter)
    probes: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, Failure]] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Take in what another range came to."""
        self.seeds += other.seeds
        self.events += other.events
        self.faults += other.faults
        self.virtual_seconds += other.virtual_seconds
        self.phases += other.phases
        self.probes += other.probes
        self.failures += other.failures

    @property
    def missed(self) -> list[str]:
        """Probes that no seed hit."""
        return sorted(NAMES - self.probes.keys())

    def as_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "seeds": self.seeds,
            "events": self.events,
            "faults": self.faults,
            "virtual_seconds": self.virtual_seconds,
            "phases": dict(self.phases.most_common()),
            "probes": {name: self.probes[name] for name in sorted(NAMES | self.probes.keys())},
            "missed": self.missed,
            "failures": [[seed, failure.sentence, failure.place] for seed, failure in self.failures],
        }


def endure(script: Script) -> tuple[Trial, Counter[str]]:
    """Play one ordeal, with all lives of its controller: the trial, and the probes that it hit."""
    probes: list[Probes] = []

    def look_on(play: Ordeal) -> Probes:
        probes.append(Probes(play))
        return probes[-1]

    trial = hold(script, look_on=look_on)
    return trial, sum((each.finish() for each in probes), Counter())


def play(
    first: int, stop: int, *, most_failures: int = 5, among: Callable[[Script], bool] = lambda script: True
) -> Tally:
    """The seeds from ``first`` up to ``stop``, of those that are ``among``; no further once so many have broken."""
    tally = Tally()
    for script in filter(among, map(draw, range(first, stop))):
        seed = int(script.run["dice"])
        trial, hits = endure(script)
        tally.seeds += 1
        tally.events += trial.events
        tally.faults += len(script.acts)
        tally.virtual_seconds += trial.theatre.now
        tally.probes += hits
        if trial.failure is not None:
            tally.failures.append((seed, trial.failure))
            if len(tally.failures) >= most_failures:
                break
        else:
            assert trial.theatre.end is not None
            tally.phases[trial.theatre.end.phase] += 1
    return tally


def campaign(first: int, stop: int, workers: int) -> tuple[Tally, float]:
    """All seeds of the range, by so many processes: the tally, and the seconds it took."""
    began = time.perf_counter()
    total = Tally()
    for tally in _portions(first, stop, workers):
        total.add(tally)
        if total.failures:
            break
    return total, time.perf_counter() - began


def _portions(first: int, stop: int, workers: int) -> Iterator[Tally]:
    starts = range(first, stop, PORTION)
    ends = [min(start + PORTION, stop) for start in starts]
    if workers == 1:
        yield from map(play, starts, ends)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(play, starts, ends)
        pool.shutdown(cancel_futures=True)
