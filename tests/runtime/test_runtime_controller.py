"""The controller: runs are made, served side by side, ended by name, and never left looking alive."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from runtime_scripted import ScriptedCore
from runtime_site import (
    LateStore,
    Link,
    ScriptedHost,
    Site,
    config,
    eventually,
    hello,
    job_dir,
    open_store,
    site,
)

from backend.core.vocabulary import Effect, End, Event, HostSaid, Operator, Record, SendHost, WriteCheckpoint
from backend.runtime.controller import Controller
from backend.runtime.errors import CommandRefused, UnknownRun
from backend.runtime.feed import Feed
from backend.runtime.limits import Limits
from backend.runtime.settings import Settings
from backend.runtime.view import history_view
from backend.store import Store, StoreError
from wire.messages import Accept, HostHeartbeat, JobOffer, Reject, RunEnded, WorldFormed
from wire.session import Channel


async def first_frame(feed: Feed, run_id: int | None) -> dict[str, Any]:
    frames = feed.subscribe(run_id)
    try:
        return await asyncio.wait_for(anext(frames), 30)
    finally:
        await frames.aclose()  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------------- new runs


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"job": ""}, {"job": "job_missing"}),
        ({"job": "absent.py:Toy"}, {"job": "job_not_found"}),
        ({"job": "../secret.py:Toy"}, {"job": "job_outside_dir"}),
        ({"job": "toy.py:Absent"}, {"job": "job_class_missing"}),
        ({"quorum": 1}, {"quorum": "quorum_below_two"}),
        ({"mode": "nccl_async"}, {"mode": "async_needs_cpu"}),
        ({"params": {"hidden": 3}}, {"params.hidden": "param_unknown"}),
        ({"quorum": 1, "epochs": 0, "job": "no.py:X"}, {"quorum": 0, "epochs": 0, "job": "job_not_found"}),
    ],
)
async def test_a_run_that_cannot_work_is_refused_with_every_reason(
    tmp_path: Path, changes: dict[str, Any], fields: dict[str, Any]
) -> None:
    async with site(tmp_path) as where:
        with pytest.raises(CommandRefused) as refused:
            await where.controller.create_run(config(**changes))
        assert refused.value.code == "invalid_config"
        codes = {problem.field: problem.code for problem in refused.value.errors}
        assert set(codes) == set(fields)
        assert {name: codes[name] for name, code in fields.items() if code} == {k: v for k, v in fields.items() if v}
        assert where.controller.live_run_ids() == []
        assert await asyncio.to_thread(where.controller.store.queries.list_runs) == []


async def test_a_run_is_in_the_store_and_live_once_it_is_made(tmp_path: Path) -> None:
    async with site(tmp_path) as where:
        run_id = await where.controller.create_run(config(seed=7))
        row = await where.row(run_id)
        view = where.controller.live_view(run_id)
        assert view is not None
        assert (row["phase"], row["job"], row["config"]["seed"]) == ("waiting", "toy.py:Toy", 7)
        assert row["name"] == view["name"] != ""
        assert row["job_hash"] != ""
        assert view["window"]["open"] is True
        assert view["created_at"] == row["created_at"]
        assert where.controller.live_view(run_id + 1) is None


async def test_a_live_view_and_its_history_have_one_shape_and_are_json(tmp_path: Path) -> None:
    async with site(tmp_path) as where:
        run_id = await where.controller.create_run(config())
        host = ScriptedHost(where, "box")
        await host.admitted(ranks=2, size=8)
        bad = await Link.dial(where.url(Channel.JOIN), Channel.JOIN, where.join_secret)
        await bad.say(hello("", ranks=1))
        await bad.closed()
        await where.controller.command(run_id, "start")
        await host.join.hear(WorldFormed)
        live = where.controller.live_view(run_id)
        assert live is not None
        await where.controller.command(run_id, "abort", by="anna")
        await where.until_over(run_id)
        past = await asyncio.to_thread(history_view, where.controller.store.queries, run_id)
        assert past is not None
        page = await first_frame(where.controller.feed, run_id)
    assert live.keys() == past.keys()
    for part in ("window", "throughput"):
        assert live[part].keys() == past[part].keys()
    for part in ("members", "ranks"):
        assert live[part], part
        assert [entry.keys() for entry in live[part]] == [entry.keys() for entry in past[part]], part
    assert live["window"]["refusals"][0].keys() == past["window"]["refusals"][0].keys()
    assert live["window"]["refusals"][0]["code"] == past["window"]["refusals"][0]["code"] == "blank_host"
    assert (live["phase"], past["phase"]) == ("forming", "failed")
    assert "anna" in past["reason"]
    assert [member["ranks"] for member in past["members"]] == [[0, 1]]
    for view in (live, past, page):
        json.dumps(view, allow_nan=False)
    assert (page["type"], page["view"]["phase"]) == ("snapshot", "failed")
    assert [event["id"] for event in page["events"]] == sorted(event["id"] for event in page["events"])
    assert "run_failed" in {event["kind"] for event in page["events"]}


async def test_an_emulated_run_never_passes_for_a_real_one(tmp_path: Path) -> None:
    async with site(tmp_path) as where:
        run_id = await where.controller.create_run(config())
        host = ScriptedHost(where, "throttled")
        host.emulate = 40.0
        await host.admitted(ranks=2)
        live = where.controller.live_view(run_id)
        await where.controller.command(run_id, "start")
        await host.join.hear(WorldFormed)
        row = await where.row(run_id)
        await where.controller.command(run_id, "abort")
        await where.until_over(run_id)
        past = await asyncio.to_thread(history_view, where.controller.store.queries, run_id)
        (listed,) = await asyncio.to_thread(where.controller.store.queries.list_runs)
    assert live is not None
    assert past is not None
    assert (live["emulated"], row["emulated"], past["emulated"], listed["emulated"]) == (True, True, True, True)
    assert [rank["emulated_ms"] for rank in past["ranks"]] == [40.0, 40.0]


async def test_a_run_that_is_over_takes_no_host_any_more(tmp_path: Path) -> None:
    """While its last links are flushed, a run is still known: a host that asks for it by number is sent away."""
    bulk = SendHost(0, JobOffer(1, "toy.py:Toy", {"text": "x" * 60_000}, ""))
    core = answering(*[bulk] * 400, End("done", "test"))
    async with site(tmp_path, core=lambda: core, limits=Limits(close_seconds=3.0, send_stall_seconds=1.0)) as where:
        run_id = await where.controller.create_run(config())
        deaf = await joined(where, core)
        deaf.socket.transport.pause_reading()
        await where.controller.command(run_id, "start")
        assert where.controller.live_run_ids() == [run_id], "its last link is being flushed"
        late = await Link.dial(where.url(Channel.JOIN), Channel.JOIN, where.join_secret)
        await late.say(hello("late", run=run_id))
        assert (await late.hear(Reject)).code == "unknown_run"
        assert (await late.closed())[0] == 4403
        deaf.socket.transport.abort()


async def test_the_time_scale_stretches_a_new_run(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, job_dir=job_dir(tmp_path), time_scale=2.0)
    controller = Controller(settings, open_store(tmp_path))
    await controller.start()
    run_id = await controller.create_run(config())
    view = controller.live_view(run_id)
    assert view is not None
    assert view["config"]["window_seconds"] == view["window"]["window_seconds"] == 600.0
    await controller.close()


# --------------------------------------------------------------------------------------------- commands


async def test_commands_reach_their_run_and_are_refused_by_name(tmp_path: Path) -> None:
    async with site(tmp_path) as where:
        run_id = await where.controller.create_run(config())
        with pytest.raises(UnknownRun):
            await where.controller.command(run_id + 1, "start")
        with pytest.raises(CommandRefused) as refused:
            await where.controller.command(run_id, "start")
        assert refused.value.code
        assert "2" in refused.value.reason
        with pytest.raises(CommandRefused) as refused:
            await where.controller.command(run_id, "turn_away", host="box")
        assert refused.value.code == "bad_argument"
        await where.controller.command(run_id, "change", quorum=3)
        view = where.controller.live_view(run_id)
        assert view is not None
        assert view["window"]["quorum"] == 3
        await where.controller.command(run_id, "abort")
        await where.until_over(run_id)
        with pytest.raises(UnknownRun):
            await where.controller.command(run_id, "abort")


async def test_a_ticket_is_good_once(tmp_path: Path) -> None:
    async with site(tmp_path) as where:
        ticket = where.controller.issue_ticket()
        assert where.controller.redeem_ticket(ticket)
        assert not where.controller.redeem_ticket(ticket)


# ------------------------------------------------------------------------------------------ side by side


async def test_two_runs_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    async with site(tmp_path) as where:
        first = await where.controller.create_run(config(name="first"))
        second = await where.controller.create_run(config(name="second"))
        hosts = {run: ScriptedHost(where, "box") for run in (first, second)}
        for run, host in hosts.items():
            assert (await host.admitted(ranks=2, run=run)).run_id == run
            await where.controller.command(run, "start")
            await host.join.hear(WorldFormed)
            await host.attach()
        assert hosts[first].run_secret != hosts[second].run_secret
        # A relay of one run has no business in the other.
        stray = await Link.dial(where.url(Channel.CONTROL), Channel.CONTROL, hosts[first].run_secret, second)
        with pytest.raises(Exception, match="secret"):
            await stray.say(HostHeartbeat([]))
        await where.controller.command(first, "abort", by="anna")
        assert (await hosts[first].join.hear(RunEnded)).phase == "failed"
        await where.until_over(first)
        assert where.controller.live_run_ids() == [second]
        await hosts[second].join.say(HostHeartbeat([]))
        view = where.controller.live_view(second)
        assert view is not None
        assert view["phase"] == "forming"
        assert where.controller.metrics()["links_control"] == 1
        overview = await first_frame(where.controller.feed, None)
        phases = {run["name"]: run["phase"] for run in overview["view"]["runs"]}
        assert phases == {"first": "failed", "second": "forming"}
        assert overview["view"]["controller"]["live_runs"] == [second]


# --------------------------------------------------------------------------------------------- durability


def answering(*effects: Effect) -> ScriptedCore:
    """A core that answers the operator's start with these effects, and hellos with nothing."""
    links: list[int] = []

    def answer(event: Event, now: float) -> list[Effect]:
        if isinstance(event, HostSaid):
            links.append(event.link)
        if isinstance(event, Operator) and event.act == "start":
            return [SendHost(links[0], e.message) if isinstance(e, SendHost) else e for e in effects]
        return []

    return ScriptedCore(answer)


