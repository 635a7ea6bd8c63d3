"""What a relay-only host knows of one attempt, and its sum: the law of ``wire.streams``, and never a division.

No clock, no I/O; ``fold`` may be called in any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import msgspec
import numpy as np

from wire import arithmetic, streams
from wire.arithmetic import BF16, F32, FloatArray
from wire.messages import Contribution, FoldOrder, NonFinite
from wire.session import ChunkHeader, Encoding
from wire.streams import ContributionRefused, Slice, Streamed, Streams


class Attempt:
    """One attempt of a round: who behind this host contributes, by the child whose link brings it."""

    def __init__(self, order: FoldOrder, carriers: Mapping[int, int]) -> None:
        """``carriers`` gives for each host the child that carries it, itself mostly. Raises ``LookupError`` naming
        hosts that are not here any more: the attempt can't be folded, and the controller is about to hear why."""
        if absent := sorted(order.hosts.keys() - carriers.keys()):
            raise LookupError(f"host {', '.join(map(str, absent))}")
        parts: dict[int, dict[int, list[int]]] = {}
        for host, ranks in sorted(order.hosts.items()):
            parts.setdefault(carriers[host], {})[host] = ranks
        self.number = (order.round, order.attempt)
        self.order = order
        self.parts = {child: msgspec.structs.replace(order, hosts=hosts) for child, hosts in parts.items()}
        """by child: the order as that child has to fold it, if it is relay-only itself"""
        expected = {child: sorted(chain(*hosts.values())) for child, hosts in parts.items()}
        self.streams = Streams(msgspec.structs.replace(order, hosts=expected), initial=order.round < 0)
        self.open = True
        self.bad: NonFinite | None = None
        """what a child says that one of its ranks contributes; nothing more is sent up then"""

    def contribution(self) -> Contribution:
        """This host's own declaration, once every child has made its own: all their ranks, what none of them moved."""
        declared = [self.streams.contributions[child] for child in self.streams.hosts]

        def united(field: str) -> dict[int, float]:
            return dict(sorted(chain(*(getattr(each, field).items() for each in declared))))

        return Contribution(
            round=self.order.round,
            attempt=self.order.attempt,
            steps={rank: int(steps) for rank, steps in united("steps").items()},
            masses=united("masses"),
            mover_masses=united("mover_masses"),
            params_elements=self.order.params_elements,
            buffers_elements=self.order.buffers_elements,
            still=self.streams.still if self.streams.realized and not self.streams.initial else [],
        )

    def header(self, piece: Slice) -> ChunkHeader:
        """Of the chunk that carries this slice up."""
        encoding = streams.section_encoding(piece.section, self.order.encoding)
        number = streams.chunk_round(self.order.round)
        return ChunkHeader(number, self.order.attempt, piece.section, piece.offset, piece.elements, encoding)

    def has(self, header: ChunkHeader) -> bool:
        """Whether a chunk belongs to this attempt, and the attempt still counts."""
        return self.open and streams.same_round(header, *self.number)

    def refuse_bad(self, child: int, bad: NonFinite) -> None:
        """Take a child's word that one of its ranks contributes a value that is not finite. Raises
        ``ContributionRefused`` when the rank is not the child's."""
        if bad.rank not in self.streams.order.hosts[child]:
            raise ContributionRefused(child, f"it speaks for rank {bad.rank}, which it does not bring")
        self.bad = self.bad or bad


def fold(taken: Mapping[int, Streamed], piece: Slice, encoding: int) -> memoryview:
    """The sum of the children's elements of one slice, in ascending order, as it travels.

    Raises ``ContributionRefused`` naming the child whose elements are not finite: its relay had to say so itself.
    """
    sources = list(taken.values())
    out = np.empty(piece.elements, F32)
    for cut in arithmetic.blocks(piece.elements):
        streams.total(sources, piece.offset + cut.start, piece.offset + cut.stop, out[cut])
        if not arithmetic.all_finite(out[cut]):
            _name_the_culprit(taken, piece.offset + cut.start, piece.offset + cut.stop)
    if encoding == Encoding.F32:
        return out.data
    bits = np.empty(piece.elements, BF16)
    arithmetic.encode_bf16(out, bits)
    return bits.data


def _name_the_culprit(taken: Mapping[int, Streamed], start: int, stop: int) -> None:
    spare: FloatArray = np.empty(stop - start, F32)
    for child, source in taken.items():
        found = arithmetic.first_non_finite(source.read(start, stop, spare))
        if found is not None:
            raise ContributionRefused(child, f"it contributed {found[1]} at element {start + found[0]}")
