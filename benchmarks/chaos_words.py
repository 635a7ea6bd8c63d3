"""Tables and stories of ``benchmarks.chaos``. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.havoc.world import Outcome


def world(outcome: Outcome, injected: int) -> list[str]:
    """Lines for a world that is over: one, or all that there is to know of one that is not as it should be."""
    hits = sum(one.hit for one in outcome.struck)
    state = "halted" if outcome.halted else "FAILED" if outcome.problems else "ok"
    head = f"seed {outcome.plan.seed}: {state}, {hits} faults in {outcome.seconds:.0f} s ({injected} so far)"
    if not outcome.problems:
        return [head]
    done = [f"  {'hit' if one.hit else 'missed'} {one.fault} {one.note}".rstrip() for one in outcome.struck]
    ends = [f"  end: {end}" for end in outcome.ends]
    problems = [f"  - {problem}" for problem in outcome.problems]
    return [head, *outcome.plan.story(), *done, *ends, *problems, f"  logs and database: {outcome.place}"]


def report(found: dict[str, Any]) -> list[str]:
    """The campaign's tables."""
    faults = [fault for each in found["worlds"] for fault in each["faults"]]
    injected = Counter(fault["kind"] for fault in faults if fault["hit"])
    missed = Counter(fault["kind"] for fault in faults if not fault["hit"])
    seconds: dict[str, list[float]] = {}
    for kind, lasted in found["detected"]:
        seconds.setdefault(kind, []).append(lasted)
    lines = [
        "| fault | injected | missed | s until its deaths were on record, median (most) |",
        "|---|---:|---:|---:|",
    ]
    for kind in sorted(injected | missed, key=lambda kind: (-injected[kind], kind)):
        times = seconds.get(kind)
        recorded = f"{statistics.median(times):.1f} ({max(times):.1f})" if times else "-"
        lines.append(f"| {kind} | {injected[kind]} | {missed[kind]} | {recorded} |")
    lines.append(f"| **all** | **{injected.total()}** | {missed.total()} | |")
    return [*lines, "", *_ends(found), *_left_out(found), *_verdict(found, injected.total())]


def _ends(found: dict[str, Any]) -> list[str]:
    phases = Counter(_short(end) for each in found["worlds"] for end in each["ends"])
    told = ", ".join(f"{count} {what}" for what, count in phases.most_common())
    rounds = sum(each["rounds"] for each in found["worlds"])
    return [f"{len(found['worlds'])} worlds, {sum(phases.values())} runs, {rounds} rounds: {told}."]


def _short(end: str) -> str:
    phase, _, reason = end.partition(": ")
    name = reason.partition(":")[0]
    return f"{phase} ({name})" if phase == "failed" and name.isalpha() else phase


def _left_out(found: dict[str, Any]) -> list[str]:
    return [f"Left out, {what}: {why}." for what, why in found["left_out"].items()]


def _verdict(found: dict[str, Any], injected: int) -> list[str]:
    broken = [each for each in found["worlds"] if each["problems"]]
    lasted = f"{injected} faults in {found['seconds']:.0f} s"
    if not broken:
        return [f"{lasted}: nothing hung, nothing lost, every death on record."]
    lines = [f"{lasted}: {len(broken)} worlds are not as they should be."]
    for each in broken:
        lines += [f"seed {each['seed']}, {each['place']}:", *(f"  - {problem}" for problem in each["problems"])]
    return lines
