"""Acknowledgements and divergence reports for the tests of guard and meta-controller."""

from __future__ import annotations

from backend.core.guard import DivergenceReport, divergence_report
from wire.messages import SyncAck


def ack(divergence: float, pre_norm: float = 1.0, post_norm: float = 1.0) -> SyncAck:
    return SyncAck(
        round=0,
        divergence=divergence,
        pre_norm=pre_norm,
        post_norm=post_norm,
        params_hash="",
        pack_ms=0.0,
        load_ms=0.0,
        wait_ms=0.0,
        reduce_ms=0.0,
    )


def report(divergence: float, k_max: int = 10) -> DivergenceReport:
    """A round in which rank 0 was this far from the consensus and did ``k_max`` batches; rank 1 hardly took part."""
    return divergence_report({0: ack(divergence), 1: ack(divergence / 2)}, {0: k_max, 1: min(1, k_max)})
