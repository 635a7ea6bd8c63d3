"""A controller that was killed and started again, over real sockets and a real database: who may come back, and how."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from runtime_site import ScriptedHost, Site, eventually, hello, open_store, site

from backend.core.config import RunConfig
from backend.runtime.limits import Limits
from simulation.theatre import Theatre
from wire.messages import Accept, RankReady, Reject, RequestParams
from wire.session import Channel

STORM = 50


def trained(hosts: int, **changes: Any) -> Theatre:
    """A cohort that has trained for a while, one rank a host."""
    config = RunConfig(job="toy.py:Toy", quorum=hosts, target=hosts, batch_size=1, initial_anchor=1, **changes)
    play = Theatre(config, samples=200 * hosts, salt=bytes(16))
    for number in range(hosts):
        play.join(f"host-{number}", 10.0)
    return play.run(until=0.3)


def left_behind(tmp_path: Path, play: Theatre) -> int:
    """Its controller is gone, and this is what it wrote down."""
    with open_store(tmp_path) as store:
        values = {"job": "toy.py:Toy", "mode": play.config.mode, "phase": "training", "config": play.config.as_dict()}
        run_id = store.create_run(values)
        for row in play.rows("continuations"):
            store.write(run_id, "continuations", row, durable=True).result()
        return run_id


async def come_back(where: Site, run_id: int, play: Theatre, number: int) -> RequestParams:
    """A host dials in anew, and its rank says what it holds; the request that opens the initial broadcast."""
    before = play.hosts[f"host-{number}"]
    (rank,) = before.ranks
    host = ScriptedHost(where, before.name)
    host.join = await host.dial()
    await host.join.say(hello(before.name, run=run_id, returning=before.host))
    host.accept = await host.join.hear(Accept)
    assert (host.accept.host_id, host.accept.ranks) == (before.host, [rank.rank])
    await host.attach()
    await host.control.say(RankReady("L", 1, 0, held_round=rank.held_round, held_hash="same"), rank.rank)
    return await host.control.hear(RequestParams, rank.rank)


async def test_fifty_hosts_come_back_at_once(tmp_path: Path) -> None:
    """All dial in at the same moment, over three links each, and none is turned away or forgotten."""
    play = trained(STORM)
    held = {played.held_round for played in play.ranks.values()}
    run_id = left_behind(tmp_path, play)
    by_address = Limits(strangers_per_source=64)  # here all come from one
    async with site(tmp_path, limits=by_address) as where:
        began = time.monotonic()
        requests = await asyncio.gather(*(come_back(where, run_id, play, number) for number in range(STORM)))
        print(f"{STORM} hosts were back after {time.monotonic() - began:.2f} s")
        assert {(request.initial, request.brings) for request in requests} == {(True, held.pop())}
        view = where.controller.live_view(run_id)
        assert view is not None
        assert where.controller.metrics()["strangers_refused_total"] == 0


async def test_a_host_that_is_none_of_the_world_is_refused_by_name(tmp_path: Path) -> None:
    play = trained(2)
    run_id = left_behind(tmp_path, play)
    async with site(tmp_path) as where:
        host = ScriptedHost(where, "somebody")
        await host.dial()
        await host.join.say(hello("somebody", run=run_id, returning=0))
        refused = await host.join.hear(Reject)
        assert (refused.code, refused.reason) == ("cannot_return", "it is no living host of this run")
        assert await asyncio.gather(*(come_back(where, run_id, play, number) for number in range(2)))


@pytest.mark.parametrize("change", [{"run_salt": "no hex"}, {"run_salt": "00"}, {"hosts": [{}]}, {"layout": None}])
async def test_what_cannot_be_read_keeps_no_controller_from_its_start(tmp_path: Path, change: dict[str, Any]) -> None:
    play = trained(2)
    for row in play.rows("continuations"):
        row["state"] |= change
    run_id = left_behind(tmp_path, play)
    async with site(tmp_path) as where:
        assert where.controller.live_view(run_id) is None
        assert (await where.row(run_id))["phase"] == "interrupted"


async def test_nobody_comes_back_in_time(tmp_path: Path) -> None:
    play = trained(2, reattach_seconds=0.3)
    run_id = left_behind(tmp_path, play)
    async with site(tmp_path) as where:
        await eventually(lambda: run_id not in where.controller.live_run_ids(), "the run to be given up")
        row = await where.row(run_id)
        assert row["phase"] == "interrupted"
        assert "not all back within 0.3 s" in row["reason"]
        link = await ScriptedHost(where, "host-0").dial()
        await link.say(hello("host-0", run=run_id, returning=0))
        assert (await link.hear(Reject)).reason
        assert (await link.closed())[0] == 4403, Channel.JOIN
