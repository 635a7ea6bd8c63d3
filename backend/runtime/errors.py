"""Errors of the controller that a caller is meant to answer.

RuntimeFault
    SettingsError       a setting can't work; nothing was started
    CommandRefused      the operator asked for something that may not happen now, with a stable code
    UnknownRun          no run has this number
    LinkEnded           a websocket is over; never leaves the links
"""

from __future__ import annotations

from collections.abc import Sequence

from backend.core.config import Problem


class RuntimeFault(Exception):
    """Base of the controller's own errors."""


class SettingsError(RuntimeFault):
    """A setting can't work; the text names it and the cure."""


class CommandRefused(RuntimeFault):
    """A command that may not happen now. ``code`` is stable, ``reason`` a sentence, ``errors`` name single fields."""

    def __init__(self, code: str, reason: str, errors: Sequence[Problem] = ()) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.errors = list(errors)


class UnknownRun(RuntimeFault):
    """No run has this number."""

    def __init__(self, run_id: int) -> None:
        super().__init__(f"there is no run {run_id}")
        self.run_id = run_id


class LinkEnded(RuntimeFault):
    """A websocket is over, for the reason in the text."""
