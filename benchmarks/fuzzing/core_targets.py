"""A run's core among three played hosts, of which the first says what the input wants. No link, no clock, no tensor.

An input is a list of replacements: which of that host's messages (u8), how often (u8), and a msgpack payload with its
length (u16). What a decoder would refuse ends the host's links, as it does in the controller.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from random import Random

import msgspec

from backend.core.cohort import Cohort
from backend.core.config import RunConfig
from backend.core.preview import preview
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
    LinkLost,
    OpenRound,
    Operator,
    RankSaid,
    Record,
    RelayAttached,
    RelayLost,
    RoundFinished,
    SendHost,
    SendRank,
    SendRelay,
    Tick,
    WriteCheckpoint,
)
from backend.store.rows import new_row
from benchmarks.fuzzing import forging, mutation
from benchmarks.fuzzing.forging import BUFFERS, LAYOUT, PARAMS, VERSIONS
from benchmarks.fuzzing.laws import Target, hold
from wire import codec
from wire.errors import RemoteProtocolError
from wire.messages import (
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
    Message,
    ProbeReport,
    RankExited,
    RankProgress,
    RankReady,
    RequestLocalState,
    RequestParams,
    RoundCommitted,
    Shutdown,
    StartChunk,
    SyncAck,
    WorldFormed,
    encode,
)

CROOK = 1
"""link of the host that says what the input wants"""
SAMPLES = 48
MOST_EVENTS = 3000
TICK_SECONDS = 40.0
"""time passes so much when nobody has anything to say: hosts fall silent, ceilings pass"""
_ENTRY = struct.Struct("<BBH")


class _Theatre:
    """Feeds the core with what its effects make of the hosts."""

    def __init__(self, replaced: dict[int, list[bytes]]) -> None:
        config = RunConfig("toy.py:Toy", start_mode="manual", quorum=2, batch_size=4, epochs=2, checkpoint_rounds=2)
        self.cohort = Cohort(1, config, run_salt=bytes(32), run_secret=None, job_hash="h" * 64, now=0.0)
        self.said: list[bytes] = []
        """what the crooked host has or would have said, in order"""
        self._replaced = replaced
        self._events: deque[Event] = deque()
        self._links: dict[int, int] = {}
        """host by link"""
        self._ranks: dict[int, int] = {}
        """link by rank"""
        self._gone: set[int] = set()
        self._since: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        self._now = 0.0
        self._spoilt = False

    def run(self) -> None:
        """From the first hello to the end, whatever it is."""
        for link in (1, 2, 3):
            devices = [Device(f"cpu:{number}", "cpu", "a processor", 1 << 30) for number in range(1 + (link == CROOK))]
            self._say(link, Hello(f"host {link}", devices, VERSIONS, None, 10.0 * link))
        started, events = False, 0
        while not self.cohort.ended and events < MOST_EVENTS:
            if self._events:
                event = self._events.popleft()
            elif not started:
                started, event = True, Operator("start")
            else:
                self._now += TICK_SECONDS
                event = Tick()
            events += 1
            self._now += 0.001
            for effect in self.cohort.handle(event, self._now):
                self._perform(effect)
            if self._spoilt and events % 4 == 0:
                self._hold()
        self._hold()
        hold(self.cohort.ended, f"the run does not come to its end: {self.cohort.phase}")

    def _hold(self) -> None:
        """What everybody else reads off a core."""
        self.cohort.check()
        msgspec.json.encode(self.cohort.snapshot(self._now))
        if self.cohort.march is None or self.cohort.march.end is None:
            json.dumps(asdict(preview(self.cohort.outlook())), allow_nan=False)

    # ------------------------------------------------------------------------------------------ what happens

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Record(table=table, row=row):
                new_row(1, table, row, "2026-01-01T00:00:00.000Z")
            case SendHost(link=link, message=message):
                self._told(link, message)
            case CloseLink(link=link):
                self._lose(link, "closed")
            case SendRank(rank=rank, message=message):
                self._ordered(rank, message)
            case SendRelay(host=host, message=RoundCommitted(round=number)):
                for rank in [rank for rank, link in self._ranks.items() if self._links[link] == host]:
                    self._speak(rank, SyncAck(number, 0.1, 1.0, 1.0, "same", 1.0, 1.0, 1.0, 3.0, 0.01))
            case OpenRound():
                self._sum(effect)
            case AbortRound():
                self._events = deque(event for event in self._events if not _is_of(event, effect))
            case DropHost(host=host):
                self._gone |= {link for link, known in self._links.items() if known == host}
            case _:
                self._perform_rare(effect)

    def _perform_rare(self, effect: Effect) -> None:
        match effect:
            case ExpectRelays(hosts=hosts):
                self._events.extend(map(RelayAttached, hosts))
            case WriteCheckpoint(checkpoint=checkpoint):
                self._events.append(CheckpointWritten(checkpoint, "runs/1/model.safetensors", 8, "0" * 64))
            case End(reason=reason):
                hold(reason, "an end without a reason")

    def _told(self, link: int, message: Message) -> None:
        match message:
            case JobOffer(job_hash=job_hash):
                self._say(link, ProbeReport("", job_hash, "s" * 64, LAYOUT, "d" * 64, SAMPLES))
            case Accept(host_id=host):
                self._links[link] = host
            case WorldFormed(assignments=assignments):
                for assignment in assignments:
                    self._ranks[assignment.rank] = link
                    self._speak(assignment.rank, RankReady("layout", PARAMS, BUFFERS))

    def _ordered(self, rank: int, message: Message) -> None:
        match message:
            case StartChunk():
                self._work(rank, message)
            case Evaluate(epoch=epoch):
                self._speak(rank, EvalResult(epoch, {"accuracy": 0.5}, 1.0))
            case RequestLocalState(checkpoint=checkpoint):
                self._speak(rank, LocalState(checkpoint, 0, 1, b"state", 0.1))
            case RequestParams(excluded=True):
                self._since[rank] = 0
            case Shutdown():
                self._speak(rank, Exiting(self._steps.get(rank, 0)))
                self._say(self._ranks[rank], RankExited(rank, ExitCause(0, clean=True)))

    def _work(self, rank: int, chunk: StartChunk) -> None:
        working = RankProgress(rank, "working", self._steps.get(rank, 0), 6.0, 1 << 20)
        self._say(self._ranks[rank], HostHeartbeat([working]))
        for number in range(chunk.batches):
            self._since[rank] = self._since.get(rank, 0) + 1
            self._steps[rank] = self._steps.get(rank, 0) + 1
            samples = min(4, chunk.size - 4 * number)
            self._speak(rank, BatchDone(5.0, 1.0, self._steps[rank], samples, 0.25))
        self._speak(rank, ChunkDone(chunk.epoch, chunk.offset, chunk.size))

    def _sum(self, opening: OpenRound) -> None:
        """The plane's part: everybody contributes what they did."""
        sizes = opening.params_elements, opening.buffers_elements
        hold(sizes == (PARAMS, BUFFERS), f"a round of {sizes} elements, where the model has {(PARAMS, BUFFERS)}")
        ranks = [rank for ranks in opening.hosts.values() for rank in ranks]
        steps = {rank: int(rank == 0) if opening.initial else self._since.get(rank, 0) for rank in ranks}
        self._since |= dict.fromkeys(ranks, 0)
        mass = float(sum(steps.values()))
        number = opening.round, opening.attempt
        self._events.append(RoundFinished(*number, mass > 0, mass > 0, steps, mass, 8, 8, 0.01))

    # ---------------------------------------------------------------------------------------------- who speaks

    def _say(self, link: int, message: Message) -> None:
        for said in self._words(link, message):
            self._events.append(HostSaid(link, said, "10.0.0.1"))

    def _speak(self, rank: int, message: Message) -> None:
        for said in self._words(self._ranks[rank], message):
            kinds = (RankReady, BatchDone, ChunkDone, SyncAck, EvalResult, LocalState, Exiting)
            if isinstance(said, kinds):
                self._events.append(RankSaid(rank, said))
            else:  # the door lets nothing else pass
                self._lose(self._ranks[rank], "out of place")

    def _words(self, link: int, message: Message) -> Iterator[Message]:
        """What the host really says: the message, or what the input has in its place."""
        if link in self._gone:
            return
        if link != CROOK:
            yield message
            return
        self.said.append(encode(message))
        other = self._replaced.get(len(self.said) - 1)
        if other is None:
            yield message
            return
        self._spoilt = True
        for payload in other:
            try:
                yield codec.unpack(memoryview(payload))
            except RemoteProtocolError:
                self._lose(link, "bad message")

    def _lose(self, link: int, reason: str) -> None:
        if link in self._gone:
            return
        self._gone.add(link)
        self._events.append(LinkLost(link, reason))
        if link in self._links and self._ranks:
            self._events.append(RelayLost(self._links[link], reason))


