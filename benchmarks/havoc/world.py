"""One world, from its first process to its last: started, struck, watched to its end, and audited."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.cli.client import CliError
from benchmarks.havoc import evidence, exact, expected
from benchmarks.havoc.exact import Reading, Saved, Trace
from benchmarks.havoc.expected import End, Struck
from benchmarks.havoc.life import Life
from benchmarks.havoc.plans import HEARTBEATS, STALL_TIMEOUTS, HostPlan, Plan
from benchmarks.havoc.proxy import proxied
from benchmarks.havoc.site import ENDED, Halted, Hung, Site
from benchmarks.havoc.strikes import Cast
from benchmarks.netns import Network
from wire.failpoints import LOG_VARIABLE, POINTS_VARIABLE

JOB = "witness.py:Witness"
SLEEP_MS = 12.0
DISK_BYTES = 64 << 20
EPOCHS = 1000
SAVE_ROUNDS = 3
FORMING_SECONDS = 300.0
"""nothing is measured before the world trains, and the machine may be busy"""
MOUNT = "marchline-chaos"


@dataclass
class Outcome:
    """What came of a world. ``problems`` is empty for one that is as it should be."""

    plan: Plan
    seconds: float = 0.0
    struck: list[Struck] = field(default_factory=list)
    detected: list[tuple[str, float]] = field(default_factory=list)
    """kind, and seconds until its death was in the interface"""
    ends: list[str] = field(default_factory=list)
    rounds: int = 0
    problems: list[str] = field(default_factory=list)
    place: str = ""
    """where its logs and database are; empty when they are gone"""
    halted: bool = False

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        faults = [
            {"kind": one.fault.kind, "what": str(one.fault), "life": one.life, "hit": one.hit, "note": one.note}
            for one in self.struck
        ]
        own = {"seed": self.plan.seed, "seconds": round(self.seconds, 1), "ends": self.ends, "rounds": self.rounds}
        return own | {"faults": faults, "problems": self.problems, "place": self.place}


@dataclass
class _Lived:
    """A life that is over; what is in the database comes later."""

    run: int
    start: Reading
    ledger: Path
    ranks: tuple[int, ...]
    ended_at: float
    struck: list[Struck]
    killed: bool
    """its controller was"""
    view: dict[str, Any]
    """the interface's last; empty when the controller was killed"""
    saved: Saved | None

    @property
    def finished(self) -> list[int] | None:
        """Accepted samples of each finished epoch, as the interface says."""
        return self.view.get("samples_accepted")


