"""Figures of an entry of ``benchmarks.heterogeneous`` from what its ranks did, and the table of them. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

WARM_UP = 0.2
"""share of a peer's wall time that does not count, and at least ``WARM_UP_SECONDS``"""
WARM_UP_SECONDS = 3.0

HELD = 3


class EntryFailed(Exception):
    """Why an entry did not come to figures, as a sentence for the table."""


@dataclass(frozen=True, slots=True)
class Window:
    """What was done in the seconds that count: batches by rank, samples of all."""

    seconds: float
    batches: tuple[int, ...]
    samples: int


@dataclass(frozen=True, slots=True)
class Figures:
    """How fast an entry was. ``fraction`` is of the sum of the ranks' solo rates; ``idle`` of a rank is the share of
    the wall time in which its device did no batch: 1 - batches x emulated ms / wall."""

    samples_per_second: float
    fraction: float
    idle: tuple[float, ...]
    seconds: float
    batches: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def solo_rates(ms: Sequence[float]) -> float:
    """Batches a second of all ranks when each works alone: the sum of 1000 / ms."""
    return sum(1000.0 / one for one in ms)


def window_of_steps(ends: Sequence[Sequence[float]], started: float, batch_size: int) -> Window:
    """A peer's steady state, from the moments at which each rank's steps ended (ascending, seconds).

    It begins after the warm-up and ends when the first rank is through, so that neither the start nor the ranks'
    unequal ends count. Raises ``EntryFailed`` when nothing is left.
    """
    if not all(ends):
        raise EntryFailed("a rank did no step")
    last = min(steps[-1] for steps in ends)
    whole = last - started
    first = started + (max(WARM_UP_SECONDS, WARM_UP * whole) if whole > 2 * WARM_UP_SECONDS else WARM_UP * whole)
    batches = tuple(bisect_right(steps, last) - bisect_right(steps, first) for steps in ends)
    return _checked(Window(last - first, batches, sum(batches) * batch_size))


def window_of_rounds(rounds: Sequence[dict[str, Any]], moments: Sequence[float], ranks: int, skip: int) -> Window:
    """Marchline's steady state: the rounds after the first ``skip``, by the wall clock from the closing of the last
    skipped one. Pauses between rounds count. Raises ``EntryFailed`` when there are no such rounds."""
    if len(rounds) <= skip:
        raise EntryFailed(f"only {len(rounds)} rounds, and the first {skip} are calibration; train more samples")
    counted = rounds[skip:]
    batches = tuple(sum(int((row["realized"] or {}).get(str(rank), 0)) for row in counted) for rank in range(ranks))
    return _checked(Window(moments[-1] - moments[skip - 1], batches, sum(row["samples"] for row in counted)))


def window_of_work(rounds: Sequence[dict[str, Any]], ranks: int, skip: int) -> Window:
    """The rounds after the first ``skip``, each from the opening of its window to its close by the controller's own
    clock: what lies between them (evaluation, say) does not count. Raises ``EntryFailed`` when there are none."""
    if len(rounds) <= skip:
        raise EntryFailed(f"only {len(rounds)} rounds, and the first {skip} are calibration; train more samples")
    counted = rounds[skip:]
    batches = tuple(sum(int((row["realized"] or {}).get(str(rank), 0)) for row in counted) for rank in range(ranks))
    return _checked(Window(sum(row["seconds"] for row in counted), batches, sum(row["samples"] for row in counted)))


def _checked(window: Window) -> Window:
    if window.seconds <= 0 or sum(window.batches) == 0:
        raise EntryFailed("it ended before it was warm; train more samples")
    return window


def figures(window: Window, ms: Sequence[float], batch_size: int) -> Figures:
    """The figures of a window; ``ms`` by rank."""
    rate = window.samples / window.seconds
    return Figures(
        samples_per_second=rate,
        fraction=rate / (batch_size * solo_rates(ms)),
        idle=tuple(1 - count * one / 1000 / window.seconds for count, one in zip(window.batches, ms, strict=True)),
        seconds=window.seconds,
        batches=window.batches,
    )


def time_to(target: float, curve: Sequence[tuple[float, float]]) -> float | None:
    """The first moment of ``curve``, pairs of (seconds, accuracy) in their order, from which the target is met ``HELD``
    times in a row: one lucky note does not count."""
    for first in range(len(curve) - HELD + 1):
        if all(accuracy >= target for _, accuracy in curve[first : first + HELD]):
            return curve[first][0]
    return None


def table(entries: Sequence[dict[str, Any]], target: float) -> list[str]:
    """Lines of a Markdown table, one entry each; those that failed say why below it."""
    head = ("entry", "samples/s", "of solo rates", "idle by rank", f"s to {target:.0%}")
    lines = [
        f"| {' | '.join((*head, 'final accuracy', 'loss', 's in all', 'load'))} |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    failed = []
    for entry in entries:
        if "failed" in entry:
            failed.append(f"{entry['name']} did not run: {entry['failed']}")
            continue
        reached = entry["seconds_to_target"]
        cells = [
            entry["name"],
            f"{entry['samples_per_second']:,.0f}",
            f"{entry['fraction']:.3f}",
            " ".join(f"{idle:.0%}" for idle in entry["idle"]),
            "-" if reached is None else f"{reached:.1f}",
            f"{entry['accuracy']:.3f}",
            f"{entry['loss']:.4f}",
            f"{entry['wall_seconds']:.1f}",
            f"{entry['load'][0]:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines + (["", *failed] if failed else [])
