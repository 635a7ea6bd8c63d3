"""The driver: one event at a time, effects in order, durable before what follows, and never a silent hang."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from runtime_scripted import ScriptedCore, turns

from backend.core.vocabulary import Effect, End, Event, Lagged, LinkLost, Operator, Record, Refused, SendHost, Tick
from backend.runtime.driver import MAX_EVENTS_BEFORE_TICK, Driver
from wire.messages import ControllerHeartbeat


def lost(number: int) -> LinkLost:
    return LinkLost(number, "test")


def effect(number: int) -> SendHost:
    return SendHost(number, ControllerHeartbeat())


class Hand:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Stage:
    """Performs by remembering; a durable record waits at the gate."""

    def __init__(self) -> None:
        self.performed: list[Effect] = []
        self.published = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = asyncio.Event()

    async def perform(self, effect: Effect) -> None:
        if isinstance(effect, Record) and effect.durable:
            self.waiting.set()
            await self.gate.wait()
        self.performed.append(effect)

    def publish(self) -> None:
        self.published += 1


@asynccontextmanager
async def driving(
    core: ScriptedCore, stage: Stage, *, clock: Hand | None = None, heartbeat: float = 1.0, inbox: int = 100
) -> AsyncIterator[tuple[Driver, asyncio.Task[str | None]]]:
    driver = Driver(
        7,
        core,
        stage.perform,
        clock=clock or time.monotonic,
        heartbeat_seconds=heartbeat,
        inbox_events=inbox,
        published=stage.publish,
    )
    task = asyncio.create_task(driver.run())
    try:
        yield driver, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_events_are_handled_in_order_and_effects_performed_in_order() -> None:
    core = ScriptedCore(lambda event, now: [effect(event.link), effect(event.link + 100)])  # type: ignore[union-attr]
    stage = Stage()
    async with driving(core, stage) as (driver, _):
        for number in (1, 2, 3):
            driver.post(lost(number))
        await core.until(lambda events: len(events) == 3)
        await turns(1)
    assert core.events == [lost(1), lost(2), lost(3)]
    assert [item.link for item in stage.performed if isinstance(item, SendHost)] == [1, 101, 2, 102, 3, 103]
    assert driver.events_handled == 3
    assert stage.published == 3


async def test_a_durable_record_is_committed_before_what_follows_and_before_publication() -> None:
    record = Record("events", {}, durable=True)
    core = ScriptedCore(lambda event, now: [effect(1), record, effect(2)])
    stage = Stage()
    stage.gate.clear()
    async with driving(core, stage) as (driver, _):
        driver.post(lost(1))
        driver.post(lost(2))
        await asyncio.wait_for(stage.waiting.wait(), 30)
        assert stage.performed == [effect(1)]
        assert stage.published == 0
        assert core.events == [lost(1)], "the next event waits for the batch"
        stage.gate.set()
        await core.until(lambda events: len(events) == 2)
        assert stage.performed[:3] == [effect(1), record, effect(2)]


async def test_a_deadline_becomes_a_tick() -> None:
    core = ScriptedCore()
    core.deadline = time.monotonic() + 0.02

    def answer(event: Event, now: float) -> list[Effect]:
        core.deadline = None
        return []

    core.answer = answer
    async with driving(core, Stage()):
        await core.heard(Tick)
    assert core.events == [Tick()]


async def test_what_is_in_the_inbox_goes_before_a_deadline_that_has_passed() -> None:
    core = ScriptedCore()
    core.deadline = 999.0
    clock = Hand()
    async with driving(core, Stage(), clock=clock) as (driver, _):
        driver.post(lost(1))
        driver.post(lost(2))
        await core.heard(Tick)
    assert core.events[:3] == [lost(1), lost(2), Tick()]


async def test_a_flood_cannot_put_a_deadline_off_for_ever() -> None:
    core = ScriptedCore()
    core.deadline = 999.0
    async with driving(core, Stage(), clock=Hand(), inbox=10_000) as (driver, _):
        for number in range(1000):
            driver.post(lost(number))
        await core.heard(Tick)
    assert core.events.index(Tick()) == MAX_EVENTS_BEFORE_TICK


async def test_a_deadline_that_a_tick_does_not_move_does_not_spin() -> None:
    core = ScriptedCore()
    core.deadline = 0.0
    async with driving(core, Stage()):
        await core.until(lambda events: len(events) >= 4)
    gaps = [later - earlier for earlier, later in zip(core.times, core.times[1:], strict=False)]
    assert min(gaps) >= 0.004


async def test_a_command_gets_its_refusal_and_only_its_own() -> None:
    refusal = Refused("quorum_not_met", "1 of 2 ranks joined")

    def answer(event: Event, now: float) -> list[Effect]:
        return [refusal] if isinstance(event, Operator) and event.act == "start" else []

    stage = Stage()
    async with driving(ScriptedCore(answer), stage) as (driver, _):
        assert await driver.command(Operator("extend", {"seconds": 5})) is None
        assert await driver.command(Operator("start")) == refusal
        assert await driver.command(Operator("extend", {"seconds": 5})) is None
    assert stage.performed == [], "a refusal is an answer, not an effect"


async def test_a_command_is_answered_once_its_effects_are_durable() -> None:
    stage = Stage()
    stage.gate.clear()
    async with driving(ScriptedCore(lambda event, now: [Record("events", {}, durable=True)]), stage) as (driver, _):
        command = asyncio.create_task(driver.command(Operator("start")))
        await asyncio.wait_for(stage.waiting.wait(), 30)
        assert not command.done()
        stage.gate.set()
        assert await command is None


async def test_a_core_that_fails_ends_the_run_by_name_and_answers_everybody(caplog: pytest.LogCaptureFixture) -> None:
    def answer(event: Event, now: float) -> list[Effect]:
        raise ZeroDivisionError("a bug")

    async with driving(ScriptedCore(answer), Stage()) as (driver, task):
        first = asyncio.create_task(driver.command(Operator("start")))
        second = asyncio.create_task(driver.command(Operator("stop")))
        assert await task == "internal error: ZeroDivisionError: a bug"
        refused = [await first, await second]
    assert [answer.code for answer in refused if answer] == ["internal_error", "run_over"]
    assert "ZeroDivisionError" in caplog.text
    assert caplog.records[-1].exc_info is not None


async def test_an_effect_that_fails_ends_the_run_by_name() -> None:
    async def perform(effect: Effect) -> None:
        raise OSError("no such thing")

    stage = Stage()
    stage.perform = perform  # type: ignore[method-assign]
    async with driving(ScriptedCore(lambda event, now: [effect(1)]), stage) as (driver, task):
        refused = await driver.command(Operator("start"))
        assert refused is not None
        assert refused.code == "internal_error"
        assert await task == "internal error: OSError: no such thing"


async def test_the_end_ends_the_task_and_later_commands_are_refused() -> None:
    core = ScriptedCore(lambda event, now: [End("done", "all epochs are trained")])
    async with driving(core, Stage()) as (driver, task):
        driver.post(lost(1))
        driver.post(lost(2))
        assert await task is None
        assert core.events == [lost(1)]
        refused = await driver.command(Operator("stop"))
        assert refused is not None
        assert refused.code == "run_over"


async def test_stop_lets_the_inbox_drain_first() -> None:
    core = ScriptedCore()
    async with driving(core, Stage()) as (driver, task):
        driver.post(lost(1))
        driver.stop()
        driver.post(lost(2))
        assert await task is None
    assert core.events == [lost(1)]


async def test_a_peer_waits_while_the_inbox_is_full_and_the_core_goes_on() -> None:
    core = ScriptedCore(lambda event, now: [Record("events", {}, durable=True)])
    stage = Stage()
    stage.gate.clear()
    async with driving(core, stage, inbox=3) as (driver, _):
        peer = asyncio.create_task(_feed(driver, 20))
        await asyncio.wait_for(stage.waiting.wait(), 30)
        await turns(50)
        assert driver.waiting == 3
        driver.post(lost(99))
        assert driver.waiting == 4, "what is not from a peer never waits"
        stage.gate.set()
        await asyncio.wait_for(peer, 30)
        await core.until(lambda events: len(events) == 21)


async def test_a_full_inbox_lets_its_peers_go_when_the_run_ends() -> None:
    core = ScriptedCore(lambda event, now: [Record("events", {}, durable=True), End("failed", "test")])
    stage = Stage()
    stage.gate.clear()
    async with driving(core, stage, inbox=1) as (driver, task):
        peer = asyncio.create_task(_feed(driver, 5))
        await asyncio.wait_for(stage.waiting.wait(), 30)
        stage.gate.set()
        await task
        await asyncio.wait_for(peer, 30)


async def _feed(driver: Driver, count: int) -> None:
    for number in range(count):
        await driver.put(lost(number))


async def test_a_driver_that_was_late_says_so_and_hears_its_hosts_before_it_judges_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, core, stage = Hand(), ScriptedCore(), Stage()
    core.deadline = clock.now + 30.0
    with caplog.at_level(logging.WARNING):
        async with driving(core, stage, clock=clock, heartbeat=0.1) as (driver, _):
            driver.post(lost(0))
            await core.until(lambda events: len(events) == 1)
            await turns(1)
            clock.now += 40.0  # a freeze: the deadline has passed meanwhile
            driver.post(lost(1))
            await core.until(lambda events: len(events) == 3)
            assert driver.lag.count == 1
            assert driver.lag.last_seconds == pytest.approx(40.0, abs=0.2)
            await turns(20)
            assert Tick() not in core.events, "the hosts get a moment to be heard"
            for number in (2, 3):
                clock.now += 0.06
                driver.post(lost(number))
                await core.until(lambda events, number=number: lost(number) in events)
            await core.heard(Tick)
    lagged = core.events.pop(1)
    assert lagged == Lagged(driver.lag.last_seconds), "the core hears of it before all that waits"
    assert core.events == [lost(0), lost(1), lost(2), lost(3), Tick()]
    assert "late" in caplog.text
