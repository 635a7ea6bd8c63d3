"""What is done to a world, from a seed: its hosts, and which fault strikes whom and when. Pure.

A world has one or two lives: the second one is the resumed run after its controller was killed. In each life one rank
is spared, so that the others' faults can be told apart from a run that fails; now and then everybody is killed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

TIMEOUT = 3.0
"""seconds of silence after which a host is lost, where the machine is not too busy for that"""
STALL_TIMEOUTS = 10
"""``stall_seconds`` in timeouts, the least that is allowed"""
HEARTBEATS = 6
"""in a timeout"""
BRIEF = (0.2, 0.9)
"""seconds of what nobody may die of"""
LONG = (2.0, 4.0)
STALLED = (3.0, 5.0)
GAPS = (0.0, 0.0, 0.1, 0.4, 0.9)
"""seconds between a fault and the next one"""
SITES_OF_RANKS = ("rank.pack", "rank.snapshot.before", "rank.snapshot.after", "rank.adopt", "rank.ack.after")
SITES_OF_RELAYS = ("relay.contribution.before", "relay.contribution.after", "relay.commit.before", "relay.commit.after")
SITES_OF_CONTROLLERS = ("plane.contribution", "plane.summed", "driver.commit.before", "driver.commit.after")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault. ``aim``: rank, host, controller or disk. ``dooms``: whether those that it strikes must die, may
    die, or must not (empty). ``needs``: how the host is connected, or what the machine must allow."""

    name: str
    aim: str
    weight: float
    dooms: str = ""
    needs: str = ""
    seconds: tuple[float, float] = (0.0, 0.0)
    timeouts: int = 0
    """that it lasts, beside the seconds"""
    armed: tuple[str, ...] = ()
    """failpoints that do it; it then strikes at a moment of its own"""
    quiet: bool = False
    """nothing is heard of its host meanwhile"""


_ALL = (
    Kind("rank killed", "rank", 5.0, "must"),
    Kind("rank killed in a round", "host", 2.0, "must", armed=SITES_OF_RANKS),
    Kind("relay killed", "host", 2.0, "must"),
    Kind("relay killed in a round", "host", 1.0, "must", armed=SITES_OF_RELAYS),
    Kind("agent killed", "host", 2.0, "must"),
    Kind("rank stopped briefly", "rank", 1.0, seconds=BRIEF),
    Kind("relay stopped briefly", "host", 1.5, seconds=BRIEF, quiet=True),
    Kind("agent stopped briefly", "host", 1.5, seconds=BRIEF, quiet=True),
    Kind("controller stopped briefly", "controller", 1.0, seconds=BRIEF),
    Kind("rank stopped", "rank", 0.5, "may", seconds=STALLED, timeouts=STALL_TIMEOUTS),
    Kind("relay stopped in a fold", "host", 0.6, "must", seconds=LONG, timeouts=1, armed=SITES_OF_RELAYS[:1]),
    # Its relay and ranks are heard meanwhile, unless they have to wait for others for so long.
    Kind("agent stopped", "host", 1.0, "may", seconds=LONG, timeouts=1, quiet=True),
    Kind("host stopped", "host", 0.7, "must", seconds=LONG, timeouts=1, quiet=True),
    Kind("link cut", "host", 3.0, "must", needs="proxied"),
    Kind("link silent briefly", "host", 2.0, needs="proxied", seconds=BRIEF, quiet=True),
    Kind("link silent", "host", 1.2, "must", needs="proxied", seconds=LONG, timeouts=1, quiet=True),
    Kind("link slow", "host", 1.0, needs="proxied", seconds=(0.5, 2.0)),
    Kind("cable out briefly", "host", 2.0, needs="cabled", seconds=BRIEF, quiet=True),
    Kind("cable out", "host", 1.5, "must", needs="cabled", seconds=LONG, timeouts=1, quiet=True),
    Kind("cable flapping", "host", 1.0, "may", needs="cabled", seconds=(4.0, 6.0), quiet=True),
    Kind("disk full", "disk", 1.0, needs="tmpfs", seconds=(0.5, 2.0)),
    Kind("disk full at a save", "disk", 0.7, armed=("checkpoint.sync",)),
    Kind("database's disk full", "disk", 0.7, armed=("store.commit.before",)),
    Kind("disk slow", "disk", 1.0, armed=("store.commit.before", "checkpoint.sync")),
    Kind("controller killed", "controller", 0.0),
    Kind("controller killed in a round", "controller", 0.0, armed=SITES_OF_CONTROLLERS),
    Kind("controller stopped", "controller", 0.0, "may", seconds=(0.0, 2.0), timeouts=2),
)
KINDS = {kind.name: kind for kind in _ALL}
STALLS = ("rank stopped",)
"""they hold a world up for half a minute: one in a world"""
ENDS = {"": 0.62, "everybody": 0.06, "controller killed": 0.2, "controller killed in a round": 0.06}
"""how a life ends, by the seed; the rest of it: the controller is stopped for longer than the timeout"""


