"""A plane on a bench: what goes in, what came out, and the right answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backend.core.vocabulary import OpenRound, RoundBroken, RoundFinished
from backend.reduce import ReducePlane
from wire.messages import Contribution
from wire.session import ChunkHeader, Section

PARAMS, BUFFERS = 61, 7
ELEMENTS = PARAMS + BUFFERS


@dataclass
class Bench:
    """A plane and what came out of it."""

    options: dict[str, Any] = field(default_factory=dict)
    sent: dict[int, list[ChunkHeader]] = field(default_factory=dict)
    arenas: dict[int, np.ndarray] = field(default_factory=dict)
    results: asyncio.Queue[RoundFinished | RoundBroken] = field(default_factory=asyncio.Queue)
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.plane = ReducePlane(
            send=self._send,
            finished=self.results.put_nowait,
            broken=self.results.put_nowait,
            **({"slice_elements": 8} | self.options),
        )

    def _send(self, host: int, header: ChunkHeader, payload: memoryview) -> None:
        assert payload.readonly
        self.heard.set()
        self.sent.setdefault(host, []).append(header)
        arena = self.arenas.setdefault(host, np.full(ELEMENTS, np.nan, dtype=np.float32))
        arena[header.offset : header.offset + header.elements] = np.frombuffer(payload, "<f4")

    def open(self, hosts: dict[int, tuple[int, ...]], round_: int = 0, attempt: int = 0) -> None:
        self.plane.open(OpenRound(round_, attempt, hosts, False, PARAMS, BUFFERS))

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


def declared(steps: dict[int, int], round_: int = 0, attempt: int = 0) -> Contribution:
    return Contribution(
        round=round_,
        attempt=attempt,
        steps=steps,
        masses={rank: float(n) for rank, n in steps.items()},
        mover_masses={rank: float(n > 0) for rank, n in steps.items()},
        params_elements=PARAMS,
        buffers_elements=BUFFERS,
    )


def chunks(
    arena: np.ndarray, size: int = 8, round_: int = 0, attempt: int = 0, dice: random.Random | None = None
) -> Iterator[tuple[ChunkHeader, memoryview]]:
    """An arena as a relay streams it; with dice the cuts fall anywhere."""
    for section, start, stop in ((Section.PARAMS, 0, PARAMS), (Section.BUFFERS, PARAMS, ELEMENTS)):
        while start < stop:
            elements = min(stop - start, dice.randint(1, size) if dice else size)
            yield (
                ChunkHeader(round_ & 0xFFFFFFFF, attempt, section, start, elements),
                memoryview(arena[start : start + elements].tobytes()),
            )
            start += elements


def arenas(hosts: int, seed: int = 3) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(ELEMENTS).astype(np.float32) * 1000 for _ in range(hosts)]


def oracle(contributed: list[np.ndarray], mass: float, mover_mass: float) -> np.ndarray:
    total = contributed[0].copy()
    for arena in contributed[1:]:
        total += arena
    total[:PARAMS] *= np.float32(1 / mass)
    total[PARAMS:] *= np.float32(1 / mover_mass)
    return total
