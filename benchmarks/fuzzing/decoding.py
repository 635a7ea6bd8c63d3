"""Many bad inputs for one decoder: guided by the branches that they reach, where atheris is installed, or at random."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from benchmarks.fuzzing.findings import Findings, from_json, peak_mib
from benchmarks.fuzzing.laws import MAX_INPUT, Target
from benchmarks.fuzzing.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
_FINAL = re.compile(r"#(\d+)\s+DONE\s+cov: (\d+) ft: (\d+) corp: (\d+)/\S+ .*?rss: (\d+)Mb")
_LIMIT_SECONDS = 3600


def is_guided() -> bool:
    """Whether atheris is here."""
    return importlib.util.find_spec("atheris") is not None


def at_random(target: Target, inputs: int, seed: int) -> Findings:
    """So many inputs, each a good one with a few things done to it. The same seed gives the same inputs."""
    findings, random, seeds = Findings(), Random(f"{target.name} {seed}"), target.seeds()
    for _ in range(inputs):
        data = random.choice(seeds)
        for _ in range(random.choice((1, 1, 2, 3))):
            data = target.mutate(data, random)
        attempt(target, data[:MAX_INPUT], findings)
    findings.peak_mib = peak_mib()
    return findings


def attempt(target: Target, data: bytes, findings: Findings) -> None:
    """Feed one input, and write down what must not be."""
    findings.inputs += 1
    try:
        target.run(data)
    except Exception as error:
        findings.note(error, data.hex())


def random_by_name(name: str, inputs: int, seed: int) -> Findings:
    """``at_random`` for another process."""
    return at_random(TARGETS[name], inputs, seed)


def guided_by_name(name: str, inputs: int, seed: int) -> Findings:
    """So many inputs that atheris makes, in a process of its own, since libFuzzer ends the one that it runs in."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="marchline-fuzz-") as place:
        result = Path(place) / "findings.json"
        command = [sys.executable, "-m", "benchmarks.fuzzing.guided", name, str(inputs), str(seed), place]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
        )
        findings = from_json(json.loads(result.read_text())) if result.exists() else Findings()
    final = _FINAL.search(done.stderr)
    if final is None:
        findings.add(f"the fuzzer of {name} ended with {done.returncode}", done.stderr[-3000:])
        return findings
    _, covered, features, corpus, rss = map(int, final.groups())
    findings.peak_mib = rss
    findings.notes = {"branches": covered, "features": features, "corpus": corpus}
    findings.notes["per_second"] = round(findings.inputs / (time.perf_counter() - began))
    return findings


def way() -> Callable[[str, int, int], Findings]:
    """How inputs are made here."""
    return guided_by_name if is_guided() else random_by_name
