"""Who contributes to one attempt, how much, and how far each stream has come: counting, no tensors.

The divisor and the sum are built from the same set: a host counts once its ``Contribution`` is accepted, and
an attempt closes only when every expected host's stream is complete (behaviour A2; law L1).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from backend.core.vocabulary import OpenRound
from wire.frames import MAX_CHUNK_ELEMENTS
from wire.mass import is_realized
from wire.messages import Contribution
from wire.session import ChunkHeader, Encoding, Section

SLICE_ELEMENTS = MAX_CHUNK_ELEMENTS
"""f32 elements that are summed and sent on as one: 1 MiB, the largest chunk"""
MASS_RANGE = (1e-30, 1e30)
"""a mass above zero outside of this would drown in f32, or drown everybody else"""
_ROUND_BITS = 0xFFFFFFFF


class ContributionRefused(Exception):
    """A host's contribution or stream breaks the attempt; ``reason`` names the thing, for people."""

    def __init__(self, host: int, reason: str) -> None:
        super().__init__(f"host {host}: {reason}")
        self.host = host
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Slice:
    """A piece of the arena within one section; ``offset`` counts f32 elements from the arena's start."""

    section: Section
    offset: int
    elements: int

    @property
    def stop(self) -> int:
        return self.offset + self.elements


def slices(params_elements: int, buffers_elements: int, slice_elements: int = SLICE_ELEMENTS) -> list[Slice]:
    """The arena in slices of at most ``slice_elements``, params first; none crosses the sections' border."""
    ends = {Section.PARAMS: params_elements, Section.BUFFERS: params_elements + buffers_elements}
    cut: list[Slice] = []
    start = 0
    for section, end in ends.items():
        for offset in range(start, end, slice_elements):
            cut.append(Slice(section, offset, min(slice_elements, end - offset)))
        start = end
    return cut


def same_round(header: ChunkHeader, round_: int, attempt: int) -> bool:
    """Whether a chunk belongs to this attempt."""
    return header.round == chunk_round(round_) and header.attempt == attempt


def chunk_round(round_: int) -> int:
    """A round's number as chunk headers hold it: 32 bits, so the initial broadcast, -1, wraps around."""
    return round_ & _ROUND_BITS


