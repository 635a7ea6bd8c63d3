"""A play in lines: what happened at the left with its time, what the core did about it indented."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

from backend.core.vocabulary import Effect, Event, Operator, Record, Refused
from simulation.watch import Watcher

SHOWN_EVENTS = frozenset({"Operator", "LinkLost", "RelayLost", "RankExited", "SessionLost", "SyncRefused"})
SHOWN_EFFECTS = frozenset({"OpenRound", "AbortRound", "DropHost", "WriteCheckpoint", "Refused", "End", "CloseLink"})
SHOWN_MESSAGES = frozenset(
    {
        *("StartChunk", "Accept", "Reject", "WorldFormed", "RoundCommitted", "RunEnded", "DeclareDead", "Shutdown"),
        *("RequestSessionId", "NewSession", "SyncNow", "SyncCommitted", "AbortSession"),
    }
)
HIDDEN_FIELDS = frozenset(
    {
        *("plan", "run_salt", "run_secret", "global_step", "params_elements", "buffers_elements", "buffers_realized"),
        *("formation_wait_seconds", "heartbeat_seconds", "heartbeat_timeout_seconds"),
        *("reattach_seconds", "returning", "held_round", "held_hash", "root", "brings"),
        *("keep", "manifest"),
    }
)
HIDDEN_OF = {"WorldFormed": "generation", "NewSession": "id", "SessionIdGenerated": "id"}
"""the same of one kind of message"""
HIDDEN_WHEN_FALSE = frozenset(
    {
        *("relay_only", "excluded", "frozen", "encoding"),
        *("memory_kills", "memory_limit_bytes", "seen_seconds_ago", "declared", "arrived"),
    }
)
"""rare: worth a word only where they hold"""

Entry = tuple[float, str, Event | Effect]
"""when, ``event`` or ``effect``, and which"""


class Log(Watcher):
    """Remembers everything that was said and done."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def event(self, now: float, event: Event) -> None:
        self.entries.append((now, "event", event))

    def effect(self, now: float, effect: Effect) -> None:
        self.entries.append((now, "effect", effect))


def render(entries: Iterable[Entry], more: Set[str] = frozenset()) -> str:
    """The story. Events and messages that tell little are left out, unless ``more`` names their kind."""
    lines: list[str] = []
    pending = ""
    for now, kind, item in entries:
        name = type(item).__name__
        said = type(getattr(item, "message", None)).__name__
        if kind == "event":
            pending = f"{now:.3f} {describe(item)}"
            if {name, said} & (SHOWN_EVENTS | more):
                lines.append(pending)
                pending = ""
            continue
        event_row = isinstance(item, Record) and item.table == "events"
        if not (name in SHOWN_EFFECTS or said in (SHOWN_MESSAGES | more) or event_row):
            continue
        if pending:
            lines.append(pending)
            pending = ""
        lines.append("    " + _effect(item))
    return "\n".join(lines) + "\n"


def describe(item: Any) -> str:
    """An event or effect in a few words."""
    name = type(item).__name__
    message = getattr(item, "message", None)
    if isinstance(item, Operator):
        return f"operator {item.act} {_words(item.arguments)}".strip()
    if isinstance(item, Refused):
        return f"refused {item.code}: {item.reason}"
    if message is not None:
        whom = next(f"{field} {getattr(item, field)}" for field in ("rank", "host", "link") if hasattr(item, field))
        arrow = "->" if name.startswith("Send") else "<-"
        said = type(message).__name__
        values = {field: getattr(message, field) for field in message.__struct_fields__}
        values.pop(HIDDEN_OF.get(said, ""), None)
        return f"{arrow} {whom}: {said} {_words(values)}".rstrip()
    values = {field: getattr(item, field) for field in item.__dataclass_fields__}
    return f"{name} {_words(values)}".rstrip()


def _effect(item: Any) -> str:
    if isinstance(item, Record):
        return f"{item.row['level']}: {item.row['text']}"
    return describe(item)


def _words(values: dict[str, Any]) -> str:
    shown = {key: value for key, value in values.items() if key not in HIDDEN_FIELDS and value not in ("", None)}
    shown = {key: value for key, value in shown.items() if value or key not in HIDDEN_WHEN_FALSE}
    return " ".join(f"{key}={_compact(value)}" for key, value in shown.items())


def _compact(value: Any) -> str:
    if hasattr(value, "__struct_fields__"):
        return "(" + _words({field: getattr(value, field) for field in value.__struct_fields__}) + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(_compact, value)) + "]"
    if isinstance(value, float):
        return f"{value:g}"
    return repr(value) if isinstance(value, str) and " " in value else str(value)
