"""Hosts as a controller sees them, agent and relay in one: honest ones, and one whose frames are tampered with."""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
from collections import Counter
from random import Random
from typing import TypeVar

import numpy as np
import safetensors.numpy

from benchmarks.fuzzing import forging, mutation
from benchmarks.fuzzing.forging import BUFFERS, LAYOUT, PARAMS, VERSIONS
from benchmarks.fuzzing.stand import Closed, Stand, Wire
from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.messages import (
    NO_RANK,
    Accept,
    BatchDone,
    ChunkDone,
    Contribution,
    Device,
    EvalResult,
    Evaluate,
    Exiting,
    Hello,
    HostHeartbeat,
    JobOffer,
    LocalState,
    Message,
    ProbeReport,
    RankProgress,
    RankReady,
    RelayHello,
    RelayWelcome,
    RequestLocalState,
    RequestParams,
    RoundCommitted,
    RunEnded,
    Shutdown,
    StartChunk,
    SyncAck,
    WorldFormed,
    encode,
)
from wire.session import Channel, ChunkHeader, Received, Session, join_secret, run_secret

M = TypeVar("M", bound=Message)

SAMPLES = 64
STATE = safetensors.numpy.save({"model.count": np.array(7)}, {"state": "{}"})
OVER = (Closed, RemoteProtocolError, LocalProtocolError)
"""how a host learns that it is out"""


class Hand:
    """Writes to a host's links what the host says."""

    tampered = 0

    async def opening(self, link: Link, frame: bytes) -> None:
        """The first frame of a link."""
        await link.wire.send(frame)

    async def message(self, link: Link, message: Message, rank: int) -> None:
        """Seal and send."""
        await link.wire.send(link.session.seal(message, rank))

    async def chunk(self, link: Link, header: ChunkHeader, payload: bytes) -> None:
        """Seal and send."""
        await link.wire.send(bytes(link.session.seal_chunk(header, payload)))


class Crooked(Hand):
    """From the frame numbered ``start`` on, some are not what they should be; ``rate`` of those after the first."""

    def __init__(self, random: Random, start: int, rate: float) -> None:
        self.tampered = 0
        self.acts: Counter[str] = Counter()
        self.last = ""
        """what was done last, for whoever reads a finding"""
        self.recorded: list[bytes] = []
        self._random = random
        self._start = start
        self._rate = rate
        self._count = 0
        self._late: list[bytes] = []

    async def opening(self, link: Link, frame: bytes) -> None:
        """A hello of the session, seldom damaged, since little comes after that."""
        if self._now() and self._random.random() < 0.3:
            frame = mutation.mutated(frame, self._random)
            self._did("hello damaged", frame)
        await link.wire.send(frame)

    async def message(self, link: Link, message: Message, rank: int) -> None:
        """Something in its place, before it, or instead of it."""
        if not self._now():
            await super().message(link, message, rank)
            return
        payload, act = encode(message), self._random.choice(_ACTS)
        for frame in self._frames(link.session, act, payload, rank):
            self._did(f"{act} {type(message).__name__}", frame, payload)
            await link.wire.send(frame)
        if act == "gone":
            self._did(f"gone {type(message).__name__}", b"")
            await link.wire.close()

    async def chunk(self, link: Link, header: ChunkHeader, payload: bytes) -> None:
        """Another header, another payload, or a damaged frame."""
        if not self._now():
            await super().chunk(link, header, payload)
            return
        random = self._random
        match random.randrange(4):
            case 0:
                frame = mutation.mutated(bytes(link.session.seal_chunk(header, payload)), random)
            case 1:
                frame = forging.sealed_chunk(link.session, _other_header(header, random), payload)
            case 2:
                odd = struct.pack("<f", random.choice((math.nan, math.inf, 3e38, 1e-45)))
                frame = forging.sealed_chunk(link.session, header, odd * header.elements)
            case _:
                frame = forging.sealed_chunk(link.session, header, mutation.mutated(payload, random))
        self._did("chunk", frame, repr(header).encode())
        await link.wire.send(frame)

    def _now(self) -> bool:
        self._count += 1
        if self._count < self._start:
            return False
        return self._count == self._start or self._random.random() < self._rate

    def _did(self, act: str, frame: bytes | str, payload: bytes = b"") -> None:
        self.tampered += 1
        self.acts[act.partition(" ")[0]] += 1
        self.last = f"{act} {payload.hex()[:400]} as {(frame if isinstance(frame, str) else frame.hex())[:1200]}"

    def _frames(self, session: Session, act: str, payload: bytes, rank: int) -> list[bytes | str]:
        random = self._random
        match act:
            case "altered":
                return [forging.sealed(session, mutation.altered_payload(payload, random), rank)]
            case "foreign":
                other = random.choice(forging.PAYLOADS)
                if random.random() < 0.7:
                    other = mutation.altered_payload(other, random)
                whose = random.choice((rank, rank, NO_RANK, 0, 1, 2, random.randrange(1 << 32)))
                return [forging.sealed(session, other, whose), forging.sealed(session, payload, rank)]
            case "damaged":
                return [mutation.mutated(forging.sealed(session, payload, rank), random)]
            case "repeated":
                return [forging.sealed(session, payload, rank) for _ in range(random.choice((2, 3, 30)))]
            case "replayed":
                frame = forging.sealed(session, payload, rank)
                return [frame, frame]
            case "text":
                return ["text"]
            case "huge":
                return [forging.sealed(session, payload + bytes(random.choice((1, 1 << 16, 1 << 20))), rank)]
            case "otherwise":
                return [forging.sealed(session, payload, random.choice((0, 1, 2, 3, NO_RANK, 1 << 31)))]
        return []  # swallowed, gone