@dataclass(slots=True)
class Accumulator:
    """The count of one attempt: contributions accepted, elements received per host."""

    opening: OpenRound
    contributions: dict[int, Contribution] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    """elements by host: streams are in order and without gaps, so this is also where the next chunk starts"""
    contributors: list[int] = field(default_factory=list)
    """hosts whose streams are summed, ascending: those that declared a mass above zero"""

    @property
    def hosts(self) -> list[int]:
        """Expected hosts in ascending order, which is the order of every sum."""
        return sorted(self.opening.hosts)

    @property
    def elements(self) -> int:
        """Length of the arena: params and buffers."""
        return self.opening.params_elements + self.opening.buffers_elements

    @property
    def declared(self) -> bool:
        """Whether every expected host's contribution is here."""
        return len(self.contributions) == len(self.opening.hosts)

    @property
    def mass(self) -> float:
        """Total parameter mass of the accepted contributions, added in host and rank order."""
        return _total(self.contributions[host].masses for host in self.hosts if host in self.contributions)

    @property
    def mover_mass(self) -> float:
        """Total buffer mass of the accepted contributions."""
        return _total(self.contributions[host].mover_masses for host in self.hosts if host in self.contributions)

    @property
    def realized(self) -> bool:
        """Whether anybody worked; without work there is no consensus and everybody keeps what they hold."""
        return is_realized(self.mass)

    @property
    def buffers_realized(self) -> bool:
        return is_realized(self.mover_mass) and self.opening.buffers_elements > 0

    @property
    def steps(self) -> dict[int, int]:
        """Accepted steps by rank, idle ranks included."""
        return {rank: steps for host in self.hosts for rank, steps in sorted(self.contributions[host].steps.items())}

    def contribute(self, host: int, contribution: Contribution) -> bool:
        """Accept an expected host's declaration; False for an exact repeat, which changes nothing.

        Raises ``ContributionRefused``: wrong ranks, another model, an impossible mass, or a second
        declaration that differs from the first.
        """
        known = self.contributions.get(host)
        if known is not None:
            if known != contribution:
                raise ContributionRefused(host, "it declared two different contributions for one attempt")
            return False
        if problem := self._problem(host, contribution):
            raise ContributionRefused(host, problem)
        self.contributions[host] = contribution
        self.received[host] = 0
        if any(map(is_realized, contribution.masses.values())):
            bisect.insort(self.contributors, host)
        return True

    def arrived(self, host: int, header: ChunkHeader, payload_bytes: int) -> bool:
        """Count a chunk of an expected host; False for one that is wholly received already.

        Raises ``ContributionRefused`` for a chunk that nobody announced, of another encoding or length,
        outside of its section, or not adjoining the host's last one.
        """
        if problem := self._chunk_problem(host, header, payload_bytes):
            raise ContributionRefused(host, problem)
        end = header.offset + header.elements
        if end <= self.received[host]:
            return False
        if header.offset != self.received[host]:
            reason = f"its chunk starts at element {header.offset} where {self.received[host]} was due"
            raise ContributionRefused(host, reason)
        self.received[host] = end
        return True

    def covers(self, piece: Slice) -> bool:
        """Whether all contributors' streams have come past this slice; True for good once it is."""
        return all(self.received[host] >= piece.stop for host in self.contributors)

    def waiting_for(self) -> dict[int, str]:
        """What is still missing, in words, by host."""
        missing = {host: "its contribution" for host in self.hosts if host not in self.contributions}
        for host in self.contributors:
            if self.received[host] < self.elements:
                missing[host] = f"elements from {self.received[host]} of {self.elements}"
        return missing

    def _problem(self, host: int, contribution: Contribution) -> str:
        expected = sorted(self.opening.hosts[host])
        for ranks in (contribution.steps, contribution.masses, contribution.mover_masses):
            if sorted(ranks) != expected:
                return f"it speaks for ranks {sorted(ranks)}, this attempt expects {expected}"
        sizes = (contribution.params_elements, contribution.buffers_elements)
        if sizes != (self.opening.params_elements, self.opening.buffers_elements):
            return (
                f"it has {sizes[0]} parameter and {sizes[1]} buffer elements, the cohort has "
                f"{self.opening.params_elements} and {self.opening.buffers_elements}"
            )
        return next(filter(None, (_mass_problem(rank, contribution) for rank in expected)), "")

    def _chunk_problem(self, host: int, header: ChunkHeader, payload_bytes: int) -> str:
        if host not in self.contributions:
            return "its chunks came before its contribution"
        if host not in self.contributors:
            return "it declared no work and sent chunks"
        if header.encoding != Encoding.F32:
            return f"its chunks have encoding {header.encoding}, this run uses {int(Encoding.F32)} (f32)"
        if payload_bytes != header.payload_bytes:
            return f"its chunk of {header.elements} elements has {payload_bytes} bytes"
        border = self.opening.params_elements
        start, end = (0, border) if header.section == Section.PARAMS else (border, self.elements)
        if not start <= header.offset < header.offset + header.elements <= end:
            stop = header.offset + header.elements
            return f"its chunk of elements {header.offset} to {stop} leaves section {header.section}"
        return ""


def _mass_problem(rank: int, contribution: Contribution) -> str:
    steps = contribution.steps[rank]
    masses = {"mass": contribution.masses[rank], "mover mass": contribution.mover_masses[rank]}
    for name, mass in masses.items():
        if not math.isfinite(mass) or mass < 0:
            return f"rank {rank} declares a {name} of {mass}"
        if is_realized(mass) and not MASS_RANGE[0] <= mass <= MASS_RANGE[1]:
            return f"rank {rank} declares a {name} of {mass:g}, outside {MASS_RANGE[0]:g} to {MASS_RANGE[1]:g}"
        if is_realized(mass) != (steps > 0):
            return f"rank {rank} declares {steps} steps and a {name} of {mass:g}"
    return ""


def _total(masses: Iterable[dict[int, float]]) -> float:
    return float(sum(mass for by_rank in masses for _, mass in sorted(by_rank.items())))
