"""A plane on a bench: hosts that stream and hosts that share memory, what came out of it, and the right answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from backend.core.vocabulary import OpenRound, RoundBroken, RoundFinished
from backend.reduce import ReducePlane, SharedArenas
from backend.reduce.outer import Nesterov
from wire import arithmetic, ranges
from wire.arithmetic import BF16, F32, FloatArray
from wire.messages import Contribution, Message, UpdateComing
from wire.ranges import Ranges
from wire.session import ChunkHeader, Section
from wire.streams import slices

PARAMS, BUFFERS = 61, 7
ELEMENTS = PARAMS + BUFFERS


@dataclass
class Receiver:
    """A host's end of the data link: it holds the consensus, and builds the next one from what comes down."""

    base: FloatArray = field(default_factory=lambda: np.full(ELEMENTS, np.nan, F32))
    new: FloatArray = field(default_factory=lambda: np.full(ELEMENTS, np.nan, F32))
    told: list[Message] = field(default_factory=list)
    headers: list[ChunkHeader] = field(default_factory=list)
    coming: UpdateComing | None = None

    def tell(self, message: Message) -> None:
        self.told.append(message)
        if not isinstance(message, UpdateComing):
            return
        self.coming = message
        if message.path:
            self.new = np.fromfile(message.path, F32)
        else:
            self.new = np.where(covered(message.still), self.base, np.float32(np.nan))

    def take(self, header: ChunkHeader, payload: memoryview) -> None:
        assert payload.readonly
        assert self.coming is not None and not self.coming.path, "said before it comes"
        self.headers.append(header)
        update = np.empty(header.elements, F32)
        if header.encoding:
            arithmetic.decode_bf16(np.frombuffer(payload, BF16), update)
        else:
            update[:] = np.frombuffer(payload, F32)
        cut = slice(header.offset, header.offset + header.elements)
        arithmetic.apply(None if self.coming.absolute else self.base[cut], update, self.new[cut])

    def commit(self) -> None:
        self.base, self.coming = self.new.copy(), None
        self.told.clear()
        self.headers.clear()


@dataclass
class Bench:
    """A plane and what came out of it."""

    tuning: dict[str, int] = field(default_factory=dict)
    outer: Nesterov | None = None
    options: dict[str, Any] = field(default_factory=dict)
    hosts: dict[int, Receiver] = field(default_factory=dict)
    results: asyncio.Queue[RoundFinished | RoundBroken] = field(default_factory=asyncio.Queue)
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    round_: int = -1

    def __post_init__(self) -> None:
        self.plane = ReducePlane(
            send=self._send,
            tell=lambda host, message: self.host(host).tell(message),
            finished=self.results.put_nowait,
            broken=self.results.put_nowait,
            outer=self.outer,
            tuning={"slice_elements": 8, "mapped_elements": 16} | self.tuning,
            **self.options,
        )

    def host(self, number: int) -> Receiver:
        return self.hosts.setdefault(number, Receiver())

    def _send(self, host: int, header: ChunkHeader, payload: memoryview) -> None:
        self.heard.set()
        self.host(host).take(header, payload)

    def open(
        self, hosts: dict[int, tuple[int, ...]], round_: int = 0, attempt: int = 0, *, encoding: int = 0, **sizes: int
    ) -> None:
        sizes = {"params_elements": PARAMS, "buffers_elements": BUFFERS} | sizes
        self.plane.open(OpenRound(round_, attempt, hosts, round_ < 0, encoding=encoding, **sizes))

    def commit(self) -> None:
        """Everybody adopts, as ``RoundCommitted`` has them do."""
        for receiver in self.hosts.values():
            receiver.commit()

    async def start_from(self, values: FloatArray, *hosts: int) -> None:
        """The initial broadcast: everybody holds ``values``."""
        first, *rest = hosts
        self.open({first: (0,)} | {host: (rank,) for rank, host in enumerate(rest, 1)}, -1)
        self.plane.contribution(first, declared({0: 1}, -1))
        for rank, host in enumerate(rest, 1):
            self.plane.contribution(host, declared({rank: 0}, -1))
        for chunk in chunks(values, round_=-1):
            self.plane.chunk(first, *chunk)
        await self.finished()
        self.commit()

    async def result(self) -> RoundFinished | RoundBroken:
        return await asyncio.wait_for(self.results.get(), 10)

    async def finished(self) -> RoundFinished:
        result = await self.result()
        assert isinstance(result, RoundFinished), result
        return result

    async def broken(self) -> RoundBroken:
        result = await self.result()
        assert isinstance(result, RoundBroken), result
        return result

    @property
    def consensus(self) -> FloatArray:
        """A copy, so that the plane may go on with the buffer."""
        assert self.plane._ledger.consensus is not None
        return self.plane._ledger.consensus.values.copy()


