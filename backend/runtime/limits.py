"""How much of the controller a peer may hold before it has proved who it is (reliability H2, section 5.3 "Limits").

A stranger is slowed and counted; it never blocks another peer and never ends a window. Silent connections are bounded
by evicting the oldest of the greediest source, so that a flood of them can't keep an honest host out: that one needs a
slot for one round trip only.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

OTHER_DESCRIPTORS = 96
"""open files that connections leave to the database, checkpoints, logs and memory shared with hosts"""
FEWEST_CONNECTIONS = 16
IPV6_SITE_BITS = 64
"""One site holds that many addresses, so it counts as one source."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Waits in seconds, bounds in connections or frames."""

    request_head_seconds: float = 5.0
    """from a connection, or a request's first byte, to the end of its headers"""
    request_body_seconds: float = 30.0
    handshake_seconds: float = 5.0
    """from the accepted websocket to the session's proof of the secret"""
    hello_seconds: float = 10.0
    """from the accepted websocket to the first message"""
    send_stall_seconds: float = 30.0
    """one frame that the peer doesn't take"""
    expect_seconds: float = 5.0
    """a relay may dial this much before the world that expects it is performed"""
    close_seconds: float = 5.0
    """flushing what a closing link still has to send"""
    connections: int = 2048
    connections_per_source: int = 512
    strangers: int = 64
    strangers_per_source: int = 32
    free_failures: int = 3
    """failed attempts of a source that cost it nothing"""
    delay_seconds: float = 0.25
    """after the first failure beyond; doubles with each"""
    delay_cap_seconds: float = 5.0
    failure_memory_seconds: float = 60.0
    remembered_sources: int = 4096
    inbox_events: int = 4096
    outbox_messages: int = 1024
    """waiting for one peer; one that lets more pile up has stopped reading"""

    def within(self, descriptors: int) -> Limits:
        """The same bounds for a process that may open so many files: connections must not take the last of them."""
        most = max(FEWEST_CONNECTIONS, descriptors - OTHER_DESCRIPTORS)
        return replace(self, connections=min(self.connections, most))

    def scaled(self, factor: float) -> Limits:
        """The same bounds with every wait stretched."""
        return replace(
            self,
            handshake_seconds=self.handshake_seconds * factor,
            hello_seconds=self.hello_seconds * factor,
            send_stall_seconds=self.send_stall_seconds * factor,
        )


def source_of(address: str) -> str:
    """The key under which an address is counted: itself, or its /64 for IPv6."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, IPV6_SITE_BITS), strict=False))


def is_nearby(address: str) -> bool:
    """Whether the address is loopback, link-local, or of a private or shared range (behaviour B15)."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return True
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return not parsed.is_global


class Slot:
    """One connection that has not proved itself yet."""

    __slots__ = ("evict", "source")

    def __init__(self, source: str, evict: Callable[[], None]) -> None:
        self.source = source
        self.evict = evict


class Gate:
    """Counts strangers by source. ``now`` is monotonic seconds, given by the caller."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.failures_total = 0
        self.evicted_total = 0
        self._slots: dict[str, OrderedDict[Slot, None]] = {}
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()

    @property
    def strangers(self) -> int:
        """Connections that have not proved themselves yet."""
        return sum(len(slots) for slots in self._slots.values())

    def enter(self, source: str, evict: Callable[[], None]) -> Slot:
        """Take a slot, evicting the oldest of the same source, or of the greediest one, when there is none left."""
        if len(self._slots.get(source, ())) >= self.limits.strangers_per_source:
            self._evict_oldest(source)
        elif self.strangers >= self.limits.strangers:
            self._evict_oldest(max(self._slots, key=lambda name: len(self._slots[name])))
        slot = Slot(source, evict)
        self._slots.setdefault(source, OrderedDict())[slot] = None
        return slot

    def leave(self, slot: Slot) -> None:
        """Give the slot back: the peer proved itself, or is gone. An evicted slot is given back already."""
        slots = self._slots.get(slot.source)
        if slots is None:
            return
        slots.pop(slot, None)
        if not slots:
            del self._slots[slot.source]

    def failed(self, source: str, now: float) -> float:
        """Count a failure of this source. Answers for how many seconds its connection is held before it's told."""
        self.failures_total += 1
        count, last = self._failures.pop(source, (0, now))
        count = count + 1 if now - last <= self.limits.failure_memory_seconds else 1
        self._failures[source] = (count, now)
        if len(self._failures) > self.limits.remembered_sources:
            self._failures.popitem(last=False)
        beyond = count - self.limits.free_failures
        if beyond <= 0:
            return 0.0
        doublings = min(beyond - 1, 32)
        return min(self.limits.delay_seconds * float(2**doublings), self.limits.delay_cap_seconds)

    def _evict_oldest(self, source: str) -> None:
        slot = next(iter(self._slots[source]))
        self.leave(slot)
        self.evicted_total += 1
        slot.evict()
