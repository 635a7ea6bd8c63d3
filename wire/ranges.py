"""The algebra of element ranges: which part of an arena moved, which lay still.

A range list is ascending (start, stop) pairs, none empty, no two overlapping or adjoining. Every function takes and
returns such lists; ``normalized`` makes one of anything. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from wire.numbers import Count

Ranges = list[tuple[Count, Count]]


def normalized(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """The same elements as a range list; pairs may come in any order, overlap, adjoin or be empty."""
    merged: Ranges = []
    for start, stop in sorted(pair for pair in pairs if pair[0] < pair[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def problem(ranges: Ranges, stop: int) -> str:
    """What keeps ``ranges``, as a peer sent it, from being a range list within ``0 <= element < stop``; empty if
    nothing does."""
    last = -1
    for start, end in ranges:
        if not last < start < end <= stop:
            return f"elements {start} to {end} are out of order or beyond {stop}"
        last = end
    return ""


def intersection(first: Ranges, second: Ranges) -> Ranges:
    """Elements in both."""
    common: Ranges = []
    a, b = 0, 0
    while a < len(first) and b < len(second):
        start, stop = max(first[a][0], second[b][0]), min(first[a][1], second[b][1])
        if start < stop:
            common.append((start, stop))
        if first[a][1] <= second[b][1]:
            a += 1
        else:
            b += 1
    return common


def union(first: Ranges, second: Ranges) -> Ranges:
    """Elements in either."""
    return normalized([*first, *second])


def complement(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Elements from ``start`` to ``stop`` that are not in ``ranges``."""
    outside: Ranges = []
    for first, last in ranges:
        if last <= start:
            continue
        if first >= stop:
            break
        if start < first:
            outside.append((start, first))
        start = last
    if start < stop:
        outside.append((start, stop))
    return outside


def elements(ranges: Ranges) -> int:
    """How many elements are in it."""
    return sum(stop - start for start, stop in ranges)


def cut(ranges: Ranges, longest: int) -> Iterator[tuple[int, int]]:
    """The ranges in pieces of at most ``longest`` elements, in order."""
    for start, stop in ranges:
        for offset in range(start, stop, longest):
            yield offset, min(offset + longest, stop)
