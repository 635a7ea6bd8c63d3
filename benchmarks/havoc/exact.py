"""What every sample, every rank's parameters and the checkpoint of a world must be, by the rounds in its database and
the lines that ``jobs/witness.py`` wrote. Pure; every function answers with what is wrong, as sentences.

A round in which ranks did n batches each moves the consensus by sum(n^2) / sum(n), and the buffers by their mean n. A
round accepts the first batches that a rank did since its last one, as many as its row says, so the accepted ones of a
rank are the first of all that it did: what came of the rest is in no consensus.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TOLERANCE = 1e-5
"""relative: sums are f32; another set of contributions is off by more than a hundredth of a round"""
SHOWN = 3
"""sentences of one kind; more of them say nothing new"""


@dataclass(frozen=True, slots=True)
class Reading:
    """All elements of the parameters, and of the buffers."""

    params: float
    buffers: float

    def near(self, other: Reading, own: int = 0) -> bool:
        """Whether it is ``other`` after so many batches of one's own."""
        pairs = ((self.params, other.params + own), (self.buffers, other.buffers + own))
        return all(abs(one - two) <= TOLERANCE * max(1.0, abs(two)) for one, two in pairs)


@dataclass(frozen=True, slots=True)
class Batch:
    """One line of the witness. ``whole``: its elements were all alike before the batch."""

    epoch: int
    before: Reading
    whole: bool
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """The newest complete checkpoint. ``error`` says why it cannot be loaded; ``whole``: its elements are alike."""

    number: int
    round: int
    held: Reading
    whole: bool = True
    error: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """What one run did. ``rounds`` are its own rows in their order; ``start`` is what it began from."""

    rounds: Sequence[Mapping[str, Any]]
    batches: Mapping[int, Sequence[Batch]]
    start: Reading
    overlaps: bool
    """ranks work ahead of the round: what they hold between rounds is theirs alone"""
    whole: bool
    """nothing of it is missing: not the last rows of a controller that was killed"""


def read_batches(text: str) -> dict[int, list[Batch]]:
    """The lines of one run, by rank."""
    found: dict[int, list[Batch]] = {}
    for line in text.splitlines():
        rank, epoch, low, high, buffers_low, buffers_high, *samples = line.split()
        whole = low == high and buffers_low == buffers_high
        reading = Reading(float(low), float(buffers_low))
        found.setdefault(int(rank), []).append(Batch(int(epoch), reading, whole, tuple(map(int, samples))))
    return found


def consensus(trace: Trace) -> list[Reading]:
    """Before the first round and after each."""
    held = [trace.start]
    for row in trace.rounds:
        counts = [count for count in row["realized"].values() if count]
        last = held[-1]
        params, buffers = (sum(n * n for n in counts) / sum(counts), sum(counts) / len(counts)) if counts else (0, 0)
        held.append(Reading(last.params + params, last.buffers + buffers))
    return held


def accepted(trace: Trace, until: int | None = None) -> dict[int, int]:
    """Batches by rank that rounds up to and including number ``until`` accepted; all of them for none."""
    counts: Counter[int] = Counter()
    for row in trace.rounds:
        if until is None or row["round"] <= until:
            counts.update({int(rank): count for rank, count in row["realized"].items() if count})
    return dict(counts)


# ------------------------------------------------------------------------------------------------------ samples


def ledger(traces: Iterable[tuple[Trace, int | None]], samples: int, finished: Sequence[int] | None) -> list[str]:
    """Every sample of every finished epoch was accepted once, and none twice in the one after. ``traces``: the runs
    that followed from each other, and up to which round each counts; ``finished``: what the last run says of each
    epoch's accepted samples, none when its controller died."""
    seen: dict[int, Counter[int]] = {}
    problems, told = [], 0
    for trace, until in traces:
        for rank, count in sorted(accepted(trace, until).items()):
            done = trace.batches.get(rank, ())
            if len(done) < count:
                problems.append(f"{count} batches of rank {rank} are accepted, and it did {len(done)}")
            for batch in done[:count]:
                seen.setdefault(batch.epoch, Counter()).update(batch.samples)
        told += sum(row["samples"] for row in trace.rounds if until is None or row["round"] <= until)
    for epoch, counts in sorted(seen.items()):
        twice = sorted(sample for sample, count in counts.items() if count > 1)
        if twice:
            problems.append(f"epoch {epoch}: accepted more than once: {_some(twice)}")
    found = sum(counts.total() for counts in seen.values())
    if found != told:
        problems.append(f"the rounds say that {told} samples are accepted, {found} were")
    return problems + (_as_told(seen, samples, finished) if finished is not None else [])


