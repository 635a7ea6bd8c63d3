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
    collective: bool = False
    """only the collective modes go where it is"""

    def among(self, script: Script) -> bool:
        """Whether an ordeal may find it."""
        return not self.collective or script.config().collective

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
    where: Any, what: str, story: str, *, collective: bool = False
) -> Callable[[Callable[[Function], Any]], Callable[[Function], Any]]:
    """Register a mutant under the name of its maker; one that is ``collective`` is looked for in those modes only."""

    def register(make: Callable[[Function], Any]) -> Callable[[Function], Any]:
        MUTANTS.append(Mutant(make.__name__, story, where, what, make, collective))
        return make

    return register
