"""An operator's command reaches the core only with arguments that it can rely on."""

from __future__ import annotations

from typing import Any

import pytest

from backend.runtime.commands import checked_arguments
from backend.runtime.errors import CommandRefused


@pytest.mark.parametrize(
    ("act", "arguments"),
    [
        ("start", {}),
        ("stop", {"by": "anna"}),
        ("abort", {}),
        ("extend", {"seconds": 30}),
        ("extend", {"seconds": 0.5}),
        ("change", {"quorum": 2}),
        ("change", {"target": None}),
        ("change", {"quorum": 2, "target": 4}),
        ("turn_away", {"host": 0}),
    ],
)
def test_good_arguments_pass(act: str, arguments: dict[str, Any]) -> None:
    assert checked_arguments(act, arguments) == arguments


@pytest.mark.parametrize(
    ("act", "arguments", "code"),
    [
        ("explode", {}, "unknown_command"),
        ("start", {"now": True}, "bad_argument"),
        ("extend", {}, "bad_argument"),
        ("extend", {"seconds": -1}, "bad_argument"),
        ("extend", {"seconds": float("nan")}, "bad_argument"),
        ("extend", {"seconds": float("inf")}, "bad_argument"),
        ("extend", {"seconds": True}, "bad_argument"),
        ("extend", {"seconds": "30"}, "bad_argument"),
        ("change", {}, "bad_argument"),
        ("change", {"quorum": None}, "bad_argument"),
        ("change", {"quorum": 2.0}, "bad_argument"),
        ("change", {"window": 3}, "bad_argument"),
        ("turn_away", {}, "bad_argument"),
        ("turn_away", {"host": "0"}, "bad_argument"),
        ("turn_away", {"host": -1}, "bad_argument"),
        ("stop", {"by": ""}, "bad_argument"),
    ],
)
def test_bad_ones_are_refused_by_name(act: str, arguments: dict[str, Any], code: str) -> None:
    with pytest.raises(CommandRefused) as refused:
        checked_arguments(act, arguments)
    assert refused.value.code == code
