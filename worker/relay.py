"""The relay process, ``python -m worker.relay``: one per host, its only connection to the controller after the join.

Upwards it passes on what the ranks say and folds their work, slice by slice in rank order, into one stream. Downwards
it passes on what the controller says and builds the next consensus from the stream of updates; the ranks adopt it at
``RoundCommitted``. Where the controller is on the same machine, nothing is streamed: each maps the other's memory. It
never divides, touches no CUDA and imports no torch (design sections 2 and 6; behaviour G9; decision 0014).

A controller that is lost in the middle of a run may come back: the ranks go back to the last round and wait, and the
relay dials for as long as the run says.

It ends with the run (exit 0), of a signal that asks it to (once everything is closed), when a link is lost for good or
anything else goes wrong (1, the reason on the last line of stderr), and with its agent. The agent supervises the ranks;
the relay tells them nothing of its own end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import msgspec

from wire import failpoints
from wire.allocator import keep_freed_memory
from wire.errors import ProtocolError
from wire.messages import (
    NO_RANK,
    BatchDone,
    ChunkDone,
    DeclareDead,
    EvalResult,
    Exiting,
    FetchState,
    LocalState,
    Message,
    RankFailed,
    RankReady,
    RelayHeartbeat,
    RequestParams,
    Rewind,
    RoundAborted,
    RoundCommitted,
    SessionIdGenerated,
    SessionJoined,
    SessionLost,
    SharedMemory,
    SnapshotReady,
    SyncAck,
    Synced,
    SyncRefused,
    UpdateStaged,
)
from wire.session import Received
from worker.arena_file import ArenaError
from worker.fold import Fold, Model, SnapshotRefused
from worker.lifeline import LifelineError, receive_orders
from worker.local_link import LocalLinkError
from worker.local_tier import obstacle
from worker.relay_links import ControllerLink, LinkLost, LinkRefused, RunOver, dial
from worker.relay_ranks import RankPorts
from worker.relay_spec import RelaySpec, SpecError, read_spec
from worker.relay_streams import Downloads, Uploads
from worker.signals import leaving_signals
from worker.staging import StagingError
from worker.tasks import first_to_end

FROM_RANK = (
    RankReady, BatchDone, ChunkDone, SyncAck, EvalResult, LocalState, FetchState, Exiting, RankFailed,
    SessionIdGenerated, SessionJoined, SessionLost, Synced, SyncRefused,
)  # fmt: skip
"""what passes through from a rank to the controller"""
FAILURES = (SpecError, LifelineError, LinkLost, ProtocolError, ArenaError, StagingError, LocalLinkError, OSError)

_OUTBOX = 256
"""messages that wait for the control link; ranks then wait too"""
_FAREWELL_SECONDS = 5.0

logger = logging.getLogger("relay")


class Relay:
    """One host's relay from its first rank to the end of the run."""

    def __init__(self, spec: RelaySpec) -> None:
        self._spec = spec
        failpoints.identify(host=spec.host_id)
        self._fold = Fold(spec.ranks)
        self._session = 0
        """controllers that were lost; what was meant for one of them is not for the next"""
        self._begin_session()
        self._ports = RankPorts(spec.ranks, self._from_rank)
        self._to_controller: asyncio.Queue[tuple[int, int, Message]] = asyncio.Queue(_OUTBOX)
        self._served = self._adopted = False
        self._rewinding: Counter[int] = Counter()
        """by rank: how often it has still to go back; what it says until then is about work that is void"""
        self._shared = False
        self._dialled = asyncio.Event()
        self._preparing = asyncio.Lock()

    async def run(self) -> None:
        """Serve until the run is over. Raises one of ``FAILURES``."""
        await self._ports.listen(self._spec.directory / "relay.sock")
        try:
            spec = self._spec
            while True:
                try:
                    await self._serve(spec)
                except LinkLost as lost:
                    if not self._may_wait(lost):
                        raise
                    self._park(lost)
                    # The agent looks for the controller as long as that, and ends this process when it looks in vain.
                    patience = 2 * spec.reattach_seconds + spec.heartbeat_timeout_seconds
                    spec = msgspec.structs.replace(self._spec, connect_seconds=patience)
        except RunOver as over:
            logger.info("the run is over: %s", over)
            await self._ports.farewell(_FAREWELL_SECONDS)
        finally:
            await self._ports.close()

    async def _serve(self, spec: RelaySpec) -> None:
        """One controller from the first dial to the loss of a link, which is raised."""
        links: tuple[ControllerLink, ...] = ()
        try:
            links = control, data = await dial(spec)
            self._served = True
            await self._agree_on_path(data)
            await first_to_end(
                self._ports.serve(),
                self._read_control(control),
                self._beat(),
                _patiently(self._write_control(control)),
                _patiently(self._downloads.read(data)),
                _patiently(self._uploads.run(data, lambda: self._downloads.pair)),
            )
        except failpoints.Cut:
            for link in links:
                link.abort()
            raise
        finally:
            self._uploads.close()
            await asyncio.gather(*(link.close() for link in links))

    def _may_wait(self, lost: LinkLost) -> bool:
        """Whether this link's end is one that another controller may follow, and ranks have a round to wait at."""
        final = isinstance(lost, RunOver | LinkRefused) or not self._served
        return not final and self._adopted and bool(self._spec.reattach_seconds)

    def _park(self, lost: LinkLost) -> None:
        """The controller is gone, the ranks are not: they go back to the last round, and wait with us for another."""
        logger.warning("%s; the ranks wait for it to come back", lost)
        self._session += 1
        self._served = False
        self._dialled.clear()
        self._fold = Fold(sorted(self._fold.live))
        self._begin_session()
        for rank in sorted(self._fold.live):
            self._rewinding[rank] += 1
            self._ports.send(rank, Rewind(reason=str(lost)[:500]))

    def _begin_session(self) -> None:
        self._uploads = Uploads(self._fold, self._spec.directory)
        self._downloads = Downloads(self._spec.directory, self._session, self._release, self._tell)

    async def _agree_on_path(self, data: ControllerLink) -> None:
        """Share memory with the controller if both can; otherwise everything is streamed."""
        problem = obstacle(data.welcome, wanted=self._spec.shared_memory, within_one_machine=data.within_one_machine)
        self._shared = not problem
        if self._shared:
            await data.send(SharedMemory(directory=str(self._spec.directory)))
            logger.info("sharing memory with the controller")
        else:
            logger.info("streaming to the controller: %s", problem)
        self._dialled.set()

    # -------------------------------------------------------------------------------------------- what is said

    async def _from_rank(self, rank: int, message: Message) -> None:
        """A rank spoke: its declaration of work stays here, the rest goes up."""
        if self._rewinding[rank] and not isinstance(message, Exiting | RankFailed):
            self._rewinding[rank] -= isinstance(message, RankReady)
            if self._rewinding[rank] or not isinstance(message, RankReady):
                return
        session = self._session
        if isinstance(message, SnapshotReady):
            try:
                self._uploads.begin(self._fold.ready(rank, message))
            except SnapshotRefused as refused:
                raise LocalLinkError(str(refused)) from refused
            return
        if not isinstance(message, FROM_RANK):
            raise LocalLinkError(f"{type(message).__name__} has no place between a rank and its relay")
        if isinstance(message, RankReady):
            await self._prepare(Model(message.params_elements, message.buffers_elements))
        await self._to_controller.put((session, rank, message))

    async def _prepare(self, model: Model) -> None:
        """Have room for the consensus before the controller hears of the first rank that is ready."""
        await self._dialled.wait()
        async with self._preparing:
            if self._fold.model is None:
                await self._downloads.prepare(model, shared=self._shared)
                self._fold.model = model
        if not any(self._rewinding[rank] for rank in self._fold.live):
            self._downloads.forget_older()

    async def _beat(self) -> None:
        """Show the controller that this process runs: its agent cannot know, and would beat on if it stood still."""
        while True:
            await asyncio.sleep(self._spec.heartbeat_seconds)
            await self._to_controller.put((self._session, NO_RANK, RelayHeartbeat()))

    async def _write_control(self, control: ControllerLink) -> None:
        while True:
            session, rank, message = await self._to_controller.get()
            if session == self._session:
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
            self._downloads.opened(message)
        self._ports.send(rank, message)

    def _from_controller(self, message: Message) -> None:
        match message:
            case RoundCommitted():
                self._downloads.committed(message)
            case RoundAborted():
                self._fold.aborted(message)
                self._downloads.aborted(message)
            case DeclareDead():
                if message.rank in self._fold.live:  # every relay hears of every death
                    logger.info("rank %s was declared dead: %s", message.rank, message.reason)
                    self._ports.refuse(message.rank, message)
                    self._uploads.begin(self._fold.dead(message.rank))
            case _:
                raise LinkRefused(f"the controller sent {type(message).__name__}, which is not for a relay")

    def _tell(self, staged: UpdateStaged) -> None:
        """So much of the consensus is here."""
        for rank in sorted(self._fold.live):
            self._ports.send(rank, staged)

    def _release(self, commit: RoundCommitted) -> None:
        """Committed and all there: the ranks may adopt it."""
        self._adopted = self._adopted or commit.realized
        failpoints.hit("relay.commit.before", round=commit.round, attempt=commit.attempt)
        for rank in sorted(self._fold.live):
            self._ports.send(rank, commit)
        failpoints.hit("relay.commit.after", round=commit.round, attempt=commit.attempt)


