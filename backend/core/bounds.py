"""Every wait of a march has a deadline, and what happens at it has a name (design section 11; behaviour J14).

    forming                  the run fails, naming who is missing
    a rank without progress  its plan is issued again; at the ceiling the rank is declared dead as TrainStall and the
                             others go on or, when nobody else would be left or the run tolerates no more deaths,
                             the run is saved and stopped
    a round                  the run is saved and stopped as ReduceStall
    the silence of a host    its ranks are dead; that is its agent's silence, or its relay's

A rank that hangs counts as dead because the others wait for it and it has had its chance; its work returns to the pool
and, should it wake, it is fenced like any zombie. When all that have work hang, the cause is hardly the ranks': ending
with a checkpoint is then better than burying one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.core.deaths import Casualty
from backend.core.ending import stalled
from backend.core.liveness import SaveReason, tolerance

if TYPE_CHECKING:
    from backend.core.march import March

FRESH_BEATS = 3
"""heartbeats that may be missed before what a host's agent said last is too old"""
IDLE = ("starting", "idle")
"""what a rank's shared counter says when it has no chunk"""


class Bounds:
    """The deadlines of one march."""

    def __init__(self, march: March) -> None:
        self._march = march

    def deadline(self) -> float | None:
        """When something must have happened, silence of hosts apart."""
        march = self._march
        waits = [march.plane.deadline()]
        if march.phase == "forming":
            waits.append(march.forming.deadline)
            return min(at for at in waits if at is not None)
        waits += [self._round_deadline(), march.checkpoints.deadline()]
        if march.ending is None:
            waits.append(march.training.watch.next_deadline())
        elif march.cycle.open is None and march.ending.timed(bool(march.evaluations.pending)):
            waits.append(march.ending.deadline)
        return min((at for at in waits if at is not None), default=None)

    def lagged(self, seconds: float) -> None:
        """The controller was away for so long: what happened meanwhile is still unread, so every wait grows by it."""
        march = self._march
        march.relays.lagged(seconds)
        march.forming.deadline += seconds
        march.training.watch.lagged(seconds)
        march.checkpoints.lagged(seconds)
        march.plane.lagged(seconds)
        if march.ending is not None:
            march.ending.deadline += seconds
        if march.cycle.open is not None:
            march.cycle.open.grace += seconds

    def watch(self, now: float) -> None:
        """Act on every deadline that has passed."""
        march = self._march
        for host in march.liveness.late(now):
            march.losses.host(march.world.hosts[host], f"no sign of life for {march.liveness.timeout:g} s", now)
        for host in march.relays.late(now):
            silence = march.relays.silence(host, now)
            reason = f"its relay was not heard for {march.relays.timeout:g} s"
            march.losses.host(march.world.hosts[host], reason, now, silence)
        march.plane.watch(now)
        if march.end is not None:
            return
        march.out += march.checkpoints.expire(now)
        if march.phase == "forming":
            if now >= march.forming.deadline:
                march.forming.expired(march, now)
            return
        opened = self._round_deadline()
        if opened is not None and now >= opened:
            self._round_stalled(now)
        elif march.ending is None:
            nudges, late = march.training.watch.overdue(now)
            for rank in nudges:
                self._issue_again(rank, now)
            if late:
                self._ranks_stalled(late, now)

    def _round_deadline(self) -> float | None:
        """None while no round is open. A contributor on an errand has its time on top."""
        march = self._march
        opened = march.cycle.open
        if opened is None:
            return None
        errands = march.training.watch.longest_errand(opened.waiting)
        return opened.opened_at + opened.grace + march.config.stall_seconds + errands

    def _round_stalled(self, now: float) -> None:
        march = self._march
        opened = march.cycle.open
        assert opened is not None
        what = stalled(opened, march.world, march.config.stall_seconds)
        march.save_and_stop(SaveReason.REDUCE_STALL, what, now)

    def _issue_again(self, rank: int, now: float) -> None:
        """The plan goes out once more, unless the rank's own counter shows that it has it or did more than was heard: a
        rank that is merely slow is left alone. Of a host that is silent nothing is known, and nothing would arrive."""
        march = self._march
        seat = march.world.ranks[rank]
        if march.liveness.silence(seat.host, now) > FRESH_BEATS * march.config.heartbeat_seconds:
            return
        if seat.progress is not None and (seat.progress.state not in IDLE or seat.progress.steps > seat.steps):
            return
        waited = march.training.watch.waited(rank, now)
        text = f"{march.world.where(rank)} did no batch for {waited:.0f} s: its plan is issued again"
        march.event("plan_issued_again", text, "warning", rank=rank)
        march.out += march.training.issue_again(rank)

    def _ranks_stalled(self, ranks: list[int], now: float) -> None:
        march = self._march
        who = ", ".join(march.world.where(rank) for rank in ranks)
        waited = march.training.watch.waited(ranks[0], now)
        what = f"no batch within {waited:.0f} s"
        moving = [rank for rank in march.world.alive() if rank not in ranks]
        size = len(march.world.ranks)
        gone, limit = len(march.world.dead()) + len(ranks), march.config.max_failure
        after = tolerance(gone, size, limit, collective=march.plane.collective)
        if moving and not after.stop:
            waits = march.training.watch.waited
            hung = [Casualty(rank, f"TrainStall: {what}", detect_seconds=waits(rank, now)) for rank in ranks]
            march.losses.ranks(hung, now)
        else:
            march.save_and_stop(SaveReason.TRAIN_STALL, f"{what}; waiting for {who}", now)
