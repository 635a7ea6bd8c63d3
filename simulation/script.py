"""Worlds as text: a few lines that say who joins, how fast they are, and what happens when.

    run KEY=VALUE ...    the run's configuration, and these of the stage: samples; reduce (seconds a sum takes, in place
                         of what links and bytes give); model_mb, uplink_mbit, controller_mbit, latency_ms, memory_gbs;
                         divergence and lr (that ranks report); local (tensors that are not averaged); checkpoint_error
                         (why none can be written); settle (rounds left out of the figures); dice (the seed of all that
                         is random); wires (1: an ordeal, simulation/ordeal.py), and of it inbox, linger, down (s);
                         score (seconds that scoring takes), notice (seconds after which ranks that sum find out that
                         the process of one is gone; default: never)
    host NAME MS [MS ...] [OPTION=VALUE ...]
                         a host that dials in at once, one rank for each ms a batch; options: data_ms, fill_ms, jitter,
                         drift, drift_seconds, phase, uplink_mbit, latency_ms
    at T join NAME MS [MS ...] [OPTION=VALUE ...]
                         one that dials in later
    at T start | stop | abort | extend SECONDS | turn_away HOST
                         the operator acts
    at T kill RANK [SIGNAL] | unplug NAME | freeze NAME | relay NAME | stop_relay NAME | poison NAME |
         nan RANK [BATCHES] | deaf RANK | quit RANK
                         what may go wrong; poison: its next contribution is refused; nan: so many of its next batches
                         make its parameters NaN; deaf: a loader hangs; quit: the process takes its leave unasked
    at T speed RANK MS | pause RANK SECONDS | lr VALUE | lag SECONDS
                         what may change; lag: the controller itself was away for so long
    at T ...             with ``run wires=1`` what is said takes its way over links, and more may strike; see ``acts``
    when open|commit ROUND ACT ...
                         the same, at the very moment when a round is opened or committed for the first time
    when name|join|joined GENERATION, when summed ROUND ACT ...
                         the same, when a session's generator is asked for its identity, ranks are to join it, or the
                         first one has; when the first rank has the sum of a round
    until T              let time pass to T (default: to the end)
    show KIND ...        besides the default, transcripts show these messages too

Lines that start with ``#`` are comments. ``Script.text`` writes what ``Script.parse`` reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from backend.core.config import RunConfig
from backend.core.round_cost import MEMORY_BYTES_PER_SECOND, Line, RoundCost, link_bytes_per_second
from backend.core.vocabulary import Effect, Event, OpenRound, RankSaid, SendRank
from simulation.acts import ACTS, OPERATOR
from simulation.ordeal import Ordeal
from simulation.pace import Pace
from simulation.played import LATENCY, Batch
from simulation.props import LOCAL_TENSOR
from simulation.rounds import Sum
from simulation.theatre import Theatre
from simulation.watch import Watcher
from wire.messages import NewSession, RequestSessionId, SessionJoined, Synced, SyncNow

STAGE_KEYS = frozenset(
    {
        *("samples", "reduce", "model_mb", "uplink_mbit", "controller_mbit", "latency_ms", "memory_gbs"),
        *("settle", "dice", "divergence", "lr", "local", "checkpoint_error", "wires", "inbox", "linger", "down"),
        *("score", "notice"),
    }
)
PACE_OPTIONS = frozenset({"data_ms", "fill_ms", "jitter", "drift", "drift_seconds", "phase"})
LINE_OPTIONS = frozenset({"uplink_mbit", "latency_ms"})
UNTIL = 10_000.0


class ScriptError(Exception):
    """A line that cannot be meant; the text says which and why."""


@dataclass
class HostLine:
    """A host: its name, the ms a batch of each of its ranks, and its options."""

    name: str
    ms: list[float]
    options: dict[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, words: list[str]) -> HostLine:
        """From the words after ``host``."""
        name, *rest = words
        numbers = [float(word) for word in rest if "=" not in word]
        options = {key: float(value) for key, _, value in (word.partition("=") for word in rest if "=" in word)}
        unknown = options.keys() - PACE_OPTIONS - LINE_OPTIONS
        if unknown or not numbers:
            raise ValueError(f"unknown option {', '.join(sorted(unknown))}" if unknown else "a host needs a rank")
        return cls(name, numbers, options)

    def text(self) -> str:
        """As ``parse`` reads it."""
        return " ".join([self.name, *map(repr, self.ms), *(f"{key}={value!r}" for key, value in self.options.items())])

    def paces(self) -> list[Pace]:
        """One for each rank."""
        options = {key: value for key, value in self.options.items() if key in PACE_OPTIONS}
        paces = [Pace(ms) for ms in self.ms]
        for pace in paces:
            for key, value in options.items():
                setattr(pace, key, value)
        return paces


@dataclass
class Act:
    """What happens: ``at`` a moment, or when a round gets so far (``open``, ``summed`` or ``commit``, and its
    number), or a session (``name``, ``join`` or ``joined``, and its generation)."""

    at: float | tuple[str, int]
    words: list[str]

    @classmethod
    def parse(cls, at: float | tuple[str, int], words: list[str]) -> Act:
        """From the words after the time."""
        if not words or words[0] not in ACTS:
            raise ValueError(f"no such act: {' '.join(words[:1])}")
        return cls(at, words)

    def text(self) -> str:
        """As a line of a script."""
        when = f"at {self.at!r}" if isinstance(self.at, float) else f"when {self.at[0]} {self.at[1]}"
        return f"{when} {' '.join(self.words)}"


@dataclass
class Script:
    """A whole world."""

    run: dict[str, str] = field(default_factory=dict)
    hosts: list[HostLine] = field(default_factory=list)
    acts: list[Act] = field(default_factory=list)
    until: float = UNTIL
    show: set[str] = field(default_factory=set)

    @classmethod
    def parse(cls, text: str) -> Script:
        """Read a script. Raises ``ScriptError``."""
        script = cls()
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or line.startswith("#"):
                continue
            try:
                script._read(words)
            except ValueError as error:
                raise ScriptError(f"line {number} cannot be read: {line.strip()} ({error})") from error
        return script

    def _read(self, words: list[str]) -> None:
        match words:
            case ["run", *pairs]:
                self.run |= dict(pair.split("=", 1) for pair in pairs)
            case ["host", *rest]:
                self.hosts.append(HostLine.parse(rest))
            case ["at", when, *act]:
                self.acts.append(Act.parse(float(when), act))
            case ["when", ("open" | "commit" | "summed" | "name" | "join" | "joined") as stage, number, *act]:
                self.acts.append(Act.parse((stage, int(number)), act))
            case ["until", when]:
                self.until = float(when)
            case ["show", *kinds]:
                self.show |= set(kinds)
            case _:
                raise ValueError("no such line")

    def text(self) -> str:
        """As ``parse`` reads it."""
        lines = ["run " + " ".join(f"{key}={value}" for key, value in self.run.items())]
        lines += [f"host {host.text()}" for host in self.hosts]
        lines += [act.text() for act in self.acts]
        lines += [f"until {self.until!r}"] if self.until != UNTIL else []
        lines += [f"show {' '.join(sorted(self.show))}"] if self.show else []
        return "\n".join(lines) + "\n"

    # ------------------------------------------------------------------------------------------------- readings

    @property
    def ranks(self) -> int:
        """Ranks of the hosts that dial in at once."""
        return sum(len(host.ms) for host in self.hosts)

    def number(self, key: str, default: float) -> float:
        """One of the stage's own keys."""
        return float(self.run.get(key, default))

    def config(self) -> RunConfig:
        """The run's configuration. Raises ``ScriptError`` for a key that neither it nor the stage has."""
        kinds = {item.name: str(item.type) for item in fields(RunConfig)}
        values: dict[str, Any] = {"job": "odometer.py:Odometer"}
        for key, value in self.run.items():
            if key in STAGE_KEYS:
                continue
            if key not in kinds:
                raise ScriptError(f"run has no {key}")
            try:
                values[key] = _converted(kinds[key], value)
            except ValueError as error:
                raise ScriptError(f"run {key}={value}: {error}") from error
        return RunConfig(**values)

    def cost(self) -> RoundCost:
        """What rounds cost."""
        uplink = self.number("uplink_mbit", float("inf"))
        return RoundCost(
            model_bytes=self.number("model_mb", 0.0) * 1e6,
            controller_bytes_per_second=link_bytes_per_second(self.number("controller_mbit", uplink)),
            memory_bytes_per_second=self.number("memory_gbs", MEMORY_BYTES_PER_SECOND / 1e9) * 1e9,
        )

    def line(self, host: HostLine) -> Line:
        """The host's way to the controller."""
        uplink = host.options.get("uplink_mbit", self.number("uplink_mbit", float("inf")))
        latency_ms = host.options.get("latency_ms", self.number("latency_ms", LATENCY * 1000))
        return Line(link_bytes_per_second(uplink), latency_ms / 1000, len(host.ms))

    # ------------------------------------------------------------------------------------------------- the play

    def theatre(self, *, check: bool = True, stopwatch: Callable[[], float] | None = None) -> Theatre:
        """The stage; nobody has dialled in yet."""
        stage = Ordeal if self.run.get("wires") == "1" else Theatre
        play = stage(
            self.config(),
            samples=int(self.number("samples", 60)),
            cost=self.cost(),
            seed=int(self.number("dice", 0)),
            check=check,
            stopwatch=stopwatch,
        )
        if "reduce" in self.run:
            play.plane.fixed_seconds = self.number("reduce", 0.0)
        play.divergence = self.number("divergence", 0.0)
        play.score_seconds = self.number("score", 0.0)
        play.network.notice_seconds = float(self.run["notice"]) if "notice" in self.run else None
        play.lr = float(self.run["lr"]) if "lr" in self.run else None
        play.checkpoint_error = self.run.get("checkpoint_error", "")
        play.layout += [LOCAL_TENSOR] * int(self.number("local", 0))
        if isinstance(play, Ordeal):
            play.inbox_seconds = self.number("inbox", 0.0)
            play.linger_seconds = self.number("linger", 0.0)
            play.down_seconds = self.number("down", 0.0)
        return play

    def put_on(self, play: Theatre) -> None:
        """Let the hosts dial in, and plan what happens."""
        play.settle = int(self.number("settle", 0))
        for host in self.hosts:
            self.join(play, host)
        triggers = _Triggers(play)
        play.watchers.append(triggers)
        for act in self.acts:
            perform = partial(self.perform, play, act.words)
            if isinstance(act.at, float):
                play.at(act.at, perform)
            else:
                triggers.acts.setdefault(act.at, []).append(perform)

    def join(self, play: Theatre, host: HostLine) -> None:
        """The host dials in."""
        play.join(host.name, *host.paces(), line=self.line(host))

    def dial_in(self, play: Theatre, words: list[str]) -> None:
        """Another one does: the words of its line. In an ordeal a name has its wires, and dials in once."""
        host = HostLine.parse(words)
        if not (isinstance(play, Ordeal) and host.name in play.hosts):
            self.join(play, host)

    def perform(self, play: Theatre, words: list[str]) -> None:
        """An act whose time has come. One that cannot happen any more does not."""
        act, *arguments = words
        if play.end is None or act in OPERATOR:
            ACTS[act](self, play, arguments)


