"""The RunView: one shape for a live run (the core's snapshot) and for one that is over (the store's rows)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
    view = _frame(run) | jsonable(core)
    for entry in view["window"]["refusals"]:
        entry["at"] = rfc3339(wall_now - timedelta(seconds=entry.get("seconds_ago") or 0.0))
    kept = ("id", "name", "job", "mode", "created_at", "started_at", "ended_at")
    return view | {key: run[key] for key in kept} | {"deaths": list(deaths), "checkpoints": list(checkpoints)}


def history_view(queries: Queries, run_id: int) -> View | None:
    """The view of a run that nobody serves, from the store alone; none when there is no such run. Blocks on the database."""
    run = queries.get_run(run_id)
    if run is None:
        return None
    hosts, epochs = queries.hosts(run_id), queries.epochs(run_id)
    events = queries.events(run_id, limit=MAX_EVENTS, newest=True)
    last, steps = _walk_rounds(queries, run_id)
    accepted = [row["samples_accepted"] for row in epochs if row["samples_accepted"] is not None]
    summary = run["summary"] or {}
    view = _frame(run)
    view["window"] |= {
        "joined_ranks": run["world_size"] or 0,
        "joined_hosts": sum(row["state"] not in ("turned_away",) for row in hosts),
        "verdict": run["reason"] or f"the run is {run['phase']}",
        "refusals": [_refusal(row) for row in events if row["kind"] == "host_refused"],
    }
    return view | {
        "members": [_member(row, run) for row in hosts],
        "ranks": _ranks(queries.ranks(run_id), hosts, last, steps),
        "epoch": max(0, (run["epochs_done"] or 0) - 1),
        "samples_done": accepted[-1] if accepted else 0,
        "samples_total": max(accepted, default=0),
        "decision": (last or {}).get("decision") or "",
        "eval": _evaluation(epochs),
        "throughput": view["throughput"] | {name: summary.get(name) for name in view["throughput"] if name in summary},
        "samples_accepted": accepted,
        "deaths": queries.deaths(run_id),
        "checkpoints": queries.checkpoints(run_id),
    }


def last_rounds(queries: Queries, run_id: int, limit: int = PAGE) -> list[Row]:
    """The newest rounds of a run in order. Blocks on the database."""
    run = queries.get_run(run_id)
    closed = 0 if run is None else run["rounds_done"] or 0
    rows: list[Row] = []
    after = max(-1, closed - 1 - limit)
    while page := queries.rounds(run_id, after=after, limit=PAGE):
        rows = (rows + page)[-limit:]
        after = page[-1]["round"]
    return rows


def summary_of(row: Row, live: View | None, deaths: int) -> View:
    """A RunSummary for the list of runs; a live run's own figures go before its row's."""
    keys = (
        "id", "name", "job", "mode", "phase", "reason", "created_at", "started_at", "ended_at", "world_size",
        "epochs_done", "rounds_done", "loss", "metrics", "emulated",
    )  # fmt: skip
    summary = {key: row.get(key) for key in keys}
    summary["epochs"] = (row.get("config") or {}).get("epochs")
    summary["deaths"] = deaths
    if live is not None:
        summary |= {key: live[key] for key in ("phase", "reason", "world_size", "loss", "emulated", "started_at", "ended_at")}
        summary |= {"rounds_done": max(0, live["round"]), "epochs_done": len(live["samples_accepted"])}
        summary["deaths"] = len(live["deaths"])
    return summary


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
        "seconds": _seconds(run["started_at"], run["ended_at"]),
        "config": config,
        "params": run["params"] or {},
        "emulated": bool(run["emulated"]),
        "window": {
            "open": False,
            "start_mode": config.get("start_mode"),
            "quorum": config.get("quorum"),
            "target": config.get("target"),
            "joined_ranks": 0,
            "joined_hosts": 0,
            "window_seconds": config.get("window_seconds"),
            "cap_seconds": config.get("cap_seconds"),
            "window_remaining_seconds": None,
            "cap_remaining_seconds": None,
            "armed": False,
            "verdict": "",
            "missing": [],
            "strangers": {"count": 0, "sources": {}},
            "refusals": [],
            "probing": [],
        },
        "members": [],
        "world_size": run["world_size"] or 0,
        "epoch": 0,
        "epochs": config.get("epochs"),
        "round": run["rounds_done"] or 0,
        "global_step": run["global_step"] or 0,
        "samples_done": 0,
        "samples_total": 0,
        "ranks": [],
        "decision": "",
        "loss": run["loss"],
        "eval": None,
        "throughput": dict.fromkeys(
            ("batches_per_second", "samples_per_second", "ideal_batches_per_second", "efficiency")
        ),
        "samples_accepted": [],
        "deaths": [],
        "checkpoints": [],
    }


def _seconds(started_at: str | None, ended_at: str | None) -> float:
    if not started_at or not ended_at:
        return 0.0
    return max(0.0, (datetime.fromisoformat(ended_at) - datetime.fromisoformat(started_at)).total_seconds())


def _walk_rounds(queries: Queries, run_id: int) -> tuple[Row | None, dict[str, int]]:
    """The last round, and each rank's accepted steps over all of them."""
    last: Row | None = None
    steps: dict[str, int] = {}
    while page := queries.rounds(run_id, after=-1 if last is None else last["round"], limit=PAGE):
        for row in page:
            for rank, count in (row["realized"] or {}).items():
                steps[rank] = steps.get(rank, 0) + count
        last = page[-1]
    return last, steps


