"""The controller's half of the CPU reduce: a stream in from every host, one averaged stream out to all.

One :class:`ReducePlane` serves one run. It lives on the event loop's thread and only moves memoryviews there;
slices are summed in a small thread pool, sent on in arena order, and kept, since the controller's copy of the
last consensus is what a checkpoint is written from. It knows nothing of scheduling: ``open`` says what to
expect, ``abort`` to forget it (design section 6; behaviour G10; laws L1, L4, L8).

Memory is two arenas (the last consensus and the one that is being built), with an outer optimizer as many of its
momentum, plus, per host, at most ``window_slices`` slices: the runtime awaits :meth:`ReducePlane.room` before it
reads more from a host's data link.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from backend.core.vocabulary import OpenRound, RoundBroken, RoundFinished
from backend.reduce.accumulator import (
    SLICE_ELEMENTS,
    Accumulator,
    ContributionRefused,
    Slice,
    chunk_round,
    same_round,
    slices,
)
from backend.reduce.attempt import Attempt, Buffer
from backend.reduce.outer import Nesterov, OuterSlice, reduce_slice
from backend.reduce.sums import F32, FloatArray, NonFinite, reciprocal
from wire.messages import Contribution
from wire.session import ChunkHeader, Section

Send = Callable[[int, ChunkHeader, memoryview], None]
"""queue a chunk to a host's data link; seal it when it is written, since a view is free and a sealed copy is not"""

WINDOW_SLICES = 8

logger = logging.getLogger(__name__)


