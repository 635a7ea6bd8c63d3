"""A relay's two streams on the data link: contributions up, updates down.

Folding, sealing, opening and applying run in threads, a few chunks ahead of the one on the wire; the event loop only
hands frames on, so that control frames and the ranks' messages never wait for data.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from wire import failpoints
from wire.arithmetic import BitsArray, FloatArray
from wire.messages import NonFinite, RequestParams, RoundAborted, RoundCommitted, UpdateComing
from wire.session import ChunkReceived, Received
from worker.arena_file import ArenaFile
from worker.fold import Fold, FoldPlan, Model, Piece
from worker.folding import ConsensusPair, NotFinite, fold
from worker.relay_links import ControllerLink, LinkRefused
from worker.staging import Staging

_FOLDED_AHEAD = 4
_SEALED_AHEAD = 2
"""chunks that are folded, and sealed, ahead of the one that is being written"""
_OPENED_AHEAD = 4
"""chunks that were opened and wait to be applied; the socket is not read meanwhile"""

logger = logging.getLogger("relay")


class Uploads:
    """Sends the host's contributions, one attempt after the other; nobody else writes to the data link.

    Without ``pair`` the controller reads the arenas itself and only hears whose work is in them.
    """

    def __init__(self, fold_: Fold, directory: Path, pool: ThreadPoolExecutor) -> None:
        self._fold = fold_
        self._directory = directory
        self._pool = pool
        self._plans: asyncio.Queue[FoldPlan] = asyncio.Queue()
        self._arenas: dict[int, FloatArray] = {}

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
        sealed: deque[tuple[Piece, asyncio.Future[memoryview]]] = deque()
        culprit: NotFinite | None = None
        try:
            async for piece, payload in self._folded(plan, base):
                reserved = data.session.reserve_chunk(piece.header)
                sealed.append((piece, loop.run_in_executor(self._pool, data.seal_framed, reserved, payload.data)))
                if len(sealed) == _SEALED_AHEAD:
                    await self._send_sealed(data, *sealed.popleft())
        except NotFinite as error:
            culprit = error
        while sealed:
            await self._send_sealed(data, *sealed.popleft())
        if culprit is not None:
            logger.warning("round %s cannot use this host's work: %s", plan.contribution.round, culprit)
            await data.send(NonFinite(*plan.number, culprit.rank, culprit.element, culprit.value))

    async def _send_sealed(self, data: ControllerLink, piece: Piece, frame: asyncio.Future[memoryview]) -> None:
        sealed = await frame
        failpoints.hit("relay.chunk.up", offset=piece.header.offset)
        await data.send_framed(sealed)

    async def _folded(
        self, plan: FoldPlan, base: FloatArray | None
    ) -> AsyncIterator[tuple[Piece, FloatArray | BitsArray]]:
        """The plan's pieces in order, until it is aborted. Raises ``NotFinite`` in the place of the first bad one."""
        loop = asyncio.get_running_loop()
        ahead: deque[tuple[Piece, asyncio.Future[FloatArray | BitsArray]]] = deque()
        try:
            for piece in plan.pieces():
                if not self._fold.is_current(plan):
                    break
                arenas = {rank: self._arena(rank) for rank in piece.masses}
                ahead.append((piece, loop.run_in_executor(self._pool, fold, piece, arenas, base)))
                if len(ahead) == _FOLDED_AHEAD:
                    first, future = ahead.popleft()
                    yield first, await future
            while ahead:
                first, future = ahead.popleft()
                yield first, await future
        finally:
            await asyncio.gather(*(future for _, future in ahead), return_exceptions=True)

    def _arena(self, rank: int) -> FloatArray:
        if rank not in self._arenas:
            assert self._fold.model is not None, "a plan has sizes"
            path = self._directory / f"rank{rank}.out"
            self._arenas[rank] = ArenaFile.open(path, self._fold.model.elements).values
        return self._arenas[rank]


class Downloads:
    """Builds the next consensus from what the controller sends, and releases it when it is complete and committed.

    ``release`` gets each commit with the path of the file to adopt, in the event loop.
    """

    def __init__(self, directory: Path, pool: ThreadPoolExecutor, release: Callable[[RoundCommitted], None]) -> None:
        self.pair: ConsensusPair | None = None
        """none until the model's size is known, and for good where the controller shares its memory"""
        self._directory = directory
        self._pool = pool
        self._release = release
        self._staging = Staging()
        self._model: Model | None = None
        self._opened: asyncio.Queue[ChunkReceived | UpdateComing] = asyncio.Queue(_OPENED_AHEAD)

    async def prepare(self, model: Model, *, shared: bool) -> None:
        """Make what is needed for a model of this size, before the controller hears of a rank that is ready."""
        if not shared:
            self.pair = await asyncio.to_thread(ConsensusPair, self._directory, model.elements)
        self._model = model

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
        """Open what comes, in a thread, until cancelled. Raises ``LinkLost``."""
        while True:
            for event in await data.receive(threaded=True):
                if isinstance(event, ChunkReceived):
                    await self._opened.put(event)
                elif isinstance(event, Received) and isinstance(event.message, UpdateComing):
                    await self._opened.put(event.message)
                else:
                    raise LinkRefused(f"the controller sent {event!r} on the data link")

    async def apply(self) -> None:
        """Take in what was opened, in order and in a thread, until cancelled. Raises ``StagingError``."""
        loop = asyncio.get_running_loop()
        while True:
            item = await self._opened.get()
            if isinstance(item, UpdateComing):
                await self._announce(item)
            elif self._staging.accepts(item.header, self._sizes):
                await loop.run_in_executor(self._pool, self._files.take, item.header, item.payload)
                failpoints.hit("relay.chunk.staged", round=item.header.round, offset=item.header.offset)
                self._pass_on(self._staging.staged(item.header))

    async def _announce(self, update: UpdateComing) -> None:
        if not self._staging.coming(update, self._sizes):
            return
        if not update.path:
            await asyncio.get_running_loop().run_in_executor(self._pool, self._files.begin, update)
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
