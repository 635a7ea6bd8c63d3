"""What may strike a run over wires: hosts and ranks that die, stand still, leave or cannot be reached."""

from __future__ import annotations

from simulation.played import Batch, PlayedHost, PlayedRank
from simulation.wired import NOTICE_SECONDS, Wired
from simulation.wires import Wire
from wire.messages import Leaving


class Ordeal(Wired):
    """A script's acts call these. Names are hosts', numbers ranks'; without seconds it is for good."""

    def survives(self, played: PlayedRank, batch: Batch) -> bool:
        if batch[:2] not in self.poison_batches:
            return True
        self.kill(played.rank, 1, "", exception="ValueError", message=f"sample {batch[1]} is broken")
        return False

    def quit(self, rank: int) -> None:
        self.struck.add(rank)
        super().quit(rank)

    def unplug(self, name: str) -> None:
        """All of a host's links end at once (a reset); both ends find out."""
        host, ways = self.hosts[name], self.ways[name]
        self._cut_all(ways)
        self.stage.after(NOTICE_SECONDS, self._link_lost, host, "connection reset")
        self.stage.after(2 * NOTICE_SECONDS, self._relay_lost, host, "connection reset")
        self.stage.after(NOTICE_SECONDS, self._give_up, host, "connection reset")

    def lose_relay(self, name: str) -> None:
        """A host's relay links are reset; its agent's link is well."""
        host, ways = self.hosts[name], self.ways[name]
        if not host.ranks:
            return
        self._cut(ways.relay)
        self.stage.after(NOTICE_SECONDS, self._relay_lost, host, "connection reset")
        self.stage.after(NOTICE_SECONDS, self._relay_ends, host)

    def stop_relay(self, name: str, seconds: float | None = None) -> None:
        """A host's relay stands still, for so long or for good: nothing passes over its links, which stay open."""
        host, ways = self.hosts[name], self.ways[name]
        if host.relay_stopped or not host.ranks:
            return
        host.relay_stopped = True
        for wire in ways.relay:
            wire.clog()
        if seconds is not None:
            self.stage.after(seconds, self._relay_goes_on, host)

    def _relay_goes_on(self, host: PlayedHost) -> None:
        host.relay_stopped = False
        self._heal(self.ways[host.name].relay)
        self.relay_says_something(host)

    def lose_join(self, name: str) -> None:
        """A host's join link is reset; its relay's links are well until the agent stops everything."""
        host, ways = self.hosts[name], self.ways[name]
        self._cut((ways.join_up, ways.join_down))
        self.stage.after(NOTICE_SECONDS, self._link_lost, host, "connection reset")
        self.stage.after(NOTICE_SECONDS, self._give_up, host, "connection reset")

    def leave(self, name: str) -> None:
        """The operator of a host ends its agent."""
        self.host_says(self.hosts[name], Leaving(reason="SIGTERM"))
        self._give_up(self.hosts[name], "it left")

    def freeze(self, name: str, seconds: float | None = None) -> None:
        """A whole machine stands still, for so long or for good; its links stay open."""
        host, ways = self.hosts[name], self.ways[name]
        if ways.frozen:
            return
        ways.frozen = True
        host.alive = False
        for played in host.ranks:
            played.stop()
        if seconds is not None:
            self.stage.after(seconds, self._thaw, host)

    def _thaw(self, host: PlayedHost) -> None:
        ways = self.ways[host.name]
        ways.frozen = False
        host.alive = not ways.gone
        for played in host.ranks:
            played.go_on()
        backlog, ways.backlog = ways.backlog, []
        for act in backlog:
            act()
        self._beat(host)
        if host.ranks:
            self.relay_says_something(host)

    def partition(self, name: str, direction: str, seconds: float) -> None:
        """Nothing passes between a host and the controller: ``up``, ``down`` or ``both``. Links hold what was sent."""
        ways = self.ways[name]
        wires = (*(ways.up if direction != "down" else ()), *(ways.down if direction != "up" else ()))
        for wire in wires:
            wire.clog()
        self.stage.after(seconds, self._heal, wires)
        timeout = self.config.heartbeat_timeout_seconds
        if direction != "up" and seconds >= timeout:
            self.stage.after(timeout, self._give_up, self.hosts[name], "the controller is silent")

    @staticmethod
    def _heal(wires: tuple[Wire, ...]) -> None:
        for wire in wires:
            wire.unclog()

    def slow(self, name: str, link: str, seconds: float) -> None:
        """What a host sends over a link (join, control or data) arrives so much later; ``down``: what it is sent."""
        ways = self.ways[name]
        wires = {"join": (ways.join_up,), "control": (ways.control_up,), "data": (ways.data_up,), "down": ways.down}
        for wire in wires[link]:
            wire.delay = seconds

    def hang(self, rank: int, seconds: float | None = None) -> None:
        """A rank's process stands still, for so long or for good, while its agent beats on."""
        played = self.ranks[rank]
        played.stop()
        if seconds is not None:
            self.stage.after(seconds, self._hang_ends, played)

    def _hang_ends(self, played: PlayedRank) -> None:
        if not self.ways[played.host.name].frozen:
            played.go_on()
