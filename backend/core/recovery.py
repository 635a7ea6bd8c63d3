"""What a death costs the others: who waited for the dead, and how long the cohort took to go on without.

    detect       from its end, or the last sign of life of its host, until it is declared dead
    decide       until a round without it is asked for; nothing when it dies while one is being adopted
    resume       until that round is closed: everybody holds the same again
    first_step   until a survivor has done the next batch

All in seconds, by the controller's clock but for the first, which its host tells where it can. A phase that the run did
not live to see is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from backend.core.vocabulary import Record

if TYPE_CHECKING:
    from backend.core.march import March

PHASES = ("detect", "decide", "resume", "first_step")
_WORDS = ("found {} after its end", "a round without it asked for {} later", "closed {} later", "next batch {} later")


def waited_for(march: March, rank: int, detect_seconds: float, now: float) -> dict[int, float]:
    """Seconds that each survivor had nothing to do because ``rank`` was not heard any more, by rank; call it before its
    work and its part in the round are given up. Who had work, or worked ahead, waited for nobody."""
    opened, since = march.cycle.open, now - detect_seconds
    waited: dict[int, float] = {}
    if not (rank in opened.waiting if opened is not None else march.training.holds_work(rank)):
        return waited
    for other in march.world.alive():
        seat = march.world.ranks[other]
        if seat.state == "working":
            continue
        idle_since = seat.idle_since
        if opened is not None:
            idle_since = opened.opened_at if idle_since is None else max(idle_since, opened.opened_at)
        if idle_since is not None and now > max(idle_since, since):
            waited[other] = round(now - max(idle_since, since), 3)
    return waited


@dataclass(slots=True)
class _Case:
    rank: int
    phases: dict[str, float]
    since: float
    """when the last phase ended"""
    round: int = -1
    """the round that is closed without it"""
    steps: int = 0
    """of the survivors, when that round was closed"""

    def ends(self, phase: str, now: float) -> None:
        self.phases[phase] = round(now - self.since, 3)
        self.since = now


@dataclass(slots=True)
class Recovery:
    """Deaths that the cohort has not got over yet. ``observe`` after every event."""

    _cases: list[_Case] = field(default_factory=list)

    def declared(self, march: March, rank: int, detect_seconds: float, now: float) -> None:
        """The rank is dead from now on, and what the others do about it has begun."""
        case = _Case(rank, {"detect": round(detect_seconds, 3)}, now)
        self._decided(case, march, now)
        self._cases.append(case)

    def observe(self, march: March, now: float) -> list[Record]:
        """Move on each death that has come further; what to write down of those that are over."""
        if not self._cases:
            return []
        over = [case for case in self._cases if self._over(case, march, now)]
        self._cases = [case for case in self._cases if case not in over]
        return [record for case in over for record in _records(case, march)]

    def conclude(self, march: March) -> list[Record]:
        """The run ends: what is known of deaths that it has not got over."""
        cases, self._cases = self._cases, []
        return [record for case in cases if "decide" in case.phases for record in _records(case, march)]

    def _decided(self, case: _Case, march: March, now: float) -> None:
        opened = march.cycle.open
        if "decide" not in case.phases and opened is not None:
            case.ends("decide", now)
            case.round = opened.round

    def _over(self, case: _Case, march: March, now: float) -> bool:
        self._decided(case, march, now)
        opened = march.cycle.open
        if "decide" in case.phases and "resume" not in case.phases and (opened is None or opened.round > case.round):
            case.ends("resume", now)
            case.steps = _steps(march)
        if "resume" in case.phases and _steps(march) > case.steps:
            case.ends("first_step", now)
        return "first_step" in case.phases


def _steps(march: March) -> int:
    """Batches that all ranks reported so far; the dead report none any more."""
    return sum(seat.steps for seat in march.world.ranks.values())


def _records(case: _Case, march: March) -> list[Record]:
    phases = [(words, case.phases[name]) for name, words in zip(PHASES, _WORDS, strict=True) if name in case.phases]
    told = [words.format(f"{seconds:g} s") for words, seconds in phases]
    row: dict[str, Any] = {"rank": case.rank, "recovery": dict(case.phases)}
    records = [Record("recoveries", row)]
    if "first_step" in case.phases:
        text = f"The cohort is over the death of {march.world.where(case.rank)}: {', '.join(told)}"
        event = {"kind": "recovered", "level": "info", "text": text, "data": {"rank": case.rank}}
        records.append(Record("events", event))
    return records
