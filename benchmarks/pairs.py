"""Ours and theirs in turns, A B A B, so that what else the machine does hits both; noisy turns are done again."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.processes import others, undisturbed, use

Repeat = Callable[[int], list[float]]
"""does something so many times in a row: the seconds of each"""

QUIET_CORES = 0.15
"""busy with what is not ours while a turn counts as quiet"""


@dataclass(frozen=True, slots=True)
class Turns:
    """How often: ``turns`` of each, ``times`` repetitions a turn, and at most ``again`` more when others disturb."""

    turns: int
    times: int
    again: int = 0
    alone: bool = False
    """with real-time priority, so that other programs stand still"""


@dataclass(slots=True)
class _Turn:
    seconds: dict[str, list[float]] = field(default_factory=dict)
    disturbed: float = 0.0


def alternate(contenders: dict[str, Repeat], plan: Turns) -> dict[str, Any]:
    """Seconds by contender, of the quietest turns.

    ``others`` are the cores that other programs kept busy in each turn that counts (the worst contender's share), and
    ``dropped`` says how many turns did not count.
    """
    done: list[_Turn] = []
    while _quiet(done) < plan.turns and len(done) < plan.turns + plan.again:
        turn = _Turn()
        for name, repeat in contenders.items():
            before = use()
            with undisturbed(plan.alone):
                turn.seconds[name] = repeat(plan.times)
            turn.disturbed = max(turn.disturbed, others(before, use()))
        done.append(turn)
    kept = sorted(done, key=lambda turn: turn.disturbed)[: plan.turns]
    return {
        "seconds": {name: [one for turn in kept for one in turn.seconds[name]] for name in contenders},
        "others": [round(turn.disturbed, 3) for turn in kept],
        "dropped": len(done) - len(kept),
    }


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median, least and most, in milliseconds."""
    return {
        "median_ms": statistics.median(seconds) * 1000,
        "min_ms": min(seconds) * 1000,
        "max_ms": max(seconds) * 1000,
        "times": len(seconds),
    }


def _quiet(turns: Sequence[_Turn]) -> int:
    return sum(turn.disturbed <= QUIET_CORES for turn in turns)