ACCEPT = Accept(1, 1, [0], b"s" * 32, 10.0, 60.0, 30.0)


async def test_nothing_is_announced_before_it_is_committed(tmp_path: Path) -> None:
    store = open_store(tmp_path, LateStore)
    core = answering(
        Record("events", {"kind": "phase_forming", "level": "info", "text": "it forms"}, durable=True),
        Record("runs", {"phase": "forming"}, durable=True),
        SendHost(0, ACCEPT),
    )
    async with site(tmp_path, core=lambda: core, store=store) as where:
        run_id = await where.controller.create_run(config())
        link = await Link.dial(where.url(Channel.JOIN), Channel.JOIN, where.join_secret)
        await link.say(hello("box"))
        await core.heard(HostSaid)
        store.hold = "events"
        started = asyncio.create_task(where.controller.command(run_id, "start"))
        await eventually(lambda: store.held, "the row to be written")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(link.socket.recv(), 0.1)
        assert not started.done(), "the operator is answered when it's done"
        assert (await first_frame(where.controller.feed, run_id))["events"] == []
        assert (await where.row(run_id))["phase"] == "waiting", "the later record waits too"
        store.release()
        await asyncio.wait_for(started, 30)
        assert await link.hear(Accept) == ACCEPT
        assert (await where.row(run_id))["phase"] == "forming"
        frame = await first_frame(where.controller.feed, run_id)
        assert [event["text"] for event in frame["events"]] == ["it forms"]


