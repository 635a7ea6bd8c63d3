"""A relay's two streams on the data link: contributions up, updates down.

A thread folds and seals what goes up, a few chunks ahead of the one on the wire. What comes down is opened and applied
chunk by chunk in the event loop; control frames and the ranks' messages never wait for more than one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from wire import failpoints
from wire.arithmetic import FloatArray
from wire.messages import NonFinite, RequestParams, RoundAborted, RoundCommitted, UpdateComing, UpdateStaged
from wire.session import ChunkReceived, Received
from worker.arena_file import ArenaFile
from worker.fold import Fold, FoldPlan, Model, Piece
from worker.folding import ConsensusPair, NotFinite, fold
from worker.relay_links import ControllerLink, LinkRefused
from worker.staging import Staging

_AHEAD = 4
"""chunks that are folded and sealed ahead of the one that is being written"""

logger = logging.getLogger("relay")


class Uploads:
    """Sends the host's contributions, one attempt after the other; nobody else writes to the data link.

    Without ``pair`` the controller reads the arenas itself and only hears whose work is in them.
    """

    def __init__(self, fold_: Fold, directory: Path) -> None:
        self._fold = fold_
        self._directory = directory
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._plans: asyncio.Queue[FoldPlan] = asyncio.Queue()
        self._arenas: dict[int, FloatArray] = {}

    def close(self) -> None:
        """Let the thread end."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def begin(self, plan: FoldPlan | None) -> None:
        """Every living rank has declared; none: not yet."""
        if plan is not None:
            self._plans.put_nowait(plan)

    async def run(self, data: ControllerLink, pair: Callable[[], ConsensusPair | None]) -> None:
        """Send until cancelled. Raises ``LinkLost``, ``ArenaError``."""
        while True:
            plan = await self._plans.get()
            if self._fold.is_current(plan):
                failpoints.identify(round=plan.number[0], attempt=plan.number[1])
                failpoints.hit("relay.contribution.before")
                await data.send(plan.contribution)
                failpoints.hit("relay.contribution.after")
                if (files := pair()) is not None:
                    await self._send_pieces(data, plan, None if plan.initial else files.base)

    async def _send_pieces(self, data: ControllerLink, plan: FoldPlan, base: FloatArray | None) -> None:
        """Fold, seal and send. An abort stops it once all that is numbered is sent, and so does work that is no number:
        numbers are given out in the order of the pieces, and only to those that are."""
        loop = asyncio.get_running_loop()
        work = _Pieces(data, base)
        ahead: deque[asyncio.Future[memoryview | None]] = deque()
        for piece in plan.pieces():
            if not self._fold.is_current(plan) or work.culprit is not None:
                break
            arenas = {rank: self._arena(rank) for rank in piece.masses}
            ahead.append(loop.run_in_executor(self._pool, work.fold_and_seal, piece, arenas))
            if len(ahead) == _AHEAD:
                await self._send_sealed(data, await ahead.popleft())
        while ahead:
            await self._send_sealed(data, await ahead.popleft())
        if (culprit := work.culprit) is not None:
            logger.warning("round %s cannot use this host's work: %s", plan.contribution.round, culprit)
            await data.send(NonFinite(*plan.number, culprit.rank, culprit.element, culprit.value))

    async def _send_sealed(self, data: ControllerLink, frame: memoryview | None) -> None:
        if frame is not None:
            await data.send_framed(frame)

    def _arena(self, rank: int) -> FloatArray:
        if rank not in self._arenas:
            assert self._fold.model is not None, "a plan has sizes"
            path = self._directory / f"rank{rank}.out"
            self._arenas[rank] = ArenaFile.open(path, self._fold.model.elements).values
        return self._arenas[rank]


