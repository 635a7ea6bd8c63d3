"""Relay processes and ranks of several hosts around one controller."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from relay_kit import Controller, Rank, RelayProcess, controller, relay, soon
from torch import nn

from backend.core.vocabulary import RoundFinished
from wire.messages import Message, RankReady


class Car(nn.Module):
    """ODO with company: w moves by 1 a step; the rest makes the arena long enough for many chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1000))
        self.register_buffer("seen", torch.zeros(10))

    @torch.no_grad()
    def drive(self, steps: int) -> None:
        self.w += steps
        self.seen.fill_(float(steps))


class World:
    """Relay processes and ranks of all hosts around one controller."""

    def __init__(self, served: Controller, directory: Path) -> None:
        self.controller = served
        self.directory = directory
        self.relays: dict[int, RelayProcess] = {}
        self.ranks: dict[int, Rank] = {}

    @classmethod
    async def form(
        cls,
        stack: AsyncExitStack,
        hosts: dict[int, list[int]],
        directory: Path,
        sharing: Collection[int] = (),
        **orders: Any,
    ) -> World:
        """``sharing``: the hosts that use the controller's memory; the others are told to stream. ``orders``: of the
        relays."""
        served = await stack.enter_async_context(controller(hosts))
        served.offer_memory()
        world = cls(served, directory)
        for host, ranks in hosts.items():
            place = directory / f"host{host}"
            started = relay(served.url, place, host, ranks, shared_memory=host in sharing, **orders)
            world.relays[host] = await stack.enter_async_context(started)
        for host, ranks in hosts.items():
            await world.relays[host].listening()
            await soon(served.attached[host].wait())
            for rank in ranks:
                world.ranks[rank] = await Rank.join(rank, Car(), directory / f"host{host}")
                stack.push_async_callback(world.ranks[rank].leave)
                assert await world.heard() == (rank, RankReady(world.ranks[rank].arena.layout_hash, 1000, 10))
        return world

    async def begin(self, value: float = 0.0) -> None:
        """The initial broadcast: everybody starts where rank 0 is."""
        self.ranks[0].model.w.data.fill_(value)
        self.ranks[0].steps = 1
        self.open(-1)
        for rank in self.ranks.values():
            assert (await rank.answers()).initial
        self.controller.commit(await self.reduced())
        for rank in self.ranks.values():
            assert (await rank.adopts()).round == -1
        assert self.values() == {value}

    async def heard(self) -> tuple[int, Message]:
        return await soon(self.controller.heard.get())

    def open(self, round_: int, attempt: int = 0, dead: tuple[int, ...] = (), encoding: int = 0) -> None:
        alive = {
            host: living
            for host, ranks in self.controller.hosts.items()
            if (living := tuple(rank for rank in ranks if rank not in dead))
        }
        self.controller.open(round_, attempt, alive, self.ranks[0].arena, encoding)

    async def reduced(self) -> RoundFinished:
        result = await soon(self.controller.results.get())
        assert isinstance(result, RoundFinished), result
        return result

    async def round(self, round_: int, steps: dict[int, int], encoding: int = 0) -> None:
        """One whole window and its round among all ranks."""
        for number, rank in self.ranks.items():
            rank.steps = steps.get(number, 0)
            rank.model.drive(rank.steps)
        self.open(round_, encoding=encoding)
        for rank in self.ranks.values():
            assert (await rank.answers()).round == round_
        self.controller.commit(await self.reduced())
        for rank in self.ranks.values():
            await rank.adopts()

    def values(self, *dead: int) -> set[float]:
        return {value for number, rank in self.ranks.items() if number not in dead for value in rank.model.w.tolist()}

    def buffers(self) -> set[float]:
        return {value for rank in self.ranks.values() for value in rank.model.seen.tolist()}
