"""How many arrays, of those that were given away, somebody still holds."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable

from wire.streams import Values


class Alive:
    """Counts arrays until they are freed, whoever drops them last and for whatever reason: sent, aborted, link lost."""

    def __init__(self, freed: Callable[[], None]) -> None:
        """``freed`` is called on the event loop's thread, after each one."""
        self.count = 0
        self._freed = freed

    def add(self, values: Values) -> None:
        """Count this one."""
        self.count += 1
        weakref.finalize(values, self._somewhere, asyncio.get_running_loop()).atexit = False

    def _somewhere(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the thread that let go of it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(self._gone)

    def _gone(self) -> None:
        self.count -= 1
        self._freed()