class _Triggers(Watcher):
    """Acts that wait for a round or a session. They follow at once, but not within the event that they wait for."""

    def __init__(self, play: Theatre) -> None:
        self.play = play
        self.acts: dict[tuple[str, int], list[Callable[[], object]]] = {}

    def event(self, now: float, event: Event) -> None:
        match event:
            case RankSaid(message=SessionJoined(generation=generation)):
                self._fire(("joined", generation))
            case RankSaid(message=Synced(round=number)):
                self._fire(("summed", number))

    def effect(self, now: float, effect: Effect) -> None:
        match effect:
            case OpenRound(round=number) | SendRank(message=SyncNow(round=number)):
                self._fire(("open", number))
            case SendRank(message=RequestSessionId(generation=generation)):
                self._fire(("name", generation))
            case SendRank(message=NewSession(generation=generation)):
                self._fire(("join", generation))

    def committed(self, number: int, result: Sum, batches: dict[int, list[Batch]]) -> None:
        self._fire(("commit", number))

    def _fire(self, moment: tuple[str, int]) -> None:
        for act in self.acts.pop(moment, []):
            self.play.stage.after(0.0, act)


def _converted(kind: str, value: str) -> Any:
    if "tuple" in kind:
        return tuple(float(part) if "." in part else int(part) for part in value.split(","))
    if "bool" in kind:
        return value.lower() in ("true", "yes", "1")
    if "str" in kind:
        return value
    return float(value) if "float" in kind else int(value)
