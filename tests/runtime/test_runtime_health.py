"""Figures of the loop's health: histograms against an exact count, lateness of heartbeats, what a driver measures."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime_scripted import ScriptedCore, turns
from runtime_site import Link, config, hello, site

from backend.api.metrics import exposition
from backend.core.vocabulary import Effect, Event, LinkLost, SendHost, Tick
from backend.runtime.driver import Driver
from backend.runtime.health import Histogram, HostBeats, LoopHealth, heartbeat_figures
from wire.beats import Beats
from wire.messages import ControllerHeartbeat, HostHeartbeat
from wire.session import Channel


@given(st.lists(st.floats(0, 300), min_size=1, max_size=200), st.floats(0.01, 1))
def test_a_quantile_is_at_most_a_step_too_long(seconds: list[float], share: float) -> None:
    histogram = Histogram()
    for value in seconds:
        histogram.add(value)
    exact = sorted(seconds)[math.ceil(share * len(seconds)) - 1]
    found = histogram.quantile(share)
    assert found >= exact or found == pytest.approx(exact)
    assert found <= max(exact * 1.1893, 1e-5) or exact > 141
    assert histogram.quantile(1) == max(seconds)
    assert list(histogram.cumulative())[-1] == (math.inf, len(seconds))
    assert [count for _, count in histogram.cumulative()] == [
        sum(value <= bound * 1.0000001 for value in seconds) for bound, _ in histogram.cumulative()
    ]


def test_histograms_add_up() -> None:
    first, second, both = Histogram(), Histogram(), Histogram()
    for number in range(100):
        (first if number % 3 else second).add(number / 1000)
        both.add(number / 1000)
    first.merge(second)
    assert first.figures() == both.figures()
    assert list(first.cumulative()) == list(both.cumulative())
    assert first.total == pytest.approx(both.total)
    assert Histogram().figures() == {"count": 0, "p50_seconds": 0.0, "p99_seconds": 0.0, "worst_seconds": 0.0}


def test_what_is_late() -> None:
    beats = Beats(1.0)
    assert [beats.heard(now) for now in (10.0, 11.0, 12.5, 14.4, 16.5, 16.6)] == pytest.approx(
        [0, 0, 0.5, 0.9, 1.1, -0.9]
    )
    assert (beats.late_count, beats.worst_late_seconds) == (1, pytest.approx(1.1))
    beats.paused()
    assert beats.heard(100.0) == 0
    assert beats.heard(102.1) == pytest.approx(1.1)
    assert beats.late_count == 2


def test_both_directions_of_all_hosts() -> None:
    assert set(heartbeat_figures({}).values()) == {0}
    left, right = HostBeats(Beats(1.0)), HostBeats(Beats(1.0))
    for now in (0.0, 4.0):
        left.heard(HostHeartbeat([], late=2, worst_late_seconds=7.0), now)
    for now in (0.0, 2.5):
        right.heard(HostHeartbeat([], late=1, worst_late_seconds=5.0), now)
    assert heartbeat_figures({"left": left, "right": right}) == {
        "late": 2,
        "worst_late_seconds": 3.0,
        "controller_late": 3,
        "controller_worst_late_seconds": 7.0,
    }


class Hand:
    """A clock that a test, or the core under test, turns."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def drive(core: ScriptedCore, clock: Hand, *posted: Event, effect_seconds: float = 0.0) -> LoopHealth:
    async def perform(effect: Effect) -> None:
        clock.now += effect_seconds

    driver = Driver(7, core, perform, clock=clock, heartbeat_seconds=1000.0, inbox_events=100, published=lambda: None)
    for event in posted:
        driver.post(event)
    task = asyncio.create_task(driver.run())
    await core.until(lambda events: len(events) >= max(1, len(posted)))
    await turns(3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return driver.health


async def test_an_event_waits_for_those_before_it_and_for_their_effects() -> None:
    clock = Hand()

    def handle(event: Event, now: float) -> list[Effect]:
        clock.now += 2.0
        return [effect]

    effect = SendHost(1, ControllerHeartbeat())
    health = await drive(ScriptedCore(handle), clock, LinkLost(1, ""), LinkLost(2, ""), effect_seconds=5.0)
    assert (health.handling.count, health.handling.worst, health.handling.total) == (2, 2.0, 4.0)
    assert (health.effects.count, health.effects.total) == (2, 10.0)
    # the second came with the first, and was handled after 2 + 5 + 2 seconds
    assert (health.latency.count, health.latency.total, health.latency.worst) == (2, 2.0 + 9.0, 9.0)


async def test_a_deadline_is_late_from_the_moment_it_was_due() -> None:
    clock = Hand()
    core = ScriptedCore()
    core.deadline = clock.now + 3.0

    def handle(event: Event, now: float) -> list[Effect]:
        if isinstance(event, Tick):
            core.deadline = None
        else:
            clock.now += 8.0  # holds the loop beyond the deadline
        return []

    core.answer = handle
    driver = Driver(7, core, _nothing, clock=clock, heartbeat_seconds=1000.0, inbox_events=9, published=lambda: None)
    driver.post(LinkLost(1, ""))
    task = asyncio.create_task(driver.run())
    await core.heard(Tick)
    await turns(3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert driver.health.latency.total == 8.0 + 5.0


async def _nothing(effect: Effect) -> None:
    return


async def test_a_site_counts_its_hosts_heartbeats_and_keeps_the_count(tmp_path: Path) -> None:
    core = ScriptedCore()
    async with site(tmp_path, core=lambda: core) as where:
        run_id = await where.controller.create_run(config())
        link = await Link.dial(where.url(Channel.JOIN), Channel.JOIN, where.join_secret)
        await link.say(hello("box"))
        for late in (0, 3):
            await link.say(HostHeartbeat([], late=late, worst_late_seconds=late / 2))
        await core.until(lambda events: len(events) >= 3)
        found = where.controller.run_health(run_id)
        assert found is not None
        health, hosts = found
        ((name, beats),) = hosts.items()
        assert (beats.here.heard_count, beats.there_late, beats.there_worst_late_seconds) == (2, 3, 1.5)
        assert health.latency.count >= 3
        figures = where.controller.metrics()
        assert figures["controller_heartbeats_late_total"] == 3
        assert figures["controller_heartbeat_worst_late_seconds"] == 1.5
        assert figures["tick_latency_worst_seconds"] >= figures["tick_latency_p50_seconds"] > 0
        text = exposition(where.controller, {"streams": 0, "dropped": 0, "sessions": 0, "failures": 0})[0].decode()
        assert f'marchline_host_hears_worst_late_seconds{{host="{name}",run_id="{run_id}"}} 1.5' in text
        assert f'marchline_run_tick_latency_seconds{{quantile="0.99",run_id="{run_id}"}}' in text
        assert f"marchline_tick_latency_seconds_count {health.latency.count}" in text
