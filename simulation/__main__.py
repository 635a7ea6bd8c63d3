"""``python -m simulation``: one world from options or a script, or many random ones on trial. ``faults`` and
``mutants`` are verbs of their own (``verbs``)."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from backend.core.config import MODES
from simulation.report import lines, report
from simulation.script import HostLine, Script, ScriptError
from simulation.shrink import shrink_failure
from simulation.trial import hold
from simulation.verbs import VERBS
from simulation.worlds import draw

FOREVER = 1e9
"""virtual seconds"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status is 0, 1 when a world broke or did not end well, 2 for bad options."""
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in VERBS:
        return VERBS[words[0]](words[1:])
    options = _parser().parse_args(words)
    try:
        return _trials(options) if options.seeds else _one(options)
    except ScriptError as error:
        print(f"simulation: {error}", file=sys.stderr)
        return 2


def _one(options: argparse.Namespace) -> int:
    script = Script.parse(options.script.read_text()) if options.script else _world(options)
    problems = script.config().problems()
    if problems:
        raise ScriptError("; ".join(f"{problem.field}: {problem.text}" for problem in problems))
    play = script.theatre(check=options.check, stopwatch=time.perf_counter)
    script.put_on(play)
    play.run(script.until if options.script else FOREVER)
    found = report(script, play)
    print("\n".join(lines(found)))
    _write(options.json, found)
    return 0 if found["phase"] == "done" or (options.script and play.end is None) else 1


def _world(options: argparse.Namespace) -> Script:
    speeds = [float(speed) for speed in options.speeds.split(",")]
    ms = [options.base_ms * speeds[rank % len(speeds)] for rank in range(options.ranks)]
    names = ("jitter", "drift", "drift_seconds", "data_ms", "fill_ms", "latency_ms")
    extras = {name: float(getattr(options, name)) for name in names if getattr(options, name) is not None}
    hosts = [
        HostLine(f"host-{first // options.per_host}", ms[first : first + options.per_host], dict(extras))
        for first in range(0, options.ranks, options.per_host)
    ]
    run: dict[str, Any] = {
        "quorum": options.ranks,
        "target": options.ranks,
        "mode": options.mode,
        "batch_size": 1,
        "samples": options.batches,
        "epochs": options.epochs,
        "model_mb": options.model_mb,
        "uplink_mbit": options.uplink_mbit,
        "settle": options.settle,
        "dice": options.seed,
    }
    if options.controller_mbit is not None:
        run["controller_mbit"] = options.controller_mbit
    run |= dict(pair.split("=", 1) for pair in options.set)
    return Script({key: str(value) for key, value in run.items()}, hosts)


def _trials(options: argparse.Namespace) -> int:
    """Random worlds, until one breaks."""
    began, events = time.perf_counter(), 0
    ends: dict[str, int] = {}
    for seed in range(options.seed, options.seed + options.seeds):
        trial = hold(draw(seed))
        events += sum(kind == "event" for _, kind, _ in trial.log.entries)
        if trial.failure is not None:
            return _broken(seed, options)
        phase = trial.theatre.cohort.phase
        ends[phase] = ends.get(phase, 0) + 1
    seconds = time.perf_counter() - began
    print(
        f"{options.seeds} worlds from seed {options.seed}, {events} events, in {seconds:.1f} s: no invariant broke "
        f"({', '.join(f'{count} {phase}' for phase, count in sorted(ends.items()))})"
    )
    found = {"seed": options.seed, "seeds": options.seeds, "events": events, "seconds": seconds, "ends": ends}
    _write(options.json, found | {"failed": None})
    return 0


def _broken(seed: int, options: argparse.Namespace) -> int:
    trial = hold(draw(seed))
    assert trial.failure is not None, f"seed {seed} does not break twice"
    print(f"Seed {seed} breaks: {trial.failure.sentence}\n  {trial.failure.place}\n\nShrunk:\n")
    small = hold(shrink_failure(trial.script, trial.failure))
    print(small.script.text())
    print(small.transcript())
    print(f"Again: python -m simulation --seeds 1 --seed {seed}")
    _write(options.json, {"failed": seed, "failure": trial.failure.sentence, "script": small.script.text()})
    return 1


def _write(path: Path | None, found: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(found, indent=2) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    add = parser.add_argument
    add("--ranks", type=_count, default=3)
    add("--per-host", type=_count, default=1, help="ranks on each host")
    add("--speeds", default="1,2,4", help="multiples of --base-ms, in turn over the ranks (default: %(default)s)")
    add("--base-ms", type=float, default=10.0, help="ms a batch of speed 1 (default: %(default)s)")
    add("--mode", choices=MODES, default="cpu_cadence")
    add("--batches", type=_count, default=20_000, help="an epoch (default: %(default)s)")
    add("--epochs", type=_count, default=1)
    add("--model-mb", type=float, default=25.0, help="megabytes of the f32 arena (default: %(default)s)")
    add("--uplink-mbit", type=float, default=1000.0, help="each host's, both ways at once (default: %(default)s)")
    add("--controller-mbit", type=float, help="the controller's own link (default: as the hosts')")
    add("--latency-ms", type=float, help="there and back (default: 1)")
    add("--jitter", type=float, help="spread of single batches, 0.05 is about 5 %%")
    add("--drift", type=float, help="how far speeds wander, 0.2 is 20 %% to both sides")
    add("--drift-seconds", type=float, help="a full swing of the drift (default: 60)")
    add("--data-ms", type=float, help="waiting for the data of each batch")
    add("--fill-ms", type=float, help="on top of it for the first batch of a chunk")
    add("--settle", type=int, default=10, help="rounds left out of the figures: calibration (default: %(default)s)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any field of the run's configuration")
    add("--script", type=Path, help="play this file in place of the options; simulation/script.py says how to write it")
    add("--check", action="store_true", help="check every invariant after every event")
    add("--seed", type=int, default=1, help="of jitter; with --seeds the first world (default: %(default)s)")
    add("--seeds", type=_count, help="play so many random worlds, checking every invariant after every event")
    add("--json", type=Path, help="write the report to this file")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"at least 1, not {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
