"""ElChe's decisions in words: the sentence under the allotment map, in the log and in the round's row.

It says why the anchor moved, names the pace, then every other rank (the few that matter most in a large cohort) by its
speed against the anchor and its batches, then whatever kept the counts from following the speeds exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from backend.core.elche_growth import Pressure
from backend.core.elche_rules import MAX_SPEED_RATIO, SpeedHint

NAMED_RANKS = 4
"""ranks spelled out beside the anchor; the rest are summed up"""
ABOUT_EQUAL = 0.05
NOTABLE_FILL = 0.10
"""the first batch's start-up is mentioned when it is at least this part of the fixed cost"""


def explain(
    *,
    before: Mapping[int, int],
    counts: Mapping[int, int],
    rates: Mapping[int, float],
    anchor_rank: int,
    moves: Sequence[str] = (),
    slack: Mapping[int, float] | None = None,
    cap: int | None = None,
    step: int | None = None,
) -> str:
    """One sentence, and one more for each thing that bent the counts.

    ``before`` and ``counts`` are batches by rank in the last and the next window, ``rates`` smoothed ms a batch (0 for
    unknown), ``moves`` why the anchor moved (clauses of ``moved``), ``slack`` ms that a rank will be away on an
    errand, ``cap`` the epoch's batches when they cut the counts, ``step`` the most batches a count may move by when
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
    if moves:
        sentence = f"{joined(moves)}: {_lower(sentence)}"
        if before == counts and step is None and cap is None:
            sentence += " So small a change does not move the allotments yet."
    for rank, ms in sorted((slack or {}).items()):
        sentence += f" Rank {rank} gets fewer this time, because an errand will take {_seconds(ms)} of its window."
    if step is not None:
        sentence += f" Counts move by at most {step} per window, so they follow the speeds in steps."
    if cap is not None:
        sentence += f" Together they may not exceed the epoch's {batches(cap)}, so every share is scaled down to fit."
    return sentence


def opening(counts: Mapping[int, int], hint: SpeedHint | None) -> str:
    """Why the first allotments are what they are."""
    start = "No round has closed yet: "
    equal = "every rank gets the same share until it has been timed"
    if hint is None:
        return f"{start}{equal}."
    if hint.slow_rank not in counts:
        return f"{start}{equal}. The speed hint names rank {hint.slow_rank}, which the cohort lacks, so it is ignored."
    if not hint.configured:
        return f"{start}{equal}, and rank {hint.slow_rank} sets the pace: its device looks slowest by name and memory."
    slow, fast = counts[hint.slow_rank], max(counts.values())
    if slow == fast:
        return f"{start}{equal}, and rank {hint.slow_rank} sets the pace, as the speed hint says."
    return f"{start}the speed hint takes rank {hint.slow_rank} as the slow one with {slow} and gives the others {fast}."


def moved(cause: str, before: int, after: int) -> str:
    """The clause about an anchor that changed. ``cause`` starts it and has no full stop."""
    return f"{cause}, so the anchor {'grows' if after > before else 'shrinks'} from {before} to {batches(after)}"


def joined(moves: Sequence[str]) -> str:
    """Clauses of ``moved`` as one, without a full stop."""
    return "; ".join(move if position == 0 else _lower(move) for position, move in enumerate(moves))


def pressed(cost: Pressure) -> str:
    """What the fixed part of the window cost, as a clause."""
    what = "The last round and the window's cold start" if cost.fill_share >= NOTABLE_FILL else "The last round"
    return f"{what} cost {_percent(cost.overhead)} of the window (target {100 * cost.target:g} %)"


def held(cost: Pressure, anchor: int, why: str) -> str:
    """A sentence about an anchor that should have grown, and what stood against it."""
    return f"{pressed(cost)}, but the anchor stays at {batches(anchor)}: {why}."


def batches(count: int) -> str:
    """A number of batches, in the singular where it is one."""
    return "1 batch" if count == 1 else f"{count} batches"


def rounds(count: int) -> str:
    """More rounds to come, in the singular where it is one."""
    return "1 more round" if count == 1 else f"{count} more rounds"


def _lower(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


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


def _seconds(ms: float) -> str:
    return f"{ms / 1000.0:.1f} s" if ms >= 1000.0 else f"{ms:.0f} ms"


def _percent(share: float) -> str:
    """Whole percents from 10 on, one decimal below: 19 %, 5.7 %."""
    percent = 100.0 * share
    return f"{percent:.0f} %" if percent >= 9.95 else f"{percent:.1f} %"
