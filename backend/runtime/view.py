"""The RunView: one shape for a live run (the core's snapshot) and for one that is over (the store's rows)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from backend.store import Queries

Row = dict[str, Any]
View = dict[str, Any]

PAGE = 400
MAX_EVENTS = 200
SPLIT = ("compute_seconds", "data_seconds", "wait_seconds")


def rfc3339(moment: datetime) -> str:
    """UTC with milliseconds: the form of every time in the API."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


def live_view(core: Mapping[str, Any], run: Row, deaths: list[Row], checkpoints: list[Row], wall_now: datetime) -> View:
    """The view of a served run: ``core`` is its snapshot, ``run`` its row, ``wall_now`` the moment of the snapshot."""
    view: View = _frame(run) | jsonable(core)
    for entry in view["window"]["refusals"]:
        entry["at"] = rfc3339(wall_now - timedelta(seconds=entry.get("seconds_ago") or 0.0))
    kept = ("id", "name", "job", "mode", "created_at", "started_at", "ended_at")
    return view | {key: run[key] for key in kept} | {"deaths": list(deaths), "checkpoints": list(checkpoints)}


def history_view(queries: Queries, run_id: int, wall_now: datetime | None = None) -> View | None:
    """The view of a run that nobody serves, from the store alone; none when there is no such run.

    Blocks on the database.
    """
    wall_now = wall_now or datetime.now(UTC)
    run = queries.get_run(run_id)
    if run is None:
        return None
    hosts, epochs = queries.hosts(run_id), queries.epochs(run_id)
    events = queries.events(run_id, limit=MAX_EVENTS, newest=True)
    summary = run["summary"] or {}
    newest = queries.rounds(run_id, limit=1, newest=True)
    last = newest[0] if newest else {}
    worked = summary.get("ranks") or _worked(queries, run_id)
    closed = [row for row in epochs if row["samples_accepted"] is not None]
    accepted = [row["samples_accepted"] for row in closed]
    lost = [sum(piece["size"] for piece in row["samples_lost"] or ()) for row in closed]
    ranks = queries.ranks(run_id)
    view = _frame(run)
    view["window"] |= {
        "joined_ranks": run["world_size"] or 0,
        "joined_hosts": len({row["host"] for row in ranks}),
        "verdict": "The window is closed.",
        "strangers": summary.get("strangers") or view["window"]["strangers"],
        "refusals": [_refusal(row, wall_now) for row in events if row["kind"] == "host_refused"],
    }
    return view | {
        "emulated": any(row["emulate_ms_per_batch"] is not None for row in hosts),
        "members": [_member(row, ranks) for row in hosts],
        "ranks": [_rank(row, hosts, last, worked.get(str(row["rank"]), {})) for row in ranks],
        "epoch": max(0, (run["epochs_done"] or 0) - 1),
        "samples_done": accepted[-1] if accepted else 0,
        "samples_lost": sum(lost),
        "samples_total": max(map(sum, zip(accepted, lost, strict=True)), default=0),
        "decision": last.get("decision") or "",
        "guard": {"verdict": last["verdict"], "reason": last["verdict_reason"]} if last.get("verdict") else None,
        "eval": _evaluation(epochs),
        "throughput": view["throughput"] | {name: summary.get(name) for name in view["throughput"] if name in summary},
        "samples_accepted": accepted,
        "deaths": queries.deaths(run_id),
        "checkpoints": queries.checkpoints(run_id),
    }


def final_figures(core: Mapping[str, Any]) -> Row:
    """What the core knows at its end and no table holds: kept in the run's summary, for its history."""
    kept = ("steps", "samples", "exclusions")
    ranks = {str(rank["rank"]): {name: rank[name] for name in kept} for rank in core["ranks"]}
    return {"ranks": ranks, "strangers": core["window"]["strangers"], "seconds": core["seconds"]}


def overview(runs: list[Row], live: Mapping[int, View]) -> list[Row]:
    """RunSummaries, newest first; a served run's own figures go before its row's."""
    return [row | _live_summary(live[row["id"]]) if row["id"] in live else row for row in runs]


def _live_summary(view: View) -> Row:
    same = ("phase", "reason", "world_size", "loss", "emulated", "started_at", "ended_at")
    return {key: view[key] for key in same} | {
        "rounds_done": view["round"],
        "epochs_done": len(view["samples_accepted"]),
        "deaths": len(view["deaths"]),
        "metrics": view["eval"]["metrics"] if view["eval"] else None,
    }


