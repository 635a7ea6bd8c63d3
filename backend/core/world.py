"""The frozen world of a run: which hosts and ranks there are, who still lives, and what each rank last said."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import asdict

from wire.messages import Device, ExitCause, RankAssignment, RankFailed, RankProgress, RankReady, Versions


@dataclass(slots=True)
class HostSeat:
    """One admitted host and the links it holds; a relay-only host has neither devices nor ranks."""

    host: int
    name: str
    address: str
    link: int
    ranks: tuple[int, ...]
    devices: tuple[Device, ...]
    versions: Versions
    emulate_ms_per_batch: float | None
    relay_up: bool = False
    via: int | None = None
    """the relay-only host that carries its data"""
    state: str = "forming"
    """forming, training, left, lost; away: not come back yet to a controller that was restarted"""

    def as_row(self) -> dict[str, Any]:
        """What stays as it is while the world lives, JSON-ready."""
        return {
            "host": self.host,
            "name": self.name,
            "address": self.address,
            "ranks": list(self.ranks),
            "devices": [asdict(device) for device in self.devices],
            "versions": asdict(self.versions),
            "emulate_ms_per_batch": self.emulate_ms_per_batch,
        }


@dataclass(slots=True)
class RankSeat:
    """One rank: its place, and what it did so far."""

    rank: int
    host: int
    local_rank: int
    device: str
    state: str = "starting"
    """starting, ready, idle, working, dead, left"""
    ready: RankReady | None = None
    failure: RankFailed | None = None
    """what the rank said before it went down"""
    exit: ExitCause | None = None
    progress: RankProgress | None = None
    idle_since: float | None = None
    """when it reported its last chunk as done"""
    steps: int = 0
    samples: int = 0
    loss: float | None = None
    last_split: dict[str, float] = field(default_factory=dict)
    """compute, data, wait and reduce seconds of the last closed window"""
    last_planned: int = 0
    last_realized: int = 0

    @property
    def alive(self) -> bool:
        return self.state not in ("dead", "left")


class World:
    """Hosts and ranks by number. Ranks are keys, never positions; a dead rank keeps its seat and its number."""

    def __init__(self, hosts: Iterable[HostSeat]) -> None:
        self.hosts: dict[int, HostSeat] = {seat.host: seat for seat in hosts}
        self.ranks: dict[int, RankSeat] = {}
        for seat in self.hosts.values():
            for local_rank, (rank, device) in enumerate(zip(seat.ranks, seat.devices, strict=True)):
                self.ranks[rank] = RankSeat(rank=rank, host=seat.host, local_rank=local_rank, device=device.id)
        self.ranks = dict(sorted(self.ranks.items()))
        self._living = dict.fromkeys(self.ranks)
        self._alive = tuple(self._living)
        self._links = {seat.link: seat for seat in self.hosts.values()}
        self.check()

    def assignments(self, host: int) -> list[RankAssignment]:
        """What ``WorldFormed`` tells this host."""
        return [
            RankAssignment(rank=rank, local_rank=self.ranks[rank].local_rank, device=self.ranks[rank].device)
            for rank in self.hosts[host].ranks
        ]

    def alive(self) -> tuple[int, ...]:
        """Living ranks in order."""
        return self._alive

    def rebind(self, seat: HostSeat, link: int, address: str) -> None:
        """The host speaks over another link from now on."""
        del self._links[seat.link]
        seat.link, seat.address = link, address
        self._links[link] = seat

    def lives(self, rank: int) -> bool:
        """Whether the rank is neither dead nor gone."""
        return rank in self._living

    def remove(self, rank: int, state: str) -> None:
        """A rank is ``dead`` or has ``left``; every other change of a seat's state leaves it among the living."""
        assert state in ("dead", "left"), state
        self.ranks[rank].state = state
        if self._living.pop(rank, rank) is None:
            self._alive = tuple(self._living)

    def dead(self) -> list[int]:
        """Ranks that died; those that left after the end are not among them."""
        return [rank for rank, seat in self.ranks.items() if seat.state == "dead"]

    def alive_by_host(self) -> dict[int, tuple[int, ...]]:
        """Living ranks of each host that still has one, in order: the contributions a round expects."""
        found: dict[int, tuple[int, ...]] = {}
        for host, seat in sorted(self.hosts.items()):
            ranks = tuple(rank for rank in seat.ranks if self.ranks[rank].alive)
            if ranks:
                found[host] = ranks
        return found

    def host_of_link(self, link: int) -> HostSeat | None:
        """The host that holds this join link."""
        return self._links.get(link)

    def where(self, rank: int) -> str:
        """A rank as people should read it: number, host and device."""
        seat = self.ranks[rank]
        return f"rank {rank} ({self.hosts[seat.host].name}/{seat.device})"

    def emulated_ms(self, rank: int) -> float | None:
        """The padding that the rank's host declared, in ms a batch."""
        return self.hosts[self.ranks[rank].host].emulate_ms_per_batch

    def check(self) -> None:
        """Ranks are contiguous from 0, each belongs to exactly one host, and the living are those whose seats say
        so."""
        assert list(self.ranks) == list(range(len(self.ranks))), f"ranks are not contiguous: {list(self.ranks)}"
        for seat in self.ranks.values():
            assert seat.rank in self.hosts[seat.host].ranks, f"{seat.rank} is not a rank of host {seat.host}"
            assert seat.alive == (seat.rank in self._living), f"rank {seat.rank} is {seat.state}"
        assert self._alive == tuple(self._living)
