"""One attempt's contributions and streams: who declared what, how far each stream has come, what can be summed.

Whoever folds several hosts uses this: the controller, and a relay-only host. Sources are hosts by number; each declares
its ``Contribution`` and then, if it worked, streams the elements that are not ``still``, in order. A slice is complete
when every stream has come past it; sums run over the sources in ascending order, whatever came first. The divisor and
the sum are built from the same set (behaviour A2; law L1).

No clock, no I/O, no threads of its own; only ``total`` may be called in another thread.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from wire import arithmetic, ranges
from wire.arithmetic import BF16, F32, FloatArray
from wire.frames import MAX_CHUNK_ELEMENTS, ChunkHeader, Encoding, Section
from wire.mass import is_realized
from wire.messages import Contribution, FoldOrder
from wire.ranges import Ranges

Values = npt.NDArray[Any]
"""elements as they travelled: f32, or bf16 bits"""
SLICE_ELEMENTS = MAX_CHUNK_ELEMENTS
"""elements that are summed and sent on as one: the largest chunk"""
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
    """A piece of the arena within one section; ``offset`` counts elements from the arena's start."""

    section: Section
    offset: int
    elements: int

    @property
    def stop(self) -> int:
        return self.offset + self.elements


def slices(params_elements: int, buffers_elements: int, still: Ranges, longest: int = SLICE_ELEMENTS) -> list[Slice]:
    """What is not ``still``, in slices of at most ``longest``, params first; none crosses the sections' border."""
    ends = {Section.PARAMS: params_elements, Section.BUFFERS: params_elements + buffers_elements}
    cut: list[Slice] = []
    start = 0
    for section, end in ends.items():
        moving = ranges.complement(still, start, end)
        cut += [Slice(section, first, last - first) for first, last in ranges.cut(moving, longest)]
        start = end
    return cut


def chunk_round(round_: int) -> int:
    """A round's number as chunk headers hold it: 32 bits, so the initial broadcast, -1, wraps around."""
    return round_ & _ROUND_BITS


def same_round(header: ChunkHeader, round_: int, attempt: int) -> bool:
    """Whether a chunk belongs to this attempt."""
    return header.round == chunk_round(round_) and header.attempt == attempt


def section_encoding(section: int, encoding: int) -> Encoding:
    """How a section travels when parameters travel as ``encoding``: buffers are always f32."""
    return Encoding(encoding) if section == Section.PARAMS else Encoding.F32


class Source(Protocol):
    """One contribution within one slice."""

    def read(self, start: int, stop: int, spare: FloatArray) -> FloatArray:
        """Its elements, (stop - start,) f32, counted from the arena's start: in ``spare``, which is as long, or a
        view that nobody may write to."""
        ...


def total(sources: Sequence[Source], start: int, stop: int, out: FloatArray) -> None:
    """Sum the sources' elements in the order given into ``out``, at most ``BLOCK_ELEMENTS`` of them, in any thread."""
    first = sources[0].read(start, stop, out)
    if first is not out:
        np.copyto(out, first)
    spare = arithmetic.scratch.free[0][: stop - start]
    for source in sources[1:]:
        arithmetic.add(out, source.read(start, stop, spare))


@dataclass(frozen=True, slots=True)
class Streamed:
    """A source whose elements came in chunks: what it left out counts as zero."""

    parts: list[tuple[int, Values]]
    """(first element, values), ascending"""

    def read(self, start: int, stop: int, spare: FloatArray) -> FloatArray:
        covered = start
        for offset, values in self.parts:
            first, last = max(start, offset), min(stop, offset + values.size)
            if first >= last:
                continue
            piece = values[first - offset : last - offset]
            if piece.size == stop - start and piece.dtype == F32:
                return piece
            spare[covered - start : first - start] = 0.0
            _write(piece, spare[first - start : last - start])
            covered = last
        spare[covered - start :] = 0.0
        return spare


def _write(piece: Values, out: FloatArray) -> None:
    if piece.dtype == BF16:
        arithmetic.decode_bf16(piece, out)
    else:
        np.copyto(out, piece)


