"""How each fault is done to a world's processes, links and disks, and how its effect is seen.

A fault that meets nobody, or that nothing came of, is a miss and counts for nothing.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.havoc.expected import Struck
from benchmarks.havoc.plans import KINDS, Fault, Plan
from benchmarks.havoc.proxy import Proxy
from benchmarks.havoc.site import Running, Site
from benchmarks.netns import Host
from wire.failpoints import injections, parse

SEEN_SECONDS = 3.0
"""until a signal has had its effect"""
FLAP_SECONDS = 0.7
"""of each half of a flapping cable"""
BALLAST_BYTES = 1 << 20


@dataclass
class Blow:
    """A fault while it is under way. ``look`` tells whether its effect is there; none: it was seen at once."""

    fault: Fault
    at: float
    ranks: tuple[int, ...] = ()
    hit: bool = False
    note: str = ""
    look: Callable[[Blow], bool] | None = None
    release: Callable[[], None] | None = None
    release_at: float = 0.0

    def struck(self, life: int) -> Struck:
        """It as the audit has it."""
        return Struck(self.fault, life, self.at, self.hit, self.ranks, self.note)


@dataclass
class Cast:
    """Whom a life's faults strike: processes by host and slot, what lies between, and where failpoints write."""

    site: Site
    plan: Plan
    life: int
    agents: dict[str, Running]
    proxies: dict[str, Proxy]
    cables: dict[str, Host]
    ranks: dict[tuple[str, int], psutil.Process] = field(default_factory=dict)
    numbers: dict[tuple[str, int], int] = field(default_factory=dict)
    """the rank that each of them is"""

    def meet(self) -> None:
        """Learn who is who, once all ranks run."""
        for name, agent in self.agents.items():
            for slot, process in enumerate(agent.ranks()):
                self.ranks[name, slot] = process
                self.numbers[name, slot] = int(process.environ()["RANK"])

    def of_host(self, name: str) -> tuple[int, ...]:
        """The ranks of a host."""
        return tuple(number for (host, _), number in sorted(self.numbers.items()) if host == name)

    def journal(self, name: str) -> Path:
        """Where the failpoints of this host's processes write, or the controller's (empty)."""
        return self.site.place / f"injections-{self.life}-{name or 'controller'}"


