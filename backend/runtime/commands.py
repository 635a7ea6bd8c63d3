"""The operator's commands: their names, and the arguments that the core may rely on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from backend.runtime.errors import CommandRefused

Check = Callable[[Any], bool]


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 200


def _count_or_none(value: Any) -> bool:
    return value is None or _count(value)


_WORDS: dict[Check, str] = {
    _count: "a whole number from 0",
    _count_or_none: "a whole number from 0, or none",
    _seconds: "a number of seconds above 0",
    _name: "a name of at most 200 characters",
}

_ACTS: dict[str, tuple[dict[str, Check], tuple[str, ...]]] = {
    "start": ({}, ()),
    "stop": ({"by": _name}, ()),
    "abort": ({"by": _name}, ()),
    "save": ({"by": _name}, ()),
    "extend": ({"seconds": _seconds}, ("seconds",)),
    "change": ({"quorum": _count, "target": _count_or_none}, ()),
    "turn_away": ({"host": _count}, ("host",)),
}
"""Arguments that an act takes, and those that it needs."""


def checked_arguments(act: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, once they are what this act takes. Raises ``CommandRefused`` (unknown_command, bad_argument)."""
    if act not in _ACTS:
        raise CommandRefused("unknown_command", f"there is no command {act!r}; there are {', '.join(_ACTS)}.")
    checks, needed = _ACTS[act]
    for name, value in arguments.items():
        if name not in checks:
            raise CommandRefused(
                "bad_argument", f"{act} doesn't take {name}; it takes {', '.join(checks) or 'nothing'}."
            )
        if not checks[name](value):
            text = f"{act} doesn't take {name}={value!r:.100}; it takes {_WORDS[checks[name]]}."
            raise CommandRefused("bad_argument", text)
    for name in needed:
        if name not in arguments:
            raise CommandRefused("bad_argument", f"{act} needs {name}.")
    if act == "change" and not arguments:
        raise CommandRefused("bad_argument", "change needs a quorum, a target, or both.")
    return arguments
