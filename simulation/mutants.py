"""Planting bugs into the core, one at a time: the machinery. What is planted stands in ``bugs``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from simulation.script import Script

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Mutant:
    """``make`` gets the real attribute ``what`` of ``where`` and answers with what replaces it."""

    name: str
    story: str
    where: Any
    what: str
    make: Callable[[Function], Any]
    modes: str = ""
    """how the modes begin that go where it is"""

    def among(self, script: Script) -> bool:
        """Whether an ordeal may find it."""
        return script.run["mode"].startswith(self.modes)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The bug is in the core as long as this lasts."""
        own = vars(self.where).get(self.what)
        real = getattr(self.where, self.what)
        setattr(self.where, self.what, self.make(real))
        try:
            yield
        finally:
            if own is None:
                delattr(self.where, self.what)
            else:
                setattr(self.where, self.what, own)


MUTANTS: list[Mutant] = []


def mutant(
    where: Any, what: str, story: str, *, modes: str = ""
) -> Callable[[Callable[[Function], Any]], Callable[[Function], Any]]:
    """Register a mutant under the name of its maker; it is looked for in ``modes`` only, where they are given."""

    def register(make: Callable[[Function], Any]) -> Callable[[Function], Any]:
        MUTANTS.append(Mutant(make.__name__, story, where, what, make, modes))
        return make

    return register