class World:
    """Plays one plan below ``place``, a directory of its own whose name is the world's mark."""

    def __init__(self, plan: Plan, place: Path, halt: threading.Event) -> None:
        self._plan = plan
        self._place = place
        self._halt = halt
        self._outcome = Outcome(plan)
        self._lives: list[_Lived] = []
        self._shared: set[Path] = set()

    def play(self) -> Outcome:
        """Do it all; never raises but for bugs of its own."""
        began = time.monotonic()
        outcome = self._outcome
        try:
            with ExitStack() as stack:
                self._play(stack)
        except Halted:
            outcome.halted = True
        except Hung as hung:
            outcome.problems.append(f"hung: {hung}")
        except CliError as error:
            outcome.problems.append(f"the interface failed: {error}")
        outcome.seconds = time.monotonic() - began
        if outcome.problems:
            outcome.place = str(self._place)
        else:
            shutil.rmtree(self._place, ignore_errors=True)
        return outcome

    def _play(self, stack: ExitStack) -> None:
        plan = self._plan
        disk = _small_disk(stack, self._place / "var") if plan.small_disk else None
        network = stack.enter_context(Network()) if any(host.way == "cabled" for host in plan.hosts) else None
        site = Site(self._place, self._halt, network.address if network else "127.0.0.1")
        stack.callback(site.close)
        cables = {host.name: network.add() for host in plan.hosts if network and host.way == "cabled"}
        for number in range(len(plan.lives)):
            site.agents.clear()
            site.serve(self._environment(number, ""))
            ledger = self._place / f"ledger-{number}"
            run = self._resume(site, ledger) if number else self._create(site, ledger)
            if run is None:
                break
            self._lives.append(self._live(Cast(site, plan, number, {}, {}, cables), run, ledger, disk))
            if not self._lives[-1].killed:
                break
        self._outcome.problems += [f"{name} did not leave when told to" for name in site.stop_controller()]
        self._audit(site)

    # ------------------------------------------------------------------------------------------------- a life

    def _create(self, site: Site, ledger: Path) -> int:
        plan = self._plan
        scheduling = {"initial_anchor": 3, "max_anchor": 6, "batch_size": plan.batch_size, "epochs": EPOCHS}
        world = {"start_mode": "auto", "quorum": plan.ranks, "target": plan.ranks, "mode": plan.mode}
        waits = {"heartbeat_seconds": plan.timeout / HEARTBEATS, "heartbeat_timeout_seconds": plan.timeout}
        waits |= {"stall_seconds": plan.timeout * STALL_TIMEOUTS, "reattach_seconds": 0}  # new hosts resume it
        waits |= {"forming_seconds": FORMING_SECONDS, "window_seconds": FORMING_SECONDS}
        saves = {"checkpoint_rounds": SAVE_ROUNDS, "checkpoint_epochs": None}
        own = {"job": JOB, "name": f"seed {plan.seed}", "params": self._params(ledger)}
        return int(site.client.post("runs", own | scheduling | world | waits | saves)["id"])

    def _resume(self, site: Site, ledger: Path) -> int | None:
        """Go on from the newest checkpoint of the run whose controller was killed; none when it has none."""
        before = self._lives[-1]
        phase = site.view(before.run)["phase"]
        if phase != "interrupted":
            self._outcome.problems.append(f"run {before.run} is {phase} after its controller was killed and restarted")
        if before.saved is None:
            return None
        wish = {"resume_from": f"{before.run}:last", "params": self._params(ledger)}
        return int(site.client.post("runs", wish)["id"])

    def _params(self, ledger: Path) -> dict[str, Any]:
        plan = self._plan
        return {"samples": plan.samples, "elements": plan.elements, "sleep_ms": SLEEP_MS, "path": str(ledger)}

    def _live(self, cast: Cast, run: int, ledger: Path, disk: Path | None) -> _Lived:
        site, outcome = cast.site, self._outcome
        with ExitStack() as stack:
            for host in self._plan.hosts:
                self._bring(stack, cast, host, run)
            site.until(run, _trains, "the world to form and close a round", 2 * FORMING_SECONDS)
            cast.meet()
            self._shared |= evidence.shared_directories(site.mark)
            life = Life(cast, run, disk)
            try:
                life.play()
            finally:
                life.release()
            killed = not site.controller.alive
            view = {} if killed else site.until(run, lambda view: view["phase"] in ENDED, "the run to end")
            outcome.problems += [f"{name} did not end with its run" for name in site.stop_agents()]
            life.release()  # what struck on the way out
        outcome.struck += life.struck
        outcome.detected += life.detected()
        start = self._lives[-1].saved.held if self._lives and self._lives[-1].saved else Reading(0.0, 0.0)
        saved = evidence.newest_checkpoint(site.data_dir, run, self._plan.elements)
        ranks = tuple(sorted(cast.numbers.values()))
        return _Lived(run, start, ledger, ranks, life.ended_at, life.struck, killed, view, saved)

    def _bring(self, stack: ExitStack, cast: Cast, host: HostPlan, run: int) -> None:
        site, join, inside = cast.site, "", []
        if host.way == "proxied":
            proxy = cast.proxies[host.name] = stack.enter_context(proxied(site.url))
            join = proxy.url
        elif host.way == "cabled":
            inside, join = cast.cables[host.name].command(), f"http://{site.address}:{site.port}"
        options = ["--run", str(run), *(["--stream-data"] if host.stream else [])]
        environment = self._environment(cast.life, host.name)
        agent = site.host(host.name, host.ranks, *options, join=join, inside=inside, environment=environment)
        cast.agents[host.name] = agent

    def _environment(self, life: int, host: str) -> dict[str, str]:
        points = self._plan.points(life, host)
        journal = self._place / f"injections-{life}-{host or 'controller'}"
        return {POINTS_VARIABLE: points, LOG_VARIABLE: str(journal)} if points else {}

    # --------------------------------------------------------------------------------------------------- audit

    def _audit(self, site: Site) -> None:
        problems, data_dir = self._outcome.problems, site.data_dir
        problems += evidence.integrity(data_dir)
        traces: list[tuple[Trace, int | None]] = []
        overlaps = self._plan.mode.endswith("_async")
        for number, lived in enumerate(self._lives):
            trace = evidence.trace(data_dir, lived.run, lived.ledger, lived.start, overlaps, not lived.killed)
            end = _end(data_dir, lived)
            found = [*expected.deaths(lived.struck, end), *expected.ending(lived.struck, end)]
            found += [*exact.odometer(trace), *exact.checkpoint(trace, lived.saved)]
            if lived.saved is None and trace.rounds and not lived.killed:
                found.append("it ended without a checkpoint")
            if lived.view and len(lived.view["deaths"]) != len(end.deaths):
                found.append(f"the interface has {len(lived.view['deaths'])} deaths, the database {len(end.deaths)}")
            problems += [f"run {lived.run}: {problem}" for problem in found]
            resumed = number + 1 < len(self._lives)
            traces.append((trace, lived.saved.round if resumed and lived.saved else None))
            self._outcome.ends.append(f"{end.phase}: {end.reason}")
            self._outcome.rounds += len(trace.rounds)
        if self._lives:
            problems += exact.ledger(traces, self._plan.samples, self._lives[-1].finished)
        problems += evidence.leftovers(site.mark, self._shared, self._place)


def _end(data_dir: Path, lived: _Lived) -> End:
    (row,) = evidence.rows(data_dir, "runs", lived.run)
    deaths, events = evidence.rows(data_dir, "deaths", lived.run), evidence.rows(data_dir, "events", lived.run)
    return End(row["phase"], row["reason"] or "", lived.ended_at, lived.ranks, deaths, events)


def _trains(view: dict[str, Any]) -> bool:
    if view["phase"] in ENDED:
        raise Hung(f"the world did not come to train: {view['phase']}: {view['reason']}")
    return view["phase"] == "training" and (view["round"] or 0) >= 1


def _small_disk(stack: ExitStack, place: Path) -> Path:
    """Mount a little memory at ``place``; it goes with the stack."""
    place.mkdir(exist_ok=True)
    size = ["-o", f"size={DISK_BYTES},mode=700"]
    subprocess.run(["mount", "-t", "tmpfs", *size, MOUNT, str(place)], check=True, capture_output=True)
    stack.callback(subprocess.run, ["umount", "-l", str(place)], capture_output=True)
    # What a world that fails is judged by must outlive the mount; of one that does not, all of it goes.
    stack.callback(shutil.copytree, place, place.with_name("disk"), dirs_exist_ok=True)
    return place