@dataclass(slots=True)
class _Stream:
    """What one contributor still sends (``moving``, split at the sections' border) and what waits to be summed."""

    moving: Ranges
    end: int
    at: int = 0
    """the next element that is due: all before it is here, or still"""
    index: int = 0
    held: int = 0
    """elements that are here and not summed yet"""
    inbox: deque[tuple[int, Values]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._settle()

    def _settle(self) -> None:
        if self.index == len(self.moving):
            self.at = self.end
        else:
            self.at = max(self.at, self.moving[self.index][0])

    def advance(self, header: ChunkHeader, values: Values) -> str:
        """Take the chunk that is due; otherwise what is wrong with it."""
        stop = header.offset + header.elements
        if self.at == self.end:
            return f"its chunk starts at element {header.offset} where nothing more was due"
        if header.offset != self.at:
            return f"its chunk starts at element {header.offset} where {self.at} was due"
        if stop > self.moving[self.index][1]:
            return f"its chunk of elements {header.offset} to {stop} goes on beyond {self.moving[self.index][1]}"
        self.inbox.append((header.offset, values))
        self.held += header.elements
        self.at = stop
        self.index += stop == self.moving[self.index][1]
        self._settle()
        return ""

    def take(self, piece: Slice) -> Streamed:
        """What is here of this slice, removed; a chunk that reaches further keeps its rest."""
        parts = []
        while self.inbox and self.inbox[0][0] < piece.stop:
            offset, values = self.inbox.popleft()
            wanted = piece.stop - offset
            parts.append((offset, values[:wanted]))
            if values.size > wanted:
                self.inbox.appendleft((piece.stop, values[wanted:]))
        return Streamed(parts)


class Streams:
    """One attempt. ``order`` says who contributes; ``initial``: values travel, so nothing is still."""

    def __init__(self, order: FoldOrder, *, initial: bool = False, longest: int = SLICE_ELEMENTS) -> None:
        self.order = order
        self.initial = initial
        self.hosts = sorted(order.hosts)
        """expected sources in ascending order, which is the order of every sum"""
        self.elements = order.params_elements + order.buffers_elements
        self.contributions: dict[int, Contribution] = {}
        self.contributors: list[int] = []
        """those that declared a mass above zero, ascending"""
        self._longest = longest
        self._streams: dict[int, _Stream] = {}

    # ------------------------------------------------------------------------------------------- declarations

    @property
    def declared(self) -> bool:
        """Whether every expected source's contribution is here."""
        return len(self.contributions) == len(self.hosts)

    @property
    def mass(self) -> float:
        """Total parameter mass of the accepted contributions, added in host and rank order."""
        return _mass(self.contributions[host].masses for host in self.hosts if host in self.contributions)

    @property
    def mover_mass(self) -> float:
        """Total buffer mass of the accepted contributions."""
        return _mass(self.contributions[host].mover_masses for host in self.hosts if host in self.contributions)

    @property
    def realized(self) -> bool:
        """Whether anybody worked; without work there is no consensus and everybody keeps what they hold."""
        return is_realized(self.mass)

    @property
    def buffers_realized(self) -> bool:
        return is_realized(self.mover_mass) and self.order.buffers_elements > 0

    @property
    def steps(self) -> dict[int, int]:
        """Accepted steps by rank, idle ranks included."""
        return {rank: steps for host in self.hosts for rank, steps in sorted(self.contributions[host].steps.items())}

    @property
    def still(self) -> Ranges:
        """Elements that no contributor moved, once all have declared; all, if nobody worked."""
        common: Ranges = [(0, self.elements)] if self.elements else []
        for host in self.contributors:
            common = ranges.intersection(common, self.contributions[host].still)
        return common

    def slices(self, still: Ranges | None = None, longest: int | None = None) -> list[Slice]:
        """What is to be summed, in order, once all have declared: all but ``still`` (none given: what nobody moved)."""
        out = self.still if still is None else still
        return slices(self.order.params_elements, self.order.buffers_elements, out, longest or self._longest)

    def contribute(self, host: int, contribution: Contribution, *, streamed: bool = True) -> bool:
        """Accept an expected source's declaration; False for an exact repeat, which changes nothing.

        Without ``streamed`` its elements are at hand already, and no chunk of it is due. Raises
        ``ContributionRefused``: wrong ranks, another model, an impossible mass or range, or a second declaration that
        differs from the first.
        """
        known = self.contributions.get(host)
        if known is not None:
            if known != contribution:
                raise ContributionRefused(host, "it declared two different contributions for one attempt")
            return False
        if problem := self._problem(host, contribution):
            raise ContributionRefused(host, problem)
        self.contributions[host] = contribution
        if any(map(is_realized, contribution.masses.values())):
            bisect.insort(self.contributors, host)
            if streamed:
                border = self.order.params_elements
                moving = [
                    *ranges.complement(contribution.still, 0, border),
                    *ranges.complement(contribution.still, border, self.elements),
                ]
                self._streams[host] = _Stream(moving, self.elements)
        return True

    # ------------------------------------------------------------------------------------------------ streams

    def arrived(self, host: int, header: ChunkHeader, payload: memoryview) -> None:
        """Keep a chunk of an expected source until it is summed.

        Raises ``ContributionRefused`` for a chunk that nobody announced, of another encoding or length, outside of its
        section, or not the next one due.
        """
        if problem := self._chunk_problem(host, header, payload.nbytes):
            raise ContributionRefused(host, problem)
        values = np.frombuffer(payload, BF16 if header.encoding == Encoding.BF16 else F32)
        if problem := self._streams[host].advance(header, values):
            raise ContributionRefused(host, problem)

    def complete(self, piece: Slice) -> bool:
        """Whether all streams have come past this slice; True for good once it is."""
        return all(stream.at >= piece.stop for stream in self._streams.values())

    def take(self, piece: Slice) -> dict[int, Streamed]:
        """Every streaming contributor's part of a complete slice, by host, ascending; give it back with ``summed``."""
        return {host: self._streams[host].take(piece) for host in self.contributors if host in self._streams}

    def summed(self, taken: dict[int, Streamed]) -> None:
        """What was taken is summed: its memory is free again."""
        for host, part in taken.items():
            self._streams[host].held -= sum(values.size for _, values in part.parts)

    def held(self, host: int) -> int:
        """Elements that are kept for this source."""
        stream = self._streams.get(host)
        return 0 if stream is None else stream.held

    def waiting_for(self) -> dict[int, str]:
        """What is still missing, in words, by host."""
        missing = {host: "its contribution" for host in self.hosts if host not in self.contributions}
        for host, stream in sorted(self._streams.items()):
            if stream.at < self.elements:
                missing[host] = f"elements from {stream.at} of {self.elements}"
        return missing

    def _problem(self, host: int, contribution: Contribution) -> str:
        expected = sorted(self.order.hosts[host])
        for ranks in (contribution.steps, contribution.masses, contribution.mover_masses):
            if sorted(ranks) != expected:
                return f"it speaks for ranks {sorted(ranks)}, this attempt expects {expected}"
        sizes = (contribution.params_elements, contribution.buffers_elements)
        if sizes != (self.order.params_elements, self.order.buffers_elements):
            return (
                f"it has {sizes[0]} parameter and {sizes[1]} buffer elements, the cohort has "
                f"{self.order.params_elements} and {self.order.buffers_elements}"
            )
        if contribution.still and self.initial:
            return "it leaves elements out of the initial broadcast, which has nothing to be equal to"
        if problem := ranges.problem(contribution.still, self.elements):
            return f"its still {problem}"
        return next(filter(None, (_mass_problem(rank, contribution) for rank in expected)), "")

    def _chunk_problem(self, host: int, header: ChunkHeader, payload_bytes: int) -> str:
        if host not in self.contributions:
            return "its chunks came before its contribution"
        if host not in self._streams:
            worked = host in self.contributors
            return "it shares its memory and sent chunks" if worked else "it declared no work and sent chunks"
        encoding = section_encoding(header.section, self.order.encoding)
        if header.encoding != encoding:
            return f"its chunk has encoding {header.encoding} where {int(encoding)} ({encoding.name.lower()}) was due"
        if payload_bytes != header.payload_bytes:
            return f"its chunk of {header.elements} elements has {payload_bytes} bytes"
        border = self.order.params_elements
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


def _mass(masses: Iterable[dict[int, float]]) -> float:
    return float(sum(mass for by_rank in masses for _, mass in sorted(by_rank.items())))