def jsonable(value: Any) -> Any:
    """A copy in JSON's terms: text keys, lists, and null for a number that JSON can't write."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _frame(run: Row) -> View:
    """Every key of a RunView, with what the run's own row can say."""
    config = run["config"] or {}
    return {
        "id": run["id"],
        "name": run["name"],
        "job": run["job"],
        "mode": run["mode"],
        "phase": run["phase"],
        "reason": run["reason"] or "",
        "stopped_by": run["stopped_by"] or "",
        "created_at": run["created_at"],
        "started_at": run["started_at"],
        "ended_at": run["ended_at"],
        "seconds": _seconds(run),
        "config": config,
        "params": run["params"] or {},
        "emulated": bool(run["emulated"]),
        "model": None,
        "window": _closed_window(config),
        "members": [],
        "world_size": run["world_size"] or 0,
        "epoch": 0,
        "epochs": config.get("epochs"),
        "round": run["rounds_done"] or 0,
        "global_step": run["global_step"] or 0,
        "samples_done": 0,
        "samples_lost": 0,
        "samples_total": 0,
        "ranks": [],
        "decision": "",
        "guard": None,
        "loss": run["loss"],
        "eval": None,
        "throughput": dict.fromkeys(
            ("batches_per_second", "samples_per_second", "ideal_batches_per_second", "efficiency")
        ),
        "samples_accepted": [],
        "resumed_from": _origin(run),
        "saving": False,
        "checkpoint_trouble": "",
        "not_durable": "",
        "session": None,
        "round_stages": {},
        "deaths": [],
        "checkpoints": [],
        "ending": None,
    }


def _origin(run: Row) -> Row | None:
    """The checkpoint that the run goes on from; none for one from the start."""
    if run.get("resumed_run") is None:
        return None
    return {name: run[f"resumed_{name}"] for name in ("run", "checkpoint", "round", "epochs")}


def _closed_window(config: Mapping[str, Any]) -> View:
    configured = {key: config.get(key) for key in ("start_mode", "quorum", "target", "window_seconds", "cap_seconds")}
    return configured | {
        "open": False,
        "joined_ranks": 0,
        "joined_hosts": 0,
        "window_remaining_seconds": None,
        "cap_remaining_seconds": None,
        "armed": False,
        "verdict": "",
        "missing": [],
        "strangers": {"count": 0, "sources": {}},
        "refusals": [],
        "probing": [],
    }


def _seconds(run: Row) -> float:
    """By the controller's monotonic clock, where the run's core could still say so; two readings of a wall clock that
    was set in between tell nothing."""
    told = (run["summary"] or {}).get("seconds")
    if told is not None:
        return float(told)
    if not run["started_at"] or not run["ended_at"]:
        return 0.0
    began, ended = (datetime.fromisoformat(run[name]) for name in ("started_at", "ended_at"))
    return max(0.0, (ended - began).total_seconds())


def _worked(queries: Queries, run_id: int) -> dict[str, Row]:
    """Each rank's accepted steps over all rounds, for a run whose core could not say so itself at its end."""
    steps: dict[str, int] = {}
    after = -1
    while page := queries.rounds(run_id, after=after, limit=PAGE, own=True):
        for row in page:
            for rank, count in (row["realized"] or {}).items():
                steps[rank] = steps.get(rank, 0) + count
        after = page[-1]["round"]
    return {rank: {"steps": count} for rank, count in steps.items()}


def _refusal(event: Row, wall_now: datetime) -> Row:
    data = event["data"] or {}
    return {
        "host": data.get("host", ""),
        "address": data.get("address", ""),
        "code": data.get("code", ""),
        "reason": event["text"],
        "seconds_ago": max(0.0, (wall_now - datetime.fromisoformat(event["at"])).total_seconds()),
        "at": event["at"],
    }


def _member(host: Row, ranks: list[Row]) -> Row:
    return {
        "host": host["host"],
        "name": host["name"],
        "address": host["address"],
        "ranks": [row["rank"] for row in ranks if row["host"] == host["host"]],
        "devices": host["devices"] or [],
        "versions": host["versions"] or {},
        "emulate_ms_per_batch": host["emulate_ms_per_batch"],
        "emulated": host["emulate_ms_per_batch"] is not None,
        "relay_only": not host["devices"],
        "via": None,
        "state": host["state"] or "left",
        "joined_seconds_ago": None,
        "last_heard_seconds": None,
        "data_path": "",
    }


def _rank(row: Row, hosts: list[Row], last: Row, worked: Row) -> Row:
    number = row["rank"]

    def of_last(column: str) -> Any:
        return (last.get(column) or {}).get(str(number))

    return {
        "rank": number,
        "host": row["host"],
        "host_name": next((host["name"] for host in hosts if host["host"] == row["host"]), ""),
        "device": row["device"] or "",
        "state": row["state"] if row["state"] == "dead" else "left",
        "busy": False,
        "doing": "",
        "doing_seconds": None,
        "planned": of_last("planned") or 0,
        "realized": of_last("realized") or 0,
        "anchor": last.get("anchor_rank") == number,
        "ms_per_batch": of_last("ms_per_batch"),
        "emulated_ms": row["emulate_ms_per_batch"],
        "steps": worked.get("steps", 0),
        "samples": worked.get("samples", 0),
        "exclusions": worked.get("exclusions", 0),
        "loss": None,
        **{name: of_last(name) for name in SPLIT},
        "reduce_seconds": last.get("reduce_seconds"),
        "rss_bytes": 0,
        **dict.fromkeys(("device_utilisation", "device_bytes", "device_peak_bytes", "device_total_bytes")),
    }


def _evaluation(epochs: list[Row]) -> Row | None:
    scored = [row for row in epochs if row["metrics"]]
    return {"epoch": scored[-1]["epoch"], "metrics": scored[-1]["metrics"]} if scored else None
