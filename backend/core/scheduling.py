"""Which scheduler a run gets, and what the cycle needs from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from backend.core.config import RunConfig
from backend.core.elche import ElChe
from backend.core.elche_fixed import FixedCounts
from backend.core.elche_rules import Decision, Phase, SpeedHint
from backend.core.timing import WindowReport
from backend.core.verdicts import Verdict


class Scheduler(Protocol):
    """What the cycle needs from whoever sets the allotments: ``ElChe`` or ``FixedCounts``."""

    @property
    def counts(self) -> dict[int, int]: ...
    @property
    def anchor(self) -> int: ...
    @property
    def anchor_rank(self) -> int | None: ...
    @property
    def calibrated(self) -> bool: ...
    @property
    def phase(self) -> Phase: ...
    @property
    def forced(self) -> bool:
        """Counts are given, not measured; ``work.window_plan`` must not pad them."""
        ...

    @property
    def opening(self) -> str: ...
    def smoothed(self, rank: int) -> float: ...
    def set_max_total(self, batches: int) -> None: ...
    def stage_slack(self, ms: Mapping[int, float]) -> None: ...
    def report_window(self, report: WindowReport) -> Decision: ...
    def apply(self, verdict: Verdict) -> Decision: ...
    def drop(self, rank: int) -> Decision: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...
    def check(self) -> None: ...


def scheduler_for(config: RunConfig, ranks: Iterable[int], *, slowest_device: int | None = None) -> ElChe | FixedCounts:
    """The scheduler of a run: forced counts, one batch each in the sync modes, or ElChe.

    ``slowest_device`` is the rank whose device looks slowest; a configured speed hint goes before it. Raises
    ``ValueError`` when forced counts do not name exactly the ranks 0 to world_size - 1.
    """
    members = sorted(set(ranks))
    if config.fixed_counts is not None:
        if members != list(range(len(config.fixed_counts))):
            raise ValueError(f"fixed_counts forces {len(config.fixed_counts)} allotments, but the ranks are {members}")
        return FixedCounts(dict(enumerate(config.fixed_counts)))
    if config.mode.endswith("_sync"):
        return FixedCounts(
            dict.fromkeys(members, 1),
            reason=f"Every rank does one batch per window: {config.mode} averages after each.",
        )
    hint = None
    if config.speed_hint is not None:
        hint = SpeedHint(*config.speed_hint)
    elif slowest_device is not None:
        hint = SpeedHint(slowest_device, configured=False)
    return ElChe(
        members,
        initial_anchor=config.initial_anchor,
        min_anchor=config.min_anchor,
        max_anchor=config.max_anchor,
        max_batch_diff=config.max_batch_diff,
        overhead_target=config.overhead_target,
        speed_hint=hint,
    )
