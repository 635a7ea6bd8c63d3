"""Sharing an epoch's batches among ranks: windows, their ends, and chunks (behaviour C16, E4, E5). Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from backend.core.work import EpochPool

Allotment = dict[int, int]
"""batches by rank"""


def largest_remainder(total: int, weights: Mapping[int, int]) -> Allotment:
    """Split ``total`` in proportion to ``weights`` (their sum above 0): whole parts first, then one each to the largest
    remainders, the lowest rank first among equals. Exact integer arithmetic."""
    whole = sum(weights.values())
    shares = {rank: total * weight // whole for rank, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda rank: (-(total * weights[rank] % whole), rank))
    for rank in by_remainder[: total - sum(shares.values())]:
        shares[rank] += 1
    return shares


def scaled_down(counts: Mapping[int, int], total: int) -> Allotment:
    """Allotments in proportion whose sum is at most ``total``, but at least 1 each, which wins over the sum."""
    whole = sum(counts.values())
    result = {rank: max(1, count * total // whole) for rank, count in sorted(counts.items())}
    for _ in range(sum(result.values()) - max(total, len(result))):
        result[max(result, key=lambda rank: (result[rank], rank))] -= 1  # pays for those lifted to 1
    return result


def clamp_total(counts: Mapping[int, int], total: int) -> Allotment:
    """Allotments cut to sum to ``total``, or to 1 each if there are more ranks than that (C16). What rounding leaves
    over goes one each in rank order."""
    if sum(counts.values()) <= total:
        return dict(counts)
    result = scaled_down(counts, total)
    for rank in list(result)[: max(0, total - sum(result.values()))]:
        result[rank] += 1
    return result


def final_window_plan(remaining: int, counts: Mapping[int, int], alive: Iterable[int]) -> Allotment | None:
    """Allotments that use up the last ``remaining`` batches of an epoch in one window, or None while more than one
    window is left (E5). Sums to ``remaining``; the dead hold 0.

    A share of one batch has no rate on the delivered scale and would drop the whole cohort to the compute scale, so
    lone batches are moved together where they can be.
    """
    living = _living(counts, alive)
    whole = sum(living.values())
    if not 0 < remaining < whole + len(counts) or not whole:
        return None
    if remaining >= whole:
        plan = _padded(living, remaining - whole)
    else:
        plan = _without_lone_batches(largest_remainder(remaining, living))
    return {rank: plan.get(rank, 0) for rank in sorted(counts)}


def window_plan(pool: EpochPool, counts: Mapping[int, int], alive: Iterable[int], *, forced: bool = False) -> Allotment:
    """Every rank's allotment for the window that starts now; 0 means that it idles in this window.

    ``forced`` keeps to the counts (one batch each in the sync modes, or counts forced by the operator): the epoch's
    end is split in proportion, and nobody is given more than its count.
    """
    alive = set(alive)
    living = _living(counts, alive)
    remaining = pool.remaining_batches
    if not forced:
        plan = final_window_plan(remaining, counts, alive)
        if plan is not None:
            return plan
    shares = largest_remainder(remaining, living) if remaining < sum(living.values()) else living
    return {rank: shares.get(rank, 0) for rank in sorted(counts)}


def chunk_batches(
    pool: EpochPool | None,
    rank: int,
    counts: Mapping[int, int],
    alive: Iterable[int],
    plan: Mapping[int, int] | None,
    taken: int = 0,
) -> int:
    """Batches of the rank's next chunk in a barrier-paced mode (E4 rules 0 to 3); 0 holds it until the reduce.

    ``plan`` is the window's plan when one was made; ``taken`` are batches the rank was already dealt in this window
    (a returned range can be shorter than its allotment, so that it needs another chunk).
    """
    if pool is None or rank not in set(alive):
        return 0
    allotment = plan.get(rank, 0) if plan is not None else counts.get(rank, 0)
    return max(0, min(allotment - taken, pool.remaining_batches))


def _living(counts: Mapping[int, int], alive: Iterable[int]) -> Allotment:
    alive = set(alive)
    return {rank: count for rank, count in sorted(counts.items()) if rank in alive and count > 0}


def _padded(living: Allotment, surplus: int) -> Allotment:
    """One more batch each for the slowest, in turn; the fastest gets none unless it is alone."""
    fastest = max(living, key=lambda rank: (living[rank], -rank))
    slowest_first = sorted((r for r in living if r != fastest), key=lambda rank: (living[rank], rank)) or [fastest]
    plan = dict(living)
    for turn in range(surplus):
        plan[slowest_first[turn % len(slowest_first)]] += 1
    return plan


def _without_lone_batches(plan: Allotment) -> Allotment:
    plan = dict(plan)
    while True:
        lone = next((rank for rank in sorted(plan) if plan[rank] == 1), None)
        peers = [rank for rank in plan if rank != lone and plan[rank] >= 1]
        if lone is None or not peers:
            return plan
        plan[lone] = 0
        plan[min(peers, key=lambda rank: (plan[rank], rank))] += 1
