"""How a run ends: score the last consensus, write the checkpoint, let everybody leave, and only then say so.

scoring -> saving -> leaving -> over
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from backend.core.cycle import OpenedRound
from backend.core.liveness import SaveReason
from backend.core.training import Training
from backend.core.vocabulary import CloseLink, Effect, Record, SendHost, SendRank
from backend.core.world import HostSeat, World
from wire.messages import RunEnded, Shutdown

if TYPE_CHECKING:
    from backend.core.march import March

LEAVING_SECONDS = 15.0
"""How long ranks may take to exit after a clean Shutdown before the run ends without them; at least half a heartbeat
timeout."""
STEPS = ("scoring", "saving", "leaving", "over")


@dataclass(slots=True)
class Ending:
    """The end that is under way. ``deadline`` bounds the step at hand; what is late is left out, and the end says
    so."""

    phase: str
    """done or failed; interrupted: saved under a controller that came back to a part of its cohort"""
    reason: str
    save: SaveReason
    """what the checkpoint on the way is for"""
    deadline: float
    step: str = "scoring"

    def worsen(self, because: str) -> None:
        """Something on the way out failed: the run is not done, and the reason says which part."""
        self.phase = "failed"
        self.reason = f"{self.reason}, but {because}"

    def timed(self, scoring: bool) -> bool:
        """Whether ``deadline`` bounds what is waited for now; a checkpoint has its own bounds. ``scoring``: a score is
        still to come."""
        return self.step == "leaving" or (self.step == "scoring" and scoring)

    def go(self, step: str, deadline: float) -> None:
        """On to a later step."""
        assert STEPS.index(step) > STEPS.index(self.step), f"{self.step} -> {step}"
        self.step, self.deadline = step, deadline


def outcome(training: Training, refused: str) -> tuple[str, str]:
    """Phase and reason of a run whose epochs are over. ``refused`` is the last refusal, if there was one."""
    epochs = training.config.epochs
    if not any(training.samples_accepted):
        return "failed", f"Not one sample was accepted. The last refusal: {refused}"
    reason = "The epoch is trained" if epochs == 1 else f"All {epochs} epochs are trained"
    if training.samples_lost:
        reason += f", but {training.samples_lost} samples are lost to values that are not finite"
    return "done", reason


def farewell(seat: HostSeat, phase: str, reason: str) -> list[Effect]:
    """What a host is told at the end of the run."""
    seat.state = "left"
    return [
        Record("hosts", {"host": seat.host, "state": "left", "reason": reason}),
        SendHost(seat.link, RunEnded(phase=phase, reason=reason)),
        CloseLink(seat.link, reason),
    ]


def step_ending(march: March, now: float) -> bool:
    """One step of a march's way out; whether it changed anything."""
    ending, desk = march.ending, march.checkpoints
    assert ending is not None
    late = now >= ending.deadline
    if ending.step == "scoring":
        if late:
            march.evaluations.pending.clear()
        if march.evaluations.pending or desk.awaited:
            return False
        ending.go("saving", now)
        trained = march.cycle.next_round > march.cycle.first_round or march.forming.brings is not None
        if trained and not desk.busy:
            march.save(ending.reason, now)
        return True
    if ending.step == "saving":
        if desk.awaited:
            return False
        if desk.orphaned and march.world.alive():  # whoever was to hand it over did not: the next one does
            march.save(ending.reason, now)
            return True
        if problem := "its checkpoint was not written in time" if desk.busy else desk.unsaved:
            ending.worsen(problem)
        ending.go("leaving", now + max(LEAVING_SECONDS, march.config.heartbeat_timeout_seconds / 2))
        march.out += [SendRank(rank, Shutdown(reason=ending.reason)) for rank in march.world.alive()]
        return True
    if march.world.alive() and not late:
        return False
    march.finish(ending.phase, ending.reason, now)
    return True


def stalled(opened: OpenedRound, world: World, seconds: float) -> str:
    """Which round did not close in time, and who is waited for: whoever did not adopt it or, before it is summed, whose
    own counter does not say that it takes part."""
    late = [rank for rank in world.alive() if rank in opened.waiting]
    if opened.finished is None:
        absent = [rank for rank in late if (progress := world.ranks[rank].progress) and progress.state != "reducing"]
        late = absent or late
    who = ", ".join(world.where(rank) for rank in late) or "nobody in particular"
    return f"round {opened.round} did not close within {seconds:g} s; waiting for {who}"
