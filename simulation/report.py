"""What a play came to, as JSON and as a few lines to read."""

from __future__ import annotations

from typing import Any

from simulation.script import Script
from simulation.theatre import Theatre
from simulation.watch import CoreTime

SHOWN_RANKS = 16
"""idle shares that are printed; the JSON has all"""
SHOWN_ANCHORS = 12


def report(script: Script, play: Theatre) -> dict[str, Any]:
    """Everything that is known of a play, JSON-ready; ``figures`` is none when too few rounds closed to measure."""
    rounds = play.rows("rounds")
    figures = play.meter.figures
    return {
        "script": script.text(),
        "mode": play.config.mode,
        "ranks": len(play.ranks),
        "hosts": len(play.hosts),
        "phase": play.end.phase if play.end else play.cohort.phase,
        "reason": play.end.reason if play.end else "",
        "virtual_seconds": play.now,
        "settle": play.settle,
        "rounds": len(rounds),
        "reduce_seconds": rounds[-1]["reduce_seconds"] if rounds else None,
        "figures": figures.as_json() if figures else None,
        "anchors": [[row["round"], row["anchor"], row["anchor_rank"]] for row in rounds],
        "allotments": {str(rank): count for rank, count in rounds[-1]["planned"].items()} if rounds else {},
        "decision": rounds[-1]["decision"] if rounds else "",
        "deaths": [row["rank"] for row in play.rows("deaths")],
        "core": core_cost(play.core_time),
    }


def core_cost(time: CoreTime) -> dict[str, Any]:
    """What the core took in real time: for all events, and for each kind of them."""
    return {
        "events": time.events,
        "seconds": time.seconds,
        "events_per_second": time.events / time.seconds if time.seconds else None,
        "us_per_event": 1e6 * time.seconds / time.events if time.events else None,
        "us_by_kind": {
            kind: {"events": count, "us": 1e6 * seconds / count}
            for kind, (count, seconds) in sorted(time.by_kind.items(), key=lambda item: -item[1][1])
        },
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The report as a person reads it."""
    text = [
        f"{found['ranks']} ranks on {found['hosts']} hosts, {found['mode']}: {found['phase']} after "
        f"{found['virtual_seconds']:.1f} virtual s and {found['rounds']} rounds. {found['reason']}"
    ]
    figures = found["figures"]
    if figures is None:
        text.append(f"Too few rounds to measure: the first {found['settle']} are left out.")
    else:
        text += [
            f"efficiency    {figures['efficiency']:.4f} of the sum of solo rates, over {figures['batches']} batches in "
            f"{figures['seconds']:.1f} s, the first {found['settle']} rounds left out",
            f"rounds        {figures['round_share']:.2%} of the time; the last took {found['reduce_seconds']:.3f} s",
            f"idle besides  {figures['idle_mean']:.2%} on average, {figures['idle_worst']:.2%} at worst: "
            f"{_some(figures['idle'], '{:.2%}')}",
        ]
    text.append(f"anchor        {_history(found['anchors'])}")
    text.append(f"last decision {found['decision']}")
    core = found["core"]
    if core["events"]:
        text.append(
            f"core          {core['events']} events, {core['events_per_second']:,.0f} a second, "
            f"{core['us_per_event']:.1f} us each"
        )
    return text


def _some(values: dict[str, float], form: str) -> str:
    shown = [f"{rank}: {form.format(value)}" for rank, value in list(values.items())[:SHOWN_RANKS]]
    return ", ".join([*shown, "..."] if len(values) > SHOWN_RANKS else shown)


def _history(anchors: list[list[int | None]]) -> str:
    """Only where it changed: ``10 (rank 2) from round 0, 20 (rank 2) from round 3``."""
    changes = [
        entry for before, entry in zip([None, *anchors], anchors, strict=False) if not before or before[1:] != entry[1:]
    ]
    said = [f"{anchor} (rank {rank}) from round {number}" for number, anchor, rank in changes]
    return "; ".join([*said[:SHOWN_ANCHORS], "..."] if len(said) > SHOWN_ANCHORS else said) or "no round closed"