def _refusal(event: Row) -> Row:
    data = event["data"] or {}
    named: Callable[[str], Any] = lambda key: data.get(key, "")  # noqa: E731
    return {
        "host": named("host"),
        "address": named("address"),
        "code": named("code"),
        "reason": event["text"],
        "seconds_ago": None,
        "at": event["at"],
    }


def _member(host: Row, run: Row) -> Row:
    return {
        "host": host["host"],
        "name": host["name"],
        "address": host["address"],
        "ranks": [],
        "devices": host["devices"] or [],
        "versions": host["versions"] or {},
        "emulate_ms_per_batch": host["emulate_ms_per_batch"],
        "emulated": host["emulate_ms_per_batch"] is not None,
        "state": host["state"] or "left",
        "joined_seconds_ago": None,
        "last_heard_seconds": None,
    }


def _ranks(ranks: list[Row], hosts: list[Row], last: Row | None, steps: dict[str, int]) -> list[Row]:
    names = {row["host"]: row["name"] for row in hosts}
    closing = last or {}

    def of_last(column: str, rank: int) -> Any:
        return (closing.get(column) or {}).get(str(rank))

    return [
        {
            "rank": row["rank"],
            "host": row["host"],
            "host_name": names.get(row["host"], ""),
            "device": row["device"] or "",
            "state": row["state"] if row["state"] == "dead" else "left",
            "busy": False,
            "planned": of_last("planned", row["rank"]) or 0,
            "realized": of_last("realized", row["rank"]) or 0,
            "anchor": closing.get("anchor_rank") == row["rank"],
            "ms_per_batch": of_last("ms_per_batch", row["rank"]),
            "emulated_ms": row["emulate_ms_per_batch"],
            "steps": steps.get(str(row["rank"]), 0),
            "samples": None,
            "loss": None,
            **{name: of_last(name, row["rank"]) for name in SPLIT},
            "reduce_seconds": closing.get("reduce_seconds"),
            "rss_bytes": None,
        }
        for row in ranks
    ]


def _evaluation(epochs: list[Row]) -> Row | None:
    scored = [row for row in epochs if row["metrics"]]
    return {"epoch": scored[-1]["epoch"], "metrics": scored[-1]["metrics"]} if scored else None