async def _patiently(job: Coroutine[Any, Any, None]) -> None:
    """At the run's end, let the control link be read to its own end: the ranks' last orders may be in it."""
    try:
        await job
    except RunOver:
        await asyncio.sleep(_FAREWELL_SECONDS)
        raise


async def serve(spec: RelaySpec) -> int:
    """Run the relay until the run is over, or a signal asks it to leave; answers that signal, or 0. Raises one of
    ``FAILURES``."""
    running = asyncio.current_task()
    assert running is not None
    loop = asyncio.get_running_loop()
    asked: list[int] = []

    def leave(number: int) -> None:
        if not asked and running.cancel():
            asked.append(number)

    for number in leaving_signals():
        loop.add_signal_handler(number, leave, number)
    try:
        await Relay(spec).run()
    except asyncio.CancelledError:
        if not asked:
            raise
    return asked[0] if asked else 0


def main() -> int:
    """Exit code: 0 when the run is over, 1 for anything that went wrong; the reason is stderr's last line. A signal
    that asked it to leave ends it in the end, so that its agent sees which one."""
    logging.basicConfig(level=logging.INFO, format="relay: %(message)s")
    logging.getLogger("websockets").setLevel(logging.WARNING)
    failpoints.arm_or_exit(os.environ)
    keep_freed_memory()
    try:
        asked = asyncio.run(serve(read_spec(receive_orders())))
    except FAILURES as error:
        print(f"relay: {error}", file=sys.stderr, flush=True)
        return 1
    if asked:
        signal.signal(asked, signal.SIG_DFL)
        signal.raise_signal(asked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
