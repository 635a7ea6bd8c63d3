"""Ranks and hosts as the simulator plays them: they train, pack, adopt and answer as the worker does, without a model.

A rank's parameters are one number ``w`` that each batch raises by 1, so that the consensus of every round has an exact
value and a rank that adopted another one is found out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import nan
from typing import TYPE_CHECKING, Any

from backend.core.round_cost import Line
from simulation.pace import BatchCost, Pace
from simulation.packed import Batch as Batch
from simulation.packed import Packed as Packed
from simulation.syncing import Syncing
from wire.messages import (
    BatchDone,
    ChunkDone,
    EvalResult,
    Evaluate,
    Exiting,
    LocalState,
    Message,
    RequestLocalState,
    RequestParams,
    Shutdown,
    StartChunk,
    SyncNow,
)

if TYPE_CHECKING:
    from simulation.setting import Setting

LATENCY = 0.001
"""seconds that anything said takes to be answered, unless the host's line says otherwise"""
LEAVING_SECONDS = 0.02
"""from a rank's last word to the exit of its process"""


@dataclass
class PlayedHost:
    """One host: a link, its devices, its line to the controller, and whether it and its relay still beat."""

    name: str
    link: int
    paces: list[Pace]
    line: Line = field(default_factory=lambda: Line(float("inf"), LATENCY))
    host: int = -1
    """the core's number, once it is admitted"""
    alive: bool = True
    told: list[Any] = field(default_factory=list)
    ranks: list[PlayedRank] = field(default_factory=list)
    relay_stopped: bool = False

    @property
    def address(self) -> str:
        """As the controller sees it."""
        return f"10.0.{self.link >> 8}.{self.link & 255}"


