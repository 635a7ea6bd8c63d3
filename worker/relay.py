"""The relay process, ``python -m worker.relay``: one per host, its only connection to the controller after the join.

Upwards it passes on what the ranks say and folds their arenas, slice by slice in rank order, into one stream.
Downwards it passes on what the controller says and stages the averaged stream in ``consensus``, which the
ranks adopt at ``RoundCommitted``. It never divides, touches no CUDA and imports no torch (design sections 2
and 6; behaviour G9).

It ends with the run (exit 0), on SIGTERM (0), when a link is lost or anything else goes wrong (1, the reason
on the last line of stderr), and with its agent. The agent supervises the ranks; the relay tells them nothing
of its own end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from wire import failpoints
from wire.errors import ProtocolError
from wire.messages import (
    NO_RANK,
    BatchDone,
    ChunkDone,
    DeclareDead,
    EvalResult,
    Exiting,
    LocalState,
    Message,
    RankFailed,
    RankReady,
    RequestParams,
    RoundAborted,
    RoundCommitted,
    SnapshotReady,
    SyncAck,
)
from wire.session import ChunkReceived, Received, ReservedChunk
from worker.arena_file import F32, ArenaError, ArenaFile, FloatArray
from worker.fold import Fold, FoldError, FoldPlan, Model, Piece, Staging
from worker.lifeline import LifelineError, receive_orders
from worker.local_link import LocalLinkError
from worker.relay_links import ControllerLink, LinkLost, LinkRefused, RunOver, dial
from worker.relay_ranks import RankPorts
from worker.relay_spec import RelaySpec, SpecError, read_spec

FROM_RANK = (RankReady, BatchDone, ChunkDone, SyncAck, EvalResult, LocalState, Exiting, RankFailed)
"""what passes through from a rank to the controller"""
FAILURES = (SpecError, LifelineError, LinkLost, ProtocolError, ArenaError, FoldError, LocalLinkError, OSError)

_OUTBOX = 256
"""messages that wait for the control link; ranks then wait too"""
_IN_FLIGHT = 4
"""chunks that are folded and sealed ahead of the one that is being written"""
_THREADS = 2
_FAREWELL_SECONDS = 5.0

logger = logging.getLogger("relay")


class Relay:
    """One host's relay from its first rank to the end of the run."""

    def __init__(self, spec: RelaySpec) -> None:
        self._spec = spec
        self._fold = Fold(spec.ranks)
        self._staging = Staging()
        self._ports = RankPorts(spec.ranks, self._from_rank)
        self._to_controller: asyncio.Queue[tuple[int, Message]] = asyncio.Queue(_OUTBOX)
        self._plans: asyncio.Queue[FoldPlan] = asyncio.Queue()
        self._arenas: dict[int, FloatArray] = {}
        self._consensus: FloatArray | None = None
        self._making_consensus = asyncio.Lock()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="fold")

    async def run(self) -> None:
        """Serve until the run is over. Raises one of ``FAILURES``."""
        await self._ports.listen(self._spec.directory / "relay.sock")
        links: tuple[ControllerLink, ...] = ()
        try:
            links = control, data = await dial(self._spec)
            await _first_to_end(
                self._ports.serve(),
                self._read_control(control),
                _patiently(self._write_control(control)),
                _patiently(self._read_data(data)),
                _patiently(self._stream(data)),
            )
        except RunOver as over:
            logger.info("the run is over: %s", over)
            await self._ports.farewell(_FAREWELL_SECONDS)
        finally:
            await asyncio.gather(self._ports.close(), *(link.close() for link in links))
            self._pool.shutdown(wait=False, cancel_futures=True)

    # -------------------------------------------------------------------------------------------- what is said

    async def _from_rank(self, rank: int, message: Message) -> None:
        """A rank spoke: its declaration of work stays here, the rest goes up."""
        if isinstance(message, SnapshotReady):
            self._begin(self._fold.ready(rank, message))
            return
        if not isinstance(message, FROM_RANK):
            raise LocalLinkError(f"{type(message).__name__} has no place between a rank and its relay")
        if isinstance(message, RankReady):
            await self._make_consensus(Model(message.params_elements, message.buffers_elements))
        await self._to_controller.put((rank, message))

    async def _write_control(self, control: ControllerLink) -> None:
        while True:
            rank, message = await self._to_controller.get()
            await control.send(message, rank)

    async def _read_control(self, control: ControllerLink) -> None:
        while True:
            for event in await control.receive():
                if not isinstance(event, Received):
                    raise LinkRefused(f"the controller sent {event!r} on the control link")
                if event.rank == NO_RANK:
                    self._from_controller(event.message)
                else:
                    self._to_rank(event.rank, event.message)

    def _to_rank(self, rank: int, message: Message) -> None:
        if isinstance(message, RequestParams) and self._fold.requested(message):
            self._staging.opened(message.round, message.attempt)
        self._ports.send(rank, message)

    def _from_controller(self, message: Message) -> None:
        match message:
            case RoundCommitted():
                self._release(self._staging.committed(message, self._model))
            case RoundAborted():
                self._fold.aborted(message)
                self._staging.aborted(message)
            case DeclareDead():
                if message.rank in self._fold.live:  # every relay hears of every death
                    logger.info("rank %s was declared dead: %s", message.rank, message.reason)
                    self._ports.refuse(message.rank)
                    self._begin(self._fold.dead(message.rank))
            case _:
                raise LinkRefused(f"the controller sent {type(message).__name__}, which is not for a relay")

    # ------------------------------------------------------------------------------------------- the way up

    def _begin(self, plan: FoldPlan | None) -> None:
        if plan is not None:
            self._plans.put_nowait(plan)

    async def _stream(self, data: ControllerLink) -> None:
        """Send the host's contributions, one attempt after the other; nobody else writes to the data link."""
        while True:
            plan = await self._plans.get()
            if self._fold.is_current(plan):
                await data.send(plan.contribution)
                await self._stream_pieces(data, plan)

    async def _stream_pieces(self, data: ControllerLink, plan: FoldPlan) -> None:
        """Fold, seal and send, a few chunks ahead. An abort stops it once all that is numbered is sent."""
        loop = asyncio.get_running_loop()
        ahead: deque[asyncio.Future[bytearray]] = deque()
        for piece in plan.pieces():
            if not self._fold.is_current(plan):
                break
            reserved = data.session.reserve_chunk(piece.header)
            arenas = [self._arena(rank) for rank in piece.ranks]
            ahead.append(loop.run_in_executor(self._pool, _fold_and_seal, arenas, piece, reserved))
            if len(ahead) == _IN_FLIGHT:
                await data.send_frame(await ahead.popleft())
        while ahead:
            await data.send_frame(await ahead.popleft())

    def _arena(self, rank: int) -> FloatArray:
        if rank not in self._arenas:
            path = self._spec.directory / f"rank{rank}.out"
            self._arenas[rank] = ArenaFile.open(path, self._model.elements).values
        return self._arenas[rank]

    # ----------------------------------------------------------------------------------------- the way down

    async def _read_data(self, data: ControllerLink) -> None:
        """Stage the averaged stream; chunks are opened in a thread, so that the ranks' messages never wait for it."""
        while True:
            for event in await data.receive(threaded=True):
                if not isinstance(event, ChunkReceived):
                    raise LinkRefused(f"the controller sent {event!r} on the data link")
                if self._staging.accepts(event.header, self._model):
                    self._stage(event)

    def _stage(self, chunk: ChunkReceived) -> None:
        assert self._consensus is not None, "made together with the model's sizes"
        start, stop = chunk.header.offset, chunk.header.offset + chunk.header.elements
        np.copyto(self._consensus[start:stop], np.frombuffer(chunk.payload, dtype=F32))
        self._release(self._staging.staged(chunk.header, self._model))

    def _release(self, commit: RoundCommitted | None) -> None:
        """Committed and all there: the ranks may adopt it."""
        if commit is not None:
            for rank in sorted(self._fold.live):
                self._ports.send(rank, commit)

    async def _make_consensus(self, model: Model) -> None:
        """Map the staging file before the controller hears of the first rank that is ready."""
        async with self._making_consensus:
            if self._consensus is None:
                path = self._spec.directory / "consensus"
                file = await asyncio.to_thread(ArenaFile.create, path, model.elements)
                self._consensus, self._fold.model = file.values, model

    @property
    def _model(self) -> Model:
        if self._fold.model is None:
            raise LinkRefused("the controller opened a round before any rank here was ready")
        return self._fold.model


