"""A run on a virtual clock: the real core, with hosts, ranks and a reduce plane that are played.

After each event the core's invariants can be checked. Nothing sleeps; time is whatever the next event says.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

from backend.core.cohort import Cohort
from backend.core.config import RunConfig
from backend.core.model import sizes
from backend.core.resume import Resume
from backend.core.round_cost import Line, RoundCost
from backend.core.vocabulary import (
    AbortRound,
    CheckpointWritten,
    CloseLink,
    DropHost,
    Effect,
    End,
    Event,
    ExpectRelays,
    HostSaid,
    KeepState,
    OpenCheckpoint,
    OpenRound,
    Operator,
    RankSaid,
    Record,
    Refused,
    RelayAttached,
    RelayHeard,
    SendHost,
    SendRank,
    SendRelay,
    Tick,
    WriteCheckpoint,
)
from simulation import props
from simulation.faults import Faults
from simulation.figures import Meter
from simulation.network import Network
from simulation.pace import Pace
from simulation.played import Batch, Packed, PlayedHost, PlayedRank
from simulation.rounds import PlayedPlane, Sum
from simulation.stage import Stage
from simulation.watch import CoreTime, Watcher
from wire.messages import (
    Accept,
    Device,
    ExitCause,
    Hello,
    HostHeartbeat,
    JobOffer,
    Message,
    ProbeReport,
    RankAssignment,
    RankExited,
    RankProgress,
    RankReady,
    Reject,
    RequestParams,
    RoundCommitted,
    RunEnded,
    SyncAck,
    SyncCommitted,
    TensorSpec,
    WorldFormed,
)


class Theatre(Faults):
    """Play a run. Hosts join by ``join``; ``run`` goes on until the cohort ended or ``until`` passed."""

    def __init__(
        self,
        config: RunConfig,
        *,
        samples: int = 60,
        layout: list[TensorSpec] | None = None,
        salt: bytes = b"salt",
        cost: RoundCost = props.INSTANT,
        seed: int = 0,
        check: bool = True,
        stopwatch: Callable[[], float] | None = None,
    ) -> None:
        """``samples`` an epoch; ``check`` the core after every event; ``stopwatch`` in seconds, to time the core."""
        self.config = config
        self.samples = samples
        self.layout = list(layout or props.one_tensor(max(1, int(cost.model_bytes) // 4)))
        self.cost = cost
        self.batch_size = config.batch_size
        self.overlap = config.mode.endswith("_async")
        self.stage = Stage()
        self.meter = Meter(self.stage)
        self.cohort = Cohort(1, config, run_salt=salt, run_secret=None, job_hash="", now=0.0)
        self.plane = PlayedPlane(self.stage, cost, config.gamma, self.feed)
        self.network = Network(self.stage, self.plane)
        self.score_seconds = 0.0
        self.hosts: dict[str, PlayedHost] = {}
        self.ranks: dict[int, PlayedRank] = {}
        self.watchers: list[Watcher] = []
        self.records: list[Record] = []
        self.refused: list[Refused] = []
        self.end: End | None = None
        self.settle = 0
        """rounds that are left out of the figures"""
        self.divergence = 0.0
        """what replicas report on average; their one number tells nothing of how a real model would drift"""
        self.lr: float | None = None
        """what optimizers report"""
        self.core_time = CoreTime(stopwatch)
        self.intercept: Callable[[Effect], bool] = lambda effect: False
        """answers True to swallow an effect: a lost message"""
        self.checkpoint_error = ""
        self._check, self._seed = check, seed
        self._links = itertools.count(1)
        self._host_of_link: dict[int, PlayedHost] = {}
        self._host_of_number: dict[int, PlayedHost] = {}
        self._last_commit: tuple[int, int] | None = None
        self._deadline: float | None = None
        self._deadline_known = False
        self._acts = self._performers()

    def _performers(self) -> dict[type, Callable[[Any], None]]:
        return {
            SendHost: self._to_host,
            SendRank: self._say_to_rank,
            SendRelay: self._to_relay,
            OpenRound: self.plane.open,
            AbortRound: self.plane.abort,
            WriteCheckpoint: self._write_checkpoint,
            Record: self._record,
            Refused: self.refused.append,
            End: self._ended,
            **dict.fromkeys((CloseLink, DropHost, ExpectRelays, OpenCheckpoint, KeepState), lambda effect: None),
        }

    # ------------------------------------------------------------------------------------------- for stories

    def go_on(self, resume: Resume) -> None:
        """Make it a run that goes on from a checkpoint; before anybody joins."""
        self.cohort = Cohort(1, self.config, run_salt=b"salt", run_secret=None, job_hash="", now=0.0, resume=resume)

    @property
    def now(self) -> float:
        return self.stage.now

    def join(
        self, name: str, *paces: float | Pace, line: Line | None = None, emulated: bool = False, **hello: Any
    ) -> PlayedHost:
        """A host dials in now with one device for each pace (a number is its ms a batch)."""
        host = PlayedHost(name=name, link=next(self._links), paces=[Pace.of(pace) for pace in paces])
        host.line = line or host.line
        self.hosts[name] = self._host_of_link[host.link] = host
        devices = [Device(id=f"cpu:{index}", type="cpu") for index in range(len(paces))]
        fields: dict[str, Any] = {
            "host": name,
            "devices": devices,
            "versions": props.VERSIONS,
            "emulate_ms_per_batch": host.paces[0].ms if emulated else None,
        } | hello
        self.host_says(host, Hello(**fields))
        self.stage.after(self.config.heartbeat_seconds, self._beat, host)
        return host

    def feed(self, event: Event) -> list[Effect]:
        """Hand the core one event now and perform what it says."""
        now = self.stage.now
        self._deadline_known = False
        for watcher in self.watchers:
            watcher.event(now, event)
        effects = self._handle(event, now)
        if self._check:
            self.cohort.check()
        for effect in effects:
            self._perform(effect)
        for watcher in self.watchers:
            watcher.handled(now, event, effects)
        return effects

    def operate(self, act: str, **arguments: Any) -> list[Refused]:
        """The operator acts; what was refused comes back."""
        return [effect for effect in self.feed(Operator(act, arguments)) if isinstance(effect, Refused)]

    def at(self, when: float, act: Callable[[], Any]) -> None:
        """Do something at a moment to come."""
        self.stage.after(when - self.stage.now, act)

    def run(self, until: float = 10_000.0) -> Any:
        """Let time pass until the run ended, or ``until``."""
        stage = self.stage
        while self.end is None and stage.now < until:
            deadline = self._next_deadline()
            next_at = stage.next_at
            if deadline is not None and (next_at is None or deadline < next_at):
                if deadline > until:
                    break
                stage.now = max(stage.now, deadline)
                self.feed(Tick())
            elif next_at is not None and next_at <= until:
                stage.step()
            else:
                break
        if self.end is None:
            stage.now = max(stage.now, until)
        return self

    def rows(self, table: str) -> list[dict[str, Any]]:
        """What was recorded in a table, in order."""
        return [record.row for record in self.records if record.table == table]

    # ----------------------------------------------------------------------------------- what the ranks ask for

    def host_says(self, host: PlayedHost, message: Message) -> None:
        """The controller hears it from a host's agent."""
        self.feed(HostSaid(host.link, message, host.address))

    def progress(self, host: PlayedHost) -> list[RankProgress]:
        """What the agent reads of its ranks."""
        return []

    def say(self, played: PlayedRank, message: Message, when: float) -> None:
        """The controller hears it at that moment, if the rank still lives."""
        self.stage.at(played.in_order(when), self._heard, played, message, order=played.rank)

    def contribute(self, played: PlayedRank, request: RequestParams, packed: Packed) -> None:
        """A rank's arena holds its contribution."""
        if played.alive:
            self.plane.contribute(played.rank, (request.round, request.attempt), packed)

    def acknowledge(self, played: PlayedRank, packed: Packed, when: float) -> None:
        """The consensus is adopted; the controller hears of it at that moment."""
        self.say(played, self.acknowledgement(played, packed, when), when)

    def acknowledgement(self, played: PlayedRank, packed: Packed, when: float) -> SyncAck:
        """What a rank reports about the round that it adopted."""
        return SyncAck(
            round=packed.round,
            divergence=self.divergence * played.pace.dice.lognormvariate(0.0, 0.5) if self.divergence else 0.0,
            pre_norm=abs(packed.w),
            post_norm=abs(played.w),
            params_hash=self.hash(played),
            pack_ms=self.cost.pack_seconds * 1000,
            load_ms=self.cost.load_seconds * 1000,
            wait_ms=0.0,
            reduce_ms=(when - packed.asked_at) * 1000,
            lr=self.lr,
        )

    def hash(self, played: PlayedRank) -> str:
        """Of what a rank adopted: its replica or, where that may be ahead of it, the consensus."""
        adopted = played.adopted if self.overlap else played.w
        return "" if adopted is None else f"{adopted:.6f}"

    def survives(self, played: PlayedRank, batch: Batch) -> bool:
        return True

    def trained(self, played: PlayedRank, batch: Batch) -> None:
        for watcher in self.watchers:
            watcher.trained(played.rank, batch)

    def restarted(self, played: PlayedRank, batches: list[Batch]) -> None:
        """A rank whose contribution was refused starts anew."""
        for watcher in self.watchers:
            watcher.restarted(played.rank, batches)

    def exited(self, played: PlayedRank) -> None:
        """A rank's process ended as it was told to."""
        played.alive = False
        cause = ExitCause(code=0, clean=True, last_step=played.steps)
        self.host_says(played.host, RankExited(rank=played.rank, cause=cause))

    def _perform(self, effect: Effect) -> None:
        for watcher in self.watchers:
            watcher.effect(self.stage.now, effect)
        if not self.intercept(effect):
            self._acts[type(effect)](effect)

    def _handle(self, event: Event, now: float) -> list[Effect]:
        stopwatch = self.core_time.stopwatch
        if stopwatch is None:
            return self.cohort.handle(event, now)
        began = stopwatch()
        effects = self.cohort.handle(event, now)
        self.core_time.add(type(getattr(event, "message", event)).__name__, stopwatch() - began)
        return effects

    def _next_deadline(self) -> float | None:
        if self._deadline_known:
            return self._deadline
        self._deadline_known = True
        stopwatch = self.core_time.stopwatch
        began = stopwatch() if stopwatch else 0.0
        self._deadline = self.cohort.next_deadline()
        self.core_time.seconds += stopwatch() - began if stopwatch else 0.0
        return self._deadline

    def _beat(self, host: PlayedHost) -> None:
        if host.alive and self.end is None:
            self.host_says(host, HostHeartbeat(ranks=self.progress(host)))
            self.stage.after(self.config.heartbeat_seconds, self._beat, host)

    def _heard(self, played: PlayedRank, message: Message) -> None:
        if played.alive:
            self.feed(RankSaid(played.rank, message))

    def _ended(self, end: End) -> None:
        assert self.end is None, "a run ends once"
        self.end = end

    def _record(self, record: Record) -> None:
        self.records.append(record)
        if record.table == "rounds":
            self.meter.note()
            if record.row["round"] == self.settle - 1:
                self.meter.begin()

    def _to_host(self, effect: SendHost) -> None:
        host = self._host_of_link.get(effect.link)
        if host is not None and host.alive:
            self.host_hears(host, effect.message)

    def host_hears(self, host: PlayedHost, message: Message) -> None:
        """An agent does what it is told."""
        host.told.append(message)
        match message:
            case JobOffer():
                self.stage.after(host.line.latency_seconds, self._report, host)
            case Accept(host_id=number):
                host.host = number
                self.plane.lines[number] = host.line
                self._host_of_number[number] = host
            case WorldFormed(assignments=assignments):
                self.spawn(host, assignments)
            case Reject() | RunEnded():
                host.alive = False

    def _report(self, host: PlayedHost) -> None:
        facts: dict[str, Any] = {"job_hash": "j", "sources_hash": "s", "dataset_signature": "d"}
        self.host_says(host, ProbeReport(layout=self.layout, dataset_size=self.samples, **facts))

    def spawn(self, host: PlayedHost, assignments: list[RankAssignment]) -> None:
        """The host starts its processes."""
        for assignment in assignments:
            rank, pace = assignment.rank, host.paces[assignment.local_rank]
            pace.dice = random.Random(f"{self._seed}/{rank}")
            played = PlayedRank(rank, host, pace, self)
            host.ranks.append(played)
            self.ranks[rank] = played
            self.say(played, RankReady("L", *sizes(self.layout)), self.stage.now + props.READY_SECONDS)
        self.stage.after(props.RELAY_SECONDS, self.attach, host)

    def attach(self, host: PlayedHost) -> None:
        """Both links of the host's relay are up."""
        self.feed(RelayAttached(host.host))
        self.stage.after(self.config.heartbeat_seconds, self.relay_beats, host)

    def relay_beats(self, host: PlayedHost) -> None:
        """Its relay shows that it runs, for as long as it does."""
        if host.alive and not host.relay_stopped and self.end is None:
            self.feed(RelayHeard(host.host))
            self.stage.after(self.config.heartbeat_seconds, self.relay_beats, host)

    def _say_to_rank(self, effect: SendRank) -> None:
        if isinstance(effect.message, SyncCommitted):
            self._committed(effect.message, self.network.sums)
        self._to_rank(effect)

    def _to_rank(self, effect: SendRank) -> None:
        played = self.ranks.get(effect.rank)
        if played is not None and played.alive:
            played.receive(effect.message)

    def _to_relay(self, effect: SendRelay) -> None:
        message = effect.message
        if isinstance(message, RoundCommitted):
            result = self._committed(message, self.plane.staged)
            for played in self._host_of_number[effect.host].ranks:
                if played.alive:
                    played.adopt(result.value)

    def _committed(self, message: RoundCommitted | SyncCommitted, sums: dict[tuple[int, int], Sum]) -> Sum:
        """The sum behind a commit; whoever looks on hears of it once."""
        result = sums[message.round, message.attempt]
        if (message.round, message.attempt) != self._last_commit:
            self._last_commit = (message.round, message.attempt)
            for watcher in self.watchers:
                watcher.committed(message.round, result, result.batches)
        return result

    def _write_checkpoint(self, effect: WriteCheckpoint) -> None:
        error = self.checkpoint_error
        event = CheckpointWritten(effect.checkpoint, "" if error else "model.safetensors", 4, "00", error=error)
        self.stage.after(props.CHECKPOINT_SECONDS, lambda: self.feed(event))
