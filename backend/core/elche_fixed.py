"""Allotments that are given instead of measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backend.core.elche_rules import Decision, Phase, Rates, Saved, read_saved
from backend.core.timing import WindowReport
from backend.core.verdicts import Verdict


class FixedCounts:
    """Allotments that never change: one batch each in the sync modes, or forced by the operator for an experiment.

    Rates are still measured, for the operator to see.
    """

    forced = True
    calibrated = True
    anchor_rank: int | None = None
    phase: Phase = "mature"

    def __init__(
        self, counts: Mapping[int, int], *, reason: str = "The allotments are forced by the run's configuration."
    ) -> None:
        if not counts or any(count < 1 for count in counts.values()):
            raise ValueError(f"forced allotments need at least one batch for at least one rank, not {dict(counts)}")
        self._counts = dict(sorted(counts.items()))
        self._rates = Rates(self._counts)
        self._reason = reason

    @property
    def counts(self) -> dict[int, int]:
        """Batches of every rank in each window."""
        return dict(self._counts)

    @property
    def anchor(self) -> int:
        """The smallest allotment; 0 when no rank is left."""
        return min(self._counts.values(), default=0)

    @property
    def opening(self) -> str:
        """Why the allotments before the first round are what they are: the same as in every other."""
        return self._reason

    def smoothed(self, rank: int) -> float:
        """The rank's ms a batch; 0 when unknown."""
        return self._rates.smoothed(rank)

    def set_max_total(self, batches: int) -> None:
        """Forced allotments are not cut; the end of an epoch is split by ``work.window_plan``."""

    def stage_slack(self, ms: Mapping[int, float]) -> None:
        """Forced allotments make no room for errands."""

    def report_window(self, report: WindowReport) -> Decision:
        """Note the rates; the counts stay."""
        self._rates.observe(report)
        return self._decision()

    def apply(self, verdict: Verdict) -> Decision:
        """No verdict moves a forced allotment: neither growth nor a nudge (C20)."""
        return self._decision()

    def drop(self, rank: int) -> Decision:
        """A rank died or left; the others keep their counts. Raises ``ValueError`` for an unknown rank."""
        if rank not in self._counts:
            raise ValueError(f"rank {rank} is not scheduled; ranks are {sorted(self._counts)}")
        del self._counts[rank]
        self._rates.drop(rank)
        return Decision(dict(self._counts), self.anchor, None, True, f"Rank {rank} left the cohort. {self._reason}")

    def _decision(self) -> Decision:
        return Decision(dict(self._counts), self.anchor, None, False, self._reason)

    def state(self) -> dict[str, Any]:
        """The measured rates, in the form of ``ElChe.state``."""
        return Saved(self.anchor, None, self._rates.by_rank(), self.phase, 0).as_json()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up saved rates. Raises ``ValueError`` unless they name exactly this cohort's ranks."""
        self._rates.restore(read_saved(state, self._counts).smoothed)

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        assert all(count >= 1 for count in self._counts.values()), f"an allotment is below 1: {self._counts}"
        assert self._rates.by_rank().keys() == self._counts.keys(), "rates and allotments name different ranks"