class _Pieces:
    """One plan's pieces on their way to frames. For one thread at a time, which takes them in their order."""

    def __init__(self, data: ControllerLink, base: FloatArray | None) -> None:
        self.culprit: NotFinite | None = None
        """the first piece that is no number: no later one gets a sequence number"""
        self._data = data
        self._base = base

    def fold_and_seal(self, piece: Piece, arenas: dict[int, FloatArray]) -> memoryview | None:
        """The piece's frame; none from the first bad piece on."""
        if self.culprit is not None:
            return None
        try:
            payload = fold(piece, arenas, self._base)
        except NotFinite as culprit:
            self.culprit = culprit
            return None
        failpoints.hit("relay.chunk.up", offset=piece.header.offset)
        return self._data.seal_framed(self._data.session.reserve_chunk(piece.header), payload.data)


class Downloads:
    """Builds the next consensus from what the controller sends, and releases it when it is complete and committed.

    ``release`` gets each commit with the path of the file to adopt, and ``tell`` how much of it is there already; both
    in the event loop.
    """

    def __init__(
        self,
        directory: Path,
        session: int,
        release: Callable[[RoundCommitted], None],
        tell: Callable[[UpdateStaged], None],
    ) -> None:
        """``session`` tells this controller's files from those of the ones before."""
        self.pair: ConsensusPair | None = None
        """none until the model's size is known, and for good where the controller shares its memory"""
        self._directory = directory
        self._session = session
        self._release = release
        self._tell = tell
        self._staging = Staging()
        self._model: Model | None = None

    async def prepare(self, model: Model, *, shared: bool) -> None:
        """Make what is needed for a model of this size, before the controller hears of a rank that is ready."""
        if not shared:
            self.pair = await asyncio.to_thread(ConsensusPair, self._directory, model.elements, self._session)
        self._model = model

    def forget_older(self) -> None:
        """No rank opens a file of the controllers before any more; who maps one keeps it."""
        for path in self._directory.glob("consensus.*"):
            if not path.name.startswith(f"consensus.{self._session}."):
                path.unlink(missing_ok=True)

    def opened(self, request: RequestParams) -> None:
        """A new attempt began."""
        self._staging.opened(request)

    def aborted(self, message: RoundAborted) -> None:
        """The attempt is void."""
        self._staging.aborted(message)

    def committed(self, message: RoundCommitted) -> None:
        """The attempt is committed; its consensus may still be on its way."""
        self._pass_on(self._staging.committed(message))

    async def read(self, data: ControllerLink) -> None:
        """Take in what comes, until cancelled. Raises ``LinkLost``, ``StagingError``.

        A chunk is opened and applied where it is read: that takes a third of a millisecond, about what handing it to
        a thread and back would cost.
        """
        while True:
            for event in await data.receive():
                if isinstance(event, ChunkReceived):
                    self._take(event)
                elif isinstance(event, Received) and isinstance(event.message, UpdateComing):
                    await self._announce(event.message)
                else:
                    raise LinkRefused(f"the controller sent {event!r} on the data link")

    def _take(self, chunk: ChunkReceived) -> None:
        if self._staging.accepts(chunk.header, self._sizes):
            self._files.take(chunk.header, chunk.payload)
            failpoints.hit("relay.chunk.staged", round=chunk.header.round, offset=chunk.header.offset)
            commit = self._staging.staged(chunk.header)
            if (stop := self._staging.news()) and commit is None:
                self._tell(UpdateStaged(*self._staging.number, self._files.path, stop))
            self._pass_on(commit)

    async def _announce(self, update: UpdateComing) -> None:
        if not self._staging.coming(update, self._sizes):
            return
        if not update.path:
            await asyncio.to_thread(self._files.begin, update)
        self._pass_on(self._staging.release())

    def _pass_on(self, commit: RoundCommitted | None) -> None:
        if commit is None:
            return
        path = ""
        if commit.realized:
            path = self._staging.path or self._files.promote()
        self._release(RoundCommitted(commit.round, commit.attempt, commit.realized, commit.buffers_realized, path))

    @property
    def _sizes(self) -> Model:
        if self._model is None:
            raise LinkRefused("the controller opened a round before any rank here was ready")
        return self._model

    @property
    def _files(self) -> ConsensusPair:
        if self.pair is None:
            raise LinkRefused("the controller streams, though it was to share its memory")
        return self.pair
