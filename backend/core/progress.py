"""How far a march has come, as rows: for the run's own row, for a checkpoint's manifest, for the summary at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

if TYPE_CHECKING:
    from backend.core.march import March


def position(march: March) -> dict[str, Any]:
    """The last closed round, the epochs that are complete, and the cohort's steps."""
    return {
        "round": march.cycle.next_round - 1,
        "epoch": len(march.training.samples_accepted),
        "global_step": march.training.global_step,
    }


def progress_row(march: March, round_number: int) -> dict[str, Any]:
    """Columns of the run's own row after ``round_number`` closed."""
    training, latest = march.training, march.evaluations.latest
    return {
        "world_size": len(march.world.ranks),
        "epochs_done": len(training.samples_accepted),
        "rounds_done": max(0, round_number + 1),
        "global_step": training.global_step,
        "loss": training.loss,
        "metrics": dict(latest.metrics) if latest else None,
        "summary": summary(march),
    }


def summary(march: March) -> dict[str, Any]:
    """What the run achieved: allotments (batches of a full window, by rank), rates, and the samples of each epoch."""
    training = march.training
    rate, ideal = training.rates.batches_per_second, training.ideal_batches_per_second()
    return {
        "allotments": {str(rank): count for rank, count in training.scheduler.counts.items()},
        "batches_per_second": rate,
        "ideal_batches_per_second": ideal,
        "efficiency": rate / ideal if rate and ideal else None,
        "samples_accepted": list(training.samples_accepted),
    }


def checkpoint_manifest(march: March, reason: str, now: float) -> dict[str, Any]:
    """Everything beside the tensors that a checkpoint carries, JSON-ready; ``backend.core.resume`` reads it again."""
    latest = march.evaluations.latest
    ranks, hosts = march.world.ranks, march.world.hosts
    return {
        "run_id": march.run_id,
        "config": march.config.as_dict(),
        "layout": [asdict(spec) for spec in march.layout],
        "dataset_size": march.training.dataset_size,
        "world_size": len(ranks),
        "seats": [[hosts[seat.host].name, seat.device] for seat in ranks.values()],
        "scheduler": march.training.scheduler.state(),
        **march.training.review.state(),
        "progress": coverage(march, now),
        "reason": reason,
        "loss": march.training.loss,
        "metrics": dict(latest.metrics) if latest else {},
        **position(march),
    }


def coverage(march: March, now: float) -> dict[str, Any]:
    """Which samples are accepted; all others, dealt or not, a resumed run trains (E12)."""
    training, latest = march.training, march.evaluations.latest
    pool, tally = training.pool, training.tally
    return {
        "samples_accepted": list(training.samples_accepted),
        "epoch": len(training.samples_accepted),
        "accepted": [[piece.offset, piece.size] for piece in pool.accepted()] if pool else [],
        "lost": [lost.row() for lost in pool.lost] if pool else [],
        "samples_lost": training.samples_lost,
        "batches": tally.batches if pool else 0,
        "seconds": now - tally.opened_at if pool else 0.0,
        "loss_sum": tally.loss_sum if pool else 0.0,
        "loss_batches": tally.loss_batches if pool else 0,
        "loss": training.loss,
        "evaluated": {"epoch": latest.epoch, "metrics": dict(latest.metrics)} if latest else None,
    }
