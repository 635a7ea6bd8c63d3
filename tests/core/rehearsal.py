"""A cohort on a virtual clock: the real core, with hosts, ranks and a reduce plane played by the rehearsal.

Every rank is an odometer (one number w that each batch raises by 1), so the consensus of every round has an exact
value. After each event the core's invariants are checked. Nothing sleeps; time is whatever the next event says.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from backend.core.cohort import Cohort
from backend.core.config import RunConfig
from backend.core.vocabulary import (
    AbortRound,
    CheckpointWritten,
    CloseLink,
    DropHost,
    Effect,
    End,
    Event,
    HostSaid,
    LinkLost,
    OpenRound,
    Operator,
    RankSaid,
    Record,
    Refused,
    RelayAttached,
    RelayLost,
    RoundFinished,
    SendHost,
    SendRank,
    SendRelay,
    Tick,
    WriteCheckpoint,
)
from wire.mass import gamma_mass, mover_mass
from wire.messages import (
    WIRE_VERSION,
    Accept,
    BatchDone,
    ChunkDone,
    Device,
    EvalResult,
    Evaluate,
    ExitCause,
    Exiting,
    Hello,
    HostHeartbeat,
    JobOffer,
    LocalState,
    ProbeReport,
    RankExited,
    RankReady,
    Reject,
    RequestLocalState,
    RequestParams,
    RoundCommitted,
    RunEnded,
    Shutdown,
    StartChunk,
    SyncAck,
    TensorSpec,
    Versions,
    WorldFormed,
)

LATENCY = 0.001
"""seconds that anything said takes to be heard"""
VERSIONS = Versions(marchline="0.1.0", wire=WIRE_VERSION, python="3.11.7", torch="2.13.0")
LAYOUT = [TensorSpec(name="w", section="params", dtype="float32", shape=[1], offset=0)]


@dataclass
class PlayedRank:
    """One rank: how fast it is, what it holds, what it did."""

    rank: int
    host: PlayedHost
    ms: float
    w: float = 0.0
    steps: int = 0
    since_commit: int = 0
    alive: bool = True
    seen: list[tuple[int, int, int]] = field(default_factory=list)
    """(epoch, offset, size) of every batch that it trained on"""


@dataclass
class PlayedHost:
    """One host: a link, its devices, and whether it still beats."""

    name: str
    link: int
    ms: list[float]
    host: int = -1
    alive: bool = True
    connected: bool = True
    told: list[Any] = field(default_factory=list)
    ranks: list[PlayedRank] = field(default_factory=list)


class Rehearsal:
    """Play a run. ``hosts`` join by ``join``; ``run`` goes on until the cohort ended or ``until`` passed."""

    def __init__(
        self,
        config: RunConfig,
        *,
        samples: int = 60,
        layout: list[TensorSpec] | None = None,
        salt: bytes = b"salt",
        reduce_seconds: float = 0.002,
    ) -> None:
        self.now = 0.0
        self.config = config
        self.samples = samples
        self.layout = layout or LAYOUT
        self.reduce_seconds = reduce_seconds
        self.cohort = Cohort(1, config, run_salt=salt, run_secret=None, job_hash="", now=0.0)
        self.hosts: dict[str, PlayedHost] = {}
        self.ranks: dict[int, PlayedRank] = {}
        self.log: list[tuple[float, str, Event | Effect | str]] = []
        self.records: list[Record] = []
        self.consensus: list[tuple[int, float]] = []
        self.refused: list[Refused] = []
        self.end: End | None = None
        self.checkpoint_error = ""
        self.intercept: Callable[[Effect], bool] = lambda effect: False
        """answers True to swallow an effect: a lost message"""
        self.spawns = True
        """False: hosts never start their processes"""
        self.flaw: tuple[int, int] | None = None
        """(rank, round) whose replica comes out different"""
        self._queue: list[tuple[float, int, Callable[[], Any]]] = []
        self._ticket = itertools.count()
        self._links = itertools.count(1)
        self._contributions: dict[tuple[int, int], dict[int, tuple[int, float]]] = {}
        self._open: OpenRound | None = None
        self._staged: dict[tuple[int, int], tuple[float, bool]] = {}
        self._acts: dict[type, Callable[[Any], None]] = {
            SendHost: self._to_host,
            SendRank: self._to_rank,
            SendRelay: self._to_relay,
            OpenRound: self._open_round,
            AbortRound: self._abort_round,
            WriteCheckpoint: self._write_checkpoint,
            Record: self.records.append,
            Refused: self.refused.append,
            End: self._ended,
            CloseLink: lambda effect: None,
            DropHost: lambda effect: None,
        }

    # ------------------------------------------------------------------------------------------- for stories

    def join(self, name: str, *ms: float, emulated: bool = False, **hello: Any) -> PlayedHost:
        """A host dials in now with one device for each of ``ms`` (its ranks' ms a batch)."""
        host = PlayedHost(name=name, link=next(self._links), ms=list(ms))
        self.hosts[name] = host
        devices = [Device(id=f"cpu:{index}", type="cpu") for index in range(len(ms))]
        emulate = ms[0] if emulated else None
        fields = {"host": name, "devices": devices, "versions": VERSIONS, "emulate_ms_per_batch": emulate} | hello
        self.feed(HostSaid(host.link, Hello(**fields), address=f"10.0.0.{host.link}"))
        self._after(1.0, lambda: self._beat(host))
        return host

    def feed(self, event: Event) -> list[Effect]:
        """Hand the core one event now and perform what it says."""
        self.log.append((self.now, "event", event))
        effects = self.cohort.handle(event, self.now)
        self.cohort.check()
        for effect in effects:
            self.log.append((self.now, "effect", effect))
            if not self.intercept(effect):
                self._perform(effect)
        return effects

    def operate(self, act: str, **arguments: Any) -> list[Refused]:
        """The operator acts; what was refused comes back."""
        return [effect for effect in self.feed(Operator(act, arguments)) if isinstance(effect, Refused)]

    def at(self, when: float, act: Callable[[], Any]) -> None:
        """Do something at a moment to come."""
        self._after(when - self.now, act)

    def run(self, until: float = 10_000.0) -> Rehearsal:
        """Let time pass until the run ended, or ``until``."""
        while self.end is None and self.now < until:
            deadline = self.cohort.next_deadline()
            next_at = self._queue[0][0] if self._queue else None
            if deadline is not None and (next_at is None or deadline < next_at):
                if deadline > until:
                    break
                self.now = max(self.now, deadline)
                self.feed(Tick())
            elif next_at is not None and next_at <= until:
                self.now, _, act = heapq.heappop(self._queue)
                act()
            else:
                break
        if self.end is None:
            self.now = max(self.now, until)
        return self

    def kill(self, rank: int, code: int = -9, signal: str = "SIGKILL", **cause: Any) -> None:
        """A rank's process ends without being asked to; its agent reports it at once."""
        played = self.ranks[rank]
        played.alive = False
        exit_cause = ExitCause(code=code, signal=signal, last_step=played.steps, **cause)
        self.feed(HostSaid(played.host.link, RankExited(rank=rank, cause=exit_cause)))

    def unplug(self, name: str) -> None:
        """A host's links end at once."""
        host = self.hosts[name]
        host.alive = host.connected = False
        for rank in host.ranks:
            rank.alive = False
        self.feed(LinkLost(host.link, "connection reset"))

    def freeze(self, name: str) -> None:
        """A host says nothing any more, but its links stay open."""
        host = self.hosts[name]
        host.alive = False
        for rank in host.ranks:
            rank.alive = False

    def rows(self, table: str) -> list[dict[str, Any]]:
        """What was recorded in a table, in order."""
        return [record.row for record in self.records if record.table == table]

    def events(self) -> list[str]:
        """The kinds of events recorded, in order."""
        return [row["kind"] for row in self.rows("events")]

    # ------------------------------------------------------------------------------------------------- parts

    def _after(self, seconds: float, act: Callable[[], Any]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._ticket), act))

    def _beat(self, host: PlayedHost) -> None:
        if host.alive and self.end is None:
            self.feed(HostSaid(host.link, HostHeartbeat(ranks=[])))
            self._after(1.0, lambda: self._beat(host))

    def _say(self, played: PlayedRank, message: Any, seconds: float = LATENCY) -> None:
        def speak() -> None:
            if played.alive:
                self.feed(RankSaid(played.rank, message))

        self._after(seconds, speak)

    def _perform(self, effect: Effect) -> None:
        act = self._acts.get(type(effect))
        if act is not None:
            act(effect)

    def _ended(self, end: End) -> None:
        assert self.end is None, "a run ends once"
        self.end = end

    def _host_of_link(self, link: int) -> PlayedHost | None:
        return next((host for host in self.hosts.values() if host.link == link), None)

    def _to_host(self, effect: SendHost) -> None:
        host = self._host_of_link(effect.link)
        if host is None or not host.alive:
            return
        host.told.append(effect.message)
        match effect.message:
            case JobOffer():
                report = ProbeReport(
                    job_hash="j", sources_hash="s", layout=self.layout, dataset_signature="d", dataset_size=self.samples
                )
                self._after(LATENCY, lambda: self.feed(HostSaid(host.link, report, f"10.0.0.{host.link}")))
            case Accept(host_id=number):
                host.host = number
            case WorldFormed(assignments=assignments) if self.spawns:
                self._spawn(host, assignments)
            case Reject() | RunEnded():
                host.alive = False

    def _spawn(self, host: PlayedHost, assignments: list[Any]) -> None:
        for assignment in assignments:
            played = PlayedRank(assignment.rank, host, host.ms[assignment.local_rank], w=float(assignment.rank))
            host.ranks.append(played)
            self.ranks[assignment.rank] = played
            self._say(played, RankReady(layout_hash="L", params_elements=1, buffers_elements=0), 0.05)
        self._after(0.04, lambda: self.feed(RelayAttached(host.host)))

    def _to_rank(self, effect: SendRank) -> None:
        played = self.ranks.get(effect.rank)
        if played is None or not played.alive:
            return
        match effect.message:
            case StartChunk() as chunk:
                self._train(played, chunk)
            case RequestParams(round=number, attempt=attempt, initial=initial):
                steps = played.since_commit if not initial else int(played.rank == 0)
                self._after(LATENCY, lambda: self._contribute(played, number, attempt, steps))
            case Evaluate(epoch=epoch):
                self._say(played, EvalResult(epoch=epoch, metrics={"w": played.w}, elapsed_ms=1.0))
            case RequestLocalState(checkpoint=checkpoint):
                self._say(played, LocalState(checkpoint=checkpoint, part=0, parts=1, data=b"local"))
            case Shutdown():
                self._leave(played)

    def _train(self, played: PlayedRank, chunk: StartChunk) -> None:
        elapsed, position = 0.0, chunk.offset
        size = self.config.batch_size
        while position < chunk.offset + chunk.size:
            samples = min(size, chunk.offset + chunk.size - position)
            elapsed += played.ms / 1000
            self._after(
                elapsed, lambda position=position, samples=samples: self._batch(played, chunk.epoch, position, samples)
            )
            position += samples
        done = ChunkDone(epoch=chunk.epoch, offset=chunk.offset, size=chunk.size)
        self._say(played, done, elapsed + LATENCY)

    def _batch(self, played: PlayedRank, epoch: int, position: int, samples: int) -> None:
        if not played.alive:
            return
        played.w += 1
        played.steps += 1
        played.since_commit += 1
        played.seen.append((epoch, position, samples))
        done = BatchDone(batch_ms=played.ms, data_ms=0.0, steps=played.steps, samples=samples, loss=1.0 / played.steps)
        self._say(played, done, LATENCY / 2)

    def _open_round(self, effect: OpenRound) -> None:
        self._open = effect
        self._contributions[(effect.round, effect.attempt)] = {}

    def _abort_round(self, effect: AbortRound) -> None:
        if self._open is not None and (self._open.round, self._open.attempt) == (effect.round, effect.attempt):
            self._open = None

    def _contribute(self, played: PlayedRank, number: int, attempt: int, steps: int) -> None:
        opened = self._open
        if not played.alive or opened is None or (opened.round, opened.attempt) != (number, attempt):
            return
        contributions = self._contributions[(number, attempt)]
        contributions[played.rank] = (steps, played.w)
        expected = {rank for ranks in opened.hosts.values() for rank in ranks}
        if contributions.keys() == expected:
            self._after(self.reduce_seconds, lambda: self._sum(opened, contributions))

    def _sum(self, opened: OpenRound, contributions: dict[int, tuple[int, float]]) -> None:
        if self._open is not opened:
            return
        self._open = None
        gamma = 1.0 if opened.initial else self.config.gamma
        masses = {rank: gamma_mass(steps, gamma) for rank, (steps, _) in contributions.items()}
        total = sum(masses.values())
        value = sum(masses[rank] * w for rank, (_, w) in contributions.items()) / total if total else 0.0
        self._staged[(opened.round, opened.attempt)] = (value, total > 0)
        self.feed(
            RoundFinished(
                round=opened.round,
                attempt=opened.attempt,
                realized=total > 0,
                buffers_realized=any(mover_mass(steps) for steps, _ in contributions.values()),
                steps={rank: steps for rank, (steps, _) in contributions.items()},
                mass=total,
                bytes_up=4,
                bytes_down=4,
                seconds=self.reduce_seconds,
            )
        )

    def _to_relay(self, effect: SendRelay) -> None:
        message = effect.message
        if not isinstance(message, RoundCommitted):
            return
        value, realized = self._staged[(message.round, message.attempt)]
        if realized and (message.round, value) not in self.consensus:
            self.consensus.append((message.round, value))
        for played in (rank for rank in self.ranks.values() if rank.host.host == effect.host and rank.alive):
            played.w = value if realized else played.w
            played.since_commit = 0
            self._say(played, self._ack(played, message.round))

    def _ack(self, played: PlayedRank, number: int) -> SyncAck:
        w = played.w + (self.flaw == (played.rank, number))
        return SyncAck(
            round=number,
            divergence=0.0,
            pre_norm=w,
            post_norm=w,
            params_hash=f"{w:.6f}",
            pack_ms=0.1,
            load_ms=0.1,
            wait_ms=0.0,
            reduce_ms=2.0,
        )

    def _leave(self, played: PlayedRank) -> None:
        self._say(played, Exiting(steps=played.steps))
        cause = ExitCause(code=0, clean=True, last_step=played.steps)

        def gone() -> None:
            played.alive = False
            self.feed(HostSaid(played.host.link, RankExited(rank=played.rank, cause=cause)))

        self._after(0.02, gone)

    def _write_checkpoint(self, effect: WriteCheckpoint) -> None:
        error = self.checkpoint_error
        event = CheckpointWritten(effect.checkpoint, "" if error else "model.safetensors", 4, "00", error=error)
        self._after(0.01, lambda: self.feed(event))


def lose_relay(play: Rehearsal, name: str) -> None:
    """A host's relay link ends while its agent lives on."""
    host = play.hosts[name]
    for rank in host.ranks:
        rank.alive = False
    play.feed(RelayLost(host.host, "connection reset"))