class ReducePlane:
    """The reduce of one run. Every method is called on the event loop's thread and returns at once.

    ``send(host, header, payload)`` queues a chunk downwards, ``finished`` and ``broken`` report the end of an
    attempt; all three are called on the same thread, possibly from within a method of the plane. ``outer`` makes each
    round's average of the parameters a step of its own; buffers and the initial broadcast are taken as they are.
    """

    def __init__(
        self,
        *,
        send: Send,
        finished: Callable[[RoundFinished], None],
        broken: Callable[[RoundBroken], None],
        slice_elements: int = SLICE_ELEMENTS,
        window_slices: int = WINDOW_SLICES,
        threads: int = min(4, os.cpu_count() or 1),
        clock: Callable[[], float] = time.monotonic,
        outer: Nesterov | None = None,
    ) -> None:
        self._send = send
        self._finished = finished
        self._broken = broken
        self._slice_elements = slice_elements
        self._window = window_slices * slice_elements
        self._threads = threads
        self._clock = clock
        self._outer = outer
        self._restored: FloatArray | None = None
        self._start: FloatArray | None = None
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="reduce")
        self._open: Attempt | None = None
        self._closed_attempt: tuple[int, int] | None = None
        self._consensus: Buffer | None = None
        self._before: Buffer | None = None
        self._moved = asyncio.Event()
        self.ignored = 0
        """frames of another attempt, of a host that is not expected, or received before"""

    @property
    def consensus(self) -> FloatArray | None:
        """The last committed arena (f32, params then buffers), read-only; None before the first.

        Whoever holds it may keep it: a buffer that was handed out is never written again.
        """
        return None if self._consensus is None else self._lend(self._consensus, self._consensus.values)

    @property
    def outer_momentum(self) -> FloatArray | None:
        """The outer momentum behind the last committed arena (f32, params only), to keep like ``consensus``; None
        before the first, and without an outer optimizer."""
        if self._consensus is None or self._consensus.momentum is None:
            return None
        return self._lend(self._consensus, self._consensus.momentum)

    def restore_outer(self, momentum: FloatArray) -> None:
        """Go on with the momentum of a checkpoint, (params_elements,) f32; call it before the first round is opened.

        Raises ``ValueError`` without an outer optimizer, once there is a round, or for what is no finite f32 vector.
        """
        if self._outer is None:
            raise ValueError("this run has no outer optimizer whose momentum could be restored")
        if self._open is not None or self._consensus is not None:
            raise ValueError("the outer momentum can be restored before the first round only")
        if momentum.dtype != F32 or momentum.ndim != 1:
            raise ValueError(f"the outer momentum is one f32 vector, not {momentum.dtype} of shape {momentum.shape}")
        if not np.isfinite(momentum).all():
            raise ValueError("the outer momentum to restore is not finite")
        self._restored = momentum.copy()

    def restore_consensus(self, values: FloatArray) -> None:
        """Start from a checkpoint: the initial round's consensus is this arena (f32, params then buffers), whatever
        ranks send. Call it before the first round is opened.

        Raises ``ValueError`` once there is a round, or for what is no finite f32 vector.
        """
        if self._open is not None or self._consensus is not None:
            raise ValueError("the consensus can be restored before the first round only")
        if values.dtype != F32 or values.ndim != 1:
            raise ValueError(f"the consensus is one f32 vector, not {values.dtype} of shape {values.shape}")
        if not np.isfinite(values).all():
            raise ValueError("the consensus to restore is not finite")
        self._start = values

    @property
    def waiting_for(self) -> dict[int, str]:
        """What the open attempt still misses, in words, by host; empty when none is open."""
        return self._open.counts.waiting_for() if self._open is not None else {}

    def open(self, opening: OpenRound) -> None:
        """Expect one contribution from each of these hosts. An attempt that is still open is dropped.

        Raises ``ValueError`` without hosts, and for a restored momentum of another length than the parameters.
        """
        if not opening.hosts:
            raise ValueError(f"round {opening.round} was opened without hosts")
        if self._consensus is not None:
            self._restored = None  # it went on with the first consensus, which nobody can take back any more
        if self._restored is not None and self._restored.size != opening.params_elements:
            sizes = f"{self._restored.size} elements, the parameters {opening.params_elements}"
            raise ValueError(f"the restored outer momentum has {sizes}")
        counts = Accumulator(opening)
        if not opening.initial:
            self._start = None
        if self._start is not None and self._start.size != counts.elements:
            raise ValueError(f"the restored consensus has {self._start.size} elements, the model {counts.elements}")
        self._open = Attempt(
            counts=counts,
            plan=slices(opening.params_elements, opening.buffers_elements, self._slice_elements),
            built=self._take_buffer(counts.elements, opening.params_elements),
            started=self._clock(),
            inbox={host: deque() for host in counts.hosts},
        )
        self._closed_attempt = None
        self._wake()

    def abort(self, round: int, attempt: int, reason: str) -> None:
        """Forget this attempt: what still arrives for it is ignored. ``reason`` is for the debug log.

        An attempt that had just finished is taken back as well, when the scheduler aborted it before it heard
        so: the consensus is then what it was before.
        """
        logger.debug("round %s, attempt %s aborted: %s", round, attempt, reason)
        if self._open is not None and self._open.number == (round, attempt):
            self._open = None
        elif self._closed_attempt == (round, attempt):
            self._consensus, self._before = self._before, None
            self._closed_attempt = None
        self._wake()

    def contribution(self, host: int, contribution: Contribution) -> None:
        """A host declares its work. Breaks the attempt when it is not what was expected."""
        attempt = self._expecting(host)
        if attempt is None or (contribution.round, contribution.attempt) != attempt.number:
            self.ignored += 1
            return
        try:
            fresh = attempt.counts.contribute(host, contribution)
        except ContributionRefused as refused:
            self._break(refused.reason, refused.host)
            return
        self.ignored += not fresh
        if attempt.counts.declared and not attempt.counts.realized:
            self._close(attempt)
        else:
            self._advance(attempt)

    def chunk(self, host: int, header: ChunkHeader, payload: memoryview) -> None:
        """A host's next elements; the plane keeps ``payload`` until it is summed."""
        attempt = self._expecting(host)
        if attempt is None or not same_round(header, *attempt.number):
            self.ignored += 1
            return
        try:
            fresh = attempt.counts.arrived(host, header, payload.nbytes)
        except ContributionRefused as refused:
            self._break(refused.reason, refused.host)
            return
        if not fresh:
            self.ignored += 1
            return
        attempt.inbox[host].append((header.offset, np.frombuffer(payload, dtype=F32)))
        attempt.bytes_up += payload.nbytes
        self._advance(attempt)

    async def room(self, host: int) -> None:
        """Return once the plane can take another chunk from this host; await it before each read of its link.

        A host that is ahead of the slowest one waits here; its link's own flow control then holds it back.
        """
        while not self._has_room(host):
            await self._moved.wait()

    def close(self) -> None:
        """Drop everything and let the threads end."""
        self._open = None
        self._wake()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------------ one attempt

    def _expecting(self, host: int) -> Attempt | None:
        attempt = self._open
        return attempt if attempt is not None and host in attempt.inbox else None

    def _advance(self, attempt: Attempt) -> None:
        """Start every sum whose slices are all here, a few at a time."""
        counts = attempt.counts
        while (
            counts.declared
            and attempt.next_sum < len(attempt.plan)
            and attempt.running < self._threads
            and counts.covers(attempt.plan[attempt.next_sum])
        ):
            self._sum(attempt, attempt.next_sum)
            attempt.next_sum += 1
        self._wake()
        if counts.declared and attempt.next_send == len(attempt.plan):
            self._close(attempt)

    def _sum(self, attempt: Attempt, index: int) -> None:
        piece = attempt.plan[index]
        mass = attempt.counts.mass if piece.section is Section.PARAMS else attempt.counts.mover_mass
        future = asyncio.get_running_loop().run_in_executor(
            self._pool,
            reduce_slice,
            [attempt.take(host, piece) for host in attempt.counts.contributors],
            attempt.built.values[piece.offset : piece.stop],
            reciprocal(mass),
            self._outer_slice(attempt, piece),
        )
        attempt.running += 1
        future.add_done_callback(lambda done: self._summed(attempt, index, done))

    def _outer_slice(self, attempt: Attempt, piece: Slice) -> OuterSlice | None:
        """The outer step of this slice: from the last consensus, which no initial broadcast and no first round has."""
        after = attempt.built.momentum
        if self._outer is None or after is None or piece.section is not Section.PARAMS:
            return None
        last = self._consensus
        start = last.values if last is not None and not attempt.counts.opening.initial else None
        before = self._restored if last is None else last.momentum
        cut = slice(piece.offset, piece.stop)
        return OuterSlice(
            self._outer,
            start=None if start is None else start[cut],
            before=None if before is None else before[cut],
            after=after[cut],
        )

    def _summed(self, attempt: Attempt, index: int, done: asyncio.Future[NonFinite | None]) -> None:
        attempt.running -= 1
        if attempt is not self._open or done.cancelled():
            return
        if error := done.exception():
            self._break(f"slice {index} could not be summed: {error!r}")
            return
        if bad := done.result():
            self._break_for(attempt, attempt.plan[index], bad)
            return
        if self._start is not None:
            piece = attempt.plan[index]
            attempt.built.values[piece.offset : piece.stop] = self._start[piece.offset : piece.stop]
        attempt.summed.add(index)
        self._send_summed(attempt)
        self._advance(attempt)

    def _send_summed(self, attempt: Attempt) -> None:
        """Send on what is summed, in arena order, to everybody who is expected, idle hosts too."""
        round_, number = attempt.number
        while attempt.next_send in attempt.summed:
            attempt.summed.remove(attempt.next_send)
            piece = attempt.plan[attempt.next_send]
            header = ChunkHeader(chunk_round(round_), number, piece.section, piece.offset, piece.elements)
            payload = attempt.built.values[piece.offset : piece.stop].data.toreadonly()
            attempt.next_send += 1
            for host in attempt.counts.hosts:
                attempt.bytes_down += payload.nbytes
                self._send(host, header, payload)

    def _close(self, attempt: Attempt) -> None:
        """Everything is summed and sent, or nobody worked: this is the consensus, and the round's end."""
        counts = attempt.counts
        self._open = None
        if counts.realized:
            self._before, self._consensus = self._consensus, attempt.built
            self._closed_attempt = attempt.number
        self._wake()
        self._finished(
            RoundFinished(
                round=counts.opening.round,
                attempt=counts.opening.attempt,
                realized=counts.realized,
                buffers_realized=counts.buffers_realized,
                steps=counts.steps,
                mass=counts.mass,
                bytes_up=attempt.bytes_up,
                bytes_down=attempt.bytes_down,
                seconds=self._clock() - attempt.started,
            )
        )

    def _break_for(self, attempt: Attempt, piece: Slice, bad: NonFinite) -> None:
        where = f"{bad.value} at element {piece.offset + bad.index} ({piece.section.name.lower()})"
        if bad.contributor is None:
            self._break(f"{bad.what} is {where}, though every contribution is finite")
            return
        host = attempt.counts.contributors[bad.contributor]
        ranks = ", ".join(map(str, sorted(attempt.counts.opening.hosts[host])))
        self._break(f"host {host} (ranks {ranks}) contributed {where}", host)

    def _break(self, reason: str, host: int | None = None) -> None:
        assert self._open is not None, "only an open attempt breaks"
        round_, attempt = self._open.number
        self._open = None
        self._wake()
        self._broken(RoundBroken(round=round_, attempt=attempt, reason=reason, host=host))

    # ----------------------------------------------------------------------------------- buffers and waiting

    @staticmethod
    def _lend(buffer: Buffer, values: FloatArray) -> FloatArray:
        buffer.lent = True
        view = values.view()
        view.flags.writeable = False
        return view

    def _take_buffer(self, elements: int, params_elements: int) -> Buffer:
        """The arena to build in: the consensus before the last one, unless somebody may still read it."""
        spare, self._before = self._before, None
        if spare is not None and not spare.lent and spare.values.size == elements:
            return spare
        momentum = None if self._outer is None else np.empty(params_elements, dtype=F32)
        return Buffer(np.empty(elements, dtype=F32), momentum)

    def _has_room(self, host: int) -> bool:
        attempt = self._expecting(host)
        if attempt is None:
            return True
        return attempt.counts.received.get(host, 0) - attempt.summed_to < self._window

    def _wake(self) -> None:
        self._moved.set()
        self._moved.clear()
