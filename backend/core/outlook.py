"""What a run's preview rests on, read off a live cohort: who has joined, and what is known of their speeds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from backend.core.join_window import JoinWindow
from backend.core.march import March
from backend.core.preview import Outlook, RankHint
from wire.messages import TensorSpec

if TYPE_CHECKING:
    from backend.core.cohort import Cohort

F32_BYTES = 4


def outlook_of(cohort: Cohort) -> Outlook:
    """The roster while the door is open, the living ranks once the world has formed."""
    march, reference = cohort.march, cohort.window.reference
    return Outlook(
        ranks=_roster(cohort.window) if march is None else _living(march),
        config=cohort.config,
        dataset_size=reference.dataset_size,
        model_bytes=arena_bytes(reference.layout),
        round_seconds=march.training.last_round_seconds if march is not None else None,
    )


def arena_bytes(layout: Iterable[TensorSpec]) -> int:
    """Bytes of the f32 arena that a round carries: what is averaged, tied tensors once."""
    averaged = (spec for spec in layout if spec.section in ("params", "buffers") and not spec.alias_of)
    return F32_BYTES * sum(math.prod(spec.shape) for spec in averaged)


def model_view(layout: Iterable[TensorSpec]) -> dict[str, int]:
    """What a round carries at most, and what of it needs no gradient: that is not sent while it is unchanged."""
    layout = list(layout)
    return {"bytes": arena_bytes(layout), "frozen_bytes": arena_bytes(spec for spec in layout if spec.frozen)}


def _roster(window: JoinWindow) -> tuple[RankHint, ...]:
    return tuple(
        RankHint(rank, member.emulate_ms_per_batch, host=member.host)
        for member in window.members.values()
        for rank in member.ranks
    )


def _living(march: March) -> tuple[RankHint, ...]:
    smoothed = march.training.scheduler.smoothed
    return tuple(
        RankHint(
            rank,
            smoothed(rank) or march.world.emulated_ms(rank),
            measured=smoothed(rank) > 0.0,
            host=march.world.ranks[rank].host,
        )
        for rank in march.world.alive()
    )