@dataclass(frozen=True, slots=True)
class HostPlan:
    """A host: its ranks, and its way to the controller: plain, proxied or cabled (a namespace of its own)."""

    name: str
    ranks: int
    way: str
    stream: bool


@dataclass(frozen=True, slots=True)
class Fault:
    """``at``: seconds after the life's first round. ``slot``: which of the host's ranks."""

    kind: str
    host: str = ""
    slot: int = 0
    at: float = 0.0
    seconds: float = 0.0
    points: str = ""
    """failpoints of the process that is struck, or of the host whose processes are"""
    channel: str = ""
    """of a link: join, control or data"""
    direction: str = ""
    """up, down or both"""
    amount: int = 0
    """bytes that still pass, or that pass in a second"""

    def __str__(self) -> str:
        where = {"rank": f" {self.host}/{self.slot}", "host": f" {self.host}"}.get(KINDS[self.kind].aim, "")
        how = [f"for {self.seconds:.1f} s" if self.seconds else "", self.channel, self.direction, self.points]
        how.append(f"{self.amount} bytes" if self.amount else "")
        moment = "" if self.points else f"{self.at:.2f} s "
        return moment + self.kind + where + "".join(f", {word}" for word in how if word)


@dataclass(frozen=True, slots=True)
class Plan:
    """A world and what is done to it."""

    seed: int
    mode: str
    elements: int
    batch_size: int
    samples: int
    """of an epoch; epochs follow each other until the world is told to stop"""
    hosts: tuple[HostPlan, ...]
    lives: tuple[tuple[Fault, ...], ...]
    small_disk: bool
    timeout: float
    """seconds of silence after which a host is lost"""

    @property
    def ranks(self) -> int:
        """Of all hosts."""
        return sum(host.ranks for host in self.hosts)

    def host(self, name: str) -> HostPlan:
        """By its name."""
        return next(host for host in self.hosts if host.name == name)

    def points(self, life: int, host: str) -> str:
        """Failpoints to start this host's agent with in a life; the controller's under an empty name."""
        return ";".join(fault.points for fault in self.lives[life] if fault.points and fault.host == host)

    def story(self) -> list[str]:
        """Lines that say it all."""
        hosts = ", ".join(
            f"{host.name} with {host.ranks} rank(s), {host.way}{', streaming' if host.stream else ''}"
            for host in self.hosts
        )
        what = f"{self.mode}, {self.elements} elements, {self.samples} samples an epoch in batches of {self.batch_size}"
        lines = [f"seed {self.seed}: {what}; {hosts}"]
        for number, faults in enumerate(self.lives):
            lines += [f"  life {number + 1}: {fault}" for fault in faults]
        return lines


def draw(seed: int, able: frozenset[str], timeout: float = TIMEOUT) -> Plan:
    """The world of a seed on a machine that is ``able`` to do namespaces, tmpfs, both or neither."""
    rng = random.Random(seed)
    hosts = tuple(_host(rng, number, able) for number in range(rng.choice((2, 2, 3))))
    elements = rng.choice((1000, 1000, 60_000, 200_000))
    small_disk = "tmpfs" in able and rng.random() < 0.3
    lives: list[tuple[Fault, ...]] = []
    while not lives or (len(lives) < 2 and lives[-1][-1].kind.startswith("controller killed")):
        lives.append(_Life(rng, hosts, elements, small_disk, timeout, last=len(lives) == 1).faults())
    mode = rng.choice(("cpu_cadence", "cpu_cadence", "cpu_sync", "cpu_async"))
    batch_size, samples = rng.choice((1, 2, 5)), rng.choice((240, 401, 800))
    return Plan(seed, mode, elements, batch_size, samples, hosts, tuple(lives), small_disk, timeout)


def _host(rng: random.Random, number: int, able: frozenset[str]) -> HostPlan:
    way = rng.choice(("plain", "proxied", "proxied", "cabled"))
    if way == "cabled" and "namespaces" not in able:
        way = "proxied"
    return HostPlan(f"host{number}", rng.choice((1, 2, 2)), way, stream=way == "cabled" or rng.random() < 0.5)


