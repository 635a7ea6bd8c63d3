"""How the controller is doing, in numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import fields

from backend.runtime.driver import Clock
from backend.runtime.feed import Feed
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
        self._clock = clock

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            expected = self._clock() + BEAT_SECONDS
            await asyncio.sleep(BEAT_SECONDS)
            self.lag_seconds = max(0.0, self._clock() - expected)
            self.worst_lag_seconds = max(self.worst_lag_seconds, self.lag_seconds)

    def retire(self, run: LiveRun) -> None:
        """Keep the counts of a run that is over: totals never shrink."""
        self.runs_ended += 1
        self.events_handled += run.driver.events_handled
        self.driver_lags += run.driver.lag.count
        _add(self.retired, run.tally)


def measure(door: Door, heartbeat: Heartbeat, runs: Sequence[LiveRun], feed: Feed, store: Store) -> dict[str, float]:
    """Numbers by name; those that end in ``_total`` only grow."""
    tally = Tally()
    for part in (heartbeat.retired, *(run.tally for run in runs)):
        _add(tally, part)
    links = {f"links_{channel.name.lower()}": count for channel, count in door.open_links.items()}
    return {
        "event_loop_lag_seconds": heartbeat.lag_seconds,
        "event_loop_lag_worst_seconds": heartbeat.worst_lag_seconds,
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