async def test_an_end_is_announced_once_it_is_on_record(tmp_path: Path) -> None:
    """Whoever sees that a run is over finds its rows, now and after a crash."""
    store = open_store(tmp_path, LateStore)
    end = {"phase": "interrupted", "reason": "enough"}
    core = answering(Record("runs", end, durable=True), End("interrupted", "enough"))
    async with site(tmp_path, core=lambda: core, store=store) as where:
        run_id = await where.controller.create_run(config())
        store.hold = "runs"
        started = asyncio.create_task(where.controller.command(run_id, "start"))
        await eventually(lambda: store.held, "the end to be written")
        assert core.ended
        view = where.controller.live_view(run_id)
        assert view is not None
        assert (view["phase"], view["reason"]) == ("waiting", "")
        frame = await first_frame(where.controller.feed, run_id)
        assert frame["view"]["phase"] == "waiting"
        store.release()
        await started
        await where.until_over(run_id)
        assert (await where.row(run_id))["phase"] == "interrupted"


class BrokenStore(Store):
    """A store whose disk is full for events."""

    def write(self, run_id: int, table: str, row: Any, durable: bool = False) -> Any:
        future = super().write(run_id, table, row, durable)
        if table != "events":
            return future
        future = type(future)()
        future.set_exception(StoreError("disk_full", "no space is left on its disk", kept=True))
        return future


async def test_a_store_in_trouble_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "backend.runtime.perform")  # a real store says more loudly that rows have to wait
    core = answering(Record("events", {"kind": "x", "level": "info", "text": "x"}, durable=True), SendHost(0, ACCEPT))
    store = open_store(tmp_path, BrokenStore)
    async with site(tmp_path, core=lambda: core, store=store) as where:
        run_id = await where.controller.create_run(config())
        link = await Link.dial(where.url(Channel.JOIN), Channel.JOIN, where.join_secret)
        await link.say(hello("box"))
        await core.heard(HostSaid)
        await where.controller.command(run_id, "start")
        assert await link.hear(Accept) == ACCEPT
        await eventually(lambda: where.controller.metrics()["store_failures_total"] == 1, "the failure to be counted")
        assert where.controller.live_run_ids() == [run_id]
    assert "no space is left" in caplog.text


