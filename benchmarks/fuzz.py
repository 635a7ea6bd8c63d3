"""Hostile inputs for everything that reads what others send: ``frames``, or requests to the REST interface (``api``).

Decoders are fed by atheris, which looks for new branches, where it is installed, and at random otherwise; a real
controller is played against by a cohort with a crooked member, and by strangers; the interface is asked what nobody
honest asks, and by schemathesis, where it is installed, what its own description allows. The same seed gives the same
inputs where nothing is guided.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from typing import Any

from benchmarks.fuzzing import conversations, decoding, described, interface, sockets
from benchmarks.fuzzing.findings import Findings
from benchmarks.fuzzing.targets import TARGETS

Part = Callable[[int, int], Findings]
"""of so many inputs, from a seed"""

SHARES = {
    "frame": 250, "message": 250, "cohort": 15, "chunk": 90, "streams": 90, "staging": 70, "local_link": 60,
    "splitter": 30, "json": 30, "tensors": 20, "manifest": 20, "members": 7, "strangers": 52, "members, sockets": 1,
    "strangers, sockets": 5, "raw": 10,
}  # fmt: skip
"""thousandths of the inputs; one of a play takes a hundred times as long as one of a decoder, or a thousand times"""
REQUESTS = {"requests": 700, "strangers' requests": 150, "described requests": 150}
MAX_GROWTH_MIB = 96.0
"""of a process from the end of its warming up to its own end"""
LEAST, PORTION = 60, 2500
"""inputs of a play or of the interface that one process has at least and at most: it starts with an empty database"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What, how many, on how many cores."""
    parser.add_argument("what", choices=("frames", "api"))
    parser.add_argument("--inputs", "--bodies", type=int, help="in all (1,000,000 frames or 50,000 requests)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=(*SHARES, *REQUESTS), help="all inputs go there")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Play the campaign. ``findings`` in the result is empty when every law held."""
    began = time.perf_counter()
    shares = SHARES if options.what == "frames" else REQUESTS
    if options.only:
        shares = {options.only: 1000}
    inputs = options.inputs or (1_000_000 if options.what == "frames" else 50_000)
    found: dict[str, Findings] = {}
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        jobs = {}
        for name, part, size, seed in _portions(shares, inputs, options.workers, options.seed):
            jobs[pool.submit(part, size, seed)] = name
        for job in as_completed(jobs):
            name = jobs[job]
            one = job.result()
            if one.grown_mib > MAX_GROWTH_MIB:
                one.add(f"memory grew by {one.grown_mib:.0f} MiB", f"{name}: {one.inputs} inputs")
            known = found.setdefault(name, Findings(notes=one.notes))
            known.take(one)
            print(f"{name}: {known.inputs} inputs, {len(known.found)} kinds of findings", flush=True)
    return _report(options.what, found, time.perf_counter() - began)


def _portions(shares: dict[str, int], inputs: int, workers: int, seed: int) -> Iterator[tuple[str, Part, int, int]]:
    """Name, work, size and seed of each portion; those that take longest come first."""
    for name in sorted(shares, key=lambda name: name in TARGETS):
        whole = -(-inputs * shares[name] // sum(shares.values()))
        spread = max(1, workers // 4 if name in TARGETS else workers)
        portion = max(1, -(-whole // spread)) if name in TARGETS else max(LEAST, min(PORTION, -(-whole // spread)))
        for number, start in enumerate(range(0, whole, portion)):
            yield name, _part(name), min(portion, whole - start), seed * 1000 + number


def _part(name: str) -> Part:
    if name in TARGETS:
        return partial(decoding.way(), name)
    if name == "described requests":
        return described.described if described.is_here() else partial(_run, interface.requests)
    return {
        "members": partial(_run, conversations.members),
        "members, sockets": partial(_run, partial(conversations.members, sockets=True)),
        "strangers": partial(_run, conversations.strangers),
        "strangers, sockets": partial(_run, partial(conversations.strangers, sockets=True)),
        "raw": partial(_run, sockets.raw),
        "requests": partial(_run, interface.requests),
        "strangers' requests": partial(_run, partial(interface.requests, known=False)),
    }[name]


def _run(part: Callable[[int, int], Any], inputs: int, seed: int) -> Findings:
    findings: Findings = asyncio.run(part(inputs, seed))
    return findings


def _report(what: str, found: dict[str, Findings], seconds: float) -> dict[str, Any]:
    total = Findings()
    for one in found.values():
        total.take(one)
    how = "guided by branches (atheris)" if decoding.is_guided() else "at random (atheris is not installed)"
    if what == "api":
        how = (
            "described ones by schemathesis" if described.is_here() else "none by schemathesis, which is not installed"
        )
    lines = [f"{what}: {total.inputs} inputs in {seconds:.0f} s, {how}; most growth {total.grown_mib:.0f} MiB"]
    lines += [line for name in found for line in found[name].lines(name)]
    parts = {name: one.as_json() for name, one in found.items()}
    return {
        "what": what,
        "how": how,
        "inputs": total.inputs,
        "seconds": round(seconds, 1),
        "findings": total.found,
        "peak_mib": round(total.peak_mib),
        "grown_mib": round(total.grown_mib),
        "parts": parts,
        "lines": lines,
    }