class _Life:
    """Draws the faults of one life."""

    def __init__(
        self,
        rng: random.Random,
        hosts: tuple[HostPlan, ...],
        elements: int,
        small_disk: bool,
        timeout: float,
        *,
        last: bool,
    ) -> None:
        self._rng = rng
        self._hosts = hosts
        self._elements = elements
        self._small_disk = small_disk
        self._timeout = timeout
        self._last = last
        self._spared = rng.choice(hosts).name
        """of this host the first rank lives, and so must the host"""
        self._slots = [(host.name, slot) for host in hosts for slot in range(host.ranks)]
        self._doomed: set[tuple[str, int]] = set()
        self._had: set[str] = set()
        """what happens once at most"""
        self._found: list[Fault] = []

    def faults(self) -> tuple[Fault, ...]:
        """In the order in which they strike; those that strike at a moment of their own come first."""
        rng = self._rng
        for _ in range(rng.randint(5, 8) if not self._last else rng.randint(3, 6)):
            self._one()
        end = rng.choices([*ENDS, "controller stopped"], [*ENDS.values(), 1 - sum(ENDS.values())])[0]
        at = rng.uniform(0.2, 0.8)
        timed = []
        for fault in self._found:
            timed.append(_at(fault, at))
            at += 0.0 if fault.points else rng.choice(GAPS) + rng.uniform(0.0, 0.1)
        timed.sort(key=lambda fault: (not fault.points, fault.at))
        if end == "everybody":
            left = [slot for slot in self._slots if slot not in self._doomed]
            return (*timed, *(Fault("rank killed", host, slot, at + 1.0) for host, slot in left))
        if end and not (self._last and end.startswith("controller killed")):
            timed.append(_at(self._aimed(KINDS[end]), at + rng.uniform(0.5, 1.5)))
        return tuple(timed)

    def _one(self) -> None:
        for _ in range(50):
            kind = self._rng.choices(_ALL, [kind.weight for kind in _ALL])[0]
            fault = self._fitting(kind)
            if fault is not None:
                self._found.append(fault)
                return

    def _fitting(self, kind: Kind) -> Fault | None:
        """A fault of this kind that has somebody to strike, if there is one."""
        once = kind.name if kind.aim in ("controller", "disk") else "stall" if kind.name in STALLS else ""
        if once in self._had or (kind.needs == "tmpfs" and not self._small_disk):
            return None
        target = ("", 0)
        if kind.aim in ("rank", "host"):
            targets = [slot for slot in self._slots if self._may_strike(kind, slot)]
            if not targets:
                return None
            target = self._rng.choice(targets)
            whole = [slot for slot in self._slots if slot[0] == target[0]] if kind.aim == "host" else [target]
            self._doomed |= set(whole) if kind.dooms else set()
            self._had |= {f"quiet {target[0]}"} if kind.quiet else set()
        self._had |= {once} if once else set()
        return self._aimed(kind, *target)

    def _may_strike(self, kind: Kind, slot: tuple[str, int]) -> bool:
        host = next(host for host in self._hosts if host.name == slot[0])
        if slot in self._doomed or kind.needs not in ("", host.way):
            return False
        if kind.quiet and f"quiet {host.name}" in self._had:
            return False  # two short silences in a row may be a long one
        if not kind.dooms:
            return True
        if kind.aim == "rank":
            return slot != (self._spared, 0)
        # What strikes a host strikes all of its ranks: of those that are doomed already the cause would be open.
        return host.name != self._spared and not any((host.name, other) in self._doomed for other in range(host.ranks))

    def _aimed(self, kind: Kind, host: str = "", slot: int = 0) -> Fault:
        rng = self._rng
        seconds = rng.uniform(*kind.seconds) + kind.timeouts * self._timeout
        if kind.armed:
            return Fault(kind.name, host, slot, seconds=seconds, points=self._points(kind))
        if kind.name == "link cut":
            channel = rng.choice(("join", "control", "data"))
            streams = any(each.name == host and each.stream for each in self._hosts)
            most = {"join": 300, "control": 4000, "data": 3 * self._elements if streams else 300}[channel]
            return Fault(kind.name, host, slot, channel=channel, direction="up", amount=rng.randint(1, most))
        if kind.name.startswith("link silent"):
            return Fault(kind.name, host, slot, seconds=seconds, direction=rng.choice(("up", "down", "both")))
        amount = rng.choice((20_000, 100_000)) if kind.name == "link slow" else 0
        return Fault(kind.name, host, slot, seconds=seconds, amount=amount)

    def _points(self, kind: Kind) -> str:
        rng = self._rng
        act: Callable[[str, int, str], str] = "{}@{}={}".format
        match kind.name:
            case "disk full at a save":
                return act("checkpoint.sync", rng.randint(2, 12), "full")
            case "database's disk full":
                first = rng.randint(15, 40)
                return ";".join(act("store.commit.before", first + more, "full") for more in range(rng.randint(2, 8)))
            case "disk slow":
                site, first, last = rng.choice((("store.commit.before", 15, 40), ("checkpoint.sync", 2, 9)))
                hit = rng.randint(first, last)
                return ";".join(act(site, hit + more, f"delay:{rng.randint(300, 1200)}") for more in range(2))
            case "relay stopped in a fold":
                return act(kind.armed[0], rng.randint(3, 10), "stop")
        return act(rng.choice(kind.armed), rng.randint(3, 14), "kill")


def _at(fault: Fault, at: float) -> Fault:
    return fault if fault.points else replace(fault, at=at)
