"""What the store's tests share: a run's values and a wall clock that moves only when told."""

from __future__ import annotations

NOON = 1_796_040_000.123  # 2026-11-30T12:00:00.123Z

RUN = {"name": "first", "job": "examples/digits.py:Digits", "mode": "cpu_cadence", "config": {"epochs": 3}}
EVENT = {"kind": "note", "level": "info", "text": "hello"}


class Wall:
    """A wall clock that moves only when told."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now