def fold(arenas: Sequence[FloatArray], piece: Piece) -> FloatArray:
    """The sum of the ranks' elements of one slice, in the order given, in f32; a lone rank's are not copied."""
    start, stop = piece.header.offset, piece.stop
    if len(arenas) == 1:
        return arenas[0][start:stop]
    with np.errstate(all="ignore"):  # the controller looks for what is not finite, and names the host
        total = arenas[0][start:stop] + arenas[1][start:stop]
        for arena in arenas[2:]:
            np.add(total, arena[start:stop], out=total)
    return total


def _fold_and_seal(arenas: Sequence[FloatArray], piece: Piece, reserved: ReservedChunk) -> bytearray:
    return reserved.seal(fold(arenas, piece).data)


async def _patiently(job: Coroutine[Any, Any, None]) -> None:
    """At the run's end, let the control link be read to its own end: the ranks' last orders may be in it."""
    try:
        await job
    except RunOver:
        await asyncio.sleep(_FAREWELL_SECONDS)
        raise


async def _first_to_end(*jobs: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends, which only an error makes them do; raise that error."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def serve(spec: RelaySpec) -> None:
    """Run the relay until the run is over or SIGTERM asks it to leave. Raises one of ``FAILURES``."""
    running = asyncio.current_task()
    assert running is not None
    loop = asyncio.get_running_loop()
    asked = False

    def leave() -> None:
        nonlocal asked
        if not asked:
            asked = running.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave)
    try:
        await Relay(spec).run()
    except asyncio.CancelledError:
        if not asked:
            raise


def main() -> int:
    """Exit code: 0 when the run is over or SIGTERM came, 1 for anything else; the reason is stderr's last line."""
    logging.basicConfig(level=logging.INFO, format="relay: %(message)s")
    logging.getLogger("websockets").setLevel(logging.WARNING)
    failpoints.arm_or_exit(os.environ)
    try:
        asyncio.run(serve(read_spec(receive_orders())))
    except FAILURES as error:
        print(f"relay: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
