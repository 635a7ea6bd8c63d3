"""The driver of one run: take an event or a deadline, ask the core, perform its answer. It decides nothing (style 15).

One task per run is the only caller of its core. Effects are performed in the order in which the core gave them;
performing a durable record waits for its commit, so whatever follows it, and whatever the feed shows, is in the
database already.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from backend.core.preview import Outlook
from backend.core.vocabulary import Effect, Event, Lagged, Operator, Refused, Tick
from backend.runtime.health import LoopHealth

Clock = Callable[[], float]
"""Monotonic seconds."""

MAX_EVENTS_BEFORE_TICK = 64
"""What is in the inbox goes before a deadline that has passed, but can't put it off for ever."""
MIN_TICK_SECONDS = 0.005
"""Ticks are at least this far apart: a deadline that a tick doesn't move must not spin the loop."""

log = logging.getLogger(__name__)


class Core(Protocol):
    """The verbs of a pure run, and the two states that its shell asks for."""

    @property
    def phase(self) -> str: ...

    @property
    def ended(self) -> bool: ...

    def handle(self, event: Event, now: float) -> list[Effect]: ...

    def next_deadline(self) -> float | None: ...

    def check(self) -> None: ...

    def snapshot(self, now: float) -> dict[str, Any]: ...

    def outlook(self) -> Outlook: ...


@dataclass(slots=True)
class Lag:
    """How late the driver was served; a controller that lags must not count its own lateness against the hosts."""

    count: int = 0
    last_seconds: float = 0.0
    worst_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Entry:
    event: Event | None
    """none asks the driver to stop"""
    due: float
    """when it came, or its deadline was due, on the driver's clock"""
    answer: asyncio.Future[Refused | None] | None = None


class Driver:
    """Runs one core. ``post``, ``put`` and ``command`` are for the event loop's thread."""

    def __init__(
        self,
        run_id: int,
        core: Core,
        perform: Callable[[Effect], Awaitable[None]],
        *,
        clock: Clock,
        heartbeat_seconds: float,
        inbox_events: int,
        published: Callable[[], None],
    ) -> None:
        self.lag = Lag()
        self.health = LoopHealth()
        self.events_handled = 0
        self._run_id = run_id
        self._core = core
        self._perform = perform
        self._clock = clock
        self._patience = heartbeat_seconds / 2
        self._inbox_events = inbox_events
        self._published = published
        self._inbox: deque[_Entry] = deque()
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._expected_by = clock() + self._patience
        self._grace_until = clock()
        self._handled_overdue = 0
        self._over = False

    @property
    def waiting(self) -> int:
        """Events in the inbox."""
        return len(self._inbox)

    def post(self, event: Event) -> None:
        """Hand over an event without waiting; dropped when the run is over."""
        if not self._over:
            self._append(_Entry(event, self._clock()))

    async def put(self, event: Event) -> None:
        """Hand over an event from a peer, waiting while the inbox is full: a peer can't flood the core."""
        came = self._clock()
        while len(self._inbox) >= self._inbox_events and not self._over:
            self._room.clear()
            await self._room.wait()
        if not self._over:
            self._append(_Entry(event, came))

    async def command(self, event: Operator) -> Refused | None:
        """Hand over an operator's command and wait for the core's answer; none means that it was obeyed."""
        if self._over:
            return Refused("run_over", "the run is over")
        answer: asyncio.Future[Refused | None] = asyncio.get_running_loop().create_future()
        self._append(_Entry(event, self._clock(), answer))
        return await answer

    def stop(self) -> None:
        """Have ``run`` return once what is in the inbox is handled."""
        self._append(_Entry(None, self._clock()))

    async def run(self) -> str | None:
        """Drive until the core has ended, ``stop`` was reached, or it failed. Answers the failure, if there is one."""
        try:
            while not self._core.ended:
                entry = await self._next()
                if entry.event is None:
                    return None
                await self._turn(entry.event, entry.due, entry.answer)
        except Exception as error:
            log.exception("run %d ends: its controller failed", self._run_id)
            return f"internal error: {type(error).__name__}: {error}"
        finally:
            self._close()
        return None

    async def _turn(self, event: Event, due: float, answer: asyncio.Future[Refused | None] | None) -> None:
        refused: Refused | None = Refused("internal_error", "the command failed inside the controller; see its log")
        try:
            started = self._clock()
            effects = self._core.handle(event, started)
            handled = self._clock()
            self.health.latency.add(handled - due)
            self.health.handling.add(handled - started)
            refused = next((effect for effect in effects if isinstance(effect, Refused)), None)
            for effect in effects:
                if not isinstance(effect, Refused):
                    await self._perform(effect)
            self.health.effects.add(self._clock() - handled)
        except Exception:
            refused = refused or Refused("internal_error", "the command failed inside the controller; see its log")
            raise
        finally:
            if answer is not None and not answer.done():
                answer.set_result(refused)
        self.events_handled += 1
        self._published()

    async def _next(self) -> _Entry:
        while True:
            expected_by = self._expected_by
            if (lagged := self._lagged()) is not None:
                return _Entry(lagged, expected_by)
            now = self._clock()
            due = self._due()
            overdue = due is not None and due <= now
            if self._inbox and not (overdue and self._handled_overdue >= MAX_EVENTS_BEFORE_TICK):
                self._handled_overdue += overdue
                return self._take()
            if due is not None and overdue:
                self._handled_overdue = 0
                self._expected_by = now + self._patience
                self._grace_until = max(self._grace_until, now + MIN_TICK_SECONDS)
                return _Entry(Tick(), due)
            await self._wait(None if due is None else due - now)

    def _due(self) -> float | None:
        deadline = self._core.next_deadline()
        return None if deadline is None else max(deadline, self._grace_until)

    def _take(self) -> _Entry:
        entry = self._inbox.popleft()
        if len(self._inbox) < self._inbox_events:
            self._room.set()
        self._expected_by = self._clock() + self._patience
        return entry

    async def _wait(self, seconds: float | None) -> None:
        # Never longer than the patience at once: how late it wakes tells whether the loop, or the machine, stood still.
        seconds = self._patience if seconds is None else min(seconds, self._patience)
        self._expected_by = self._clock() + seconds + self._patience
        self._wake.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return

    def _lagged(self) -> Lagged | None:
        late = self._clock() - self._expected_by
        if late <= 0:
            return None
        self.lag.count += 1
        self.lag.last_seconds = late + self._patience
        self.lag.worst_seconds = max(self.lag.worst_seconds, self.lag.last_seconds)
        # What the hosts said meanwhile must be read before their silence is judged.
        self._grace_until = self._clock() + 2 * self._patience
        self._expected_by = self._clock() + self._patience
        log.warning(
            "run %d: the controller was %.1f s late; deadlines wait another %.1f s for what its hosts have sent",
            self._run_id,
            self.lag.last_seconds,
            2 * self._patience,
        )
        return Lagged(self.lag.last_seconds)

    def _append(self, entry: _Entry) -> None:
        self._inbox.append(entry)
        self._wake.set()

    def _close(self) -> None:
        self._over = True
        self._room.set()
        for entry in self._inbox:
            if entry.answer is not None and not entry.answer.done():
                entry.answer.set_result(Refused("run_over", "the run ended before the command was read"))
        self._inbox.clear()
