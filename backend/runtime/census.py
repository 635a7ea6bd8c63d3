"""Who is connected, whatever they say: raw connections in all and by source."""

from __future__ import annotations

import json
from collections import Counter

from backend.runtime.limits import Limits

UNKNOWN_SOURCE = "unknown"
REFUSALS = 16
"""connections beyond the limit that are told so at one time; more are dropped unread"""


class Census:
    """Open connections, in all and by source."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.refused_total = 0
        self.refusing = 0
        """refused connections that are still being told"""
        self._by_source: Counter[str] = Counter()

    @property
    def open(self) -> int:
        """Connections of all sources."""
        return self._by_source.total()

    def enter(self, source: str) -> bool:
        """Count a connection; false when this source, or everybody together, has too many."""
        full = self._by_source[source] >= self.limits.connections_per_source or self.open >= self.limits.connections
        if full:
            self.refused_total += 1
            if not self._by_source[source]:
                del self._by_source[source]
            return False
        self._by_source[source] += 1
        return True

    def refusal(self, source: str) -> bytes:
        """What a connection that was not let in gets for its request: a problem, as HTTP."""
        crowded = self._by_source[source] >= self.limits.connections_per_source
        bound = self.limits.connections_per_source if crowded else self.limits.connections
        whose = "from your address" if crowded else "in all"
        cure = "close a few pages, let a host go, or start it with a higher limit of open files (ulimit -n)"
        detail = f"The controller holds {bound} connections {whose}, and takes no more; {cure}."
        body = {
            "type": "about:blank",
            "title": "Service Unavailable",
            "status": 503,
            "detail": detail,
            "code": "connections_full",
            "errors": [],
        }
        content = json.dumps(body).encode("ascii")
        head = f"content-type: application/problem+json\r\ncontent-length: {len(content)}\r\nretry-after: 5\r\n"
        return f"HTTP/1.1 503 Service Unavailable\r\n{head}connection: close\r\n\r\n".encode("ascii") + content

    def leave(self, source: str) -> None:
        """A counted connection is over."""
        self._by_source[source] -= 1
        if self._by_source[source] <= 0:
            del self._by_source[source]
