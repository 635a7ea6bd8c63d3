"""The CPU reduce against gloo's all_reduce, on a host and between hosts: time, memory, the controller's pulse.

Marchline runs as its users start it, with all settings at their defaults: verified, with divergence and both norms.
A round's time is the controller's own: from the moment at which it asks the ranks for their parameters to that at
which it has heard from the last one that the consensus is adopted. gloo's is from the moment at which the last rank
has entered all_reduce to that at which the last one has divided its result, in place; it packs nothing, copies nothing
out, hashes nothing and has no third party to ask. Both go in turns in the same minutes. Turns in which other programs
kept more than a little of a core busy are repeated, as far as --again allows, and the quietest count. A megabyte is
10^6 bytes.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib import metadata
from types import FrameType
from typing import Any

from benchmarks import netns, reduce_words
from benchmarks.cohorts import Cohort, Wish
from benchmarks.figures import EntryFailed
from benchmarks.gloo import Gloo, raw_stream
from benchmarks.pairs import Repeat, Turns, alternate, summary
from benchmarks.processes import machine, peaks, undisturbed

WORLDS = (2, 4)
SIZES = (1.0, 16.0, 100.0, 400.0)
LINK_HOSTS = (2, 4)
LINK_MEGABYTES = 100.0
MEMORY_HOSTS = (2, 4, 8)
MEMORY_MEGABYTES = 400.0
TICK_MEGABYTES = 400.0
SPLIT_MEGABYTES = (100.0, 400.0)
SPLIT_ROUNDS = 9
WARM_UP = 2
"""rounds and repetitions that do not count"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this measurement."""
    parser.add_argument("--only", default=",".join(PARTS), help="parts, of %(default)s (default: all)")
    parser.add_argument("--worlds", default=_join(WORLDS), help="ranks on one host (default: %(default)s)")
    parser.add_argument("--sizes", default=_join(SIZES), help="megabytes on one host (default: %(default)s)")
    parser.add_argument("--link-hosts", default=_join(LINK_HOSTS), help="hosts on limited links (default: %(default)s)")
    parser.add_argument("--mbit", type=float, default=1000.0, help="of those links, each way (default: %(default)s)")
    parser.add_argument("--memory-hosts", default=_join(MEMORY_HOSTS), help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of rounds for the pulse (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="of each contender (default: %(default)s)")
    parser.add_argument("--again", type=int, default=12, help="turns more, when disturbed (default: %(default)s)")
    parser.add_argument("--alone", action="store_true", help="real-time priority during turns; needs root")
    parser.add_argument("--nice", type=int, default=0, help="for all that is measured; below 0 needs root")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Do the parts that were asked for; one that cannot be done says why."""
    chosen = options.only.split(",")
    if unknown := [name for name in chosen if name not in PARTS]:
        raise SystemExit(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, _stop)  # so that namespaces and processes go then, too
    os.nice(options.nice)
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": metadata.version("torch"),
        "machine_before": machine(),
        "nice": options.nice,
        "alone": options.alone,
    }
    lines: list[str] = []
    for name in chosen:
        do, words = PARTS[name]
        try:
            found[name] = do(options)
            told = words(found[name])
        except EntryFailed as error:
            found[name] = {"failed": str(error)}
            told = [f"{name} did not come to figures: {error}"]
        print("\n".join(told), file=sys.stderr, flush=True)
        lines += [*told, ""]
    return found | {"machine_after": machine(), "lines": lines}


# ------------------------------------------------------------------------------------------------- one host


def _one_host(options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for world in map(int, options.worlds.split(",")):
        with Gloo(world) as gloo:
            for megabytes in map(float, options.sizes.split(",")):
                rows.append(_one_size(world, megabytes, gloo, options))
    return {"rows": rows}


def _one_size(world: int, megabytes: float, gloo: Gloo, options: argparse.Namespace) -> dict[str, Any]:
    _say(f"one host, {world} ranks, {megabytes:g} MB")
    row: dict[str, Any] = {"world": world, "megabytes": megabytes, "load": os.getloadavg()[0]}
    times = 10 if megabytes <= 1 else 5 if megabytes <= 100 else 3
    with Cohort(Wish(megabytes, (world,))) as cohort:
        elements = cohort.wish.elements
        contenders = {"ours": ours(cohort), "gloo": lambda count: gloo.go(elements, count)}
        row |= _compare(contenders, Turns(options.turns, times, options.again, options.alone))
    return row


def ours(cohort: Cohort, rows: list[dict[str, Any]] | None = None) -> Repeat:
    """Rounds of a cohort as a contender; their rows are added to ``rows``."""

    def repeat(times: int) -> list[float]:
        done = cohort.go(times)
        if rows is not None:
            rows.extend(done)
        return [row["reduce_seconds"] for row in done]

    return repeat


def _compare(contenders: dict[str, Repeat], plan: Turns) -> dict[str, Any]:
    for repeat in contenders.values():
        repeat(WARM_UP)
    turns = alternate(contenders, plan)
    found = {name: summary(seconds) for name, seconds in turns.pop("seconds").items()}
    ratio = found["ours"]["median_ms"] / found["gloo"]["median_ms"]
    return found | {"ratio": ratio} | turns


# -------------------------------------------------------------------------------------------------- the links


def _links(options: argparse.Namespace) -> dict[str, Any]:
    if reason := netns.unavailable():
        return {"skipped": reason}
    rows = []
    hosts = [int(text) for text in options.link_hosts.split(",")]
    for count, own_limit in [*((count, False) for count in hosts), (min(hosts), True)]:
        for encoding in ("f32",) if own_limit else ("f32", "bf16"):
            rows.append(_one_link(count, encoding, own_limit, options))
    return {"rows": rows, "mbit": options.mbit, "burst_bytes": netns.BURST_BYTES, "queue_bytes": netns.QUEUE_BYTES}


def _one_link(count: int, encoding: str, own_limit: bool, options: argparse.Namespace) -> dict[str, Any]:
    where = "its own limited link" if own_limit else "an unlimited one"
    _say(f"{count} hosts at {options.mbit:g} Mbit/s, {encoding}, the controller on {where}")
    row: dict[str, Any] = {"hosts": count, "encoding": encoding, "controller_limited": own_limit}
    with ExitStack() as stack:
        network = stack.enter_context(netns.Network())
        places = tuple(network.add(options.mbit) for _ in range(count))
        controller = network.add(options.mbit) if own_limit else None
        settings = {"bf16_wire": True} if encoding == "bf16" else {}
        wish = Wish(LINK_MEGABYTES, (1,) * count, network, places, controller, stream=True, settings=settings)
        row |= {"load": os.getloadavg()[0], "congestion_control": netns.congestion_control(places[0])}
        raw = [raw_stream(places[0], network.address, LINK_MEGABYTES) for _ in range(3)]
        gloo = stack.enter_context(Gloo(count, places))
        try:
            cohort = stack.enter_context(Cohort(wish))
        except EntryFailed as error:
            return row | {"failed": str(error)}
        contenders = {"ours": ours(cohort), "gloo": lambda times: gloo.go(wish.elements, times)}
        if encoding == "bf16":
            contenders["gloo_bf16"] = lambda times: gloo.go(wish.elements, times, "bf16")
        row |= _compare(contenders, Turns(options.turns, 2, options.again, options.alone))
    bits = LINK_MEGABYTES * 8 / (2 if encoding == "bf16" else 1)
    line = {name: bits / row[name]["median_ms"] * 1000 / options.mbit for name in ("ours",)}
    return row | {"raw_mbit": statistics.median(raw), "of_line": line["ours"]}


# ----------------------------------------------------------------------------------------------------- memory


def _memory(options: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for count in map(int, options.memory_hosts.split(",")):
        _say(f"memory, {count} hosts")
        with Cohort(Wish(MEMORY_MEGABYTES, (1,) * count, stream=True)) as cohort:
            cohort.go(4)
            found = peaks()
        resident = {kind: max(peak.resident for peak in of_kind) for kind, of_kind in found.items()}
        anonymous = {kind: max(peak.anonymous for peak in of_kind) for kind, of_kind in found.items()}
        rows.append({"hosts": count, "anonymous": anonymous} | resident)
    model = MEMORY_MEGABYTES * 1e6
    first = rows[0]
    for row in rows[1:]:
        growth = (row["controller"] - first["controller"]) / (row["hosts"] - first["hosts"])
        row["growth_per_host"] = growth / model
    return {"megabytes": MEMORY_MEGABYTES, "rows": rows}


# ------------------------------------------------------------------------------------------------------ pulse


def _ticks(options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for hosts, stream in (((2,), False), ((1, 1), True)):
        _say(f"pulse, {len(hosts)} host{'s' if len(hosts) > 1 else ''}{', streamed' if stream else ''}")
        with Cohort(Wish(TICK_MEGABYTES, hosts, stream=stream, gated=False)) as cohort:
            cohort.wait_for_rounds(WARM_UP)
            time.sleep(options.seconds)
            rounds = [row["reduce_seconds"] for row in cohort.rows()]
            if not rounds:
                raise EntryFailed(f"no round within {options.seconds:g} s")
            rows.append({"hosts": len(hosts), "stream": stream, "round": summary(rounds), "pulse": cohort.pulse()})
    return {"megabytes": TICK_MEGABYTES, "seconds": options.seconds, "rows": rows}


# ------------------------------------------------------------------------------------------------------ split


def _split(options: argparse.Namespace) -> dict[str, Any]:
    """Where the time of a round goes, by the controller's own account of each; medians."""
    rows = [
        _one_split(Wish(megabytes, (world,)), options)
        for world in map(int, options.worlds.split(","))
        for megabytes in SPLIT_MEGABYTES
    ]
    if not netns.unavailable():
        for encoding in ("f32", "bf16"):
            with netns.Network() as network:
                places = tuple(network.add(options.mbit) for _ in range(2))
                settings = {"bf16_wire": encoding == "bf16"}
                wish = Wish(LINK_MEGABYTES, (1, 1), network, places, stream=True, settings=settings)
                rows.append(_one_split(wish, options) | {"encoding": encoding, "mbit": options.mbit})
    return {"rows": rows}


def _one_split(wish: Wish, options: argparse.Namespace) -> dict[str, Any]:
    _say(f"split, {wish.world} ranks, {wish.megabytes:g} MB{', streamed' if wish.stream else ''}")
    with Cohort(wish) as cohort:
        cohort.go(WARM_UP)
        rounds = []
        for _ in range(SPLIT_ROUNDS):
            with undisturbed(options.alone):
                cohort.go(1)
            rounds.append(cohort.view()["round_stages"])
    median = {name: statistics.median(stages[name] for stages in rounds) * 1000 for name in rounds[0]}
    return {"world": wish.world, "megabytes": wish.megabytes, "stream": wish.stream, "stages_ms": median}


Part = tuple[Callable[[argparse.Namespace], dict[str, Any]], Callable[[dict[str, Any]], list[str]]]
PARTS: dict[str, Part] = {
    "one-host": (_one_host, reduce_words.one_host),
    "links": (_links, reduce_words.links),
    "memory": (_memory, reduce_words.memory),
    "ticks": (_ticks, reduce_words.ticks),
    "split": (_split, reduce_words.split),
}


def _join(values: tuple[float, ...]) -> str:
    return ",".join(f"{value:g}" for value in values)


def _say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(143)
