"""What an event costs the core, by the size of the world.

Each world is simulated from its first hello to its end, so that joining, forming, windows, rounds and the way out are
all in the mean. Only the core's own time counts (``handle`` and ``next_deadline``), by the machine's clock.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from simulation.report import core_cost
from simulation.script import HostLine, Script

SIZES = (4, 64, 1024)
SPEEDS = (1.0, 2.0, 4.0)
BASE_MS = 10.0
EVENTS = 100_000
"""of each world, about"""
LIMITS = {64: 50.0, 1024: 200.0}
"""us an event that a world of this size may cost on average"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this measurement."""
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="ranks of the worlds (default: %(default)s)")
    parser.add_argument("--per-host", type=int, default=8, help="ranks on each host (default: %(default)s)")
    parser.add_argument("--mode", default="cpu_cadence")
    parser.add_argument("--events", type=int, default=EVENTS, help="of each world, about (default: %(default)s)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Simulate the worlds one after another."""
    worlds = []
    for ranks in map(int, options.sizes.split(",")):
        cost = measure_world(ranks, per_host=options.per_host, mode=options.mode, events=options.events)
        worlds.append({"ranks": ranks} | cost)
    return {"mode": options.mode, "per_host": options.per_host, "worlds": worlds, "lines": _lines(worlds)}


def measure_world(
    ranks: int, *, per_host: int, mode: str, events: int, stopwatch: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """The cost of one world, as ``simulation.report.core_cost`` gives it, in millionths of what ``stopwatch`` counts.
    Raises ``RuntimeError`` when the world does not end well."""
    batches = max(ranks, events if mode == "cpu_cadence" else events // 3)
    ms = [BASE_MS * SPEEDS[rank % len(SPEEDS)] for rank in range(ranks)]
    hosts = [HostLine(f"host-{first}", ms[first : first + per_host]) for first in range(0, ranks, per_host)]
    run = {"quorum": ranks, "target": ranks, "mode": mode, "batch_size": 1, "samples": batches, "reduce": 0.05}
    script = Script({key: str(value) for key, value in run.items()}, hosts)
    play = script.theatre(check=False, stopwatch=stopwatch)
    script.put_on(play)
    play.run(1e9)
    if play.end is None or play.end.phase != "done":
        raise RuntimeError(f"the world of {ranks} ranks ended otherwise: {play.end}")
    return {"rounds": len(play.rows("rounds"))} | core_cost(play.core_time)


def _lines(worlds: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"{'ranks':>6} {'rounds':>7} {'events':>9} {'events/s':>10} {'us/event':>9} {'limit':>6}   costliest kinds"
    ]
    for world in worlds:
        kinds = list(world["us_by_kind"].items())[:3]
        costly = ", ".join(f"{kind} {cost['us']:.0f} us x {cost['events']}" for kind, cost in kinds)
        limit = LIMITS.get(world["ranks"])
        lines.append(
            f"{world['ranks']:>6} {world['rounds']:>7} {world['events']:>9} {world['events_per_second']:>10,.0f} "
            f"{world['us_per_event']:>9.1f} {limit or '':>6}   {costly}"
        )
    return lines
