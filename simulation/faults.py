"""What may happen to hosts and ranks in a play: they die, fall silent, hang, leave, or change their speed."""

from __future__ import annotations

from typing import Any

from backend.core.vocabulary import Effect, Event, LinkLost, RelayLost
from simulation.played import PlayedHost, PlayedRank
from simulation.rounds import PlayedPlane
from wire.messages import ExitCause, Message, RankExited, Shutdown


class Faults:
    """The part of a theatre that strikes. Names are hosts', numbers ranks'."""

    hosts: dict[str, PlayedHost]
    ranks: dict[int, PlayedRank]
    plane: PlayedPlane

    def feed(self, event: Event) -> list[Effect]:
        """Hand the core one event now and perform what it says."""
        raise NotImplementedError

    def host_says(self, host: PlayedHost, message: Message) -> None:
        """The controller hears it from a host's agent."""
        raise NotImplementedError

    def kill(self, rank: int, code: int = -9, signal: str = "SIGKILL", **cause: Any) -> None:
        """A rank's process ends without being asked to; its agent reports it at once."""
        played = self.ranks[rank]
        played.alive = False
        exit_cause = ExitCause(code=code, signal=signal, last_step=played.steps, **cause)
        self.host_says(played.host, RankExited(rank=rank, cause=exit_cause))

    def unplug(self, name: str) -> None:
        """A host's links end at once."""
        host = self._silence(name)
        self.feed(LinkLost(host.link, "connection reset"))

    def freeze(self, name: str) -> None:
        """A host says nothing any more, but its links stay open."""
        self._silence(name)

    def lose_relay(self, name: str) -> None:
        """A host's relay link ends while its agent lives on; there is none before the world has formed."""
        host = self.hosts[name]
        for rank in host.ranks:
            rank.alive = False
        if host.ranks:
            self.feed(RelayLost(host.host, "connection reset"))

    def stop_relay(self, name: str) -> None:
        """A host's relay stands still, and with it whatever its ranks say; its agent beats on."""
        host = self.hosts[name]
        host.relay_stopped = True
        for rank in host.ranks:
            rank.alive = False

    def poison(self, name: str) -> None:
        """The reduce plane refuses what this host contributes next."""
        self.plane.poisoned.add(self.hosts[name].host)

    def spoil(self, rank: int, batches: int = 1) -> None:
        """So many of a rank's next batches make its parameters NaN."""
        self.ranks[rank].spoiled = batches

    def deafen(self, rank: int) -> None:
        """A rank takes up no chunk any more."""
        self.ranks[rank].deaf = True

    def quit(self, rank: int) -> None:
        """A rank takes its leave unasked, and exits clean."""
        self.ranks[rank].receive(Shutdown(reason=""))

    def set_speed(self, rank: int, ms: float) -> None:
        """A rank takes so many ms a batch from its next one on."""
        self.ranks[rank].pace.ms = ms

    def pause(self, rank: int, seconds: float) -> None:
        """A rank's device stands still for so long."""
        self.ranks[rank].pause(seconds)

    def _silence(self, name: str) -> PlayedHost:
        host = self.hosts[name]
        host.alive = False
        for rank in host.ranks:
            rank.alive = False
        return host
