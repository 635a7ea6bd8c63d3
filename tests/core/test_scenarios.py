"""Failure stories as text: each file under tests/scenarios is a script above ``---`` and what the core did below it.

``pytest tests/core/test_scenarios.py --rewrite`` records them anew; read the diff before you commit it.

    run KEY=VALUE ...              the run's configuration; samples= and reduce= (seconds) belong to the rehearsal
    host NAME MS [MS ...]          a host that dials in at once, one rank for each ms a batch
    at T join NAME MS [MS ...]     one that dials in later
    at T start | stop | abort      the operator acts
    at T kill RANK [SIGNAL] | unplug NAME | freeze NAME | relay NAME
    until T                        let time pass to T (default: to the end)
    show KIND ...                  besides the default, show these messages too
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rehearsal import Rehearsal, lose_relay

from backend.core.config import RunConfig
from backend.core.vocabulary import Operator, Record, Refused

SCENARIOS = sorted((Path(__file__).parent.parent / "scenarios").glob("*.txt"))
SEPARATOR = "---\n"
SHOWN_EVENTS = {"Operator", "LinkLost", "RelayLost", "RankExited"}
SHOWN_EFFECTS = {"OpenRound", "AbortRound", "DropHost", "WriteCheckpoint", "Refused", "End", "CloseLink"}
SHOWN_MESSAGES = {
    *("StartChunk", "Accept", "Reject", "WorldFormed", "RoundCommitted", "RunEnded", "DeclareDead", "Shutdown"),
}
HIDDEN_FIELDS = {
    *("plan", "run_salt", "run_secret", "global_step", "params_elements", "buffers_elements", "buffers_realized"),
    *("formation_wait_seconds", "heartbeat_seconds", "heartbeat_timeout_seconds", "generation"),
    *("local_state", "manifest"),
}


def perform(script: str) -> Rehearsal:
    """Play a script."""
    lines = [line.split() for line in script.splitlines() if line.strip() and not line.startswith("#")]
    fields = dict(word.split("=", 1) for words in lines if words[0] == "run" for word in words[1:])
    rehearsal = {"samples": int(fields.pop("samples", 60)), "reduce_seconds": float(fields.pop("reduce", 0.002))}
    config: dict[str, Any] = {"job": "odometer.py:Odometer"}
    for key, value in fields.items():
        default = RunConfig.__dataclass_fields__[key].type
        config[key] = value if "str" in str(default) else float(value) if "float" in str(default) else int(value)
    play = Rehearsal(RunConfig(**config), **rehearsal)  # type: ignore[arg-type]
    until = 10_000.0
    for words in lines:
        match words:
            case ["host", name, *ms]:
                play.join(name, *map(float, ms))
            case ["at", when, act, *arguments]:
                play.at(float(when), lambda act=act, arguments=arguments: do(play, act, arguments))
            case ["until", when]:
                until = float(when)
            case ["run" | "show", *_]:
                pass
            case _:
                raise ValueError(f"no such line: {' '.join(words)}")
    return play.run(until)


def do(play: Rehearsal, act: str, arguments: list[str]) -> None:
    """One line of a script whose time has come."""
    match act, arguments:
        case "join", [name, *ms]:
            play.join(name, *map(float, ms))
        case (("start" | "stop" | "abort"), []):
            play.operate(act, by="operator")
        case "extend", [seconds]:
            play.operate("extend", seconds=float(seconds))
        case "turn_away", [host]:
            play.operate("turn_away", host=int(host))
        case "kill", [rank, *signal]:
            play.kill(int(rank), signal=signal[0] if signal else "SIGKILL")
        case "unplug", [name]:
            play.unplug(name)
        case "freeze", [name]:
            play.freeze(name)
        case "relay", [name]:
            lose_relay(play, name)
        case _:
            raise ValueError(f"no such act: {act} {arguments}")


def render(play: Rehearsal, more: set[str]) -> str:
    """The story in lines: what happened at the left with its time, what the core did about it indented."""
    lines: list[str] = []
    pending = ""
    for now, kind, item in play.log:
        name = type(item).__name__
        message = getattr(item, "message", None)
        if kind == "event":
            shown = {name, type(message).__name__} & (SHOWN_EVENTS | more)
            pending = f"{now:.3f} {describe(item)}"
            if shown:
                lines.append(pending)
                pending = ""
            continue
        said = type(message).__name__
        event_row = isinstance(item, Record) and item.table == "events"
        if not (name in SHOWN_EFFECTS or said in (SHOWN_MESSAGES | more) or event_row):
            continue
        if pending:
            lines.append(pending)
            pending = ""
        lines.append("    " + (f"{item.row['level']}: {item.row['text']}" if event_row else describe(item)))
    return "\n".join(lines) + "\n"


def describe(item: Any) -> str:
    """An event or effect in a few words."""
    name = type(item).__name__
    message = getattr(item, "message", None)
    if isinstance(item, Operator):
        return f"operator {item.act} {words(item.arguments)}".strip()
    if isinstance(item, Refused):
        return f"refused {item.code}: {item.reason}"
    if message is not None:
        whom = next(f"{field} {getattr(item, field)}" for field in ("rank", "host", "link") if hasattr(item, field))
        arrow = "->" if name.startswith("Send") else "<-"
        values = {field: getattr(message, field) for field in message.__struct_fields__}
        return f"{arrow} {whom}: {type(message).__name__} {words(values)}".rstrip()
    values = {field: getattr(item, field) for field in item.__dataclass_fields__}
    return f"{name} {words(values)}".rstrip()


def words(values: dict[str, Any]) -> str:
    shown = {key: value for key, value in values.items() if key not in HIDDEN_FIELDS and value not in ("", None)}
    return " ".join(f"{key}={compact(value)}" for key, value in shown.items())


def compact(value: Any) -> str:
    if hasattr(value, "__struct_fields__"):
        return "(" + words({field: getattr(value, field) for field in value.__struct_fields__}) + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(compact, value)) + "]"
    if isinstance(value, float):
        return f"{value:g}"
    return repr(value) if isinstance(value, str) and " " in value else str(value)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    script, _, recorded = path.read_text().partition(SEPARATOR)
    more = {word for line in script.splitlines() if line.startswith("show ") for word in line.split()[1:]}
    told = render(perform(script), more)
    if request.config.getoption("--rewrite"):
        path.write_text(script + SEPARATOR + told)
        return
    assert told == recorded


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 10
