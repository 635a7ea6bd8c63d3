"""What a death costs the others: killed ranks, relays, agents and links, against torchrun's elastic restart.

Marchline: two hosts of two ranks each, as users start them, everything at its defaults; something of the second host is
killed in the middle of a window, in a world of its own each time. Seconds are from the kill, by the machine's clock,
until the deaths are on record, and until the survivors' next round is committed: both as the database has them.
torchrun (one node, as many ranks, gloo, DDP): a worker is killed; seconds until all ranks have finished a step again,
and until they are beyond where they were. The same network on the same pictures, batch size and emulated milliseconds a
batch. torchrun's program saves a checkpoint every so many steps; a second's worth by default.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil

from backend.core.config import MODES
from benchmarks import netns, recovery_words
from benchmarks.entries import ROOT
from benchmarks.havoc.proxy import Proxy, proxied
from benchmarks.havoc.site import Hung, Running, Site, command_of
from benchmarks.jobs.images import DATA_VARIABLE
from benchmarks.processes import machine
from benchmarks.recovery_words import Kill, Restart

T = TypeVar("T")

JOB = "fashion.py:Fashion"
HOSTS = {"left": 2, "right": 2}
RANKS = sum(HOSTS.values())
BATCH_SIZE = 32
PICTURES, PIXELS = 20_000, 784
WARM_UP_ROUNDS = 6
WARM_SECONDS = 300.0
RECOVERED_SECONDS = 90.0
KINDS = ("rank killed", "relay killed", "agent killed", "link cut", "cable out")
SLOW_KINDS = ("cable out",)
"""nobody is told of these: they take the heartbeat timeout, and are done less often"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this measurement."""
    parser.add_argument("--kills", type=int, default=5, help="of each kind (default: %(default)s)")
    parser.add_argument("--only", default="all", help=f"any of {', '.join((*KINDS, 'torchrun'))} (default: all)")
    parser.add_argument("--mode", choices=MODES, default="cpu_cadence", help="of the runs (default: %(default)s)")
    parser.add_argument("--ms", type=float, default=20.0, help="a batch, emulated (default: %(default)s)")
    parser.add_argument(
        "--save-every", type=int, default=50, help="torchrun's steps a checkpoint (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the moments in a window (default: %(default)s)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Kill everything several times."""
    wanted = [*KINDS, "torchrun"] if options.only == "all" else options.only.split(",")
    left_out = {"cable out": netns.unavailable()} if "cable out" in wanted and netns.unavailable() else {}
    rng, load = random.Random(options.seed), os.getloadavg()
    ours: dict[str, list[Kill]] = {}
    theirs: list[Restart] = []
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        place = Path(name)
        (place / "data").mkdir()
        _pictures(place / "data")
        for kind in [kind for kind in KINDS if kind in wanted and kind not in left_out]:
            times = max(1, options.kills // 2) if kind in SLOW_KINDS else options.kills
            ours[kind] = [_kill(kind, place, options, rng) for _ in range(times)]
            _tell(kind, ours[kind])
        if "torchrun" in wanted:
            theirs = [_restart(place, options, rng) for _ in range(options.kills)]
            _tell("torchrun", theirs)
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": machine(),
        "load_before": load,
        "ranks": RANKS,
        "mode": options.mode,
        "ms": options.ms,
        "batch_size": BATCH_SIZE,
        "save_every": options.save_every,
        "marchline": {kind: recovery_words.summary(kills) for kind, kills in ours.items()},
        "torchrun": recovery_words.summary(theirs) if theirs else None,
        "kills": {kind: [asdict(one) for one in kills] for kind, kills in ours.items()},
        "restarts": [asdict(one) for one in theirs],
        "left_out": left_out,
    }
    return found | {"lines": recovery_words.report(found)}


def _pictures(place: Path) -> None:
    """Any pictures do: what they show costs no time."""
    rng = np.random.default_rng(0)
    for part, count in (("train", PICTURES), ("held-out", 10)):
        np.save(place / f"{part}-pixels.npy", rng.integers(0, 256, (count, PIXELS), dtype=np.uint8))
        np.save(place / f"{part}-labels.npy", rng.integers(0, 10, count))


def _tell(what: str, kills: list[Kill] | list[Restart]) -> None:
    for one in kills:
        figures = ", ".join(f"{name} {value:.2f}" for name, value in asdict(one).items())
        print(f"{what}: {figures}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------- Marchline


def _kill(kind: str, place: Path, options: argparse.Namespace, rng: random.Random) -> Kill:
    own = Path(tempfile.mkdtemp(dir=place))
    with ExitStack() as stack:
        network = stack.enter_context(netns.Network()) if kind == "cable out" else None
        site = Site(own, threading.Event(), network.address if network else "127.0.0.1")
        stack.callback(site.close)
        site.serve()
        scheduling = {"start_mode": "auto", "quorum": RANKS, "target": RANKS, "batch_size": BATCH_SIZE}
        order = {"job": JOB, "name": kind, "mode": options.mode, "epochs": 1000} | scheduling
        run = site.client.post("runs", order)["id"]
        strike = _bring(stack, site, kind, network, {DATA_VARIABLE: str(place / "data")}, options.ms)
        site.until(run, lambda view: (view["round"] or 0) >= WARM_UP_ROUNDS, "the cohort to be warm", WARM_SECONDS)
        time.sleep(rng.uniform(0.0, 1.0))  # anywhere in a window
        killed_at = time.time()
        strike()
        found = site.wait(lambda: _recovered(site, run, killed_at), "the others to go on", RECOVERED_SECONDS)
        site.client.post(f"runs/{run}/abort")
        site.stop_agents()
        site.stop_controller()
        return found


def _bring(
    stack: ExitStack, site: Site, kind: str, network: netns.Network | None, environment: dict[str, str], ms: float
) -> Callable[[], None]:
    """Start both hosts; what kills the second one's rank, relay, agent or link."""
    options = ("--emulate-ms-per-batch", f"{ms:g}")
    site.host("left", HOSTS["left"], *options, environment=environment)
    if network is not None:
        cable = network.add()
        join = f"http://{site.address}:{site.port}"
        site.host("right", HOSTS["right"], *options, join=join, inside=cable.command(), environment=environment)
        return cable.cut
    if kind == "link cut":
        proxy = stack.enter_context(proxied(site.url))
        site.host("right", HOSTS["right"], *options, join=proxy.url, environment=environment)
        return lambda: _cut(proxy)
    agent = site.host("right", HOSTS["right"], *options, environment=environment)
    return lambda: os.kill(_victim(agent, kind).pid, signal.SIGKILL)


def _cut(proxy: Proxy) -> None:
    proxy.close()  # resets all three connections


def _victim(agent: Running, kind: str) -> psutil.Process:
    if kind == "agent killed":
        return psutil.Process(agent.popen.pid)
    found = agent.relay() if kind == "relay killed" else agent.ranks()[-1]
    if found is None:
        raise Hung(f"{agent.name} has no relay")
    return found


def _recovered(site: Site, run: int, killed_at: float) -> Kill | None:
    rounds = [row for page in site.client.pages(f"runs/{run}/rounds", after=-1, key="round") for row in page]
    return recovery_words.kill(rounds, site.client.get(f"runs/{run}/deaths")["items"], killed_at)


# ----------------------------------------------------------------------------------------------------- torchrun


def _restart(place: Path, options: argparse.Namespace, rng: random.Random) -> Restart:
    own = Path(tempfile.mkdtemp(dir=place))
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1", "--local-addr=127.0.0.1"]
    program += [f"--nproc-per-node={RANKS}", "--max-restarts=3", "-m", "benchmarks.peers.elastic"]
    program += ["--place", str(own), "--ms", f"{options.ms:g}", "--batch-size", str(BATCH_SIZE)]
    program += ["--save-every", str(options.save_every)]
    environment = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment[DATA_VARIABLE] = str(place / "data")
    with (own / "torchrun.log").open("wb") as log:
        torchrun = subprocess.Popen(
            program, env={**os.environ, **environment}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        enough = 2 * options.save_every
        _wait(torchrun, own, lambda: _finished(own) >= enough, "torchrun's ranks to be warm", WARM_SECONDS)
        time.sleep(rng.uniform(0.0, 1.0))
        killed_at = time.time()
        os.kill(int((own / f"pid{RANKS - 1}").read_text()), signal.SIGKILL)
        look = partial(recovery_words.restart, killed_at=killed_at)
        return _wait(torchrun, own, lambda: look(_notes(own)), "torchrun to go on", RECOVERED_SECONDS)
    finally:
        _end(torchrun)


def _wait(torchrun: subprocess.Popen[bytes], own: Path, look: Callable[[], T | None], what: str, seconds: float) -> T:
    deadline = time.monotonic() + seconds
    while not (found := look()):
        if torchrun.poll() is not None or time.monotonic() > deadline:
            raise Hung(f"waited for {what}; it said: {(own / 'torchrun.log').read_text()[-2000:]}")
        time.sleep(0.05)
    return found


def _finished(own: Path) -> int:
    """The step that all ranks have finished."""
    notes = _notes(own)
    return min((steps[-1][1] for steps in notes.values() if steps), default=0) if len(notes) == RANKS else 0


def _notes(own: Path) -> dict[int, list[tuple[int, int, float]]]:
    found = {}
    for path in sorted(own.glob("steps*")):
        lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found[int(path.name.removeprefix("steps"))] = [(int(start), int(step), float(at)) for start, step, at in lines]
    return found


def _end(torchrun: subprocess.Popen[bytes]) -> None:
    """It hands SIGTERM on to its workers; what is left of them after that is killed."""
    workers = psutil.Process(torchrun.pid).children(recursive=True) if torchrun.poll() is None else []
    torchrun.terminate()
    try:
        torchrun.wait(15)
    except subprocess.TimeoutExpired:
        torchrun.kill()
        torchrun.wait()
    for worker in workers:
        if "benchmarks.peers.elastic" in command_of(worker):
            worker.kill()
