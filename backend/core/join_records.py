"""What the join window hands out and keeps: candidates, offers, the refusal log, and strangers by source."""

from __future__ import annotations

from dataclasses import dataclass

from wire.messages import Hello, JobOffer

KEPT_SOURCES = 256
KEPT_CODES = 16
OTHERS = "others"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A host that was offered the job and has not reported yet. Times are monotonic seconds."""

    link: int
    hello: Hello
    address: str
    since: float
    deadline: float

    @property
    def name(self) -> str:
        """The host's own name."""
        return self.hello.host.strip()


@dataclass(frozen=True, slots=True)
class Offer:
    """The hello was good: send the job, and wait for the report until ``deadline``."""

    job: JobOffer
    deadline: float


@dataclass(frozen=True, slots=True)
class Admission:
    """The host is in. ``ranks`` are its own if the window closes now."""

    host: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """A line of the refusal log; ``at`` in monotonic seconds."""

    host: str
    address: str
    code: str
    reason: str
    at: float


class Strangers:
    """Refusals before authentication, by source. At most 256 sources are told apart; the rest are ``others``."""

    def __init__(self) -> None:
        self.count = 0
        self._sources: dict[str, int] = {}
        self._codes: dict[str, set[str]] = {}

    @property
    def sources(self) -> dict[str, int]:
        """Refusals by source address, without its port."""
        return dict(self._sources)

    def add(self, address: str, code: str) -> bool:
        """Count one; whether it is the first of its kind from its source."""
        self.count += 1
        source = source_of(address)
        if source not in self._sources and len(self._sources.keys() - {OTHERS}) >= KEPT_SOURCES:
            source = OTHERS
        self._sources[source] = self._sources.get(source, 0) + 1
        codes = self._codes.setdefault(source, set())
        if code in codes or len(codes) >= KEPT_CODES:
            return False
        codes.add(code)
        return True


def source_of(address: str) -> str:
    """A peer's address without its port: ``10.0.0.2:53412`` and ``[::1]:80`` are ``10.0.0.2`` and ``::1``."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") == 1 else address
