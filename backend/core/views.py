"""The run as the page, the API and the command line show it: JSON-ready values, times in seconds relative to
``now``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from backend.core.join_window import JoinWindow
from backend.core.liveness import Liveness
from backend.core.march import March
from backend.core.outlook import model_view
from backend.core.world import HostSeat, RankSeat
from wire.messages import RankProgress

if TYPE_CHECKING:
    from backend.core.cohort import Cohort

BUSY_SECONDS = 5.0
"""A rank that has been at one thing for longer is shown with the time: it lives, but says nothing new."""
BUSY_STATES = ("working", "evaluating", "saving")


def cohort_view(cohort: Cohort, now: float) -> dict[str, Any]:
    """The core's part of the run's view (see the API's ``RunView``)."""
    march = cohort.march
    view: dict[str, Any] = {
        "phase": cohort.phase,
        "reason": cohort.end.reason if cohort.end else "",
        "window": window_view(cohort.window, now, open_=march is None and not cohort.ended),
        "emulated": any(member.emulate_ms_per_batch for member in cohort.window.members.values()),
        "model": model_view(cohort.window.reference.layout) if cohort.window.reference.layout else None,
        "epochs": cohort.config.epochs,
    }
    if march is None:
        return (
            view | {"members": waiting_members(cohort.window, cohort.liveness, now)} | _nothing_trained(cohort.window)
        )
    return view | {
        "members": [_seat_view(seat, cohort, now) for seat in march.world.hosts.values()],
        **march_view(march, now),
    }


def window_view(window: JoinWindow, now: float, *, open_: bool) -> dict[str, Any]:
    """The join window: who decides, how long still, what is missing to start, who was turned away at the door."""
    verdict = window.verdict(now)
    return {
        "open": open_,
        "start_mode": window.config.start_mode,
        "quorum": window.quorum,
        "target": window.target,
        "joined_ranks": window.joined_ranks,
        "joined_hosts": sum(1 for member in window.members.values() if member.ranks),
        "window_seconds": window.window_seconds,
        "cap_seconds": window.cap_seconds,
        "window_remaining_seconds": window.window_remaining(now) if open_ else None,
        "cap_remaining_seconds": window.cap_remaining(now) if open_ else None,
        "armed": window.armed,
        "verdict": verdict.reason if open_ else "The window is closed.",
        "missing": [{"code": m.code, "text": m.text, "cure": m.cure} for m in window.missing(now)] if open_ else [],
        "strangers": {"count": window.strangers.count, "sources": dict(window.strangers.sources)},
        "refusals": [
            {
                "host": entry.host,
                "address": entry.address,
                "code": entry.code,
                "reason": entry.reason,
                "seconds_ago": now - entry.at,
            }
            for entry in window.refusals
        ],
        "probing": [{"host": c.name, "address": c.address} for c in window.candidates()] if open_ else [],
    }


def waiting_members(window: JoinWindow, liveness: Liveness, now: float) -> list[dict[str, Any]]:
    """The roster while the door is open."""
    return [
        {
            "host": member.host,
            "name": member.name,
            "address": member.address,
            "ranks": list(member.ranks),
            "devices": [asdict(device) for device in member.devices],
            "versions": asdict(member.versions),
            "emulate_ms_per_batch": member.emulate_ms_per_batch,
            "emulated": member.emulate_ms_per_batch is not None,
            "relay_only": member.relay_only,
            "via": None,
            "state": "admitted",
            "joined_seconds_ago": now - member.joined_at,
            "last_heard_seconds": liveness.silence(member.host, now),
        }
        for member in window.members.values()
    ]


def march_view(march: March, now: float) -> dict[str, Any]:
    """The formed world: ranks, progress, rates, deaths."""
    training, rates = march.training, march.training.rates
    ideal = training.ideal_batches_per_second()
    mean = rates.batches_per_second
    until = march.ended_at if march.ended_at is not None else now
    latest = march.evaluations.latest
    return {
        "seconds": until - march.started_at if march.started_at is not None else 0.0,
        "stopped_by": march.stopping,
        "world_size": len(march.world.ranks),
        "epoch": training.epoch,
        "round": max(0, march.cycle.next_round - (1 if march.cycle.open else 0)),
        "global_step": training.global_step,
        "samples_done": training.pool.accepted_samples if training.pool else 0,
        "samples_lost": training.samples_lost + (training.pool.lost_samples if training.pool else 0),
        "samples_total": training.dataset_size,
        "ranks": [_rank_view(seat, march) for seat in march.world.ranks.values()],
        "decision": training.decision if march.phase != "forming" else march.plane.waits() or march.forming.missing(),
        "session": march.plane.view(),
        "guard": training.review.view(),
        "loss": training.loss,
        "eval": {"epoch": latest.epoch, "metrics": dict(latest.metrics)} if latest else None,
        "throughput": {
            "batches_per_second": rates.last_batches_per_second,
            "samples_per_second": rates.last_samples_per_second,
            "ideal_batches_per_second": ideal,
            "efficiency": mean / ideal if mean and ideal else None,
        },
        "round_stages": dict(training.round_stages),
        "samples_accepted": list(training.samples_accepted),
        "saving": march.checkpoints.busy,
        "checkpoint_trouble": march.checkpoints.trouble,
        "ending": march.ending.step if march.ending and march.end is None else None,
    }


def _nothing_trained(window: JoinWindow) -> dict[str, Any]:
    return {
        "seconds": 0.0,
        "stopped_by": "",
        "world_size": window.joined_ranks,
        "epoch": 0,
        "round": 0,
        "global_step": 0,
        "samples_done": 0,
        "samples_lost": 0,
        "samples_total": window.reference.dataset_size,
        "ranks": [],
        "decision": "",
        "session": None,
        "guard": None,
        "loss": None,
        "eval": None,
        "throughput": dict.fromkeys(
            ("batches_per_second", "samples_per_second", "ideal_batches_per_second", "efficiency")
        ),
        "round_stages": {},
        "samples_accepted": [],
        "saving": False,
        "checkpoint_trouble": "",
        "ending": None,
    }


def _seat_view(seat: HostSeat, cohort: Cohort, now: float) -> dict[str, Any]:
    member = cohort.window.members[seat.host]
    return seat.as_row() | {
        "emulated": seat.emulate_ms_per_batch is not None,
        "relay_only": not seat.ranks,
        "via": seat.via,
        "state": seat.state,
        "joined_seconds_ago": now - member.joined_at,
        "last_heard_seconds": cohort.liveness.silence(seat.host, now),
    }


def _rank_view(seat: RankSeat, march: March) -> dict[str, Any]:
    training, progress = march.training, seat.progress
    pace = training.scheduler.smoothed(seat.rank)
    window = training.window
    doing = progress.state if progress is not None and seat.alive else ""
    busy = progress is not None and doing in BUSY_STATES and progress.state_seconds > BUSY_SECONDS
    planned = window.planned.get(seat.rank, 0) if window else seat.last_planned
    return {
        "rank": seat.rank,
        "host": seat.host,
        "host_name": march.world.hosts[seat.host].name,
        "device": seat.device,
        "state": _state(seat, march),
        "busy": busy,
        "doing": doing,
        "doing_seconds": int(progress.state_seconds) if progress is not None and busy else None,
        "planned": planned,
        "realized": training.steps(seat.rank) if window else seat.last_realized,
        "anchor": training.scheduler.anchor_rank == seat.rank,
        "ms_per_batch": pace or None,
        "emulated_ms": march.world.emulated_ms(seat.rank),
        "steps": seat.steps,
        "samples": seat.samples,
        "exclusions": march.refusals.total.get(seat.rank, 0),
        "loss": seat.loss,
        "compute_seconds": seat.last_split.get("compute_seconds", 0.0),
        "data_seconds": seat.last_split.get("data_seconds", 0.0),
        "wait_seconds": seat.last_split.get("wait_seconds", 0.0),
        "reduce_seconds": seat.last_split.get("reduce_seconds", 0.0),
        "rss_bytes": progress.rss_bytes if progress else 0,
        **_device_view(seat, march, progress if seat.alive else None),
    }


def _device_view(seat: RankSeat, march: March, progress: RankProgress | None) -> dict[str, int | None]:
    """The rank's GPU as its host sees it; all none for a CPU rank, and where nobody can tell."""
    devices = march.world.hosts[seat.host].devices
    memory = next((d.memory_bytes for d in devices if d.id == seat.device and d.type == "cuda"), 0)
    return {
        "device_utilisation": progress.device_utilisation if progress else None,
        "device_bytes": progress.device_bytes if progress else None,
        "device_peak_bytes": progress.device_peak_bytes if progress else None,
        "device_total_bytes": memory or None,
    }


def _state(seat: RankSeat, march: March) -> str:
    opened = march.cycle.open
    waits = seat.state != "working" or not march.training.overlaps
    if seat.alive and opened is not None and waits and seat.rank in opened.ranks and seat.rank not in opened.acks:
        return "reducing"
    if seat.alive and seat.rank in march.evaluations.pending.values():
        return "evaluating"
    return seat.state
