"""A theatre with real links and a controller that may be away or die: where messages are under way, faults have room.

What the controller sends takes its way over wires (``wires``); what hosts and ranks send waits while the controller
stands still; a sum that is complete is news that lies in the driver's inbox for a moment. Hosts watch the controller as
agents do: when nothing comes down for the heartbeat timeout they end their ranks (behaviour J13).
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

from backend.core.vocabulary import (
    CloseLink,
    DropHost,
    Effect,
    End,
    Event,
    HostSaid,
    Lagged,
    LinkLost,
    Operator,
    RankSaid,
    Record,
    RelayAttached,
    RelayHeard,
    RelayLost,
    SendHost,
    SendRank,
    SendRelay,
    StrangerRefused,
    Tick,
    WriteCheckpoint,
)
from simulation.played import Packed, PlayedHost, PlayedRank
from simulation.theatre import Theatre
from simulation.wires import Ways, Wire
from wire.messages import (
    Accept,
    ChunkDone,
    DeclareDead,
    ExitCause,
    Message,
    RankExited,
    RankProgress,
    RelayExited,
    RequestParams,
    RoundCommitted,
    RunEnded,
    StartChunk,
)

AT_GOODBYE = -1
NOTICE_SECONDS = 0.002
"""from the end of a link to whoever finds out at either end"""


class Wired(Theatre):
    """Play a run over wires."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.ways: dict[str, Ways] = {}
        self.away_until = 0.0
        self.inbox: deque[Event] = deque()
        self.inbox_seconds = 0.0
        """how long news of the plane lies in the inbox"""
        self.down_seconds = 0.0
        """what the controller sends is so long under way"""
        self.linger_seconds = 0.0
        """how long frames still come in on a link that the controller closed"""
        self.lost_plans: set[int] = set()
        """ranks whose next chunk gets lost, with all that is sent at the same moment"""
        self._lost_at: dict[int, float] = {}
        self.double_plans: set[int] = set()
        """ranks whose next chunk comes twice"""
        self.poison_batches: set[tuple[int, int]] = set()
        """epoch and first sample of batches that no rank survives"""
        self.silent_disk = False
        """checkpoints are neither written nor refused"""
        self.disk_trouble = False
        """one of them could not be written, or might not have been"""
        self.crash_in: int | None = None
        """effects until the controller's process dies"""
        self.recorded: list[tuple[float, Record]] = []
        """rows for the database, and when"""
        self.crashed = False
        self.struck: set[int] = set()
        """ranks whose process was ended"""
        self.time_away = 0.0
        """seconds that the controller stood still, so far"""
        self._grace_until = 0.0
        super().__init__(*arguments, **options)
        self.plane.tell(self._plane_says)
        self._acts |= {CloseLink: self._close_link, DropHost: self._drop_host}

    # ------------------------------------------------------------------------------------------- the controller

    def feed(self, event: Event) -> list[Effect]:
        """Hand the core an event, unless its controller stands still: then it waits in the inbox."""
        if self.crashed:
            return []
        if self.stage.now < self.away_until or self.inbox:
            self.inbox.append(event)
            return []
        return super().feed(event)

    def away(self, seconds: float) -> None:
        """The controller's process stands still for so long."""
        if self.away_until > self.stage.now:
            return
        self.away_until = self.stage.now + seconds
        self.stage.at(self.away_until, self._back, seconds)
        timeout = self.config.heartbeat_timeout_seconds
        if seconds >= timeout:
            for host in list(self.hosts.values()):
                self.stage.after(timeout, self._give_up, host, "the controller is silent")

    def _back(self, seconds: float) -> None:
        self._grace_until = self.stage.now + self.config.heartbeat_seconds
        self.time_away += seconds
        inbox, self.inbox = self.inbox, deque()
        for event in (Lagged(seconds), *inbox):
            if self.end is None:
                self.feed(event)

    def crash(self, effects: int) -> None:
        """The controller's process dies once it has performed so many more effects; at -1 right behind the first word
        that a run is over."""
        if self.crash_in is None:
            self.crash_in = effects

    def _perform(self, effect: Effect) -> None:
        if self.crash_in == 0 and not self.crashed:
            self._die()
        if self.crashed:
            return
        super()._perform(effect)
        if self.crash_in is not None:
            goodbye = isinstance(effect, SendHost) and isinstance(effect.message, RunEnded)
            if self.crash_in > 0:
                self.crash_in -= 1
            elif self.crash_in == AT_GOODBYE and goodbye:
                self.crash_in = 0

    def _die(self) -> None:
        self.crashed = True
        for host in self.hosts.values():
            self._cut_all(self.ways[host.name])
            self.stage.after(NOTICE_SECONDS, self._give_up, host, "the connection ended")
        if self.end is None:
            self.end = End("interrupted", "controller stopped")

    def _next_deadline(self) -> float | None:
        deadline = super()._next_deadline()
        return None if deadline is None else max(deadline, self._grace_until, self.away_until)

    def _plane_says(self, event: Event) -> None:
        if self.inbox_seconds:
            self.stage.after(self.inbox_seconds, self.feed, event)
        else:
            self.feed(event)

    def afterwards(self) -> None:
        """The run is over, and not everybody knows: the operator acts, a rank reports, time passes."""
        self.away_until, self.inbox = 0.0, deque()
        self.feed(Operator("abort", {"by": "operator"}))
        for rank in self.ranks:
            self.feed(RankSaid(rank, ChunkDone(epoch=0, offset=0, size=1)))
        self.feed(Tick())

    def stranger(self) -> None:
        """Somebody fails before authentication."""
        self.feed(StrangerRefused("10.9.9.9", "bad_mac", "it could not prove that it holds the token"))

    # ------------------------------------------------------------------------------------------ what is said

    def host_says(self, host: PlayedHost, message: Message) -> None:
        ways = self.ways.get(host.name)
        if ways is None:
            ways = self.ways[host.name] = Ways(self.stage)
            for wire in ways.down:
                wire.delay = self.down_seconds
        if ways.frozen:
            ways.backlog.append(partial(self.host_says, host, message))
        elif not ways.gone:
            ways.join_up.carry(self.stage.now, self._host_heard, host, message)

    def _host_heard(self, host: PlayedHost, message: Message) -> None:
        if self.ways[host.name].join_open:
            self.feed(HostSaid(host.link, message, host.address))

    def progress(self, host: PlayedHost) -> list[RankProgress]:
        return [
            RankProgress(played.rank, played.state if played.alive else "exited", played.steps, 0.0)
            for played in host.ranks
        ]

    def say(self, played: PlayedRank, message: Message, when: float) -> None:
        self.ways[played.host.name].control_up.carry(when, self._rank_heard, played.rank, message)

    def _rank_heard(self, rank: int, message: Message) -> None:
        self.feed(RankSaid(rank, message))

    def contribute(self, played: PlayedRank, request: RequestParams, packed: Packed) -> None:
        if played.stopped:
            played.when_running(partial(self.contribute, played, request, packed))
        elif played.alive:
            key = (request.round, request.attempt)
            data = self.ways[played.host.name].data_up
            data.carry(self.stage.now, self.plane.contribute, played.rank, key, packed)

    def attach(self, host: PlayedHost) -> None:
        ways = self.ways[host.name]
        if ways.frozen:
            ways.backlog.append(partial(self.attach, host))
        elif not ways.gone:
            ways.control_up.carry(self.stage.now, self.feed, RelayAttached(host.host))
            self.stage.after(self.config.heartbeat_seconds, self.relay_beats, host)

    def relay_beats(self, host: PlayedHost) -> None:
        if self.end is None and not self.ways[host.name].gone:
            self.relay_says_something(host)
            self.stage.after(self.config.heartbeat_seconds, self.relay_beats, host)

    def relay_says_something(self, host: PlayedHost) -> None:
        """A heartbeat of its relay, where that runs."""
        ways = self.ways[host.name]
        if not (host.relay_stopped or ways.frozen):
            ways.control_up.carry(self.stage.now, self.feed, RelayHeard(host.host))

    # ------------------------------------------------------------------------------------------ what is heard

    def _to_host(self, effect: SendHost) -> None:
        host = self._host_of_link.get(effect.link)
        if host is not None:
            if isinstance(effect.message, Accept):
                self._host_of_number[effect.message.host_id] = host
            self.ways[host.name].join_down.carry(self.stage.now, self.host_hears, host, effect.message)

    def host_hears(self, host: PlayedHost, message: Message) -> None:
        ways = self.ways[host.name]
        if ways.frozen:
            ways.backlog.append(partial(self.host_hears, host, message))
        elif not ways.gone:
            super().host_hears(host, message)
            if isinstance(message, RunEnded):
                self._give_up(host, "the run is over")

    def _to_rank(self, effect: SendRank) -> None:
        rank, message = effect.rank, effect.message
        played = self.ranks.get(rank)
        if played is None:
            return
        for _ in range(self._copies(played) if isinstance(message, StartChunk) else 1):
            self.ways[played.host.name].control_down.carry(self.stage.now, self._rank_hears, played, message)

    def _copies(self, played: PlayedRank) -> int:
        """How often a chunk arrives. Where links keep their order, only what nothing follows can get lost alone."""
        rank, now = played.rank, self.stage.now
        if rank in self.lost_plans and played.state == "idle":
            self.lost_plans.discard(rank)
            self._lost_at[rank] = now
        if self._lost_at.get(rank) == now:
            return 0
        if rank in self.double_plans:
            self.double_plans.discard(rank)
            return 2
        return 1

    @staticmethod
    def _rank_hears(played: PlayedRank, message: Message) -> None:
        if played.alive:
            played.receive(message)

    def _to_relay(self, effect: SendRelay) -> None:
        host, message = self._host_of_number[effect.host], effect.message
        down = self.ways[host.name].control_down
        if isinstance(message, RoundCommitted):
            down.carry(self.stage.now, self._adopted, host, self._committed(message, self.plane.staged).value)
        elif isinstance(message, DeclareDead):
            down.carry(self.stage.now, self._fence, host, message.rank)

    @staticmethod
    def _adopted(host: PlayedHost, value: float | None) -> None:
        for played in host.ranks:
            if played.alive:
                played.adopt(value)

    def _fence(self, host: PlayedHost, rank: int) -> None:
        """The relay refuses a rank that was declared dead; if it still lives it has no link any more and exits."""
        for played in host.ranks:
            if played.rank == rank:
                played.when_running(partial(self.kill, rank, 1, ""))

    # ------------------------------------------------------------------------------------------ links that end

    def _close_link(self, effect: CloseLink) -> None:
        host = self._host_of_link.get(effect.link)
        if host is None:
            return
        ways = self.ways[host.name]
        ways.join_open = False
        ways.join_down.carry(self.stage.now, self._cut_off, host)
        self.stage.after(self.linger_seconds, ways.join_up.cut)

    def _drop_host(self, effect: DropHost) -> None:
        host = self._host_of_number[effect.host]
        ways = self.ways[host.name]
        ways.relay_open = False
        ways.control_down.carry(self.stage.now, self._relay_ends, host)
        for wire in (ways.control_up, ways.data_up):
            self.stage.after(self.linger_seconds, wire.cut)

    def _cut_off(self, host: PlayedHost) -> None:
        """The agent finds its link closed."""
        ways = self.ways[host.name]
        if ways.frozen:
            ways.backlog.append(partial(self._cut_off, host))
        else:
            self._give_up(host, "the controller closed the link")

    def _relay_ends(self, host: PlayedHost) -> None:
        """The relay lost its links, and its process ends; the agent tells, and stops the ranks."""
        ways = self.ways[host.name]
        if ways.frozen:
            ways.backlog.append(partial(self._relay_ends, host))
            return
        if ways.gone:
            return
        self.host_says(host, RelayExited(cause=ExitCause(code=1, message="its control link ended")))
        self._stop_ranks(host)

    def _give_up(self, host: PlayedHost, reason: str) -> None:
        """The agent ends everything on its host, and its links with it."""
        ways = self.ways[host.name]
        if ways.gone:
            return
        if ways.frozen:
            ways.backlog.append(partial(self._give_up, host, reason))
            return
        ways.gone = True
        host.alive = False
        for played in host.ranks:
            played.alive = False
        ways.join_up.carry(self.stage.now, self._link_lost, host, reason)
        if host.host >= 0:
            ways.control_up.carry(self.stage.now, self._relay_lost, host, reason)

    def _stop_ranks(self, host: PlayedHost) -> None:
        for played in host.ranks:
            if played.alive:
                self.kill(played.rank, -15, "SIGTERM")

    def _link_lost(self, host: PlayedHost, reason: str) -> None:
        ways = self.ways[host.name]
        if ways.join_open:
            ways.join_open = False
            self.feed(LinkLost(host.link, reason))

    def _relay_lost(self, host: PlayedHost, reason: str) -> None:
        ways = self.ways[host.name]
        if ways.relay_open and host.ranks:
            ways.relay_open = False
            self.feed(RelayLost(host.host, reason))

    def kill(self, rank: int, code: int = -9, signal: str = "SIGKILL", **cause: Any) -> None:
        played = self.ranks[rank]
        if not played.alive:
            return
        played.alive = False
        self.struck.add(rank)
        exit_cause = ExitCause(code=code, signal=signal, last_step=played.steps, **cause)
        self.host_says(played.host, RankExited(rank=rank, cause=exit_cause))

    @staticmethod
    def _cut(wires: tuple[Wire, ...]) -> None:
        for wire in wires:
            wire.cut()

    def _cut_all(self, ways: Ways) -> None:
        self._cut((*ways.up, *ways.down))

    # ------------------------------------------------------------------------------------------- the database

    def _record(self, record: Record) -> None:
        super()._record(record)
        self.recorded.append((self.stage.now, record))

    def _write_checkpoint(self, effect: WriteCheckpoint) -> None:
        if not self.silent_disk:
            super()._write_checkpoint(effect)
