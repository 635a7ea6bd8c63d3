"""Windows and calibrated schedulers for ElChe's tests."""

from __future__ import annotations

from backend.core.elche import ElChe
from backend.core.timing import WindowReport


def window(ms_per_batch: dict[int, float], batches: int = 10) -> WindowReport:
    """A window in which each rank did the same number of batches at this cost; cost 0 is no reading."""
    return WindowReport(
        ms={rank: ms * batches for rank, ms in ms_per_batch.items()},
        batches={rank: batches if ms else 0 for rank, ms in ms_per_batch.items()},
        fill_ms=dict.fromkeys(ms_per_batch, 0.0),
        sync_ms=0.0,
        scale="delivered",
        compute_seconds=dict.fromkeys(ms_per_batch, 0.0),
        data_seconds=dict.fromkeys(ms_per_batch, 0.0),
    )


def ran(
    counts: dict[int, int], ms_per_batch: dict[int, float], *, sync_ms: float = 0.0, fill_ms: float = 0.0
) -> WindowReport:
    """A window of these counts at these rates, after a round of ``sync_ms``; every rank's start-up took ``fill_ms``."""
    return WindowReport(
        ms={rank: ms * counts[rank] for rank, ms in ms_per_batch.items()},
        batches=dict(counts),
        fill_ms=dict.fromkeys(counts, fill_ms),
        sync_ms=sync_ms,
        scale="delivered",
        compute_seconds=dict.fromkeys(counts, 0.0),
        data_seconds=dict.fromkeys(counts, 0.0),
    )


def calibrated(ms_per_batch: dict[int, float], reports: int = 1, **knobs) -> ElChe:
    elche = ElChe(ms_per_batch, **knobs)
    for _ in range(reports):
        elche.report_window(window(ms_per_batch))
        elche.check()
    return elche
