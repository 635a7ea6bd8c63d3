"""Over which network interface the ranks of this host reach the others, where they sum among themselves.

It is the one through which this host reached the controller, unless the operator says otherwise with the variables that
NCCL and gloo read.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

NCCL_VARIABLE, GLOO_VARIABLE = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"
_ROUTES = Path("/proc/net/route")
_UP = 0x1


def interface_of(address: str, *, alone: bool) -> str:
    """The name of the interface with this address; empty when there is none.

    Who joined by loopback is on the controller's host: loopback serves if all ranks are here (``alone``); else others
    must be able to come, over the default route's interface, if there is any.
    """
    found = _named(address)
    if not _is_loopback(address):
        return found
    return (found or _loopback()) if alone else (default_interface(_routes()) or found or _loopback())


def default_interface(routes: Iterable[str]) -> str:
    """The interface of the best default route in ``/proc/net/route``; empty without one."""
    best: tuple[int, str] | None = None
    for line in routes:
        fields = line.split()
        if len(fields) < 8 or fields[1] != "00000000" or fields[7] != "00000000" or not int(fields[3], 16) & _UP:
            continue
        best = min(best or (int(fields[6]), fields[0]), (int(fields[6]), fields[0]))
    return best[1] if best is not None else ""


def chosen(environment: Mapping[str, str], variable: str, found: str) -> str:
    """The operator's first choice in this variable, or what was found."""
    return environment.get(variable, "").split(",")[0].lstrip("=").strip() or found


def _named(address: str) -> str:
    wanted = address.partition("%")[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == wanted for one in addresses):
            return str(name)
    return ""


def _loopback() -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and _is_loopback(one.address) for one in addresses):
            return str(name)
    return ""


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1" or address.startswith("::ffff:127.")


def _routes() -> list[str]:
    try:
        return _ROUTES.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return []
