"""Figures and tables of ``benchmarks.recovery``. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

TARGET_SECONDS = 2.0
"""from the death of a rank to the survivors' next committed round, one window aside"""


@dataclass(frozen=True, slots=True)
class Kill:
    """What one kill cost. Seconds are from the kill on."""

    detect: float
    """until the last of the deaths is on record"""
    committed: float
    """until a round without the dead is committed"""
    window: float
    """between two rounds before it"""
    redone: int
    """batches that were done, that no round held, and that are done again"""


@dataclass(frozen=True, slots=True)
class Restart:
    """What one killed worker cost below torchrun. Seconds are from the kill on."""

    stepped: float
    """until the first step after the restart is finished by all"""
    caught_up: float
    """until all have finished a step that had not been finished before"""
    redone: int
    """batches, of all ranks, that are done again"""


def kill(rounds: Sequence[Mapping[str, Any]], deaths: Sequence[Mapping[str, Any]], killed_at: float) -> Kill | None:
    """The figures of a kill at this Unix time, from a run's rows; none while no round without the dead has come."""
    dead = {row["rank"] for row in deaths}
    moments = [(_moment(row), row) for row in rounds]
    after = [at for at, row in moments if at > killed_at and not dead & set(map(int, row["realized"]))]
    before = [at for at, _ in moments if at <= killed_at]
    if not after or not deaths or len(before) < 3:
        return None
    windows = [later - earlier for earlier, later in itertools.pairwise(before)]
    redone = 0
    for row in deaths:
        held = sum(each["realized"].get(str(row["rank"])) or 0 for each in rounds)
        redone += max(0, row["last_step"] - held)
    detect = max(_moment(row) for row in deaths) - killed_at
    return Kill(detect, min(after) - killed_at, statistics.median(windows[-8:]), redone)


def restart(notes: Mapping[int, Sequence[tuple[int, int, float]]], killed_at: float) -> Restart | None:
    """The figures of a killed worker from each rank's finished steps (start, step, Unix seconds); none while the job
    has not gone beyond the step at which it was killed."""
    before = [step for steps in notes.values() for _, step, at in steps if at <= killed_at]
    last = max(before)
    firsts, caught_up = [], []
    for steps in notes.values():
        again = [(step, at) for start, step, at in steps if start > 0]
        new = [at for step, at in again if step > last]
        if not new:
            return None
        firsts.append(again[0])
        caught_up.append(min(new))
    redone = sum(last - (step - 1) for step, _ in firsts)
    return Restart(max(at for _, at in firsts) - killed_at, max(caught_up) - killed_at, redone)


def summary(kills: Sequence[Kill | Restart]) -> dict[str, float]:
    """The median of each figure, and how many there were."""
    rows = [asdict(one) for one in kills]
    return {"kills": len(rows)} | {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def report(found: Mapping[str, Any]) -> list[str]:
    """The tables."""
    world = f"{found['ranks']} ranks, {found['mode']}, {found['ms']:g} ms a batch of {found['batch_size']}"
    lines = [
        f"{world}; medians, seconds from the kill on",
        "",
        "| Marchline | kills | deaths on record | next round committed | a window | batches redone |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, row in found["marchline"].items():
        figures = [f"{row[key]:.2f}" for key in ("detect", "committed", "window")]
        lines.append(f"| {name} | {row['kills']} | {' | '.join(figures)} | {row['redone']:g} |")
    lines += [f"{name} was left out: {why}." for name, why in found["left_out"].items()]
    row = found["torchrun"]
    if row is None:
        return lines
    lines += [
        "",
        f"| torchrun, saving every {found['save_every']} steps | kills | next step finished | beyond where it was | "
        "batches redone |",
        "|---|---:|---:|---:|---:|",
        f"| worker killed | {row['kills']} | {row['stepped']:.2f} | {row['caught_up']:.2f} | {row['redone']:g} |",
        "",
        *_target(found),
    ]
    return lines


def _target(found: Mapping[str, Any]) -> list[str]:
    ours = found["marchline"].get("rank killed")
    if ours is None:
        return []
    allowed = TARGET_SECONDS + ours["window"]
    verdict = "met" if ours["committed"] <= allowed else "MISSED"
    return [
        f"Target, {TARGET_SECONDS:g} s and one window ({allowed:.2f} s) for a killed rank: {verdict} at "
        f"{ours['committed']:.2f} s; torchrun's restart takes {found['torchrun']['stepped']:.2f} s."
    ]


def _moment(row: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(row["at"]).timestamp()