def covered(still: Ranges) -> np.ndarray:
    """Which elements are in these ranges."""
    mask = np.zeros(ELEMENTS, bool)
    for start, stop in still:
        mask[start:stop] = True
    return mask


def declared(steps: dict[int, int], round_: int = 0, attempt: int = 0, **changes: Any) -> Contribution:
    contribution = Contribution(
        round=round_,
        attempt=attempt,
        steps=steps,
        masses={rank: float(n) for rank, n in steps.items()},
        mover_masses={rank: float(n > 0) for rank, n in steps.items()},
        params_elements=PARAMS,
        buffers_elements=BUFFERS,
    )
    return msgspec.structs.replace(contribution, **changes)


def share_of(
    contribution: Contribution, base: FloatArray | None, values: dict[int, FloatArray], encoding: int = 0
) -> FloatArray:
    """What a host streams: the weighted differences of its ranks that worked, bf16 rounded if it travels so."""
    out = np.empty(ELEMENTS, F32)
    worked = sorted(rank for rank, mass in contribution.masses.items() if mass > 0)
    border = contribution.params_elements
    for cut, masses in ((slice(border), contribution.masses), (slice(border, None), contribution.mover_masses)):
        start = None if base is None else base[cut]
        arithmetic.contribution(start, [values[r][cut] for r in worked], [masses[r] for r in worked], out[cut])
    for start, stop in contribution.still:
        out[start:stop] = 0.0
    if encoding:
        arithmetic.round_bf16(out[:border])
    return out


def chunks(
    share: FloatArray,
    size: int = 8,
    *,
    round_: int = 0,
    attempt: int = 0,
    still: Sequence[tuple[int, int]] = (),
    encoding: int = 0,
    dice: random.Random | None = None,
) -> Iterator[tuple[ChunkHeader, memoryview]]:
    """A contribution as a relay streams it; with dice the cuts fall anywhere."""
    for piece in slices(PARAMS, BUFFERS, list(still), ELEMENTS):
        start = piece.offset
        while start < piece.stop:
            elements = min(piece.stop - start, dice.randint(1, size) if dice else size)
            payload: np.ndarray = share[start : start + elements]
            bf16 = encoding if piece.section is Section.PARAMS else 0
            if bf16:
                payload = np.empty(elements, BF16)
                arithmetic.encode_bf16(share[start : start + elements], payload)
            header = ChunkHeader(round_ & 0xFFFFFFFF, attempt, piece.section, start, elements, bf16)
            yield header, memoryview(payload.tobytes())
            start += elements


def arenas(hosts: int, seed: int = 3) -> list[FloatArray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(ELEMENTS).astype(F32) * 1000 for _ in range(hosts)]


def oracle(base: FloatArray, shares: dict[int, tuple[Contribution, FloatArray]], encoding: int = 0) -> FloatArray:
    """The new consensus, by the definition: shares summed in host order, divided once, subtracted."""
    total = np.zeros(ELEMENTS, F32)
    masses, movers = [], []
    for position, host in enumerate(sorted(shares)):
        contribution, share = shares[host]
        total = share.copy() if position == 0 else total + share
        masses += [contribution.masses[rank] for rank in sorted(contribution.masses)]
        movers += [contribution.mover_masses[rank] for rank in sorted(contribution.mover_masses)]
    total[:PARAMS] *= arithmetic.reciprocal(sum(masses))
    total[PARAMS:] *= arithmetic.reciprocal(sum(movers))
    if encoding:
        arithmetic.round_bf16(total[:PARAMS])
    still = ranges.normalized([(0, ELEMENTS)])
    for contribution, _ in shares.values():
        still = ranges.intersection(still, contribution.still)
    return np.where(covered(still), base, base - total)


def shared(directory: Path, values: dict[int, FloatArray]) -> SharedArenas:
    """A host's arenas on disk, as its relay would offer them."""
    directory.mkdir(mode=0o700, exist_ok=True)
    for rank, arena in values.items():
        (directory / f"rank{rank}.out").write_bytes(arena.tobytes())
    return SharedArenas(str(directory))
