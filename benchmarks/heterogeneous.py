"""Unequal devices, one job: Marchline and what people use today, one after another.

Every entry trains the same network on the same pictures: same batch size, optimizer, rate and number of samples, and
each rank's step padded to the same emulated milliseconds. Samples a second are of the steady state: for Marchline the
rounds after the third, for a peer what follows its warm-up. Accuracy is that of the first (fastest) rank's weights on
the held-out pictures: they are noted four times a second inside a padded step, and scored when the entry is over, so
that evaluating costs nobody time; at the end, a peer's are those after its last step, Marchline's its last checkpoint.
Seconds to the target count from the first batch to the first of three notes in a row that meet it. What a peer does in
its step counts into the padded time, communication included; Marchline's rounds come on top of its steps. With
--devices cuda each rank has a GPU of its own, padded alike; DDP then goes over NCCL. On CPUs nccl_ modes go over gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from backend.core.config import MODES
from benchmarks.entries import Task, Traces, run_marchline, run_peer
from benchmarks.figures import EntryFailed, figures, solo_rates, table, time_to
from benchmarks.jobs import images
from worker.devices import list_gpus

SPEEDS = {"1:1": (1, 1), "1:2.5": (1, 2.5), "1:2:4": (1, 2, 4), "1:2:4:8": (1, 2, 4, 8)}
PEERS = {
    "ddp": "torch DDP",
    "ddp_join": "torch DDP + Join",
    "periodic": "PeriodicModelAverager",
    "hivemind_local": "hivemind local updates, 8k",
    "hivemind_rare": "hivemind local updates, 32k",
    "torchft_localsgd": "torchft LocalSGD",
}
ON_GPUS = ("ddp",)
"""the peers that have a program for GPUs"""
AGAINST = ("nccl_cadence", "ddp")
"""whose samples a second are compared in a line of their own"""
PROGRAMS = {"hivemind_rare": ("hivemind_local", {"BENCH_HIVEMIND_TARGET": "32768"})}
"""of the peers that are a program of another name with settings of their own"""
PYTHON_VARIABLE = "MARCHLINE_PEER_PYTHON"
PACKAGES = ("torch", "numpy", "hivemind", "torchft", "torchft-nightly")
QUICK_SAMPLES = 9600
ASK_VERSIONS = """
import json, sys
from importlib import metadata
found = {"python": sys.version.split()[0]}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this measurement."""
    parser.add_argument("--speeds", default="1:2:4", help=f"any of {', '.join(SPEEDS)}, or all (default: %(default)s)")
    parser.add_argument("--entries", default="all", help=f"any of {', '.join((*MODES, *PEERS))} (default: all)")
    parser.add_argument("--devices", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    parser.add_argument("--base-ms", type=float, default=8.0, help="of the fastest rank's batch (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2, help="of every entry (default: %(default)s)")
    parser.add_argument("--target", type=float, default=0.82, help="accuracy to reach (default: %(default)s)")
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds that an entry may take (default: %(default)s)"
    )
    parser.add_argument(
        "--peer-python",
        default=os.environ.get(PYTHON_VARIABLE, sys.executable),
        help=f"Python with the peers' packages (default: ${PYTHON_VARIABLE}, else this one)",
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_SAMPLES:,} pictures, one epoch: does it run at all?"
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the entries at the speeds that were asked for."""
    chosen = list(SPEEDS) if options.speeds == "all" else options.speeds.split(",")
    gpus = _gpus(options.devices, max(len(SPEEDS[speeds]) for speeds in chosen))
    runners = _runners(options)
    worlds = []
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        place = Path(name)
        data = place / "data"
        data.mkdir()
        os.environ[images.DATA_VARIABLE] = str(data)
        kind = images.lay_out(data, QUICK_SAMPLES if options.quick else None)
        for speeds in chosen:
            ms = tuple(options.base_ms * factor for factor in SPEEDS[speeds])
            entries = [
                _entry(title, run, _task(options, ms, data, place, gpus), options) for title, run in runners.items()
            ]
            worlds.append(
                {"speeds": speeds, "ms": ms, "ideal": options.batch_size * solo_rates(ms), "entries": entries}
            )
            lines += [
                f"{speeds} at {options.base_ms:g} ms: {worlds[-1]['ideal']:,.0f} samples/s are the sum of solo rates"
            ]
            lines += [*table(entries, options.target), *_against(entries), ""]
    return {
        "data": kind,
        "devices": options.devices,
        "gpus": gpus,
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "versions": {"ours": {"torch": metadata.version("torch")}, "peers": _peer_versions(options.peer_python)},
        "options": {name: getattr(options, name) for name in ("base_ms", "batch_size", "epochs", "target", "quick")},
        "worlds": worlds,
        "lines": lines,
    }


