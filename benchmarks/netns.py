"""Hosts on one machine with links of their own: network namespaces, veth pairs and a bridge. Needs root and iproute2.

    with Network() as network:
        host = network.add(mbit=1000)
        subprocess.Popen(host.command("python", "-m", "worker", "--join", f"http://{network.address}:8470"))

The bridge stands in a namespace too, the hub, and the thread that entered the network is there until it leaves: what it
starts and opens meanwhile sits on the bridge under ``network.address``, without a limit of its own. The machine's own
network never changes, since whoever uses it would notice: browsers drop what they are loading. A host's limit is a
token bucket (tc tbf) at both ends of its link, so that it holds for each direction by itself. What a process leaves
when it is killed, the next network removes: names hold the process's number.

``python -m benchmarks.netns NAMESPACE PROGRAM ...`` becomes that program inside the namespace.
"""

from __future__ import annotations

import ctypes
import itertools
import os
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
SUBNET = "10.64.0"
"""of every network: each has its own hub, so none meets another or the machine's"""
NAMESPACES = Path("/run/netns")
BRIDGE = "bridge"
CLONE_NEWNET = 0x40000000
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
    """A namespace with one interface, ``interface`` inside and ``outside`` on the hub's bridge."""

    namespace: str
    hub: str
    interface: str
    outside: str
    address: str

    def command(self, *program: str) -> list[str]:
        """The arguments that run ``program`` in here; the process keeps its number."""
        return ["ip", "netns", "exec", self.namespace, *program]

    def limit(self, mbit: float | None) -> None:
        """Hold each direction of the link to so many Mbit/s, or to nothing. Raises ``NetnsError``."""
        for place, interface in ((self.namespace, self.interface), (self.hub, self.outside)):
            if mbit is None:
                _run("tc", "-n", place, "qdisc", "del", "dev", interface, "root", tolerate=True)
                continue
            bucket = ("rate", f"{mbit:g}mbit", "burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES))
            _run("tc", "-n", place, "qdisc", "replace", "dev", interface, "root", "tbf", *bucket)

    def cut(self) -> None:
        """Take the link down: nothing passes, nobody is told. Raises ``NetnsError``."""
        _run("ip", "-n", self.hub, "link", "set", self.outside, "down")

    def mend(self) -> None:
        """Bring it up again. Raises ``NetnsError``."""
        _run("ip", "-n", self.hub, "link", "set", self.outside, "up")

    def is_down(self) -> bool:
        """Whether the link is down, as the kernel says. Raises ``NetnsError``."""
        return "state DOWN" in _run("ip", "-n", self.hub, "link", "show", self.outside)

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
    """A hub, this thread's ``address`` in it, and the hosts that were added. Leaving the block, by the thread that
    entered it, removes them all; what runs in them should have ended by then."""

    def __init__(self) -> None:
        self.hosts: list[Host] = []
        self.address = f"{SUBNET}.1"
        self._prefix = f"{_prefix()}{chr(ord('a') + next(_networks) % 26)}"
        self._hub = f"{self._prefix}h"
        self._home = -1

    def __enter__(self) -> Self:
        """Raises ``NetnsError``."""
        reap_abandoned()
        self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _run("ip", "netns", "add", self._hub)
            self._on_hub("link", "set", "lo", "up")
            self._on_hub("link", "add", BRIDGE, "type", "bridge")
            self._on_hub("addr", "add", f"{self.address}/24", "dev", BRIDGE)
            self._on_hub("link", "set", BRIDGE, "addrgenmode", "none")  # an address of its own would come in a second
            self._on_hub("link", "set", BRIDGE, "up")
            hub = os.open(NAMESPACES / self._hub, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _move_thread(hub)
            finally:
                os.close(hub)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def add(self, mbit: float | None = None) -> Host:
        """A further host, its link limited to ``mbit`` Mbit/s in each direction. Raises ``NetnsError``."""
        number = len(self.hosts)
        host = Host(f"{self._prefix}{number}", self._hub, "eth0", f"host{number}", f"{SUBNET}.{number + 2}")
        self.hosts.append(host)
        name, inside = host.namespace, ("ip", "-n", host.namespace)
        _run("ip", "netns", "add", name)
        self._on_hub("link", "add", host.outside, "type", "veth", "peer", "name", host.interface, "netns", name)
        self._on_hub("link", "set", host.outside, "master", BRIDGE)
        _run(*inside, "addr", "add", f"{host.address}/24", "dev", host.interface)
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "link", "set", host.interface, "up")
        self._on_hub("link", "set", host.outside, "up")
        if mbit is not None:
            host.limit(mbit)
        return host

    def _on_hub(self, *command: str) -> None:
        _run("ip", "-n", self._hub, *command)

    def _remove(self) -> None:
        _move_thread(self._home)
        os.close(self._home)
        for name in [*(host.namespace for host in self.hosts), self._hub]:  # links go with them
            _run("ip", "netns", "del", name, tolerate=True)
        self.hosts = []


def reap_abandoned() -> list[str]:
    """Remove namespaces whose process is gone; returns their names."""
    reaped = []
    for name in sorted(path.name for path in NAMESPACES.glob("ml*")):
        match = _NAME.fullmatch(name)
        if match is None or Path(f"/proc/{int(match['pid'], 16)}").exists():
            continue
        _run("ip", "netns", "del", name, tolerate=True)
        reaped.append(name)
    return reaped


def congestion_control(host: Host | None = None) -> str:
    """How TCP paces itself there, bbr or cubic as a rule."""
    program = ("cat", "/proc/sys/net/ipv4/tcp_congestion_control")
    return _run(*(program if host is None else host.command(*program))).strip()


def _prefix() -> str:
    return f"ml{os.getpid():06x}"


def _move_thread(namespace: int) -> None:
    """The calling thread into the network namespace of a descriptor. Raises ``NetnsError``."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns is of Python 3.12
    if libc.setns(namespace, CLONE_NEWNET):
        raise NetnsError(f"setns: {os.strerror(ctypes.get_errno())}")


def _run(*command: str, tolerate: bool = False) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and not tolerate:
        raise NetnsError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


if __name__ == "__main__":
    os.execvp("ip", ["ip", "netns", "exec", *sys.argv[1:]])
