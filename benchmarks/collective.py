"""A round of the collective plane against a bare all_reduce and torch's own; its memory; a job in its modes.

sync: processes with a model of a wanted size, parameters and buffers, which they average as a rank does, COUNT, PARAM,
BUFFER, divergence and checksum included, until the consensus is adopted. Beside it, on the same communicator, one sum
of as many elements, and torch.distributed's all_reduce of as many over its own process group. The three go in turns.
memory: as many such rounds back to back; device and process before and after. training: examples/tiny_gpt.py through
a real controller and agents, one rank twice as slow as the other, in nccl_cadence, nccl_sync and cpu_cadence.
On GPUs the library is NCCL, on CPUs gloo. Where ranks share a GPU, each plays a host of its own and sums go through
sockets (P2P and shared memory off): that measures our overhead, not the device's links.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

from benchmarks import collective_words
from benchmarks.collective_ranks import Layout, Ranks, layout
from benchmarks.collective_training import Course, add_course_options, train
from benchmarks.figures import EntryFailed
from benchmarks.pairs import Turns, alternate, summary
from benchmarks.processes import machine

MILLIONS = {"cuda": "25,250", "cpu": "0.25,2.5"}
"""of parameters"""
MEMORY_MILLIONS = {"cuda": 25.0, "cpu": 0.25}
LARGE = 100_000_000
"""parameters from which on a turn is two repetitions at most"""
CONTENDERS = ("ours", "bare", "torch")
WARM_UP = 3
"""repetitions that do not count"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this measurement."""
    parser.add_argument("--only", default=",".join(PARTS), help="parts, of %(default)s (default: all)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(default: %(default)s)")
    parser.add_argument(
        "--gpus", type=int, help="at most; ranks share the first where there are too few (default: all)"
    )
    parser.add_argument("--ranks", default="2,4", help="of sync (default: %(default)s)")
    parser.add_argument("--millions", help=f"of parameters, of sync (default: {MILLIONS['cuda']}; on CPUs less)")
    parser.add_argument("--turns", type=int, default=4, help="of each contender (default: %(default)s)")
    parser.add_argument("--times", type=int, default=5, help="repetitions a turn (default: %(default)s)")
    parser.add_argument("--again", type=int, default=2, help="turns more, when disturbed (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=500, help="of memory (default: %(default)s)")
    add_course_options(parser)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Do the parts that were asked for; one that cannot be done says why."""
    chosen = options.only.split(",")
    if unknown := [name for name in chosen if name not in PARTS]:
        raise SystemExit(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    place = layout(options.device, options.gpus)
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": metadata.version("torch"),
        "backend": place.backend,
        "gpus": place.gpus,
        "machine_before": machine(),
    }
    lines = [collective_words.headline(found), ""]
    for name in chosen:
        do, words = PARTS[name]
        try:
            found[name] = do(options, place)
            told = words(found[name])
        except EntryFailed as error:
            found[name] = {"failed": str(error)}
            told = [f"{name} did not come to figures: {error}"]
        print("\n".join(told), file=sys.stderr, flush=True)
        lines += [*told, ""]
    failed = any("failed" in found[name] for name in chosen)
    return found | {"machine_after": machine(), "failed": failed, "lines": lines}


# ------------------------------------------------------------------------------------------------------- sync


def _sync(options: argparse.Namespace, place: Layout) -> dict[str, Any]:
    rows = []
    for world in map(int, options.ranks.split(",")):
        with Ranks(place, world) as ranks:
            for millions in (options.millions or MILLIONS[place.device]).split(","):
                rows.append(_one_size(ranks, round(float(millions) * 1e6), options))
    return {"rows": rows}


def _one_size(ranks: Ranks, params: int, options: argparse.Namespace) -> dict[str, Any]:
    _say(f"sync, {ranks.world} ranks, {params / 1e6:g} M parameters")
    transport = ranks.lay_out(params)
    splits: list[dict[str, float]] = []
    repeats = {name: _repeat(ranks, name, splits) for name in CONTENDERS}
    for repeat in repeats.values():
        repeat(WARM_UP)
    splits.clear()
    times = min(options.times, 2) if params >= LARGE else options.times
    turns = alternate(repeats, Turns(options.turns, times, options.again))
    found = {name: summary(seconds) for name, seconds in turns.pop("seconds").items()}
    median = {name: figures["median_ms"] for name, figures in found.items()}
    return {
        "ranks": ranks.world,
        "shared": ranks.layout.shared(ranks.world),
        "params": params,
        "bytes": ranks.elements * 4,
        "transport": transport,
        **found,
        "ratio": median["ours"] / median["bare"],
        "ratio_torch": median["ours"] / median["torch"],
        "split_ms": {name: statistics.median(split[name] for split in splits) for name in splits[0]},
        **turns,
    }


def _repeat(ranks: Ranks, name: str, splits: list[dict[str, float]]) -> Callable[[int], list[float]]:
    def repeat(times: int) -> list[float]:
        seconds, found = ranks.go(name, times)
        splits.extend(found)
        return seconds

    return repeat


# ------------------------------------------------------------------------------------------------------ memory


def _memory(options: argparse.Namespace, place: Layout) -> dict[str, Any]:
    params = round(MEMORY_MILLIONS[place.device] * 1e6)
    _say(f"memory, 2 ranks, {params / 1e6:g} M parameters, {options.rounds} rounds")
    with Ranks(place, 2) as ranks:
        transport = ranks.lay_out(params)
        ranks.go("ours", WARM_UP)
        notes = ranks.remember(options.rounds)
    rows = [_grown(rank, told) for rank, told in enumerate(notes)]
    return {"params": params, "rounds": options.rounds, "transport": transport, "rows": rows}


def _grown(rank: int, notes: list[dict[str, float]]) -> dict[str, Any]:
    """First and last note of a rank, and the most in between."""
    return {
        "rank": rank,
        "first": notes[0],
        "last": notes[-1],
        "most": {name: max(note[name] for note in notes) for name in notes[0]},
    }


# ---------------------------------------------------------------------------------------------------- training


def _training(options: argparse.Namespace, place: Layout) -> dict[str, Any]:
    return train(Course.of(options, place), _say)


def _say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)


Part = tuple[Callable[[argparse.Namespace, Layout], dict[str, Any]], Callable[[dict[str, Any]], list[str]]]
PARTS: dict[str, Part] = {
    "sync": (_sync, collective_words.sync),
    "memory": (_memory, collective_words.memory),
    "training": (_training, collective_words.training),
}