def _runners(options: argparse.Namespace) -> dict[str, Callable[[Task], Traces]]:
    """Title and way of each entry that was asked for. Raises ``SystemExit`` for one that does not exist."""
    offered = (*MODES, *(ON_GPUS if options.devices == "cuda" else PEERS))
    names = list(offered) if options.entries == "all" else options.entries.split(",")
    unknown = [name for name in names if name not in offered]
    if unknown:
        raise SystemExit(f"no such entry on {options.devices}: {', '.join(unknown)}; there are {', '.join(offered)}")
    runners: dict[str, Callable[[Task], Traces]] = {}
    for name in names:
        if name in MODES:
            runners[_title(name)] = partial(run_marchline, name)
        else:
            module, settings = PROGRAMS.get(name, (name, {}))
            runners[PEERS[name]] = partial(run_peer, module, options.peer_python, settings)
    return runners


def _title(name: str) -> str:
    return f"Marchline {name}" if name in MODES else PEERS[name]


def _against(entries: list[dict[str, Any]]) -> list[str]:
    """How many times the samples of the one are those of the other; nothing where either is missing."""
    rates = {entry["name"]: entry["samples_per_second"] for entry in entries if "failed" not in entry}
    ours, theirs = map(_title, AGAINST)
    if ours not in rates or theirs not in rates:
        return []
    return ["", f"{ours} did {rates[ours] / rates[theirs]:.2f} times the samples of {theirs}."]


def _gpus(devices: str, ranks: int) -> int:
    """How many GPUs the ranks have, each one. Raises ``SystemExit`` when there are too few."""
    if devices == "cpu":
        return 0
    there = len(list_gpus())
    if there < ranks:
        raise SystemExit(f"--devices cuda: {ranks} ranks need as many GPUs, and this machine shows {there}")
    return ranks


def _task(options: argparse.Namespace, ms: tuple[float, ...], data: Path, place: Path, gpus: int) -> Task:
    epochs = 1 if options.quick else options.epochs
    samples = len(np.load(data / "train-labels.npy", mmap_mode="r"))
    own = Path(tempfile.mkdtemp(dir=place))
    (own / "weights").mkdir()
    return Task(ms, options.batch_size, epochs, samples * epochs, data, own, options.limit, gpus)


def _entry(title: str, run: Callable[[Task], Traces], task: Task, options: argparse.Namespace) -> dict[str, Any]:
    """One line of the table, as JSON; a failure's reason when there is none."""
    load = os.getloadavg()
    print(f"{title} at {', '.join(f'{one:g}' for one in task.ms)} ms ...", file=sys.stderr, flush=True)
    try:
        traces = run(task)
        found = figures(traces.window, task.ms, task.batch_size).as_dict()
        curve, loss = _curve(task.weights, traces)
    except EntryFailed as error:
        print(f"  did not run: {error}", file=sys.stderr, flush=True)
        return {"name": title, "failed": str(error), "load": load}
    told = {
        "seconds_to_target": time_to(options.target, curve),
        "accuracy": curve[-1][1],
        "loss": loss,
        "wall_seconds": traces.ended - traces.started,
        "load": load,
        "load_after": os.getloadavg(),
        "curve": curve,
    }
    print(f"  {found['fraction']:.3f} of the solo rates", file=sys.stderr, flush=True)
    return {"name": title} | found | told | traces.notes


def _curve(weights: Path, traces: Traces) -> tuple[list[tuple[float, float]], float]:
    """Seconds since the first batch and accuracy of each noted set of weights, and the loss of the last. Raises
    ``EntryFailed`` without any."""
    notes = sorted((int(path.stem) / 1e9, path) for path in weights.glob("*.npy"))
    curve = [
        (round(moment - traces.started, 3), round(images.score(np.load(path)).accuracy, 5))
        for moment, path in notes
        if moment >= traces.started
    ]
    if not curve:
        raise EntryFailed("the first rank noted no weights")
    return curve, round(images.score(np.load(notes[-1][1])).loss, 5)


def _peer_versions(python: str) -> dict[str, str] | str:
    """What the peers' Python has, by its own account; a sentence when it does not answer."""
    try:
        done = subprocess.run(
            [python, "-c", ASK_VERSIONS, *PACKAGES], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{python} did not answer: {error}"
    found: dict[str, str] = json.loads(done.stdout)
    return found