# ------------------------------------------------------------------------------------------------- ends


async def joined(where: Site, core: ScriptedCore) -> Link:
    link = await Link.dial(where.url(Channel.JOIN), Channel.JOIN, where.join_secret)
    await link.say(hello("box"))
    await core.heard(HostSaid)
    return link


async def test_a_core_that_fails_ends_its_run_by_name_and_no_other(tmp_path: Path) -> None:
    def answer(event: Event, now: float) -> list[Effect]:
        if isinstance(event, Operator):
            raise RuntimeError("a bug in the core")
        return []

    async with site(tmp_path, core=lambda: ScriptedCore(answer)) as where:
        run_id = await where.controller.create_run(config())
        other = await where.controller.create_run(config())
        link = await joined(where, where.core(0))
        with pytest.raises(CommandRefused) as refused:
            await where.controller.command(run_id, "start")
        assert refused.value.code == "internal_error"
        ended = await link.hear(RunEnded)
        assert (ended.phase, ended.reason) == ("failed", "internal error: RuntimeError: a bug in the core")
        assert (await link.closed())[0] == 4410
        row = await where.until_over(run_id)
        assert (row["phase"], row["reason"]) == ("failed", ended.reason)
        assert row["ended_at"] is not None
        events = await asyncio.to_thread(where.controller.store.queries.events, run_id)
        assert events[-1]["kind"] == "run_ended"
        assert where.controller.live_run_ids() == [other]


async def test_closing_interrupts_what_is_live_and_tells_its_hosts(tmp_path: Path) -> None:
    async with site(tmp_path) as where:
        run_id = await where.controller.create_run(config())
        host = ScriptedHost(where, "box")
        await host.admitted(ranks=2)
        await where.controller.command(run_id, "start")
        await host.join.hear(WorldFormed)
        await host.attach()
        await where.controller.close()
        ended = await host.join.hear(RunEnded)
        assert (ended.phase, ended.reason) == ("interrupted", "controller stopped")
        assert (await host.join.closed())[0] == 4410
        assert (await host.control.closed())[0] == 4410
        assert (await host.data.closed())[0] == 4410
        with pytest.raises(CommandRefused) as refused:
            await where.controller.create_run(config())
        assert refused.value.code == "controller_stopping"
    with open_store(tmp_path) as store:
        row = store.queries.get_run(run_id)
        assert row is not None
        assert (row["phase"], row["reason"]) == ("interrupted", "controller stopped")


async def test_what_a_dead_controller_left_running_is_interrupted_at_the_next_start(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        run_id = store.create_run({"job": "toy.py:Toy", "mode": "cpu_sync", "phase": "training"})
        half = tmp_path / "var" / "runs" / str(run_id) / "checkpoints" / ".1.deadbeef"
        half.mkdir(parents=True)
    async with site(tmp_path) as where:
        assert (await where.row(run_id))["phase"] == "interrupted"
        assert where.controller.live_view(run_id) is None
        assert not half.exists()
        frame = await first_frame(where.controller.feed, run_id)
        assert frame["view"]["phase"] == "interrupted"


async def test_a_checkpoint_that_cannot_be_written_comes_back_as_an_event(tmp_path: Path) -> None:
    from backend.core.vocabulary import CheckpointWritten

    core = answering(WriteCheckpoint(1, "test", (), {"layout": []}, -1), SendHost(0, ACCEPT))
    async with site(tmp_path, core=lambda: core) as where:
        run_id = await where.controller.create_run(config())
        await joined(where, core)
        await where.controller.command(run_id, "start")
        written = await core.heard(CheckpointWritten)
        assert "nothing to save" in written.error
        assert where.controller.metrics()["checkpoint_failures_total"] == 1


async def test_metrics_are_finite_numbers_and_totals_outlive_their_runs(tmp_path: Path) -> None:
    core = answering(End("done", "test"))
    async with site(tmp_path, core=lambda: core) as where:
        run_id = await where.controller.create_run(config())
        await joined(where, core)
        before = where.controller.metrics()
        await where.controller.command(run_id, "start")
        await where.until_over(run_id)
        after = where.controller.metrics()
    assert before.keys() == after.keys()
    assert all(isinstance(value, int | float) and math.isfinite(value) for value in after.values())
    assert (before["runs_live"], after["runs_live"], after["runs_ended_total"]) == (1, 0, 1)
    shrunk = [name for name in before if name.endswith("_total") and after[name] < before[name]]
    assert shrunk == []
    assert after["driver_events_total"] >= 2
