"""Rounds over the host's relay: have the values in the arena, declare them, adopt the consensus (design section 6)."""

from __future__ import annotations

import contextlib
import sys

import msgspec

from wire import failpoints
from wire.messages import SnapshotReady
from wire.ranges import Ranges
from worker.actions import Adopt, LookAhead, Pack, Resend
from worker.arena import Arena
from worker.arena_file import ConsensusGone
from worker.desk import Desk


class StreamPlane:
    """One rank's side. In the collective modes, only the initial broadcast goes this way."""

    def __init__(self, desk: Desk, arena: Arena) -> None:
        self._desk = desk
        self._arena = arena
        self._still: Ranges = []

    def obey(self, order: Pack | Resend | LookAhead | Adopt) -> None:
        """Do one step of a round."""
        match order:
            case Pack(ready):
                failpoints.identify(round=ready.round, attempt=ready.attempt)
                self._pack()
                self._declare(ready)
            case Resend(ready):
                self._declare(ready)
            case LookAhead():
                self._look_ahead(order)
            case Adopt():
                self._adopt(order)

    def _pack(self) -> None:
        failpoints.hit("rank.pack")
        self._desk.window.requested()
        self._still = self._arena.pack()
        self._desk.window.packed()

    def _declare(self, ready: SnapshotReady) -> None:
        failpoints.identify(round=ready.round, attempt=ready.attempt)
        failpoints.hit("rank.snapshot.before")
        self._desk.link.send(msgspec.structs.replace(ready, still=self._still))
        failpoints.hit("rank.snapshot.after")

    def _look_ahead(self, order: LookAhead) -> None:
        """While the others' work streams in, so that less is left to do once it is committed."""
        hashed = self._desk.options.verify_consensus
        with contextlib.suppress(ConsensusGone):  # the commit will not come either
            self._arena.look_ahead(order.consensus, order.stop, fresh=order.fresh, hashed=hashed)

    def _adopt(self, order: Adopt) -> None:
        desk, options = self._desk, self._desk.options
        failpoints.hit("rank.adopt", round=order.round)
        started = desk.window.clock()
        desk.window.count_idle(started)
        try:
            moved = self._arena.adopt(
                order.consensus,
                params=order.params,
                buffers=order.buffers,
                ahead=options.write_back if order.ahead else None,
                hashed=options.verify_consensus,
                looked=order.looked,
            )
        except ConsensusGone as gone:  # Rewind is on its way; were it not, the round's ceiling would end the run
            print(f"round {order.round} is not adopted: {gone}", file=sys.stderr, flush=True)
            desk.control.not_adopted()
            desk.window.rest()
            return
        if order.restart:
            desk.trainer.restart()
        ack = desk.acknowledge(order.round, moved, started)
        desk.window.rest()
        desk.link.send(ack)
        failpoints.hit("rank.ack.after", round=order.round)