_ACTS = (
    "altered", "altered", "altered", "altered", "altered", "altered", "foreign", "foreign", "foreign", "damaged",
    "repeated", "replayed", "text", "huge", "otherwise", "swallowed", "gone",
)  # fmt: skip


def _other_header(header: ChunkHeader, random: Random) -> ChunkHeader:
    values = [header.round, header.attempt, header.section, header.offset, header.elements, header.encoding]
    bits = (32, 32, 16, 64, 32, 16)
    at = random.randrange(len(values))
    values[at] = random.choice((*mutation.NUMBERS, values[at] + 1)) % (1 << bits[at])
    return ChunkHeader(*values)


class Link:
    """A host's end of one websocket."""

    def __init__(self, wire: Wire, session: Session, hand: Hand) -> None:
        self.wire = wire
        self.session = session
        self._hand = hand
        self._heard: list[Received] = []

    async def open(self) -> None:
        """Shake hands. Raises one of ``OVER``."""
        await self._hand.opening(self, self.session.opening())
        while not self.session.established:
            self.session.receive(await self.wire.recv())

    async def say(self, message: Message, rank: int = NO_RANK) -> None:
        """Raises one of ``OVER``."""
        await self._hand.message(self, message, rank)

    async def stream(self, header: ChunkHeader, payload: bytes) -> None:
        """Raises one of ``OVER``."""
        await self._hand.chunk(self, header, payload)

    async def next(self) -> Received:
        """The next message; chunks are let go of. Raises one of ``OVER``."""
        while not self._heard:
            self._heard += [e for e in self.session.receive(await self.wire.recv()) if isinstance(e, Received)]
        return self._heard.pop(0)

    async def hear(self, kind: type[M]) -> M:
        """The next message of this kind. Raises one of ``OVER``, also when the run is over first."""
        while True:
            message = (await self.next()).message
            if isinstance(message, kind):
                return message
            if isinstance(message, RunEnded):
                raise Closed(1000, message.reason)


