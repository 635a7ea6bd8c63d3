"""The controller's half of the CPU reduce: every host's contribution in, one update out to all.

One :class:`ReducePlane` serves one run. It lives on the event loop's thread and only moves memoryviews there; the
arithmetic runs in a small thread pool, slice by slice, in host order. A host streams its contribution and is sent the
update; a host on this machine may share its memory instead, where its ranks' values are read in place and the new
consensus is mapped. Either way gives the same bits. The controller's copy of the last consensus is what the next update
is applied to, and what a checkpoint is written from. The plane knows nothing of scheduling: ``open`` says what to
expect, ``abort`` to forget it (design section 6; decision 0014; behaviour G10; laws L1, L4, L8).

Memory is two arenas (the last consensus and the one that is being built), with an outer optimizer as many of its
momentum; per streaming host at most ``window_slices`` slices, since the runtime awaits ``room`` before it reads more;
and, once for all hosts, at most ``outgoing_slices`` slices of the update that some link has not been sent yet.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from backend.core.vocabulary import NonFiniteValue, OpenRound, RoundBroken, RoundFinished
from backend.reduce import pieces
from backend.reduce.alive import Alive
from backend.reduce.attempt import MAPPED_ELEMENTS, Attempt, Settings, fold_order
from backend.reduce.ledger import Ledger
from backend.reduce.outer import Nesterov
from backend.reduce.pieces import Culprit
from backend.reduce.shared import SharedArenas, SharedMemoryRefused
from wire import failpoints
from wire.arithmetic import FloatArray
from wire.mass import is_realized
from wire.messages import Contribution, Message, NonFinite, UpdateComing
from wire.session import ChunkHeader, Section
from wire.streams import (
    SLICE_ELEMENTS,
    ContributionRefused,
    Streamed,
    Streams,
    chunk_round,
    same_round,
    section_encoding,
)

Send = Callable[[int, ChunkHeader, memoryview], None]
"""queue a chunk to a host's data link; seal it when it is written, since a view is free and a sealed copy is not"""
Tell = Callable[[int, Message], None]
"""queue a message to a host's data link"""

WINDOW_SLICES = 3
OUTGOING_SLICES = 8
AHEAD = 2
"""pieces under way for each thread: one is worked on, the next one waits, so that no thread waits for the event loop"""

logger = logging.getLogger(__name__)