class PlayedRank:
    """One rank: what it holds, what it did, and the chunks that it was given."""

    def __init__(self, rank: int, host: PlayedHost, pace: Pace, setting: Setting) -> None:
        self.rank = rank
        self.host = host
        self.pace = pace
        self.w = float(rank)
        self.steps = 0
        self.seen: list[Batch] = []
        """batches it trained on, where the theatre keeps them"""
        self.spoiled = 0
        """so many of its next batches leave no number in ``w``"""
        self.deaf = False
        """it hears of no chunk any more: a loader that hangs"""
        self.setting = setting
        self.syncing = Syncing(self)
        self.scoring = False
        """it hears nothing before it is done"""
        self._alive = True
        self._chunk: StartChunk | None = None
        self._waiting: deque[StartChunk] = deque()
        self._fresh: list[Batch] = []
        """batches since what was packed last"""
        self._packed: Packed | None = None
        self._asked: tuple[RequestParams | SyncNow, float] | None = None
        """asked for its parameters in the middle of a batch, and when"""
        self._result: tuple[float | None] | None = None
        """the consensus to adopt after the batch at hand"""
        self.adopted: float | None = None
        """the consensus of the last round; none when nobody had worked"""
        self.held_round: int | None = None
        self.base = 0.0
        """the consensus of the last round in which somebody had worked"""
        self._refused: list[Batch] | None = None
        """batches behind what it packed and the round refused"""
        self._said_until = 0.0
        self._halted = False
        """the round interrupted a chunk"""
        self._held_until = 0.0
        """it packs or loads"""
        self._position = 0
        self._started_at = 0.0
        self._elapsed = 0.0
        self._stall = 0.0
        self._known: deque[Batch] = deque(maxlen=64)
        """the newest chunks that it was given: a plan may come twice"""
        self.stopped = False
        """its process stands still: what is to happen to it waits"""
        self._backlog: list[Callable[[], None]] = []
        setting.meter.join(rank, pace.solo_ms)

    @property
    def alive(self) -> bool:
        return self._alive

    @alive.setter
    def alive(self, alive: bool) -> None:
        if self._alive and not alive:
            self.setting.meter.gone(self.rank)
            self.setting.network.gone(self.rank)
        self._alive = alive

    @property
    def state(self) -> str:
        """What its agent reads of it."""
        if self.scoring:
            return "evaluating"
        if self.syncing.inside or (self._packed is not None and not self.setting.overlap):
            return "reducing"
        return "idle" if self._chunk is None else "working"

    @property
    def held(self) -> bool:
        """Whatever is to happen to it waits."""
        return self.stopped or self.scoring

    def stop(self) -> None:
        """The process is stopped (SIGSTOP, or user code that holds it up); nobody is told."""
        self.stopped = True

    def go_on(self) -> None:
        """It runs again, and takes up what came meanwhile, in order."""
        self.stopped = False
        if not self.scoring:
            self.catch_up()

    def catch_up(self) -> None:
        """Take up what came while it could not."""
        backlog, self._backlog = self._backlog, []
        for act in backlog:
            self.when_running(act)
        self.setting.network.poke()

    def when_running(self, act: Callable[[], None]) -> None:
        """Do this now or, while the process is stopped, once it runs again; never when it is dead."""
        if self.held:
            self._backlog.append(act)
        elif self._alive:
            act()

    def receive(self, message: Message) -> None:
        """Do what the controller says."""
        if self.held or not self.syncing.hears(message):
            self._backlog.append(partial(self.receive, message))
            return
        setting = self.setting
        soon = setting.stage.now + self.host.line.latency_seconds
        match message:
            case StartChunk():
                self._start(message)
            case RequestParams():
                self.request(message)
            case Evaluate(epoch=epoch) if setting.score_seconds:
                self.scoring = True
                setting.stage.after(setting.score_seconds, self._scored, epoch, order=self.rank)
            case Evaluate(epoch=epoch):
                setting.say(self, EvalResult(epoch=epoch, metrics={"w": self.w}, elapsed_ms=1.0), soon)
            case RequestLocalState(checkpoint=checkpoint, consensus=consensus):
                data = f"{self.held_round} {self.base}".encode() if consensus else b"local"
                setting.say(self, LocalState(checkpoint=checkpoint, part=0, parts=1, data=data), soon)
            case Shutdown():
                self.syncing.drop()
                setting.say(self, Exiting(steps=self.steps), soon)
                leave = partial(self.when_running, partial(setting.exited, self))
                setting.stage.after(LEAVING_SECONDS, leave, order=self.rank)
            case _:
                self.syncing.receive(message)

    def _scored(self, epoch: int) -> None:
        result = EvalResult(epoch=epoch, metrics={"w": self.w}, elapsed_ms=self.setting.score_seconds * 1000)
        self.scoring = False
        self.when_running(partial(self.setting.say, self, result, self.setting.stage.now))
        if not self.stopped:
            self.catch_up()

    def in_order(self, when: float) -> float:
        """When a word arrives that would, on a free line, at this moment: none overtakes another."""
        self._said_until = max(when, self._said_until)
        return self._said_until

    def pause(self, seconds: float) -> None:
        """The device stands still: the batch at hand, or the next one, takes so much longer."""
        if self._chunk is not None and not self._halted:
            self._stall += seconds
        else:
            self.pace.paused_until = max(self.pace.paused_until, self.setting.stage.now + seconds)

    def adopt(self, value: float | None) -> None:
        """The round is committed; ``value`` is its consensus, none when nobody worked."""
        if self.held:
            self._backlog.append(partial(self.adopt, value))
            return
        if self._packed is None:
            return
        if self._chunk is not None and not self._halted:
            self._result = (value,)
            return
        self._adopt(value)
        self._resume()

    def settle(self) -> None:
        """Take up what came before the controller was lost, as a rank does before it goes back."""
        self.go_on()
        if self._result is not None:
            self._adopt(*self._result)

    # ------------------------------------------------------------------------------------------------- batches

    def _start(self, chunk: StartChunk) -> None:
        known = (chunk.epoch, chunk.offset, chunk.size)
        if self.deaf or known in self._known:
            return
        self._known.append(known)
        if self._chunk is not None or (self._packed is not None and not self.setting.overlap):
            self._waiting.append(chunk)
        else:
            self._begin(chunk)

    def _begin(self, chunk: StartChunk) -> None:
        self._chunk, self._position = chunk, chunk.offset
        now = self.setting.stage.now
        self._started_at, self._elapsed = max(now, self._held_until), 0.0
        self.setting.meter.works(self.rank)
        self.setting.meter.round_work(self.rank, self._started_at - now)
        self._next_batch()

    def _next_batch(self) -> None:
        chunk, setting = self._chunk, self.setting
        assert chunk is not None
        cost = self.pace.batch(setting.stage.now, first=self._position == chunk.offset)
        self._elapsed += (cost.compute_ms + cost.data_ms) / 1000
        setting.stage.at(self._started_at + self._elapsed, self._batch_done, chunk, cost, order=self.rank)

    def _batch_done(self, chunk: StartChunk, cost: BatchCost) -> None:
        setting = self.setting
        if not self._alive:
            return
        if self.held:
            self._backlog.append(partial(self._batch_done, chunk, cost))
            return
        if self._stall:
            longer = self._stall * 1000
            cost = BatchCost(cost.compute_ms + longer, cost.data_ms, cost.solo_ms + longer)
            self._elapsed, self._stall = self._elapsed + self._stall, 0.0
            setting.stage.at(self._started_at + self._elapsed, self._batch_done, chunk, cost, order=self.rank)
            return
        samples = min(setting.batch_size, chunk.offset + chunk.size - self._position)
        batch = (chunk.epoch, self._position, samples)
        if not setting.survives(self, batch):
            return
        self._position += samples
        self.w += nan if self.spoiled else 1
        self.spoiled = max(0, self.spoiled - 1)
        self.steps += 1
        self._fresh.append(batch)
        setting.trained(self, batch)
        setting.meter.batch(self.rank, (cost.compute_ms + cost.data_ms) / 1000, cost.solo_ms / 1000)
        latency = self.host.line.latency_seconds
        done = BatchDone(
            batch_ms=cost.compute_ms, data_ms=cost.data_ms, steps=self.steps, samples=samples, loss=1.0 / self.steps
        )
        setting.say(self, done, setting.stage.now + latency / 2)
        if self._position == chunk.offset + chunk.size:
            self._chunk_done(chunk)
        elif self._between_batches():
            self._next_batch()

    def _chunk_done(self, chunk: StartChunk) -> None:
        latency = self.host.line.latency_seconds
        done = ChunkDone(epoch=chunk.epoch, offset=chunk.offset, size=chunk.size)
        self.setting.say(self, done, self._started_at + (self._elapsed + latency))
        self._chunk = None
        self._between_batches()
        self.setting.meter.rests(self.rank)
        if self._packed is None or self.setting.overlap:
            self._resume()

    def _between_batches(self) -> bool:
        """Hear what was said during the batch; whether training goes on."""
        if self._result is not None:
            self._adopt(*self._result)
        if self._asked is not None:
            request, asked_at = self._asked
            self._pack(request, asked_at)
        if self._packed is None or self.setting.overlap:
            return True
        self._halted = True
        self.setting.meter.rests(self.rank)
        return False

    def _resume(self) -> None:
        """Go on where the round interrupted, or with the next chunk."""
        if self._halted:
            self._halted = False
            if self._chunk is not None:
                self._started_at, self._elapsed = self.setting.stage.now, 0.0
                self.setting.meter.works(self.rank)
                self._next_batch()
                return
        if self._chunk is None and self._waiting:
            self._begin(self._waiting.popleft())

    # -------------------------------------------------------------------------------------------------- rounds

    def request(self, request: RequestParams | SyncNow) -> None:
        """Hand over what was done since the last round, after the batch at hand."""
        if self._packed is not None and self._packed.round == request.round:
            if request.excluded and self._refused is None:
                self._refused = self._packed.batches
                self._packed = replace(self._packed, batches=[], steps=0)
            self._hand_over(request, self._packed, 0.0)  # only the attempt is new
        elif self._chunk is not None and not self._halted:
            self._asked = (request, self.setting.stage.now)
        else:
            self._pack(request, self.setting.stage.now)

    def _pack(self, request: RequestParams | SyncNow, asked_at: float) -> None:
        self._asked = None
        steps, holds = len(self._fresh), request.round
        if isinstance(request, RequestParams):
            steps = int(self.rank == request.root) if request.initial else steps
            holds = holds if request.brings is None else request.brings
        packed = self._packed = Packed(request.round, steps, self.w, self._fresh, asked_at, holds)
        self._fresh = []
        seconds = self.setting.cost.pack_seconds
        self._spend(seconds)
        self._hand_over(request, packed, seconds)

    def _hand_over(self, request: RequestParams | SyncNow, packed: Packed, seconds: float) -> None:
        if isinstance(request, SyncNow):
            act = partial(self.syncing.sum, request, packed)
            self.setting.stage.after(seconds, self.when_running, act, order=self.rank)
            return
        seconds = self.host.line.latency_seconds + seconds
        self.setting.stage.after(seconds, self.setting.contribute, self, request, packed, order=self.rank)

    def _adopt(self, value: float | None) -> None:
        packed, setting = self._packed, self.setting
        assert packed is not None
        self._packed = self._result = None
        self.adopted, self.held_round = value, packed.holds
        self.base = self.base if value is None else value
        if self._refused is not None:
            setting.restarted(self, [*self._refused, *self._fresh])
            self.w, self._fresh, self._refused = self.base, [], None
        elif value is not None:
            self.w = self._written_back(value, packed.w)
        seconds = setting.cost.load_seconds
        self._spend(seconds)
        setting.acknowledge(self, packed, setting.stage.now + (self.host.line.latency_seconds + seconds))

    def _written_back(self, value: float, packed: float) -> float:
        """What it holds with the consensus taken in; without a batch since the arena was packed, the consensus."""
        config = self.setting.config
        if not self._fresh or config.write_back == "overwrite":
            return value
        if config.write_back == "blend":
            return (1.0 - config.blend_alpha) * self.w + config.blend_alpha * value
        return value + (self.w - packed)

    def _spend(self, seconds: float) -> None:
        """Packing and loading hold the rank up."""
        if self._chunk is not None and not self._halted:
            self._elapsed += seconds
            self.setting.meter.round_work(self.rank, seconds)
        else:
            self._held_until = self.setting.stage.now + seconds
