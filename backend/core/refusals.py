"""Contributions that hold a value which is not finite: named, refused, and their ranks left out of the round.

A refused rank declares no work in the next attempt, takes the consensus and starts anew; what it did since the last
round is void, and its samples are lost. One that is refused ``IN_A_ROW`` times without a contribution in between is
dead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING

from backend.core.config import RunConfig
from backend.core.cycle import INITIAL_ROUND, OpenedRound
from backend.core.deaths import Casualty
from backend.core.liveness import SaveReason
from backend.core.vocabulary import NonFiniteValue, RoundBroken
from wire.messages import SyncAck, TensorSpec

if TYPE_CHECKING:
    from backend.core.march import March

IN_A_ROW = 3
"""Refusals of a rank, with no accepted contribution between them, that end it: starting anew did not help."""
REASON = "non-finite"
"""why samples are lost"""


class Refusals:
    """How often each rank was refused, in all and in a row."""

    def __init__(self, config: RunConfig) -> None:
        self.stops = config.non_finite == "stop"
        self.total: dict[int, int] = {}
        self.latest = ""
        """the last refusal as a sentence"""
        self._in_a_row: dict[int, int] = {}
        self._hopeless: set[int] = set()

    def again(self, rank: int) -> bool:
        """One more; whether that was one too many."""
        self.total[rank] = self.total.get(rank, 0) + 1
        self._in_a_row[rank] = self._in_a_row.get(rank, 0) + 1
        if self._in_a_row[rank] >= IN_A_ROW:
            self._hopeless.add(rank)
        return rank in self._hopeless

    def accepted(self, steps: Mapping[int, int]) -> None:
        """A round was committed: whoever worked in it is well again."""
        for rank, batches in steps.items():
            if batches > 0:
                self._in_a_row.pop(rank, None)

    def epitaph(self, dead: set[int]) -> str:
        """What to add to the reason of a run that ends with these deaths."""
        return f" The last refusal: {self.latest}." if dead & self._hopeless else ""


def refuse(march: March, event: RoundBroken, current: OpenedRound, now: float) -> bool:
    """Act on an attempt that was refused for a value that is not finite. False, and nothing is done, when it was
    refused for something else, or when nobody is left who could be at fault."""
    bad = event.non_finite
    suspects = _suspects(march, event, current)
    if bad is None or not suspects:
        return False
    who = ", ".join(march.world.where(rank) for rank in suspects)
    doubt = "one of " if bad.rank is None and len(suspects) > 1 else ""
    what = f"{doubt}{who} contributed {bad.value} in {spot(march.layout, bad.element)}"
    march.refusals.latest = what
    if current.round == INITIAL_ROUND:
        march.fail(f"The initial parameters cannot be handed out: {what}", now)
    elif march.refusals.stops:
        _note(march, f"{what}, and the run was told to stop for that", bad, dict.fromkeys(suspects, 0))
        reason = f"Round {current.round} cannot be summed: {what}"
        march.out += march.cycle.abandon(reason)
        march.end_after("failed", f"{SaveReason.NON_FINITE.label}: {reason}", SaveReason.NON_FINITE, now)
    else:
        _exclude(march, current, suspects, what, bad, now)
    return True


def acknowledged(march: March, rank: int, ack: SyncAck) -> None:
    """A rank adopted the consensus. One that was left out of the round has started anew by that: what it trained in the
    meantime is void, too."""
    current = march.cycle.open
    starts_anew = current is not None and rank in current.excluded and rank in current.waiting
    if not march.cycle.acknowledge(rank, ack) or not starts_anew:
        return
    samples = march.training.void(rank, REASON)
    text = f"{march.world.where(rank)} started anew from the consensus"
    if samples:
        text += f"; {samples} more samples, which it trained before that, are lost"
    march.event("rank_restarted", text, rank=rank, samples=samples)


def locate(layout: Iterable[TensorSpec], element: int) -> tuple[str, list[int]]:
    """The tensor that holds an element of the arena, and the index in it, which is empty for a scalar."""
    for spec in layout:
        if spec.offset < 0 or not spec.offset <= element < spec.offset + prod(spec.shape):
            continue
        rest, index = element - spec.offset, []
        for length in reversed(spec.shape):
            rest, position = divmod(rest, length)
            index.append(position)
        return spec.name, index[::-1]
    return f"element {element}, which is no tensor's", []


def spot(layout: Iterable[TensorSpec], element: int) -> str:
    """The same in words: ``layers.0.weight[3, 17]``."""
    name, index = locate(layout, element)
    return f"{name}{index}" if index else name


def _suspects(march: March, event: RoundBroken, current: OpenedRound) -> list[int]:
    """The rank at fault or, where only the host is known, those of its ranks that worked."""
    named = event.non_finite.rank if event.non_finite is not None else None
    ranks = (named,) if named is not None else current.hosts.get(-1 if event.host is None else event.host, ())
    able = [rank for rank in ranks if rank in current.ranks - current.excluded]
    if current.round == INITIAL_ROUND:
        return [rank for rank in able if rank == 0]
    return [rank for rank in able if march.training.steps(rank) > 0] or able


def _exclude(
    march: March, current: OpenedRound, suspects: list[int], what: str, bad: NonFiniteValue, now: float
) -> None:
    lost = {rank: march.training.void(rank, REASON) for rank in suspects}
    whose = "it" if len(suspects) == 1 else "they"
    text = f"{what}: left out of round {current.round}; {sum(lost.values())} samples that {whose} trained are lost"
    _note(march, text, bad, lost)
    current.excluded |= set(suspects)
    hopeless = [rank for rank in suspects if march.refusals.again(rank)]
    if hopeless:
        reason = f"{IN_A_ROW} of its contributions in a row were not finite, the last one in "
        reason += spot(march.layout, bad.element)
        march.losses.ranks([Casualty(rank, reason) for rank in hopeless], now)
    else:
        why = f"what {', '.join(f'rank {rank}' for rank in suspects)} contributed is not finite"
        march.out += march.cycle.retry(march.world.alive_by_host(), why, now)


def _note(march: March, text: str, bad: NonFiniteValue, lost: dict[int, int]) -> None:
    """Write the refusal down. ``lost`` is samples by rank."""
    seats = [march.world.ranks[rank] for rank in lost]
    tensor, index = locate(march.layout, bad.element)
    march.event(
        "non_finite",
        text,
        "warning",
        ranks=list(lost),
        host=march.world.hosts[seats[0].host].name,
        devices=[seat.device for seat in seats],
        tensor=tensor,
        index=index,
        value=bad.value,
        samples=lost,
    )