class ReducePlane:
    """The reduce of one run. Every method is called on the event loop's thread and returns at once.

    ``send(host, header, payload)`` and ``tell(host, message)`` queue chunks and messages downwards, ``finished`` and
    ``broken`` report the end of an attempt; all four are called on the same thread, possibly from within a method of
    the plane. ``outer`` makes each round's update of the parameters a step of its own; buffers and the initial
    broadcast are taken as they are. ``tuning`` is for tests and benchmarks: ``slice_elements``, ``mapped_elements``,
    ``window_slices``, ``outgoing_slices``, ``threads``.
    """

    def __init__(
        self,
        *,
        send: Send,
        tell: Tell,
        finished: Callable[[RoundFinished], None],
        broken: Callable[[RoundBroken], None],
        clock: Callable[[], float] = time.monotonic,
        outer: Nesterov | None = None,
        tuning: Mapping[str, int] | None = None,
    ) -> None:
        threads = min(4, os.cpu_count() or 1)
        usual = Settings(SLICE_ELEMENTS, MAPPED_ELEMENTS, threads, WINDOW_SLICES, OUTGOING_SLICES)
        self._cuts = replace(usual, **(tuning or {}))
        self._send = send
        self._tell = tell
        self._finished = finished
        self._broken = broken
        self._clock = clock
        self._ledger = Ledger(outer)
        self._pool = ThreadPoolExecutor(self._cuts.threads, thread_name_prefix="reduce")
        self._open: Attempt | None = None
        self._shared: dict[int, SharedArenas] = {}
        self._moved = asyncio.Event()
        self.ignored = 0
        """frames of another attempt, of a host that is not expected, or received before"""

    @property
    def consensus(self) -> FloatArray | None:
        """The last committed arena (f32, params then buffers), read-only; None before the first.

        Whoever holds it may keep it: a buffer that was handed out is never written again.
        """
        return self._ledger.values

    @property
    def outer_momentum(self) -> FloatArray | None:
        """The outer momentum behind the last committed arena (f32, params only), to keep like ``consensus``; None
        before the first, and without an outer optimizer."""
        return self._ledger.momentum

    def restore_outer(self, momentum: FloatArray) -> None:
        """Go on with the momentum of a checkpoint, (params_elements,) f32; call it before the first round is opened.

        Raises ``ValueError`` without an outer optimizer, once there is a round, or for what is no finite f32 vector.
        """
        if self._open is not None:
            raise ValueError("the outer momentum can be restored before the first round only")
        self._ledger.restore(momentum)

    def restore_consensus(self, values: FloatArray) -> None:
        """Start from a checkpoint: the initial broadcast brings this arena (f32, params then buffers), whatever ranks
        send. The plane keeps it. Raises ``ValueError`` once there is a round, or for what is no finite f32 vector.
        """
        if self._open is not None:
            raise ValueError("the consensus can be restored before the first round only")
        self._ledger.start_from(values)

    @property
    def waiting_for(self) -> dict[int, str]:
        """What the open attempt still misses, in words, by host; empty when none is open."""
        return self._open.streams.waiting_for() if self._open is not None else {}

    # ---------------------------------------------------------------------------------------------- what to expect

    def share(self, host: int, arenas: SharedArenas) -> None:
        """From its next contribution on, this host's ranks are read where they lie, and nothing is streamed to it."""
        self._shared[host] = arenas

    def unshare(self, host: int) -> None:
        """The host's data link is over, so its memory is not read any more."""
        self._shared.pop(host, None)

    def open(self, opening: OpenRound) -> None:
        """Expect one contribution from each of these hosts. An attempt that is still open is dropped.

        Raises ``ValueError`` without hosts, before the initial broadcast, for another model than the consensus is of,
        and for a restored momentum of another length than the parameters.
        """
        if not opening.hosts:
            raise ValueError(f"round {opening.round} was opened without hosts")
        self._ledger.check(opening)
        built = self._ledger.take_buffer(opening)
        self._open = Attempt(
            opening=opening,
            streams=Streams(fold_order(opening), initial=opening.initial, longest=self._cuts.slice_elements),
            base=None if opening.initial else self._ledger.consensus,
            built=built,
            outer=self._ledger.outer_step(built, opening.initial),
            started=self._clock(),
            start=self._ledger.start(opening.initial),
            outgoing=Alive(self._sent_on),
        )
        self._wake()

    def abort(self, round: int, attempt: int, reason: str) -> None:
        """Forget this attempt: what still arrives for it is ignored. ``reason`` is for the debug log.

        An attempt that had just finished is taken back as well, when the scheduler aborted it before it heard
        so: the consensus is then what it was before.
        """
        logger.debug("round %s, attempt %s aborted: %s", round, attempt, reason)
        if self._open is not None and self._open.number == (round, attempt):
            self._open = None
        else:
            self._ledger.take_back((round, attempt))
        self._wake()

    # ------------------------------------------------------------------------------------------- what hosts say

    def contribution(self, host: int, contribution: Contribution) -> None:
        """A host declares its work. Breaks the attempt when it, or memory that the host shares, is not what was
        expected."""
        attempt = self._expecting(host, contribution)
        if attempt is None:
            return
        shared = self._shared.get(host)
        try:
            fresh = attempt.streams.contribute(host, contribution, streamed=shared is None)
            if shared is not None:
                attempt.shared.add(host)
                attempt.map(host, shared)
        except ContributionRefused as refused:
            self._break(refused.reason, refused.host)
            return
        except SharedMemoryRefused as refused:
            self._break(str(refused), host)
            return
        self.ignored += not fresh
        failpoints.hit("plane.contribution", host=host, round=contribution.round, attempt=contribution.attempt)
        if attempt.streams.declared and not attempt.planned:
            self._begin(attempt)
        self._advance(attempt)

    def chunk(self, host: int, header: ChunkHeader, payload: memoryview) -> None:
        """A host's next elements; the plane keeps ``payload`` until it is summed."""
        attempt = self._open
        if attempt is None or host not in attempt.opening.hosts or not same_round(header, *attempt.number):
            self.ignored += 1
            return
        try:
            attempt.streams.arrived(host, header, payload)
        except ContributionRefused as refused:
            self._break(refused.reason, refused.host)
            return
        attempt.bytes_up += payload.nbytes
        attempt.arrived_at = self._clock()
        self._advance(attempt)

    def non_finite(self, host: int, found: NonFinite) -> None:
        """A host's relay saw a value that no sum may hold: the attempt is broken."""
        attempt = self._expecting(host, found)
        if attempt is None:
            return
        if found.rank not in attempt.opening.hosts[host] or not 0 <= found.element < attempt.streams.elements:
            where = f"element {found.element} of rank {found.rank}"
            self._break(f"it speaks of {where}, of which it knows nothing", host)
            return
        self._break_for(attempt, Culprit(found.element, found.value, host, found.rank))

    async def room(self, host: int) -> None:
        """Return once the plane can take another chunk from this host; await it before each read of its link.

        A host that is ahead of the slowest one waits here; its link's own flow control then holds it back.
        """
        while not self._has_room(host):
            await self._moved.wait()

    def close(self) -> None:
        """Drop everything and let the threads end."""
        self._open = None
        self._shared.clear()
        self._wake()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------------ one attempt

    def _expecting(self, host: int, message: Contribution | NonFinite) -> Attempt | None:
        attempt = self._open
        if attempt is None or host not in attempt.opening.hosts or (message.round, message.attempt) != attempt.number:
            self.ignored += 1
            return None
        return attempt

    def _begin(self, attempt: Attempt) -> None:
        """Everybody has declared: say what comes down, and bring up to date what does not move."""
        attempt.make_plan(self._cuts)
        attempt.declared_at = self._clock()
        if not attempt.streams.realized:
            return
        round_, number = attempt.number
        coming = UpdateComing(round_, number, absolute=attempt.opening.initial, still=attempt.still)
        for host in attempt.listeners:
            self._tell(host, coming)
        copies, attempt.copies = attempt.copies, []
        for start, stop in copies:
            assert attempt.base is not None, "nothing is still in the initial broadcast"
            self._run(attempt, pieces.copy, attempt.base.values, attempt.built.values, start, stop)

    def _advance(self, attempt: Attempt) -> None:
        """Start every sum whose slices are all here, a few at a time."""
        if attempt.culprits and not attempt.running:  # the first one, whichever thread was quicker
            self._break_for(attempt, min(attempt.culprits, key=lambda culprit: culprit.element))
            return
        while (
            attempt.planned
            and not attempt.culprits
            and attempt.next_sum < len(attempt.plan)
            and attempt.running < AHEAD * self._cuts.threads
            and attempt.outgoing.count + len(attempt.summed) + attempt.running < self._cuts.outgoing_slices
            and attempt.streams.complete(attempt.plan[attempt.next_sum])
        ):
            cut = attempt.plan[attempt.next_sum]
            taken = attempt.streams.take(cut)
            self._run(attempt, pieces.reduce_piece, attempt.piece(cut, taken), at=attempt.next_sum, taken=taken)
            attempt.next_sum += 1
        self._wake()
        if attempt.complete:
            self._close(attempt)

    def _run(
        self,
        attempt: Attempt,
        work: Callable[..., Any],
        *arguments: Any,
        at: int | None = None,
        taken: Mapping[int, Streamed] | None = None,
    ) -> None:
        """Have a thread do this; ``at``: the place in the plan of what it makes."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)
        attempt.running += 1
        future.add_done_callback(lambda done: self._ran(attempt, done, at, dict(taken or {})))

    def _ran(self, attempt: Attempt, done: asyncio.Future[Any], at: int | None, taken: dict[int, Streamed]) -> None:
        attempt.running -= 1
        attempt.streams.summed(taken)
        if attempt is not self._open or done.cancelled():
            return
        if error := done.exception():
            self._break(f"a piece of the round could not be worked on: {error!r}")
            return
        result = done.result()
        if isinstance(result, Culprit):
            attempt.culprits.append(result)
        elif at is not None:
            attempt.summed[at] = result
            failpoints.hit("plane.summed", round=attempt.number[0], offset=attempt.plan[at].offset)
            self._send_summed(attempt)
        self._advance(attempt)

    def _send_summed(self, attempt: Attempt) -> None:
        """Send on what is summed, in arena order, to everybody who listens, idle hosts too."""
        round_, number = attempt.number
        while attempt.next_send in attempt.summed:
            values = attempt.summed.pop(attempt.next_send)
            cut = attempt.plan[attempt.next_send]
            attempt.next_send += 1
            if values is None:
                continue
            encoding = section_encoding(cut.section, attempt.opening.encoding)
            header = ChunkHeader(chunk_round(round_), number, cut.section, cut.offset, cut.elements, encoding)
            attempt.outgoing.add(values)
            payload = values.data.toreadonly()
            for host in attempt.listeners:
                attempt.bytes_down += payload.nbytes
                failpoints.hit("plane.chunk.down", host=host, round=round_, offset=cut.offset)
                self._send(host, header, payload)

    def _sent_on(self) -> None:
        """A slice of some update is on its way to everybody, or dropped."""
        if self._open is not None:
            self._advance(self._open)

    def _close(self, attempt: Attempt) -> None:
        """Everything is summed and sent, or nobody worked: this is the consensus, and the round's end."""
        opening = attempt.opening
        if attempt.streams.realized and attempt.shared and not attempt.built.path:
            self._break("no further file can be opened for the consensus that hosts on this machine read")
            return
        self._open = None
        if attempt.streams.realized:
            coming = UpdateComing(*attempt.number, opening.initial, attempt.still, attempt.built.path)
            for host in sorted(attempt.shared):
                self._tell(host, coming)
            self._ledger.commit(attempt)
        self._wake()
        failpoints.hit("plane.finished.before", round=opening.round)
        self._finished(attempt.outcome(self._clock()))
        failpoints.hit("plane.finished.after", round=opening.round)

    def _break_for(self, attempt: Attempt, bad: Culprit) -> None:
        section = Section.PARAMS if bad.element < attempt.opening.params_elements else Section.BUFFERS
        where = f"{bad.value} at element {bad.element} ({section.name.lower()})"
        if bad.host is None:
            self._break(f"the new consensus is {where}, though every contribution is finite")
            return
        share, rank = attempt.streams.contributions.get(bad.host), bad.rank
        if rank is None and share is not None:
            worked = [rank for rank, mass in share.masses.items() if is_realized(mass)]
            rank = worked[0] if len(worked) == 1 else None
        who = f"host {bad.host} (ranks {', '.join(map(str, sorted(attempt.opening.hosts[bad.host])))})"
        if rank is not None:
            who = f"rank {rank} of host {bad.host}"
        self._break(f"{who} contributed {where}", bad.host, NonFiniteValue(rank, bad.element, bad.value))

    def _break(self, reason: str, host: int | None = None, value: NonFiniteValue | None = None) -> None:
        assert self._open is not None, "only an open attempt breaks"
        round_, attempt = self._open.number
        self._open = None
        self._wake()
        self._broken(RoundBroken(round=round_, attempt=attempt, reason=reason, host=host, non_finite=value))

    # ----------------------------------------------------------------------------------- waiting

    def _has_room(self, host: int) -> bool:
        attempt = self._open
        return attempt is None or attempt.streams.held(host) < self._cuts.window_slices * self._cuts.slice_elements

    def _wake(self) -> None:
        self._moved.set()
        self._moved.clear()
