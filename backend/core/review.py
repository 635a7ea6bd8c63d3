"""What becomes of the pace when a round closes: times to the scheduler, the guard's verdict, the meta-controller's, and
both applied, in this order (behaviour F9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backend.core.config import RunConfig
from backend.core.cycle import OpenedRound
from backend.core.elche_rules import Decision
from backend.core.guard import divergence_report, guard_for
from backend.core.meta import MetaController, first_known_lr
from backend.core.scheduling import Scheduler
from backend.core.timing import WindowReport
from backend.core.verdicts import Stable, Verdict


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round decided."""

    decision: Decision
    divergence: float | None
    """the largest of the replicas' distances from the consensus; none when nobody reported one"""
    verdict: str
    """stable, suppress_growth or nudge_down: the strongest of guard's and meta-controller's"""
    reason: str


class Review:
    """Guard and meta-controller of a run, and what they last said."""

    def __init__(self, config: RunConfig) -> None:
        self.guard = guard_for(config)
        self.meta = MetaController() if config.meta_controller else None
        self.last: Outcome | None = None

    def close(
        self, opened: OpenedRound, report: WindowReport, scheduler: Scheduler, slack_ms: Mapping[int, float]
    ) -> Outcome:
        """Review a settled round. ``slack_ms`` is what errands will take of ranks' next window."""
        assert opened.finished is not None
        scheduler.stage_slack(slack_ms)
        decision = scheduler.report_window(report)
        acks = {rank: ack for rank, ack in opened.acks.items() if rank not in opened.excluded}
        divergences = divergence_report(acks, opened.finished.steps)
        if opened.finished.realized:
            verdict = self.guard.judge(divergences)
            nudge = self._meta_verdict(opened, verdict, scheduler)
            decision = scheduler.apply(verdict) if nudge is None else self._both(scheduler, nudge, verdict)
        else:
            verdict, nudge = Stable("Nobody worked, so there is nothing to judge."), None
        self.last = Outcome(
            decision=decision,
            divergence=divergences.divergence if divergences.deltas else None,
            verdict=verdict.name if nudge is None else nudge.name,
            reason=verdict.reason if nudge is None else f"{nudge.reason} {verdict.reason}",
        )
        return self.last

    def view(self) -> dict[str, Any] | None:
        """The last verdict, JSON-ready; none before the first round."""
        return {"verdict": self.last.verdict, "reason": self.last.reason} if self.last else None

    def state(self) -> dict[str, Any]:
        """What guard and meta-controller remember, for a checkpoint."""
        return {"guard": self.guard.state(), "meta": self.meta.state() if self.meta else None}

    def _meta_verdict(self, opened: OpenedRound, verdict: Verdict, scheduler: Scheduler) -> Verdict | None:
        if self.meta is None or scheduler.forced:
            return None
        return self.meta.observe(first_known_lr(opened.acks), scheduler.anchor, verdict, scheduler.phase)

    @staticmethod
    def _both(scheduler: Scheduler, nudge: Verdict, verdict: Verdict) -> Decision:
        scheduler.apply(nudge)
        return scheduler.apply(verdict)