def _is_of(event: Event, void: AbortRound) -> bool:
    """Whether this is the sum of an attempt that is void."""
    return isinstance(event, RoundFinished) and (event.round, event.attempt) == (void.round, void.attempt)


def _entries(data: bytes) -> list[tuple[int, int, bytes]]:
    found: list[tuple[int, int, bytes]] = []
    at = 0
    while at + _ENTRY.size <= len(data) and len(found) < 12:
        index, times, size = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size
        found.append((index, times, data[at : at + size]))
        at += size
    return found


def _written(entries: list[tuple[int, int, bytes]]) -> bytes:
    return b"".join(_ENTRY.pack(index, times, len(payload)) + payload for index, times, payload in entries)


def _cohort(data: bytes) -> None:
    replaced = {index: [payload] * (1 + times % 4) for index, times, payload in _entries(data)}
    _Theatre(replaced).run()


def _honest() -> list[bytes]:
    theatre = _Theatre({})
    theatre.run()
    hold(theatre.cohort.phase == "done", f"an honest cohort ended as {theatre.cohort.end}")
    return theatre.said


_HONEST: list[bytes] = []


def _seeds() -> list[bytes]:
    _HONEST[:] = _honest()
    return [b"", *(_written([(index, 0, payload)]) for index, payload in enumerate(_HONEST) if index < 256)]


def _mutated(data: bytes, random: Random) -> bytes:
    """One more replacement, or a change of one that is there."""
    honest = _HONEST or _honest()
    entries = [entry for entry in _entries(data) if len(entry[2]) < 2000]
    if not entries or random.random() < 0.5:
        index = random.randrange(min(256, len(honest)))
        payload = honest[index] if random.random() < 0.85 else random.choice(forging.PAYLOADS)
        entries.append((index, random.choice((0, 0, 0, 1, 2, 3)), payload))
    at = random.randrange(len(entries))
    index, times, payload = entries[at]
    entries[at] = index, times, mutation.altered_payload(payload, random)[:4000]
    return _written(entries[-6:])


TARGETS = (Target("cohort", "what a member says to the core of a run", _cohort, _seeds, _mutated),)
