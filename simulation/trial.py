"""A world on trial: played to its end with every invariant checked after every event; what breaks it, and where."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from simulation.laws import Laws
from simulation.lives import LaterLaws, Return, next_life
from simulation.oracle import Oracle
from simulation.ordeal import Ordeal
from simulation.script import Script
from simulation.theatre import Theatre
from simulation.transcript import Log, render
from simulation.watch import Watcher

HORIZON = 3000.0
"""virtual seconds in which every world must have ended"""
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Failure:
    """What broke, as a sentence, and where: the kind of error and the function of ours in which it was raised."""

    sentence: str
    place: str


@dataclass(frozen=True, slots=True)
class Trial:
    """A world that was played; ``failure`` is none when every invariant held."""

    script: Script
    theatre: Theatre
    """of the last life, where controllers died"""
    failure: Failure | None
    log: Log

    @property
    def events(self) -> int:
        """What the core was told, in number."""
        return sum(kind == "event" for _, kind, _ in self.log.entries)

    def transcript(self, last: int = 60) -> str:
        """The last lines before the world ended or broke."""
        lines = render(self.log.entries).splitlines()[-last:]
        return "\n".join([*lines, f"!!! {self.failure.sentence}"] if self.failure else lines) + "\n"


def hold(script: Script, *, look_on: Callable[[Ordeal], Watcher] | None = None) -> Trial:
    """Play a world; one over wires is held to all laws of an ordeal, and ``look_on`` makes one more watcher of it."""
    theatre = script.theatre()
    log = Log()
    theatre.watchers.append(log)
    if not isinstance(theatre, Ordeal):
        oracle = Oracle(theatre)
        return Trial(script, theatre, _failure(lambda: _play(script, theatre, oracle)), log)
    failure, life = None, 0
    laws: Laws | None = None
    following: Ordeal | None = theatre
    while following is not None and failure is None:
        theatre, life = following, life + 1
        theatre.watchers[:] = [log, *([look_on(theatre)] if look_on else [])]
        laws = LaterLaws(theatre, laws) if isinstance(theatre, Return) and laws is not None else Laws(theatre)
        failure = _failure(partial(_play, script, theatre, laws))
        following = next_life(theatre, int(script.number("dice", 0)), life)
    return Trial(script, theatre, failure, log)


def _play(script: Script, theatre: Theatre, oracle: Oracle) -> None:
    """One life to its end."""
    if not isinstance(theatre, Return):
        script.put_on(theatre)
    theatre.run(HORIZON)
    if isinstance(theatre, Ordeal) and theatre.end is not None:
        theatre.afterwards()
    oracle.finish()


def _failure(play: Callable[[], None]) -> Failure | None:
    try:
        play()
    except Exception as error:  # whatever breaks is the result
        return Failure(f"{type(error).__name__}: {error}", f"{type(error).__name__} in {_place(error)}")
    return None


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(ROOT)]
    return f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else "nowhere of ours"
