"""What one open attempt holds: its streams, its plan, how far the sums have come, and the arena that is being built."""

from __future__ import annotations

from dataclasses import dataclass, field

from backend.core.vocabulary import OpenRound, RoundFinished
from backend.reduce.alive import Alive
from backend.reduce.buffers import Buffer
from backend.reduce.outer import OuterStep
from backend.reduce.pieces import Culprit, Mapped, Piece
from backend.reduce.shared import SharedArenas
from wire import ranges
from wire.arithmetic import FloatArray, reciprocal
from wire.frames import Encoding
from wire.mass import is_realized
from wire.messages import Contribution, FoldOrder
from wire.ranges import Ranges
from wire.session import Section
from wire.streams import Slice, Source, Streamed, Streams, Values, section_encoding

MAPPED_ELEMENTS = 1 << 20
"""elements of one task where nobody waits for its result: 4 MiB"""


@dataclass(frozen=True, slots=True)
class Settings:
    """How finely a plane cuts, and how many pieces it works on at once."""

    slice_elements: int
    mapped_elements: int
    threads: int
    window_slices: int
    """slices of one host's stream that are kept until they are summed"""
    outgoing_slices: int
    """slices of the update that are kept until the slowest link has been sent them"""


def fold_order(opening: OpenRound) -> FoldOrder:
    """The same attempt, as every fold tier counts it."""
    hosts = {host: list(ranks) for host, ranks in opening.hosts.items()}
    sizes = (opening.params_elements, opening.buffers_elements)
    return FoldOrder(opening.round, opening.attempt, hosts, *sizes, encoding=opening.encoding)


@dataclass(slots=True)
class Attempt:
    """One open attempt and its buffer: dropped together, so that late sums hurt nobody."""

    opening: OpenRound
    streams: Streams
    base: Buffer | None
    """the consensus in force, which contributions differ from; none in the initial broadcast"""
    built: Buffer
    outer: OuterStep | None
    started: float
    outgoing: Alive
    """pieces of the update that some link has not been sent. Each attempt has its own: what a link that is stuck still
    holds of an aborted one must not keep the next from going on"""
    start: FloatArray | None = None
    """a restored consensus, (elements,): the initial broadcast brings it, whatever ranks send"""
    shared: set[int] = field(default_factory=set)
    """hosts on this machine: they are told where the result is, instead of being sent it"""
    values: dict[int, dict[int, FloatArray]] = field(default_factory=dict)
    """where the ranks' values lie, by host, ranks ascending, (elements,) each: those that worked and need no stream"""
    still: Ranges = field(default_factory=list)
    """elements that the result has in common with ``base``"""
    plan: list[Slice] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """elements that are still, and not what they were in the buffer that is built in; none yet under way"""
    planned: bool = False
    next_sum: int = 0
    next_send: int = 0
    summed: dict[int, Values | None] = field(default_factory=dict)
    """by place in the plan: what is to be sent of each slice that is summed and not sent yet"""
    culprits: list[Culprit] = field(default_factory=list)
    """pieces without a usable result; no further one is begun"""
    running: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    declared_at: float = 0.0
    arrived_at: float = 0.0

    @property
    def number(self) -> tuple[int, int]:
        return self.opening.round, self.opening.attempt

    @property
    def listeners(self) -> list[int]:
        """Hosts that are sent the update, ascending."""
        return [host for host in self.streams.hosts if host not in self.shared]

    @property
    def complete(self) -> bool:
        """Whether everything is summed and sent on, and nothing runs any more."""
        return self.planned and self.next_send == len(self.plan) and not self.copies and not self.running

    def map(self, host: int, arenas: SharedArenas) -> None:
        """Find the values of a host that has declared. Raises ``SharedMemoryRefused``."""
        masses = self.streams.contributions[host].masses
        worked = sorted(rank for rank, mass in masses.items() if is_realized(mass))
        self.values[host] = {rank: arenas.values(rank, self.streams.elements) for rank in worked}

    def make_plan(self, cuts: Settings) -> None:
        """Everybody has declared: what moves, what has to be copied, in which pieces."""
        self.planned = True
        if not self.streams.realized:
            return
        self.still = self._still()
        in_chunks = self.listeners or any(host not in self.values for host in self.streams.contributors)
        longest = cuts.slice_elements if in_chunks else cuts.mapped_elements
        self.plan = self.streams.slices(self.still, longest)
        self.copies = list(ranges.cut(ranges.intersection(self.still, self.built.stale), cuts.mapped_elements))

    def piece(self, cut: Slice, taken: dict[int, Streamed]) -> Piece:
        """The work on one slice, whose streamed parts are ``taken``."""
        params = cut.section is Section.PARAMS
        rounded = section_encoding(cut.section, self.opening.encoding) is Encoding.BF16
        base = None if self.base is None else self.base.values
        sources: dict[int, Source] = {}
        for host in self.streams.contributors:
            share = self.streams.contributions[host]
            sources[host] = taken[host] if host in taken else self._mapped(host, share, base, cut.section, rounded)
        scale = reciprocal(self.streams.mass if params else self.streams.mover_mass)
        if self.start is not None:
            sources, scale = {0: Mapped(None, [0], [self.start], [1.0], [], rounded=False)}, reciprocal(1.0)
        return Piece(
            cut=cut,
            sources=sources,
            scale=scale,
            base=base,
            new=self.built.values,
            outer=self.outer if params else None,
            rounded=rounded,
            streamed=bool(self.listeners),
        )

    def outcome(self, now: float) -> RoundFinished:
        """What came of it; everything is summed, or nobody worked."""
        streams = self.streams
        return RoundFinished(
            *self.number,
            realized=streams.realized,
            buffers_realized=streams.buffers_realized,
            steps=streams.steps,
            mass=streams.mass,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            seconds=now - self.started,
            declared=self.declared_at - self.started,
            arrived=max(self.declared_at, self.arrived_at) - self.started,
        )

    def commit(self, before: Buffer | None) -> None:
        """The built buffer is the consensus now, after ``before``; remember what that one lacks."""
        if before is not None:
            before.stale = ranges.complement(self.still, 0, self.streams.elements)
        self.built.stale = []
        zero = self._momentum_zero()
        self.built.momentum_zero = zero if self.opening.initial else ranges.intersection(zero, self.still)

    def _mapped(
        self, host: int, share: Contribution, base: FloatArray | None, section: Section, rounded: bool
    ) -> Mapped:
        by_rank = self.values[host]
        masses = share.masses if section is Section.PARAMS else share.mover_masses
        weights = [masses[rank] for rank in by_rank]
        return Mapped(base, list(by_rank), list(by_rank.values()), weights, share.still, rounded)

    def _still(self) -> Ranges:
        if self.opening.initial:
            return []
        still = self.streams.still
        if self.outer is not None:  # momentum moves what nobody moves any more
            buffers = (self.opening.params_elements, self.streams.elements)
            still = ranges.intersection(still, ranges.union(self._momentum_zero(), [buffers]))
        return still

    def _momentum_zero(self) -> Ranges:
        return [] if self.outer is None else self.outer.zero
