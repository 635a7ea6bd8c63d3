"""A core whose answers a test writes down: the core is a port, and the shells around it must not care whose it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from backend.core.config import RunConfig
from backend.core.preview import Outlook
from backend.core.vocabulary import Effect, End, Event

Answer = Callable[[Event, float], list[Effect]]


async def turns(count: int) -> None:
    """Let every other task take this many turns."""
    for _ in range(count):
        await asyncio.sleep(0)


async def moment(seconds: float) -> None:
    """Let real time pass, where that is what is tested."""
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, over.set)
    await over.wait()


class ScriptedCore:
    """Remembers every event; ``answer`` says what it does about one."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.answer: Answer = answer or (lambda event, now: [])
        self.events: list[Event] = []
        self.times: list[float] = []
        self.deadline: float | None = None
        self.phase = "waiting"
        self.ended = False
        self._changed = asyncio.Event()

    def handle(self, event: Event, now: float) -> list[Effect]:
        self.events.append(event)
        self.times.append(now)
        self._changed.set()
        effects = self.answer(event, now)
        for effect in effects:
            if isinstance(effect, End):
                self.phase, self.ended = effect.phase, True
        return effects

    def next_deadline(self) -> float | None:
        return None if self.ended else self.deadline

    def check(self) -> None:
        return None

    def snapshot(self, now: float) -> dict[str, Any]:
        return {"phase": self.phase, "epochs": 1, "ranks": []}

    def outlook(self) -> Outlook:
        return Outlook(ranks=(), config=RunConfig(job="toy.py:Toy"), dataset_size=0, model_bytes=0)

    async def until(self, condition: Callable[[list[Event]], bool], seconds: float = 30.0) -> list[Event]:
        """Wait until the events so far satisfy the condition."""
        async with asyncio.timeout(seconds):
            while not condition(self.events):
                self._changed.clear()
                await self._changed.wait()
        return self.events

    async def heard(self, kind: type, seconds: float = 30.0) -> Any:
        """The first event of this kind, waiting for it."""
        events = await self.until(lambda events: any(isinstance(event, kind) for event in events), seconds)
        return next(event for event in events if isinstance(event, kind))
