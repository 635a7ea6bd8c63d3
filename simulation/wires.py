"""The links of a played host, as TCP gives them: what is sent in one direction arrives in order and at most once.

A wire may be slow, or clogged for a while: then everything waits in it and arrives later, in order. Once it is cut,
what was under way is gone, and nothing arrives any more. Between two wires nothing is ordered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from simulation.stage import Stage


class Wire:
    """One direction of one link. ``delay`` in seconds, on top of when a message would arrive."""

    __slots__ = ("_clogs", "_free_at", "_held", "_stage", "cut_off", "delay")

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._clogs = 0
        self._free_at = 0.0
        self._held: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self.delay = 0.0
        self.cut_off = False

    def carry(self, when: float, act: Callable[..., Any], *arguments: Any) -> None:
        """Do this at the other end at ``when`` or as much later as the wire needs."""
        if self.cut_off:
            return
        now = self._stage.now
        arrives = max(when + self.delay, self._free_at)
        if arrives <= now and not self._clogs and not self._held:
            act(*arguments)
            return
        self._free_at = max(now, arrives)
        self._stage.at(self._free_at, self._arrive, act, arguments)

    @property
    def clogged(self) -> bool:
        """Nothing passes now."""
        return self._clogs > 0

    def clog(self) -> None:
        """Nothing passes until ``unclog`` was called as often."""
        self._clogs += 1

    def unclog(self) -> None:
        """What was held up arrives at once, in order."""
        self._clogs -= 1
        if not self._clogs and self._held:
            self._stage.after(0.0, self._drain)

    def cut(self) -> None:
        """The link ends: what is under way is lost."""
        self.cut_off = True
        self._held.clear()

    def _arrive(self, act: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if self.cut_off:
            return
        if self._clogs or self._held:
            self._held.append((act, arguments))
        else:
            act(*arguments)

    def _drain(self) -> None:
        while self._held and not self._clogs:
            act, arguments = self._held.popleft()
            act(*arguments)


class Ways:
    """All wires between one host and the controller, and how they stand."""

    def __init__(self, stage: Stage) -> None:
        self.join_up, self.join_down = Wire(stage), Wire(stage)
        self.control_up, self.control_down = Wire(stage), Wire(stage)
        self.data_up = Wire(stage)
        self.join_open = True
        """the controller has not let go of the join link, nor lost it"""
        self.relay_open = True
        self.frozen = False
        """the whole machine stands still"""
        self.backlog: list[Callable[[], Any]] = []
        """what the agent does once the machine runs again"""
        self.gone = False
        """the agent gave up, or was told that the run is over"""
        self.deaf_since: float | None = None
        """nothing comes down since then"""

    @property
    def barred(self) -> bool:
        """Something that is under way may not have arrived."""
        return self.frozen or self.gone or any(wire.cut_off or wire.clogged for wire in (*self.up, *self.down))

    @property
    def up(self) -> tuple[Wire, ...]:
        return self.join_up, self.control_up, self.data_up

    @property
    def down(self) -> tuple[Wire, ...]:
        return self.join_down, self.control_down

    @property
    def relay(self) -> tuple[Wire, ...]:
        return self.control_up, self.control_down, self.data_up
