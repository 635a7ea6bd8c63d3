"""How a finding is told: a law that does not hold, and what every target of the fuzzers is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from benchmarks.fuzzing import mutation

MAX_INPUT = 8192
"""bytes of an input that a fuzzer makes up"""
MAX_TEXT = 600
"""characters of a refusal"""


class Broken(AssertionError):
    """A law does not hold; the text says which."""


@dataclass(frozen=True, slots=True)
class Target:
    """One decoder. It takes any bytes, and returns or raises ``Broken``; what its decoder should not have raised passes
    through. ``seeds`` are good inputs; ``mutate`` makes a bad one of one of them."""

    name: str
    headline: str
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    mutate: Callable[[bytes, Random], bytes] = mutation.mutated


def hold(condition: object, what: str) -> None:
    """Raises ``Broken`` unless the condition is true."""
    if not condition:
        raise Broken(what)


def hold_text(text: str) -> None:
    """A peer can have had a hand in this text: one line of bounded length, fit for a log."""
    hold(text.isprintable() and len(text) <= MAX_TEXT, f"its text is unfit for a log: {text[:200]!r}")
