"""The phases of a run and the verdict on its join window: pure tables and one function (behaviour B5, B6)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from backend.core.config import RunConfig

Phase = Literal["waiting", "staging", "forming", "training", "done", "failed", "interrupted"]
Action = Literal["open", "form", "fail"]
OpenPhase = Literal["waiting", "staging"]

PHASES: dict[tuple[str, str], str] = {
    ("", "waiting"): "the run is created and its join window opens",
    ("waiting", "staging"): "the quorum is met and the operator may close the window",
    ("staging", "waiting"): "a host left and the quorum is no longer met",
    ("waiting", "forming"): "the target is reached, the window ended with a quorum, or an armed start met its quorum",
    ("staging", "forming"): "the operator started the run; in hybrid mode also the target or the end of the window",
    ("waiting", "failed"): "the hard cap passed without a quorum, or the operator aborted",
    ("staging", "failed"): "the hard cap passed and nobody started the run, or the operator aborted",
    ("forming", "training"): "every rank is ready and holds the initial parameters",
    ("forming", "failed"): "a rank was not ready in time, the cohort fell below tolerance, or the operator aborted",
    ("training", "done"): "the last epoch is trained, or the operator stopped the run",
    ("training", "failed"): "the cohort fell below tolerance, a stall ceiling passed, or the operator aborted",
    ("waiting", "interrupted"): "the controller stopped",
    ("staging", "interrupted"): "the controller stopped",
    ("forming", "interrupted"): "the controller stopped, or came back and its cohort could not go on",
    ("training", "interrupted"): "the controller stopped, or came back to too few of its hosts",
}
"""Every move a run's phase may make, and its condition. ``""`` is before the window opens."""

MAX_EXTENSION_SECONDS = 86400.0
OPEN_PHASES = ("waiting", "staging")
END_PHASES = ("done", "failed", "interrupted")


def can_move(before: str, after: str) -> bool:
    """Whether the phase table has this move."""
    return (before, after) in PHASES


@dataclass(frozen=True, slots=True)
class Terms:
    """Who closes the window and when. ``quorum`` and ``target`` in ranks, the rest in seconds since the opening."""

    start_mode: str
    quorum: int
    target: int | None
    window_seconds: float
    cap_seconds: float

    @classmethod
    def of(cls, config: RunConfig, at_least: int = 0) -> Terms:
        """A configuration's terms; ``at_least`` ranks raises a quorum or target below it."""
        return cls(
            start_mode=config.start_mode,
            quorum=max(config.quorum, at_least),
            target=None if config.target is None else max(config.target, at_least),
            window_seconds=config.window_seconds,
            cap_seconds=config.cap_seconds,
        )

    def extended(self, seconds: float, elapsed: float) -> Terms:
        """So many seconds more for the window and its cap; a window that is past opens again from ``elapsed`` on."""
        window = max(self.window_seconds, elapsed) + seconds
        return replace(self, window_seconds=window, cap_seconds=max(self.cap_seconds + seconds, window))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of the window now. ``phase`` is what an open window reports; ``reason`` is for the operator."""

    action: Action
    phase: OpenPhase
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Missing:
    """One thing that start would be refused for, and what to do about it."""

    code: str
    text: str
    cure: str


def judge(terms: Terms, joined: int, elapsed: float, armed: bool) -> Verdict:
    """The verdict, by the rules of B6 in their order.

    ``joined`` ranks, ``elapsed`` seconds since the opening, ``armed`` once the operator pressed start.
    """
    by_clock = terms.start_mode != "manual"
    quorate = joined >= terms.quorum
    phase: OpenPhase = "staging" if quorate and terms.start_mode != "auto" else "waiting"
    have = f"{ranks(joined)} joined"
    if armed and terms.start_mode != "auto" and quorate:
        return Verdict("form", phase, "operator_start", f"The operator started the run with {have}.")
    if terms.target is not None and by_clock and joined >= terms.target:
        return Verdict("form", phase, "target_reached", f"The target of {ranks(terms.target)} is reached: {have}.")
    if elapsed < terms.window_seconds:
        return Verdict("open", phase, "window_open", _open_reason(terms, joined, armed))
    if by_clock and quorate:
        reason = f"The window of {_seconds(terms.window_seconds)} ended with {have}; {terms.quorum} were needed."
        return Verdict("form", phase, "window_ended_with_quorum", reason)
    if elapsed < terms.cap_seconds:
        return Verdict("open", phase, "grace", _grace_reason(terms, joined))
    if quorate:
        cap = _seconds(terms.cap_seconds)
        reason = f"The quorum was met with {have}, but nobody started the run within the hard cap of {cap}."
        return Verdict("fail", phase, "operator_start_missing", reason)
    reason = (
        f"Only {joined} of {terms.quorum} needed ranks joined within the hard cap of {_seconds(terms.cap_seconds)}."
    )
    return Verdict("fail", phase, "quorum_not_met", reason)


def missing_to_start(terms: Terms, joined: int) -> list[Missing]:
    """Everything that an open window's start would be refused for; empty when it would be accepted (B14)."""
    found = []
    if terms.start_mode == "auto":
        text = "This run starts by the clock or at its target, not by hand."
        found.append(Missing("start_mode_auto", text, "Wait, or create the run with start mode manual or hybrid."))
    if joined < terms.quorum:
        text = f"{joined} of {terms.quorum} needed ranks joined."
        cure = f"Let {ranks(terms.quorum - joined)} more dial in, or lower the quorum."
        found.append(Missing("quorum_not_met", text, cure))
    return found


def ranks(count: int) -> str:
    """``1 rank``, ``3 ranks``."""
    return "1 rank" if count == 1 else f"{count} ranks"


def _open_reason(terms: Terms, joined: int, armed: bool) -> str:
    if joined < terms.quorum:
        then = " The start is armed and takes effect with the quorum." if armed else ""
        return f"Waiting for hosts: {joined} of {terms.quorum} needed ranks joined.{then}"
    if terms.start_mode == "manual":
        return f"Ready with {ranks(joined)}: waiting for the operator to start."
    until = "the window ends" if terms.target is None else f"{terms.target} ranks joined or the window ends"
    if terms.start_mode == "hybrid":
        return f"Ready with {ranks(joined)}: the operator may start, or the run starts once {until}."
    return f"Enough with {ranks(joined)}: the run starts once {until}."


def _grace_reason(terms: Terms, joined: int) -> str:
    cap = f"before the hard cap of {_seconds(terms.cap_seconds)}"
    if joined >= terms.quorum:
        return f"Ready with {ranks(joined)}: the window is past, and the operator must start {cap}."
    return f"The window is past with {joined} of {terms.quorum} needed ranks; the rest must join {cap}."


def _seconds(value: float) -> str:
    return f"{value:g} s"
