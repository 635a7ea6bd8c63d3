"""Waiting for a condition that several tasks bring about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Pulse:
    """Wakes everybody who waits for a condition to hold, so that each looks again."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def fire(self) -> None:
        """Something changed."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once the condition holds."""
        while not condition():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                await future
            finally:
                self._waiting.discard(future)
