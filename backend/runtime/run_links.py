"""The links of one run, by the numbers that the core uses: join links, and one control and one data link per host.

A relay-only host has a data link only; the data links of the hosts behind it end there, and it says so (decision 0015).

Sending is best effort here: a link that can't take a message ends by itself, and its end comes back as an event
(behaviour M6, M7).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from backend.core.join_admission import MAX_NAME
from backend.core.vocabulary import Event, LinkLost, RelayAttached, RelayLost
from backend.runtime.health import HostBeats
from backend.runtime.outbox import Outbox
from wire.beats import Beats
from wire.codes import CloseCode
from wire.messages import ChildLost, Message
from wire.session import Channel

MAX_BEATS = 1024
"""names of hosts whose heartbeats are counted"""


@dataclass(slots=True)
class Relay:
    """The two links of a host's relay; ``lost`` once one of them ended. With ``via``, the data link ends at that
    relay-only host."""

    links: dict[Channel, Outbox] = field(default_factory=dict)
    via: int | None = None
    lost: bool = False
    announced: bool = False
    """the core knows of it: both links were up"""
    shares_memory: bool = False
    """its data is read and written where it lies, not streamed"""

    def has(self, channel: Channel) -> bool:
        """Whether this link is up, wherever it ends."""
        return channel in self.links or (channel is Channel.DATA and self.via is not None)


class RunLinks:
    """Knows who may speak for whom in one run. All calls come from the event loop's thread."""

    def __init__(self, post: Callable[[Event], None]) -> None:
        self.beats: dict[str, HostBeats] = {}
        """heartbeats, by the host's name"""
        self._post = post
        self._joins: dict[int, Outbox] = {}
        self._expected: dict[int, tuple[int, ...]] = {}
        self._owner: dict[int, int] = {}
        self._relays: dict[int, Relay] = {}
        self._dropped: dict[int, str] = {}
        self._world_known = asyncio.Event()
        self._closing: list[Outbox] = []
        """told to close and not closed yet"""
        self._over = ""

    def all(self) -> Iterator[Outbox]:
        """Every open link."""
        yield from self._joins.values()
        for relay in self._relays.values():
            yield from relay.links.values()

    @property
    def over(self) -> str:
        """Why no link is taken any more; empty while the run lives."""
        return self._over

    # -------------------------------------------------------------------------------------------- join links

    def add_join(self, link: int, outbox: Outbox) -> None:
        """A host said hello on this link; the core knows it by its number from now on."""
        self._joins[link] = outbox

    def beats_of(self, host: str, period: float) -> HostBeats:
        """Where to count this host's heartbeats; a host that comes back is not late for its absence. Whoever says hello
        under ever new names is counted for nobody."""
        name, beats = host.strip()[:MAX_NAME], HostBeats(Beats(period))
        if name in self.beats or len(self.beats) < MAX_BEATS:
            beats = self.beats.setdefault(name, beats)
        beats.here.paused()
        return beats

    def join_ended(self, link: int, reason: str) -> None:
        """The link is over. The core hears of it, unless it was the core that closed it."""
        if self._joins.pop(link, None) is not None:
            self._post(LinkLost(link, reason))

    def is_joined(self, link: int) -> bool:
        """Whether the core still listens to this link."""
        return link in self._joins

    def send_host(self, link: int, message: Message) -> None:
        """Queue a message on a join link; its loss, if it can't be written, comes back as ``LinkLost``."""
        outbox = self._joins.get(link)
        if outbox is not None:
            outbox.post(message)

    def close_join(self, link: int, reason: str) -> None:
        """Close a join link once it's flushed. The core has let it go: nothing that it still says is heard."""
        outbox = self._joins.pop(link, None)
        if outbox is not None:
            self._remember(outbox)
            outbox.finish(reason)

    # ------------------------------------------------------------------------------------------- relay links

    def expect(self, hosts: dict[int, tuple[int, ...]]) -> None:
        """The world formed: these hosts' relays may attach, each for these ranks."""
        self._expected = dict(hosts)
        self._owner = {rank: host for host, ranks in hosts.items() for rank in ranks}
        self._world_known.set()

    async def world_known(self, seconds: float) -> None:
        """Wait a moment for the world: a relay may be quicker than the effects that announce it."""
        try:
            async with asyncio.timeout(seconds):
                await self._world_known.wait()
        except TimeoutError:
            return

    def objection(self, channel: Channel, host: int, ranks: list[int]) -> str:
        """Why this relay may not attach, or an empty string."""
        if self._over:
            return f"the run is over: {self._over}"
        if host in self._dropped:
            return f"host {host} is out of this run: {self._dropped[host]}"
        if host not in self._expected:
            return f"host {host} is not part of this run's world"
        if channel is Channel.CONTROL and not self._expected[host]:
            return f"host {host} has no ranks that could speak on a control link"
        if tuple(ranks) != self._expected[host]:
            return f"host {host} owns ranks {list(self._expected[host])}, not {list(ranks)}"
        relay = self._relays.get(host)
        if relay is not None and relay.lost:
            return f"the relay of host {host} was lost before; its ranks are out"
        if relay is not None and relay.has(channel):
            return f"the {channel.name.lower()} link of host {host} is attached already"
        return ""

    def attach(self, channel: Channel, host: int, outbox: Outbox) -> None:
        """Take a relay's link that has no ``objection``; the core hears of it when both are up."""
        relay = self._relays.setdefault(host, Relay())
        relay.links[channel] = outbox
        self._announce(host, relay)

    def attach_child(self, site: int, host: int, ranks: list[int]) -> None:
        """A relay-only host says that this host's data link ends there; a claim with an objection is sent back."""
        if objection := self.objection(Channel.DATA, host, ranks):
            self.send_data(site, ChildLost(host=host, reason=objection))
            return
        relay = self._relays.setdefault(host, Relay())
        relay.via = site
        self._announce(host, relay)

    def child_lost(self, site: int, host: int, reason: str) -> None:
        """A relay-only host says that this host's data link is over. Word of a host that it does not carry is void."""
        relay = self._relays.get(host)
        if relay is not None and relay.via == site:
            relay.via = None
            self._lose(host, relay, f"its data link to relay-only host {site} ended: {reason}")

    def relay_only(self) -> list[int]:
        """The hosts of the world that have no ranks."""
        return [host for host, ranks in self._expected.items() if not ranks]

    def is_relay_only(self, host: int) -> bool:
        """Whether this host of the world has no ranks."""
        return self._expected.get(host) == ()

    def uplinks(self, hosts: dict[int, tuple[int, ...]]) -> dict[int, dict[int, tuple[int, ...]]]:
        """These hosts and their ranks by the host whose data link carries them, in the order of the first each."""
        found: dict[int, dict[int, tuple[int, ...]]] = {}
        for host, ranks in sorted(hosts.items()):
            relay = self._relays.get(host)
            uplink = host if relay is None or relay.via is None else relay.via
            found.setdefault(uplink, {})[host] = ranks
        return found

    def relay_ended(self, channel: Channel, host: int, outbox: Outbox, reason: str) -> None:
        """One of a relay's links is over: the other one is of no use any more. A relay that was not there yet may dial
        again."""
        relay = self._relays.get(host)
        if relay is None or relay.links.get(channel) is not outbox:
            return
        del relay.links[channel]
        if relay.announced or self.is_relay_only(host):
            self._lose(host, relay, f"the {channel.name.lower()} link ended: {reason}")

    def owner(self, rank: int) -> int | None:
        """The host that a rank belongs to."""
        return self._owner.get(rank)

    def owns(self, host: int, rank: int) -> bool:
        """Whether this host's relay may speak for this rank."""
        return self._owner.get(rank) == host

    def send_relay(self, host: int, message: Message) -> None:
        """Queue a host-level message on the host's control link."""
        outbox = self._control(host)
        if outbox is not None:
            outbox.post(message)

    def send_rank(self, rank: int, message: Message) -> None:
        """Queue a message for a rank on its host's control link."""
        host = self._owner.get(rank)
        outbox = None if host is None else self._control(host)
        if outbox is not None:
            outbox.post(message, rank)

    def send_data(self, host: int, message: Message) -> None:
        """Queue a message on the host's data link, in order with its chunks; best effort."""
        outbox = self.data(host)
        if outbox is not None:
            outbox.post(message)

    def data(self, host: int) -> Outbox | None:
        """The host's data link, if it's up."""
        relay = self._relays.get(host)
        return None if relay is None else relay.links.get(Channel.DATA)

    def shares_memory(self, host: int) -> None:
        """The host's data link carries no data: both sides map each other's memory."""
        if host in self._relays:
            self._relays[host].shares_memory = True

    def data_paths(self) -> dict[int, str]:
        """How each attached host's data travels: ``shared memory`` or ``stream``."""
        return {
            host: "shared memory" if relay.shares_memory else "stream"
            for host, relay in self._relays.items()
            if relay.has(Channel.DATA)
        }

    def drop(self, host: int, reason: str) -> None:
        """Close a host's relay links at once and refuse it from now on."""
        self._dropped[host] = reason
        relay = self._relays.pop(host, None)
        if relay is not None:
            self._close_relay(host, relay, reason)

    # ----------------------------------------------------------------------------------------------- the end

    def finish_all(self, reason: str, last_words: Message | None = None) -> None:
        """The run is over: close every link once it's flushed, join links with these last words."""
        self._over = reason
        self._world_known.set()
        self._closing += self.all()
        for outbox in self._joins.values():
            if last_words is not None:
                outbox.post(last_words)
            outbox.finish(reason, CloseCode.GONE)
        self._joins.clear()
        for relay in self._relays.values():
            for outbox in relay.links.values():
                outbox.finish(reason, CloseCode.GONE)
        self._relays.clear()

    async def flushed(self) -> None:
        """Wait until the links that were told to close are closed."""
        for outbox in self._closing:
            await outbox.closed.wait()

    def drop_chunks(self) -> None:
        """Forget what waits on the data links: the attempt that it belongs to was aborted."""
        for relay in self._relays.values():
            outbox = relay.links.get(Channel.DATA)
            if outbox is not None:
                outbox.drop_chunks()

    def _control(self, host: int) -> Outbox | None:
        relay = self._relays.get(host)
        outbox = None if relay is None else relay.links.get(Channel.CONTROL)
        if outbox is None and host in self._expected and host not in self._dropped and not self._over:
            # Nothing to write to: a taken step must not be left hanging on a peer that isn't there (M6).
            self._lose(host, self._relays.setdefault(host, Relay()), "its control link is not attached")
        return outbox

    def lose(self, rank: int, reason: str) -> None:
        """What this rank does must not go on: its host's relay is lost."""
        host = self._owner.get(rank)
        relay = None if host is None else self._relays.get(host)
        if host is not None and relay is not None:
            self._lose(host, relay, reason)

    def _lose(self, host: int, relay: Relay, reason: str) -> None:
        if relay.lost or self._over:
            return
        relay.lost = True
        self._post(RelayLost(host, reason))
        self._close_relay(host, relay, reason)

    def _close_relay(self, host: int, relay: Relay, reason: str) -> None:
        for outbox in relay.links.values():
            self._remember(outbox)
            outbox.drop_chunks()
            outbox.finish(reason, CloseCode.REFUSED)
        relay.links.clear()
        if relay.via is not None:
            self.send_data(relay.via, ChildLost(host=host, reason=reason))
            relay.via = None
        if self.is_relay_only(host):
            for child, other in self._relays.items():
                if other.via == host:
                    other.via = None
                    self._lose(child, other, f"relay-only host {host}, which carried its data, was lost: {reason}")

    def _announce(self, host: int, relay: Relay) -> None:
        """The core hears of a relay once both of its links are up."""
        if self._expected[host] and relay.has(Channel.CONTROL) and relay.has(Channel.DATA):
            relay.announced = True
            self._post(RelayAttached(host, relay.via))

    def _remember(self, outbox: Outbox) -> None:
        self._closing = [other for other in self._closing if not other.closed.is_set()]
        self._closing.append(outbox)
