"""What people see: tables on a terminal, tab-separated lines in a pipe. Data goes to stdout, words to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def as_json(value: Any) -> None:
    """For scripts."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def as_json_line(value: Any) -> None:
    """For scripts that read as it comes."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def say(text: str) -> None:
    """A message; never data."""
    print(text, file=sys.stderr)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Rows under their columns; in a pipe without the columns, a tab between values."""
    if not sys.stdout.isatty():
        for row in rows:
            print("\t".join(_plain(value) for value in row))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for row in rows:
        shown.add_row(*(Text(_plain(value)) for value in row))
    Console().print(shown)


def facts(pairs: Sequence[tuple[str, Any]]) -> None:
    """Names and values below each other; those without a value are left out."""
    kept = [(name, _plain(value)) for name, value in pairs if value not in (None, "", [])]
    if not sys.stdout.isatty():
        for name, value in kept:
            print(f"{name}\t{value}")
        return
    width = max((len(name) for name, _ in kept), default=0)
    for name, value in kept:
        print(f"{name:<{width}}  {value}")


def runs(items: Sequence[Row]) -> None:
    """The list of runs."""
    if not items:
        say("No runs yet; make one with `python -m backend runs create JOB`, or try `python -m backend demo`.")
        return
    table(
        ("run", "name", "phase", "job", "ranks", "epochs", "rounds", "loss", "deaths"),
        [
            (
                item["id"],
                item["name"],
                item["phase"],
                item["job"].rpartition(":")[2],
                _ranks_of(item),
                f"{item['epochs_done'] or 0}/{item['epochs']}",
                item["rounds_done"],
                number(item["loss"]),
                item["deaths"],
            )
            for item in items
        ],
    )


def run(view: Row) -> None:
    """A run as it is now."""
    window = view["window"]
    facts(
        [
            ("run", f"{view['id']} {view['name']}"),
            ("phase", _phase(view)),
            ("reason", view["reason"]),
            ("job", f"{view['job']} ({view['mode']})"),
            ("window", window["verdict"] if window["open"] else ""),
            ("missing", "; ".join(f"{item['text']} ({item['cure']})" for item in window["missing"])),
            ("progress", _progress(view)),
            ("loss", number(view["loss"])),
            ("evaluation", _evaluation(view)),
            ("rate", _rate(view)),
            ("decision", view["decision"]),
            ("checkpoints", ", ".join(str(row["checkpoint"]) for row in view["checkpoints"])),
        ]
    )
    if view["ranks"]:
        _ranks(view)
    elif view["members"]:
        _members(view)
    for refusal in window["refusals"][-5:]:
        say(f"refused {refusal['host'] or refusal['address']}: {refusal['reason']} ({refusal['code']})")
    for death in view["deaths"]:
        say(f"lost rank {death['rank']} on {death['host_name']}: {death['reason']}")


def event(row: Row) -> None:
    """One line of what happened."""
    if not sys.stdout.isatty():
        print("\t".join(_plain(row[key]) for key in ("at", "level", "kind", "text")), flush=True)
        return
    mark = {"warning": "!", "error": "x"}.get(row["level"], " ")
    print(f"{row['at']} {mark} {row['text']}", flush=True)


def number(value: float | None) -> str:
    """Four significant digits."""
    return "" if value is None else f"{value:.4g}"


def _members(view: Row) -> None:
    table(
        ("host", "name", "address", "state", "ranks", "devices", "ms/batch, emulated"),
        [
            (
                item["host"],
                item["name"],
                item["address"],
                item["state"],
                ", ".join(map(str, item["ranks"])),
                "relay only" if item["relay_only"] else ", ".join(device["id"] for device in item["devices"]),
                number(item["emulate_ms_per_batch"]),
            )
            for item in view["members"]
        ],
    )


def _ranks(view: Row) -> None:
    table(
        ("rank", "host", "device", "state", "done/planned", "ms/batch (emulated)", "steps", "loss"),
        [
            (
                item["rank"],
                item["host_name"],
                item["device"],
                item["state"],
                f"{item['realized']}/{item['planned']}" + (" anchor" if item["anchor"] else ""),
                number(item["ms_per_batch"]) + (f" ({number(item['emulated_ms'])})" if item["emulated_ms"] else ""),
                item["steps"],
                number(item["loss"]),
            )
            for item in view["ranks"]
        ],
    )


def _phase(item: Row) -> str:
    return f"{item['phase']} (emulated speeds)" if item["emulated"] else str(item["phase"])


def _ranks_of(item: Row) -> str:
    return f"{item['world_size'] or 0} emulated" if item["emulated"] else str(item["world_size"] or 0)


def _progress(view: Row) -> str:
    done = len(view["samples_accepted"])
    return f"{done} of {view['epochs']} epochs, {view['round']} rounds, step {view['global_step']}"


def _evaluation(view: Row) -> str:
    if not view["eval"]:
        return ""
    metrics = ", ".join(f"{name} {number(value)}" for name, value in view["eval"]["metrics"].items())
    return f"after epoch {view['eval']['epoch']}: {metrics}"


def _rate(view: Row) -> str:
    rates = view["throughput"]
    if rates["batches_per_second"] is None:
        return ""
    text = f"{number(rates['batches_per_second'])} batches/s"
    if rates["ideal_batches_per_second"]:
        text += f" of {number(rates['ideal_batches_per_second'])} possible"
    if rates["efficiency"] is not None:
        text += f" ({rates['efficiency']:.0%})"
    return text


def _plain(value: Any) -> str:
    """Never a control character, so that a name from elsewhere cannot write on somebody's terminal."""
    text = "" if value is None else str(value)
    return "".join(char if char.isprintable() else " " for char in text)
