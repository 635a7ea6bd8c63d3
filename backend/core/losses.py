"""Who is lost, and how the rest of the cohort goes on without: the one way from an exit, a silence or a broken link to
a death on record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.core.deaths import Casualty, bury
from backend.core.liveness import SaveReason, tolerance
from backend.core.poison import Poison
from backend.core.vocabulary import CloseLink, DropHost, Record, SendHost
from backend.core.world import HostSeat
from wire.messages import ExitCause, RunEnded

if TYPE_CHECKING:
    from backend.core.march import March


class Losses:
    """Deaths of one march."""

    def __init__(self, march: March) -> None:
        self._march = march
        self._poison = Poison(march.config)

    def exited(self, rank: int, cause: ExitCause, now: float) -> None:
        """A rank's process ended: because it was told to, or it died, however politely."""
        march = self._march
        seat = march.world.ranks[rank]
        seat.exit = cause
        if not seat.alive:
            return
        if march.leaving or (cause.clean and not march.forming.restored):  # told to, maybe by the controller before
            march.world.remove(rank, "left")
            return
        batch = march.training.at_work_on(rank, max(seat.steps, cause.last_step))
        why = self._poison.died(rank, *batch) if batch is not None else ""
        self.ranks([Casualty(rank, "its process ended", cause, cause.seen_seconds_ago)], now)
        if why and march.ending is None and march.end is None:
            march.save_and_stop(SaveReason.REPEATED_FAILURE, why, now)

    def host(self, seat: HostSeat, reason: str, now: float, silence: float | None = None) -> None:
        """The host is out, with every rank that it carried. ``silence``: for how many seconds nothing was heard of what
        is lost; without it, of the host's agent."""
        march = self._march
        if seat.state in ("left", "lost"):
            return
        silence = march.liveness.silence(seat.host, now) if silence is None else silence
        march.liveness.remove(seat.host)
        march.relays.remove(seat.host)
        if march.leaving:
            seat.state = "left"
            for rank in seat.ranks:
                if march.world.lives(rank):
                    march.world.remove(rank, "left")
            return
        seat.state = "lost"
        told = f"this host was declared lost: {reason}"
        march.out += [
            Record("hosts", {"host": seat.host, "state": "lost", "reason": reason}, durable=True),
            DropHost(seat.host, reason),
            SendHost(seat.link, RunEnded(phase="failed", reason=told)),
            CloseLink(seat.link, reason),
        ]
        if not seat.ranks:
            march.event("relay_lost", f"{seat.name}, a relay without ranks, was lost: {reason}", "error")
        self.ranks([Casualty(rank, reason, detect_seconds=silence) for rank in seat.ranks], now)

    def ranks(self, casualties: list[Casualty], now: float) -> None:
        """Deaths of one cause are one step: all are marked before anybody is asked to do anything."""
        march = self._march
        casualties = [casualty for casualty in casualties if march.world.lives(casualty.rank)]
        for casualty in casualties:
            march.world.remove(casualty.rank, "dead")
        for casualty in casualties:
            march.out += bury(march, casualty, now)
        if not casualties or march.end is not None:
            return
        if march.phase == "forming":
            march.forming.bereaved(march, casualties[0].sentence(march.world), now)
            return
        self._carry_on_without({casualty.rank for casualty in casualties}, now)
        for casualty in casualties:
            march.recovery.declared(march, casualty.rank, casualty.detect_seconds, now)

    def _carry_on_without(self, dead: set[int], now: float) -> None:
        march = self._march
        deaths, size, limit = len(march.world.dead()), len(march.world.ranks), march.config.max_failure
        verdict = tolerance(deaths, size, limit, collective=march.plane.collective)
        reason = verdict.reason + march.refusals.epitaph(dead)
        march.out += march.plane.bereaved(dead, now)
        current = march.cycle.open
        if current is not None and current.finished is None and current.ranks & dead:
            why = f"rank(s) {', '.join(map(str, sorted(dead)))} died"
            hosts = march.world.alive_by_host()
            march.out += march.cycle.abandon(reason) if verdict.stop else march.cycle.retry(hosts, why, now)
        substitute = march.errands.rank()
        for rank in sorted(dead):
            asked = march.evaluations.rank_died(rank, substitute)
            if asked and substitute is not None:
                march.excuse_to_score(substitute)
            march.out += asked
            march.out += march.checkpoints.rank_died(rank, now)
        if verdict.stop and march.ending is None:
            assert verdict.save_reason is not None
            march.end_after("failed", f"{verdict.save_reason.label}: {reason}", verdict.save_reason, now)
