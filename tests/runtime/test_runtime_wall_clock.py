"""The wall clock jumps while a run is served: nobody dies, no window closes, and durations stay what they were (case
K10)."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from pathlib import Path

from runtime_site import ScriptedHost, config, site

from backend.runtime.view import history_view
from backend.store import Store
from wire.messages import HostHeartbeat, WorldFormed

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)


class Swinging:
    """Ten minutes ahead and ten behind in turn, whenever it is asked."""

    def __init__(self) -> None:
        self._offsets = itertools.cycle((-600.0, 600.0))

    def __call__(self) -> datetime:
        return NOON + timedelta(seconds=next(self._offsets))


async def test_a_wall_clock_that_jumps_closes_no_window_and_kills_nobody(tmp_path: Path) -> None:
    wall = Swinging()
    path = tmp_path / "var"
    path.mkdir(mode=0o700)
    store = Store.open(f"sqlite:///{path / 'test.sqlite3'}", wall_clock=lambda: wall().timestamp())
    async with site(tmp_path, store=store, wall_clock=wall) as where:
        run_id = await where.controller.create_run(config(heartbeat_timeout_seconds=3.0, stall_seconds=30.0))
        host = ScriptedHost(where, "box")
        await host.admitted(ranks=2)
        remaining = 300.0
        for _ in range(20):
            await host.join.say(HostHeartbeat(ranks=[]))
            view = where.controller.live_view(run_id)
            assert view is not None
            assert view["window"]["open"]
            assert 250.0 < view["window"]["window_remaining_seconds"] <= remaining
            remaining = view["window"]["window_remaining_seconds"]
            assert 0.0 <= view["members"][0]["last_heard_seconds"] < 3.0
        await where.controller.command(run_id, "start")
        await host.join.hear(WorldFormed)
        view = where.controller.live_view(run_id)
        assert view is not None
        assert (view["phase"], view["deaths"]) == ("forming", [])
        await where.controller.command(run_id, "abort")
        await where.until_over(run_id)


def test_how_long_a_run_took_is_not_reckoned_from_two_readings_of_the_wall_clock(tmp_path: Path) -> None:
    times = iter(NOON.timestamp() + offset for offset in itertools.count(0.0, -600.0))
    store = Store.open(f"sqlite:///{tmp_path / 'test.sqlite3'}", wall_clock=lambda: next(times))
    run_id = store.create_run({"job": "a.py:A", "mode": "cpu_cadence"})
    for row in ({"phase": "training"}, {"phase": "done", "summary": {"seconds": 12.5}}):
        store.write(run_id, "runs", row, durable=True).result(10)
    view = history_view(store.queries, run_id)
    store.close()
    assert view is not None
    assert view["started_at"] > view["ended_at"]
    assert view["seconds"] == 12.5
