"""Real faults on running worlds, by a seed, and an audit of what came of each world.

Each world is a real controller with agents, relays and ranks, and lives for some seconds: processes are killed and
stopped, links cut after so many bytes, silenced, slowed and pulled, disks full and slow, the controller killed,
restarted and the run resumed. Its job is an odometer that keeps a ledger. Afterwards its database, its interface, its
files and the machine are looked at: every run is over within its bound and for a reason that was given to it; every
injected death is on record once, with its cause, and no other; every sample is accepted once; no rank ever held
anything but a consensus and its own batches; the last checkpoint loads and is that of its round; no process and no
shared memory is left. A fault whose effect was not seen counts as missed, not as injected.

Faults that need root (namespaces, a small disk) are left out without it. One world that is not as it should be makes
the exit code 1; its seed, what was done to it and where its logs are is printed, and ``--seed N --faults 1`` plays it
again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks import chaos_words, netns
from benchmarks.havoc.plans import TIMEOUT, draw
from benchmarks.havoc.world import MOUNT, Outcome, World
from benchmarks.processes import machine

PREFIX = "marchline-chaos-"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this measurement."""
    parser.add_argument("--minutes", type=float, default=15.0, help="no world begins later (default: %(default)s)")
    parser.add_argument("--faults", type=int, default=200, help="no world begins after so many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first world; each next one's is one more")
    parser.add_argument(
        "--workers",
        type=int,
        default=max(2, (os.cpu_count() or 2) // 2),
        help="worlds at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT,
        help="of a silent host, s; more on a busy machine (default: %(default)s)",
    )
    parser.add_argument("--no-root", action="store_true", help="leave out what needs root, even for root")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Play worlds until there were enough faults."""
    _reap()
    able, left_out = abilities(allowed=not options.no_root)
    place = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    campaign = Campaign(options, able, place)
    began, load = time.monotonic(), os.getloadavg()
    with _interruptible(campaign.halt):
        campaign.run()
    if not any(outcome.problems for outcome in campaign.outcomes):
        shutil.rmtree(place, ignore_errors=True)
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "options": {
            name: getattr(options, name) for name in ("minutes", "faults", "seed", "workers", "timeout", "no_root")
        },
        "able": sorted(able),
        "left_out": left_out,
        "hardware": machine(),
        "load_before": load,
        "seconds": round(time.monotonic() - began, 1),
        "detected": [pair for outcome in campaign.outcomes for pair in outcome.detected],
        "worlds": [outcome.as_dict() for outcome in sorted(campaign.outcomes, key=lambda one: one.plan.seed)],
    }
    found["failed"] = campaign.failed or not campaign.injected
    return found | {"lines": chaos_words.report(found)}


class Campaign:
    """Worlds, several at a time, from one count of seeds."""

    def __init__(self, options: argparse.Namespace, able: frozenset[str], place: Path) -> None:
        self.halt = threading.Event()
        self.outcomes: list[Outcome] = []
        self._options = options
        self._able = able
        self._place = place
        self._seeds = itertools.count(options.seed)
        self._lock = threading.Lock()
        self._ends_at = time.monotonic() + options.minutes * 60

    @property
    def injected(self) -> int:
        """Faults that had their effect so far."""
        return sum(one.hit for outcome in self.outcomes for one in outcome.struck)

    @property
    def failed(self) -> bool:
        """Whether a world is not as it should be, or was never finished."""
        return any(outcome.problems or outcome.halted for outcome in self.outcomes)

    def run(self) -> None:
        """Until there were enough, or time is up."""
        with ThreadPoolExecutor(self._options.workers, "world") as pool:
            for future in [pool.submit(self._worker) for _ in range(self._options.workers)]:
                future.result()

    def _worker(self) -> None:
        while not self.halt.is_set():
            with self._lock:
                if self.injected >= self._options.faults or time.monotonic() > self._ends_at:
                    return
                seed = next(self._seeds)
            plan = draw(seed, self._able, self._options.timeout)
            place = self._place / f"world-{seed}-{self._place.name.removeprefix(PREFIX)}"
            place.mkdir()
            world = World(plan, place, self.halt)
            try:
                outcome = world.play()
            except Exception:  # a bug of the campaign's own fails that world, and says which
                outcome = Outcome(plan, problems=[traceback.format_exc()], place=str(place))
            with self._lock:
                self.outcomes.append(outcome)
                print("\n".join(chaos_words.world(outcome, self.injected)), file=sys.stderr, flush=True)


def abilities(*, allowed: bool) -> tuple[frozenset[str], dict[str, str]]:
    """What this machine lets us do, and why the rest is left out, by what it is."""
    why = {"namespaces": netns.unavailable(), "tmpfs": _cannot_mount()}
    if not allowed:
        why = dict.fromkeys(why, "--no-root")
    return frozenset(name for name, reason in why.items() if not reason), {k: v for k, v in why.items() if v}


def _cannot_mount() -> str:
    if os.geteuid() != 0:
        return "mounting a small disk needs root"
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", MOUNT, name], capture_output=True, text=True)
        if done.returncode:
            return f"no small disk can be mounted: {done.stderr.strip()}"
        subprocess.run(["umount", name], check=True, capture_output=True)
    return ""


def _reap() -> None:
    """Unmount what a campaign that was killed left mounted."""
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            source, where = line.split()[:2]
            pids = [part.removeprefix(PREFIX).split("-")[0] for part in where.split("/") if part.startswith(PREFIX)]
            if source == MOUNT and pids and not Path(f"/proc/{pids[0]}").exists():
                subprocess.run(["umount", "-l", where], capture_output=True)


@contextmanager
def _interruptible(halt: threading.Event) -> Iterator[None]:
    """SIGINT and SIGTERM end every world, bluntly and in order."""
    handlers = {number: signal.signal(number, lambda *_: halt.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