class Player:
    """One host with one rank, from its hello to the end of the run or of its links. ``joined`` once it was accepted."""

    def __init__(self, stand: Stand, name: str, run_id: int, hand: Hand) -> None:
        self.name = name
        self.hand = hand
        self.joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """or refused: it is not waited for any longer"""
        self.finished = False
        """the run told it to leave"""
        self._stand = stand
        self._run_id = run_id
        self._links: list[Link] = []
        self._since = 0
        self._steps = 0

    async def play(self) -> None:
        """Never raises on the controller's account."""
        try:
            await self._play()
        except OVER:
            pass
        finally:
            self._done_joining()
            await self.leave()

    def _done_joining(self) -> None:
        if not self.joined.done():
            self.joined.set_result(None)

    async def leave(self) -> None:
        """Drop every link."""
        links, self._links = self._links, []
        await asyncio.gather(*(link.wire.close() for link in links))

    async def _dial(self, channel: Channel, secret: bytes) -> Link:
        run_id = 0 if channel is Channel.JOIN else self._run_id
        session = Session.client(channel, secret, run_id=run_id)
        link = Link(await self._stand.channel(channel), session, self.hand)
        self._links.append(link)
        await link.open()
        return link

    async def _play(self) -> None:
        secret = join_secret(self._stand.controller.join_token)
        join = await self._dial(Channel.JOIN, secret)
        await join.say(Hello(self.name, [Device("cpu:0", "cpu", "a processor", 1 << 30)], VERSIONS, self._run_id))
        offer = await join.hear(JobOffer)
        report = ProbeReport("", offer.job_hash, "s" * 64, LAYOUT, "d" * 64, SAMPLES)
        await join.say(report)
        accept = await join.hear(Accept)
        self._done_joining()
        world = await join.hear(WorldFormed)
        rank = world.assignments[0].rank
        run = run_secret(secret, accept.run_salt)
        control, data = [await self._relay(channel, accept, rank, run) for channel in (Channel.CONTROL, Channel.DATA)]
        await control.say(RankReady("layout", PARAMS, BUFFERS), rank)
        drains = [asyncio.create_task(_drain(link)) for link in (join, data)]
        try:
            await self._train(join, control, data, rank)
        finally:
            for task in drains:
                task.cancel()
            await asyncio.gather(*drains, return_exceptions=True)

    async def _relay(self, channel: Channel, accept: Accept, rank: int, secret: bytes) -> Link:
        link = await self._dial(channel, secret)
        await link.say(RelayHello(accept.host_id, [rank]))
        await link.hear(RelayWelcome)
        return link

    async def _train(self, join: Link, control: Link, data: Link, rank: int) -> None:
        while True:
            message = (await control.next()).message
            match message:
                case StartChunk():
                    await join.say(HostHeartbeat([RankProgress(rank, "working", self._steps, 0.1, 1 << 20)]))
                    await self._work(control, message, rank)
                case RequestParams():
                    await self._contribute(data, message, rank)
                case RoundCommitted(round=round_):
                    self._since = 0
                    await control.say(SyncAck(round_, 0.1, 1.0, 1.0, "same", 1.0, 1.0, 1.0, 3.0, 0.01), rank)
                case Evaluate(epoch=epoch):
                    await control.say(EvalResult(epoch, {"accuracy": 0.5}, 1.0), rank)
                case RequestLocalState(checkpoint=checkpoint):
                    await control.say(LocalState(checkpoint, 0, 1, STATE, 0.1), rank)
                case Shutdown():
                    self.finished = True
                    with contextlib.suppress(*OVER):
                        await control.say(Exiting(self._steps), rank)
                    return

    async def _work(self, control: Link, chunk: StartChunk, rank: int) -> None:
        left = chunk.size
        for _ in range(chunk.batches):
            self._steps += 1
            self._since += 1
            await control.say(BatchDone(5.0, 1.0, self._steps, min(4, left), 0.25), rank)
            left -= 4
        await control.say(ChunkDone(chunk.epoch, chunk.offset, chunk.size), rank)

    async def _contribute(self, data: Link, request: RequestParams, rank: int) -> None:
        steps = int(rank == 0) if request.initial else 0 if request.excluded else self._since
        mover = float(steps > 0)
        masses, movers = {rank: float(steps)}, {rank: mover}
        await data.say(Contribution(request.round, request.attempt, {rank: steps}, masses, movers, PARAMS, BUFFERS))
        if steps:
            number, values = request.round & 0xFFFFFFFF, np.zeros(PARAMS + BUFFERS, "<f4")
            await data.stream(ChunkHeader(number, request.attempt, 0, 0, PARAMS), values[:PARAMS].tobytes())
            await data.stream(ChunkHeader(number, request.attempt, 1, PARAMS, BUFFERS), values[PARAMS:].tobytes())


async def _drain(link: Link) -> None:
    """Take what comes, so that nobody takes this host for one that does not read."""
    with contextlib.suppress(*OVER):
        while True:
            await link.next()
