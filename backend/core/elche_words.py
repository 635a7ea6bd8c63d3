"""ElChe's decisions in words: the sentence under the allotment map, in the log and in the round's row.

It names the pace, then every other rank (the few that matter most in a large cohort) by its speed against the anchor
and its batches, then whatever kept the counts from following the speeds exactly.
"""

from __future__ import annotations

from collections.abc import Mapping

from backend.core.elche_rules import MAX_SPEED_RATIO

NAMED_RANKS = 4
"""ranks spelled out beside the anchor; the rest are summed up"""
ABOUT_EQUAL = 0.05


def explain(
    *,
    before: Mapping[int, int],
    counts: Mapping[int, int],
    rates: Mapping[int, float],
    anchor_rank: int,
    cap: int | None = None,
    step: int | None = None,
) -> str:
    """One or two sentences.

    ``before`` and ``counts`` are batches by rank in the last and the next window, ``rates`` smoothed ms a batch (0 for
    unknown), ``cap`` the epoch's batches when they cut the counts, ``step`` the most batches a count may move by when
    that held one back.
    """
    pace = rates[anchor_rank]
    verb = _verb(before, counts, anchor_rank)
    parts = [f"Rank {anchor_rank} sets the pace at {_ms(pace)} ms a batch and {verb}"]
    others = sorted((rank for rank in counts if rank != anchor_rank), key=lambda rank: (-counts[rank], rank))
    named = others if len(others) <= NAMED_RANKS + 1 else others[:NAMED_RANKS]
    parts += [f"rank {rank} {_speed(pace, rates[rank])} and {_verb(before, counts, rank)}" for rank in named]
    parts += _summary([counts[rank] for rank in others[len(named) :]])
    sentence = "; ".join(parts) + "."
    if step is not None:
        sentence += f" Counts move by at most {step} per window, so they follow the speeds in steps."
    if cap is not None:
        sentence += f" Together they may not exceed the epoch's {_batches(cap)}, so every share is scaled down to fit."
    return sentence


def _verb(before: Mapping[int, int], counts: Mapping[int, int], rank: int) -> str:
    return f"{'keeps' if before.get(rank) == counts[rank] else 'gets'} {counts[rank]}"


def _speed(pace: float, ms: float) -> str:
    if ms <= 0.0:
        return "has no timing yet"
    ratio = pace / ms
    if abs(ratio - 1.0) <= ABOUT_EQUAL:
        return "is about as fast"
    if ratio < 1.0:
        return f"is slower still at {_ms(ms)} ms"
    text = f"is {ratio:.1f} times as fast" if ratio < 10.0 else f"is {ratio:.0f} times as fast"
    return text if ratio <= MAX_SPEED_RATIO else f"{text}, counted as {MAX_SPEED_RATIO:.0f},"


def _summary(rest: list[int]) -> list[str]:
    if not rest:
        return []
    low, high = min(rest), max(rest)
    span = f"{low} each" if low == high else f"between {low} and {high}"
    return [f"{len(rest)} more ranks get {span}"]


def _ms(ms: float) -> str:
    """Three significant figures or one decimal, whichever says more: 0.0412, 4.12, 81.2, 1240."""
    if ms >= 1000.0:
        return f"{ms:.0f}"
    return f"{ms:.1f}" if ms >= 10.0 else f"{ms:.3g}"


def _batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count} batches"
