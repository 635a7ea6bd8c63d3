"""Who must be dead of what, and how a life may end, after what was done to it. Pure; answers are sentences.

An injected death must be on record exactly once, with its true cause; nobody else may be dead; and the run must be over
for a reason that what was done to it explains.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.havoc.plans import KINDS, STALLS, Fault

GRACE = 6.0
"""seconds before a controller's death in which a death may have gone unnoticed"""
STALLED = "ReduceStall|TrainStall"
_LINK = r"link was lost|link ended|relay|the host left"
_SILENT = r"(no sign of life|its relay was not heard) for [\d.]+ s"
CAUSES = {
    "rank killed": "SIGKILL",
    "rank killed in a round": "SIGKILL",
    "relay killed": "relay",
    "relay killed in a round": "relay",
    "agent killed": _LINK,
    "rank stopped": "TrainStall",
    "relay stopped in a fold": f"{_LINK}|{_SILENT}",
    "agent stopped": _SILENT,
    "host stopped": _SILENT,
    "link cut": _LINK,
    "link silent": f"{_SILENT}|{_LINK}",
    "cable out": f"{_SILENT}|{_LINK}",
    "cable flapping": f"{_SILENT}|{_LINK}",
    "controller stopped": f"{_SILENT}|{_LINK}",
}
"""what a recorded death says of its cause; a signal stands in the field of its own"""


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that was played. ``hit``: its effect was seen; ``ranks`` are those that it strikes."""

    fault: Fault
    life: int
    at: float
    """monotonic seconds"""
    hit: bool
    ranks: tuple[int, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class End:
    """How a life ended. ``ended_at``, as ``Struck.at``: when it was told to stop, or seen to be over; ``deaths`` and
    ``events`` are the database's rows."""

    phase: str
    reason: str
    ended_at: float
    ranks: tuple[int, ...]
    deaths: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]


def deaths(struck: Sequence[Struck], end: End) -> list[str]:
    """Each injected one once, with its cause, and no other."""
    problems = []
    recorded = Counter(row["rank"] for row in end.deaths)
    by_rank: dict[int, list[Struck]] = {rank: [] for rank in end.ranks}
    for one in struck:
        if one.hit and KINDS[one.fault.kind].dooms:
            for rank in one.ranks:
                by_rank.setdefault(rank, []).append(one)
    for rank, causes in sorted(by_rank.items()):
        musts = [one for one in causes if KINDS[one.fault.kind].dooms == "must" and not _unnoticed(one, end)]
        if recorded[rank] > 1:
            problems.append(f"rank {rank} is recorded dead {recorded[rank]} times")
        if musts and not recorded[rank]:
            problems.append(f"rank {rank} is not recorded dead: {musts[0].fault}")
    for row in end.deaths:
        causes = by_rank.get(row["rank"], [])
        if not causes:
            problems.append(f"rank {row['rank']} is recorded dead ({_how(row)}), and nothing was done to it")
        elif not any(_explains(one.fault.kind, row) for one in causes):
            done = "; ".join(str(one.fault) for one in causes)
            problems.append(f"rank {row['rank']} is recorded dead of something else ({_how(row)}): {done}")
    return problems


def _explains(kind: str, row: Mapping[str, Any]) -> bool:
    if CAUSES[kind].startswith("SIG"):
        return bool(row["signal"] == CAUSES[kind])
    return re.search(CAUSES[kind], row["reason"] or "") is not None


def _how(row: Mapping[str, Any]) -> str:
    return f"{row['reason']}{', ' + row['signal'] if row['signal'] else ''}"


def _unnoticed(one: Struck, end: End) -> bool:
    """Whether the controller was gone, or the run over, before it could know of this death; who dies on the way out of
    a run that was told to stop need not be on record either."""
    return end.ended_at - one.at < (0.0 if end.phase == "done" else GRACE)


def ending(struck: Sequence[Struck], end: End) -> list[str]:
    """The run is over once, for a reason that what was done explains."""
    hits = [one.fault.kind for one in struck if one.hit]
    problems = []
    if end.phase not in allowed(hits, struck, end):
        problems.append(f"the run is {end.phase}: {end.reason}, which nothing that was done explains")
    hung = {rank for one in struck if one.hit and one.fault.kind == "rank stopped" for rank in one.ranks}
    forgotten = hung - {row["rank"] for row in end.deaths}
    if forgotten and not re.search(STALLED, end.reason):
        problems.append(f"ranks {sorted(forgotten)} stood still beyond the ceiling, and neither they nor the run ended")
    ends = [row["text"] for row in end.events if row["kind"] in ("run_ended", "run_interrupted")]
    if len(ends) != 1:
        problems.append(f"the run has {len(ends)} ends on record: {'; '.join(ends)}")
    return problems


def allowed(hits: Sequence[str], struck: Sequence[Struck], end: End) -> set[str]:
    """Phases in which the life may have ended."""
    if any(kind.startswith("controller killed") for kind in hits):
        return {"interrupted"}
    doomed = {rank for one in struck if one.hit and KINDS[one.fault.kind].dooms == "must" for rank in one.ranks}
    maybe = {rank for one in struck if one.hit and KINDS[one.fault.kind].dooms == "may" for rank in one.ranks}
    everybody = set(end.ranks)
    over_a_batch = sum(kind == "rank killed" for kind in hits) > 2 and "RepeatedFailure" in end.reason
    if doomed >= everybody:
        return {"failed"} if over_a_batch or "AllRanksLost" in end.reason else set()
    found = {"done"}
    stalls = any(kind in STALLS for kind in hits) and re.search(STALLED, end.reason)
    all_dead = doomed | maybe >= everybody and "AllRanksLost" in end.reason
    if stalls or all_dead or over_a_batch:
        found.add("failed")
    return found
