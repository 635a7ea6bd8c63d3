"""Hosts on one machine with links of their own: network namespaces, veth pairs and a bridge. Needs root and iproute2.

    with Network() as network:
        host = network.add(mbit=1000)
        subprocess.Popen(host.command("python", "-m", "worker", "--join", f"http://{network.address}:8470"))

This namespace sits on the bridge under ``network.address``, without a limit of its own. A host's limit is a token
bucket (tc tbf) at both ends of its link, so that it holds for each direction by itself. What a process leaves when it
is killed, the next network removes: names hold the process's number.

``python -m benchmarks.netns NAMESPACE PROGRAM ...`` becomes that program inside the namespace.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

BURST_BYTES = 256 << 10
"""of a bucket: some of the largest packets that the kernel hands to a link at once (64 KiB), 2 ms at 1 Gbit/s"""
QUEUE_BYTES = 1 << 20
"""what waits for tokens before packets are dropped: 8 ms at 1 Gbit/s, a switch port's"""
NAMESPACES = Path("/run/netns")
_NAME = re.compile(r"ml(?P<pid>[0-9a-f]{6})[a-z]\w*")
_networks = itertools.count()


class NetnsError(Exception):
    """A namespace or link cannot be made; the text is the tool's."""


def unavailable() -> str:
    """Why there can be no namespaces here, as a sentence; empty when there can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"{_prefix()}try"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "del", name)
    except NetnsError as error:
        return f"namespaces cannot be made here: {error}"
    return ""


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace with one interface, ``interface`` inside and ``outside`` on the bridge."""

    namespace: str
    interface: str
    outside: str
    address: str

    def command(self, *program: str) -> list[str]:
        """The arguments that run ``program`` in here; the process keeps its number."""
        return ["ip", "netns", "exec", self.namespace, *program]

    def limit(self, mbit: float | None) -> None:
        """Hold each direction of the link to so many Mbit/s, or to nothing. Raises ``NetnsError``."""
        for place, interface in ((("-n", self.namespace), self.interface), ((), self.outside)):
            if mbit is None:
                _run("tc", *place, "qdisc", "del", "dev", interface, "root", tolerate=True)
                continue
            bucket = ("rate", f"{mbit:g}mbit", "burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES))
            _run("tc", *place, "qdisc", "replace", "dev", interface, "root", "tbf", *bucket)

    def cut(self) -> None:
        """Take the link down: nothing passes, nobody is told. Raises ``NetnsError``."""
        _run("ip", "link", "set", self.outside, "down")

    def mend(self) -> None:
        """Bring it up again. Raises ``NetnsError``."""
        _run("ip", "link", "set", self.outside, "up")

    def is_down(self) -> bool:
        """Whether the link is down, as the kernel says. Raises ``NetnsError``."""
        return "state DOWN" in _run("ip", "link", "show", self.outside)

    def block(self, hook: str) -> None:
        """Drop every packet that comes in (``input``) or goes out (``output``): a link that is cut one way. Needs nft;
        raises ``NetnsError``."""
        name = {"input": "iifname", "output": "oifname"}[hook]
        rule = f"type filter hook {hook} priority 0; {name} {self.interface} drop;"
        _run(*self.command("nft", f"table inet {hook}_blocked {{ chain drops {{ {rule} }}; }}"))

    def unblock(self, hook: str) -> None:
        """Let pass again what ``block`` drops. Raises ``NetnsError``."""
        _run(*self.command("nft", "delete", "table", "inet", f"{hook}_blocked"))


def cannot_block() -> str:
    """Why packets cannot be dropped one way here, as a sentence; empty when they can."""
    return unavailable() or ("" if shutil.which("nft") else "nft not found; install nftables")


class Network:
    """A bridge, this namespace's ``address`` on it, and the hosts that were added. Leaving the block removes them all;
    what runs in them should have ended by then."""

    def __init__(self) -> None:
        self.hosts: list[Host] = []
        self._prefix = f"{_prefix()}{chr(ord('a') + next(_networks) % 26)}"
        self._bridge = f"{self._prefix}b"
        self._subnet = ""

    @property
    def address(self) -> str:
        """Of this namespace, for the hosts."""
        return f"{self._subnet}.1"

    def __enter__(self) -> Self:
        reap_abandoned()
        try:
            self._subnet = _free_subnet()
            _run("ip", "link", "add", self._bridge, "type", "bridge")
            _run("ip", "addr", "add", f"{self.address}/24", "dev", self._bridge)
            _run("ip", "link", "set", self._bridge, "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def add(self, mbit: float | None = None) -> Host:
        """A further host, its link limited to ``mbit`` Mbit/s in each direction. Raises ``NetnsError``."""
        number = len(self.hosts)
        name, outside = f"{self._prefix}{number}", f"{self._prefix}v{number}"
        host = Host(name, "eth0", outside, f"{self._subnet}.{number + 2}")
        self.hosts.append(host)
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", outside, "type", "veth", "peer", "name", host.interface, "netns", name)
        _run("ip", "link", "set", outside, "master", self._bridge)
        _run("ip", "-n", name, "addr", "add", f"{host.address}/24", "dev", host.interface)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", name, "link", "set", host.interface, "up")
        _run("ip", "link", "set", outside, "up")
        if mbit is not None:
            host.limit(mbit)
        return host

    def _remove(self) -> None:
        for host in self.hosts:
            _run("ip", "link", "del", host.outside, tolerate=True)
            _run("ip", "netns", "del", host.namespace, tolerate=True)
        _run("ip", "link", "del", self._bridge, tolerate=True)
        self.hosts = []


def reap_abandoned() -> list[str]:
    """Remove namespaces and links whose process is gone; returns their names."""
    found = [path.name for path in NAMESPACES.glob("ml*")] if NAMESPACES.is_dir() else []
    links = [line.split(": ")[1].partition("@")[0] for line in _run("ip", "-o", "link", "show").splitlines()]
    reaped = []
    for name in [*found, *links]:
        match = _NAME.fullmatch(name)
        if match is None or Path(f"/proc/{int(match['pid'], 16)}").exists():
            continue
        kind = "netns" if name in found else "link"
        _run("ip", kind, "del", name, tolerate=True)
        reaped.append(name)
    return reaped


def congestion_control(host: Host | None = None) -> str:
    """How TCP paces itself there, bbr or cubic as a rule."""
    program = ("cat", "/proc/sys/net/ipv4/tcp_congestion_control")
    return _run(*(program if host is None else host.command(*program))).strip()


def _prefix() -> str:
    return f"ml{os.getpid():06x}"


def _free_subnet() -> str:
    taken = _run("ip", "-4", "-o", "addr", "show") + _run("ip", "-4", "route", "show")
    for _ in range(1000):
        subnet = f"10.{random.randrange(64, 256)}.{random.randrange(256)}"
        if f"{subnet}." not in taken:
            return subnet
    raise NetnsError("no free subnet below 10.64.0.0")


def _run(*command: str, tolerate: bool = False) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and not tolerate:
        raise NetnsError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


if __name__ == "__main__":
    os.execvp("ip", ["ip", "netns", "exec", *sys.argv[1:]])