class Strikes:
    """Does the faults of one life."""

    def __init__(self, cast: Cast, small_disk: Path | None) -> None:
        self._cast = cast
        self._small_disk = small_disk
        self.controller_frozen = False

    def strike(self, fault: Fault) -> Blow:
        """Do it now; for one that a failpoint does, watch for it."""
        blow = Blow(fault, time.monotonic())
        if fault.points:
            blow.look = self._injected
            return blow
        kind = KINDS[fault.kind]
        if kind.aim == "rank":
            blow.ranks = (self._cast.numbers[fault.host, fault.slot],)
        elif kind.aim == "host":
            blow.ranks = self._cast.of_host(fault.host)
        elif kind.dooms:
            blow.ranks = tuple(sorted(self._cast.numbers.values()))
        if kind.needs == "proxied":
            self._on_link(blow, self._cast.proxies[fault.host])
        elif kind.needs == "cabled":
            self._on_cable(blow, self._cast.cables[fault.host])
        elif kind.aim == "disk":
            self._fill(blow)
        else:
            self._signal(blow)
        return blow

    # --------------------------------------------------------------------------------------------- processes

    def _targets(self, fault: Fault) -> list[psutil.Process]:
        what = fault.kind.split()[0]
        if what == "rank":
            return [self._cast.ranks[fault.host, fault.slot]]
        with contextlib.suppress(psutil.NoSuchProcess):
            if what == "controller":
                return [psutil.Process(self._cast.site.controller.popen.pid)]
            agent = self._cast.agents[fault.host]
            if what == "relay":
                relay = agent.relay()
                return [relay] if relay is not None else []
            own = [psutil.Process(agent.popen.pid)]
            return own + agent.children() if what == "host" else own
        return []

    def _signal(self, blow: Blow) -> None:
        targets = [process for process in self._targets(blow.fault) if _lives(process)]
        kills = "killed" in blow.fault.kind
        for process in targets:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL if kills else signal.SIGSTOP)
        if not targets:
            blow.note = "it was gone already"
        elif kills:
            blow.hit = _until(lambda: not any(map(_lives, targets)))
        else:
            blow.hit = _until(lambda: all(map(_stands_still, targets)))
            controller = blow.fault.kind.startswith("controller")
            self.controller_frozen |= controller
            release = self._wake(targets)
            blow.release = (lambda: self._thaw(release)) if controller else release
            blow.release_at = time.monotonic() + blow.fault.seconds

    def _wake(self, targets: Sequence[psutil.Process]) -> Callable[[], None]:
        def wake() -> None:
            for process in targets:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)

        return wake

    def _thaw(self, wake: Callable[[], None]) -> None:
        wake()
        self.controller_frozen = False

    # -------------------------------------------------------------------------------------------- failpoints

    def _injected(self, blow: Blow) -> bool:
        """Whether the failpoint has struck; by its own word, the process is dead or stopped then, or was hindered."""
        fault = blow.fault
        points = {(point.site, point.action, point.at) for point in parse(fault.points)}
        lines = injections(self._cast.journal(fault.host))
        mine = [line for line in lines if (line["site"], line["action"], line["hit"]) in points]
        if not mine:
            return False
        if not blow.hit:
            ago = time.time() - self._cast.journal(fault.host).stat().st_mtime
            blow.at, blow.hit = time.monotonic() - ago, True
            self._stopped(blow, int(mine[0]["pid"]))
        if fault.kind.startswith("rank"):
            blow.ranks = tuple(sorted({int(line["where"]["rank"]) for line in mine}))
            return len(blow.ranks) == len(self._cast.of_host(fault.host))
        if fault.host:
            blow.ranks = self._cast.of_host(fault.host)
        return True

    def _stopped(self, blow: Blow, pid: int) -> None:
        if not blow.fault.seconds:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            blow.hit = _until(lambda: _stands_still(process))
            blow.release, blow.release_at = self._wake([process]), time.monotonic() + blow.fault.seconds

    # ------------------------------------------------------------------------------------------------- links

    def _on_link(self, blow: Blow, proxy: Proxy) -> None:
        fault = blow.fault
        if fault.kind == "link cut":
            proxy.cut_after(fault.amount, fault.channel)
            blow.look = lambda blow: self._was_cut(blow, proxy)
            return
        slow = fault.kind == "link slow"
        before = proxy.slowed if slow else proxy.held
        proxy.slow(fault.amount) if slow else proxy.hold(fault.direction)

        def release() -> None:
            blow.hit = (proxy.slowed if slow else proxy.held) > before
            proxy.slow(0) if slow else proxy.release()

        blow.release, blow.release_at = release, blow.at + fault.seconds

    def _was_cut(self, blow: Blow, proxy: Proxy) -> bool:
        if not proxy.cut.is_set():
            return False
        blow.at, blow.hit = time.monotonic(), True
        return True

    def _on_cable(self, blow: Blow, cable: Host) -> None:
        """Packets are lost while the link is down; its state is what the kernel says."""
        fault = blow.fault
        cable.cut()
        blow.hit = cable.is_down()
        blow.release, blow.release_at = cable.mend, blow.at + fault.seconds
        if fault.kind == "cable flapping":
            ends, down = blow.release_at, True

            def flap(_: Blow) -> bool:
                nonlocal down
                half = int((time.monotonic() - blow.at) / FLAP_SECONDS)
                if down != (half % 2 == 0) and time.monotonic() < ends:
                    down = not down
                    cable.cut() if down else cable.mend()
                return time.monotonic() >= ends

            blow.look = flap

    # ------------------------------------------------------------------------------------------------- disks

    def _fill(self, blow: Blow) -> None:
        """Write until there is no room at all, then have a checkpoint saved, which cannot succeed."""
        assert self._small_disk is not None
        ballast = self._small_disk / "ballast"
        try:
            with ballast.open("wb", buffering=0) as file:
                for piece in (BALLAST_BYTES, 1 << 12):
                    with contextlib.suppress(OSError):
                        while file.write(bytes(piece)):
                            pass
                file.write(bytes(1 << 12))
        except OSError as error:
            blow.hit = error.errno == errno.ENOSPC
        blow.release = lambda: ballast.unlink(missing_ok=True)
        blow.release_at = blow.at + blow.fault.seconds


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _stands_still(process: psutil.Process) -> bool:
    """Whether it is stopped; a process that is gone counts as that."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    return True


def _until(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SEEN_SECONDS
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
