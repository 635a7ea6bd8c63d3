"""How the controller is doing, in numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import fields

from backend.runtime.driver import Clock
from backend.runtime.feed import Feed
from backend.runtime.health import Histogram, HostBeats, LoopHealth, heartbeat_figures
from backend.runtime.links import Door
from backend.runtime.perform import LiveRun, Tally
from backend.store import Store

BEAT_SECONDS = 0.25


class Heartbeat:
    """Measures how late the event loop serves a timer, and remembers what runs that are over have counted."""

    def __init__(self, clock: Clock) -> None:
        self.lag_seconds = 0.0
        self.worst_lag_seconds = 0.0
        self.runs_ended = 0
        self.events_handled = 0
        self.driver_lags = 0
        self.retired = Tally()
        self.lag = Histogram()
        self.health = LoopHealth()
        """of runs that are over"""
        self.beats: dict[str, float] = heartbeat_figures({})
        self._clock = clock

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            expected = self._clock() + BEAT_SECONDS
            await asyncio.sleep(BEAT_SECONDS)
            self.lag_seconds = max(0.0, self._clock() - expected)
            self.worst_lag_seconds = max(self.worst_lag_seconds, self.lag_seconds)
            self.lag.add(self.lag_seconds)

    def retire(self, run: LiveRun) -> None:
        """Keep the counts of a run that is over: totals never shrink."""
        self.runs_ended += 1
        self.events_handled += run.driver.events_handled
        self.driver_lags += run.driver.lag.count
        _add(self.retired, run.tally)
        self.health.merge(run.driver.health)
        self.beats = _worse(self.beats, run.links.beats)


def loop_health(heartbeat: Heartbeat, runs: Sequence[LiveRun]) -> LoopHealth:
    """How promptly all runs since the start were served."""
    health = LoopHealth()
    for part in (heartbeat.health, *(run.driver.health for run in runs)):
        health.merge(part)
    return health


def measure(door: Door, heartbeat: Heartbeat, runs: Sequence[LiveRun], feed: Feed, store: Store) -> dict[str, float]:
    """Numbers by name; those that end in ``_total`` only grow."""
    tally = Tally()
    for part in (heartbeat.retired, *(run.tally for run in runs)):
        _add(tally, part)
    health = loop_health(heartbeat, runs)
    beats = heartbeat.beats
    for run in runs:
        beats = _worse(beats, run.links.beats)
    links = {f"links_{channel.name.lower()}": count for channel, count in door.open_links.items()}
    return {
        "event_loop_lag_seconds": heartbeat.lag_seconds,
        "event_loop_lag_worst_seconds": heartbeat.worst_lag_seconds,
        **_spread("event_loop_lag", heartbeat.lag),
        **_spread("tick_latency", health.latency),
        "tick_latency_worst_seconds": health.latency.worst,
        **_spread("event_handling", health.handling),
        "event_handling_worst_seconds": health.handling.worst,
        "heartbeats_late_total": beats["late"],
        "heartbeat_worst_late_seconds": beats["worst_late_seconds"],
        "controller_heartbeats_late_total": beats["controller_late"],
        "controller_heartbeat_worst_late_seconds": beats["controller_worst_late_seconds"],
        "driver_lags_total": heartbeat.driver_lags + sum(run.driver.lag.count for run in runs),
        "driver_events_total": heartbeat.events_handled + sum(run.driver.events_handled for run in runs),
        "driver_inbox": sum(run.driver.waiting for run in runs),
        "runs_live": len(runs),
        "runs_ended_total": heartbeat.runs_ended,
        **links,
        "link_bytes_in_total": door.bytes_in,
        "link_bytes_out_total": door.bytes_out,
        "strangers": door.gate.strangers,
        "strangers_refused_total": door.gate.failures_total,
        "strangers_evicted_total": door.gate.evicted_total,
        "rounds_total": tally.rounds,
        "reduce_bytes_up_total": tally.bytes_up,
        "reduce_bytes_down_total": tally.bytes_down,
        "checkpoints_total": tally.checkpoints,
        "checkpoint_failures_total": tally.checkpoint_failures,
        "store_failures_total": tally.store_failures,
        "store_pending_rows": store.pending,
        "store_in_trouble": float(store.trouble is not None),
        "feed_subscribers": feed.subscribers,
    }


def _add(into: Tally, part: Tally) -> None:
    for entry in fields(Tally):
        setattr(into, entry.name, getattr(into, entry.name) + getattr(part, entry.name))


def _spread(name: str, durations: Histogram) -> dict[str, float]:
    return {f"{name}_p50_seconds": durations.quantile(0.5), f"{name}_p99_seconds": durations.quantile(0.99)}


def _worse(figures: dict[str, float], hosts: dict[str, HostBeats]) -> dict[str, float]:
    """With these hosts' lateness: counts add up, the worst is the worst of both."""
    more = heartbeat_figures(hosts)
    return {
        name: figures[name] + more[name] if name.endswith("late") else max(figures[name], more[name]) for name in more
    }