def _as_told(seen: Mapping[int, Counter[int]], samples: int, finished: Sequence[int]) -> list[str]:
    """The finished epochs have everything, and say so; there is one more at most."""
    problems = []
    for epoch, count in enumerate(finished):
        missing = sorted(set(range(samples)) - seen.get(epoch, Counter()).keys())
        if missing:
            problems.append(f"epoch {epoch} is over, and never accepted: {_some(missing)}")
        if count != samples:
            problems.append(f"epoch {epoch} is over, and {count} samples of {samples} are said to be accepted")
    beyond = sorted(seen.keys() - set(range(len(finished) + 1)))
    if beyond:
        problems.append(f"accepted in epochs that had not begun: {_some(beyond)}")
    return problems


# ------------------------------------------------------------------------------------------------------ odometer


def odometer(trace: Trace) -> list[str]:
    """No rank ever held a part of a consensus, and each that does not work ahead began each of its windows with exactly
    the one before."""
    problems = []
    held = consensus(trace)
    for rank, batches in sorted(trace.batches.items()):
        torn = [number for number, batch in enumerate(batches) if not batch.whole]
        if torn:
            problems.append(f"rank {rank} held parts of two consensus before its batch {torn[0]}")
        elif not trace.overlaps:
            problems += _follow(rank, batches, held, trace)[:SHOWN]
    return problems


def _follow(rank: int, batches: Sequence[Batch], held: Sequence[Reading], trace: Trace) -> list[str]:
    """One rank's windows. What no round accepted comes at its end: done from some later consensus, unless rows of it
    may be missing."""
    problems: list[str] = []
    at, last = 0, 0
    for number, row in enumerate(trace.rounds):
        for own in range(row["realized"].get(str(rank)) or 0):
            if at >= len(batches):
                return [*problems, f"round {row['round']} accepts a batch of rank {rank} that it never did"]
            if not batches[at].before.near(held[number], own):
                where = f"rank {rank}, round {row['round']}, batch {own}"
                problems.append(f"{where}: it held {batches[at].before}, not {held[number]} and {own} batches")
            at, last = at + 1, number + 1
    rest = batches[at:]
    if not rest or not trace.whole:
        return problems
    starts = [reading for reading in held[last:] if rest[0].before.near(reading)]
    if not starts:
        return [*problems, f"rank {rank} went on from {rest[0].before}, which is no consensus since its last round"]
    wrong = [own for own, batch in enumerate(rest) if not batch.before.near(starts[0], own)]
    return problems + [f"rank {rank}, {own} batches after its last round: {rest[own].before}" for own in wrong]


def checkpoint(trace: Trace, saved: Saved | None) -> list[str]:
    """It loads, and holds exactly the consensus of its round."""
    if saved is None:
        return []
    what = f"checkpoint {saved.number}"
    if saved.error:
        return [f"{what} does not load: {saved.error}"]
    if not saved.whole:
        return [f"{what} holds parts of two consensus"]
    held = dict(zip((row["round"] for row in trace.rounds), consensus(trace)[1:], strict=True))
    if saved.round < min(held, default=saved.round + 1):
        held[saved.round] = trace.start  # of the run that this one goes on from
    if saved.round not in held:
        return [f"{what} is of round {saved.round}, of which there is no row"]
    wanted = held[saved.round]
    if trace.overlaps:  # what a rank added to buffers while a round was open is overwritten at its end
        wanted = Reading(wanted.params, saved.held.buffers)
    if not saved.held.near(wanted):
        return [f"{what} holds {saved.held}, and round {saved.round} came to {held[saved.round]}"]
    return []


def _some(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - 10} more" if len(numbers) > 10 else ""
    return ", ".join(map(str, numbers[:10])) + more
