"""From what an operator writes, ``last``, ``best``, ``7``, ``7:best``, ``7:12``, to a checkpoint that loads.

``last`` is the newest complete one, by number; ``best`` the one with the best score on the evaluation set where the job
has one, else with the lowest loss. A damaged one is passed over by name, unless it was asked for by number.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from backend.core.config import RunConfig
from backend.runtime import bundle
from backend.runtime.bundle import BundleError, CheckpointPlace, Loaded
from backend.runtime.errors import CommandRefused
from backend.store import Queries

NEWEST_RUNS = 200
"""how far back a run with a checkpoint is looked for, when none is named"""
LOWER_IS_BETTER = re.compile(r"loss|err|perplexity|ppl|mse|mae|rmse|nll|wer|cer|distance|divergence", re.IGNORECASE)
_GRAMMAR = re.compile(r"(?:(?P<run>[0-9]{1,18}):)?(?P<which>last|best|[0-9]{1,9})|(?P<alone>[0-9]{1,18})")

Row = dict[str, Any]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """What was asked for. ``run`` none: the newest run that has a checkpoint. ``number`` none: by ``best``."""

    run: int | None
    number: int | None = None
    best: bool = False


def parse(text: str) -> Source:
    """Read ``last``, ``best``, ``RUN``, ``RUN:last``, ``RUN:best`` or ``RUN:NUMBER``. Raises ``CommandRefused``."""
    run, colon, which = text.strip().rpartition(":")
    if not colon and which.isdigit():
        run, which = which, "last"
    if not _GRAMMAR.fullmatch(f"{run}:{which}" if run else which) or (which.isdigit() and not run):
        reason = f"{text!r} names no checkpoint; write last, best, RUN, RUN:last, RUN:best or RUN:NUMBER."
        raise CommandRefused("checkpoint_unreadable_name", reason)
    number = int(which) if which.isdigit() else None
    return Source(int(run) if run else None, number, which == "best")


def find(queries: Queries, data_dir: Path, text: str) -> tuple[Row, Loaded]:
    """The run's row and the checkpoint, verified and loaded. Blocks on database and disk. Raises ``CommandRefused``."""
    source = parse(text)
    row = _run_of(queries, data_dir, source)
    place = CheckpointPlace(data_dir, row["id"])
    complete = place.complete()
    if not complete:
        reason = f"Run {row['id']} has no complete checkpoint to resume from."
        raise CommandRefused("no_checkpoint", reason)
    if source.number is not None:
        if source.number not in complete:
            had = ", ".join(map(str, complete))
            reason = f"Run {row['id']} has no checkpoint {source.number}; there are {had}."
            raise CommandRefused("checkpoint_unknown", reason)
        wanted = [source.number]
    else:
        wanted = _by_score(queries, row["id"], complete) if source.best else complete[::-1]
    damaged: list[str] = []
    for number in wanted:
        directory = place.bundle(number)
        try:
            return row, bundle.load(directory, bundle.verify(directory), tuple(damaged))
        except BundleError as error:
            log.error("checkpoint %d of run %d is damaged: %s", number, row["id"], error)
            damaged.append(f"Checkpoint {number} was passed over: {error}")
    raise CommandRefused("checkpoint_damaged", "; ".join(damaged) + ".")


def config_of(row: Row, changes: Mapping[str, Any]) -> RunConfig:
    """The saved run's configuration with these changes."""
    known = {entry.name for entry in fields(RunConfig)}
    values = {name: value for name, value in (row["config"] or {}).items() if name in known}
    for name in ("fixed_counts", "speed_hint"):
        values[name] = tuple(values[name]) if values.get(name) is not None else None
    return RunConfig(**(values | dict(changes)))


def compared(origin: Loaded, config: RunConfig, job_hash: str) -> Loaded:
    """The checkpoint, with notes of what the operator changed that is allowed to change."""
    notes = []
    if origin.job_hash and job_hash and origin.job_hash != job_hash:
        notes.append(f"The job's file has changed since {origin.resume.where}")
    changed = sorted(
        name for name in {*origin.params, *config.params} if origin.params.get(name) != config.params.get(name)
    )
    if changed:
        notes.append(f"Parameters of the job have changed: {', '.join(changed)}")
    if (origin.momentum is not None) != (config.outer_optimizer != "none"):
        what = "has no outer momentum; it begins at zero" if origin.momentum is None else "has one that is not used"
        notes.append(f"The outer optimizer has changed: the checkpoint {what}")
    return origin.noted(*notes)


def columns(origin: Loaded | None) -> Row:
    """What a run's row says of where it came from."""
    if origin is None:
        return {}
    position = origin.resume
    return {
        "resumed_run": position.run_id,
        "resumed_checkpoint": position.checkpoint,
        "resumed_round": position.round,
        "resumed_epochs": len(position.samples_accepted),
    }


def lost_rows(queries: Queries, place: CheckpointPlace) -> Iterator[Row]:
    """Rows of bundles that are complete and that the database does not know: the controller died in between."""
    known = {row["checkpoint"] for row in queries.checkpoints(place.run_id)}
    for number in place.complete():
        if number in known:
            continue
        try:
            manifest = bundle.read_manifest(place.bundle(number))
            model = manifest["files"][bundle.MODEL]
            yield {name: manifest[name] for name in ("round", "epoch", "global_step", "loss", "reason")} | {
                "checkpoint": number,
                "path": place.model(number).relative_to(place.data_dir).as_posix(),
                "bytes": model["bytes"],
                "sha256": model["sha256"],
            }
        except (BundleError, KeyError) as error:
            log.error("checkpoint %d of run %d is of no use: %s", number, place.run_id, error)


def gone_rows(queries: Queries, place: CheckpointPlace) -> Iterator[Row]:
    """Rows of checkpoints that were removed for newer ones when the controller died, and still count as there."""
    complete = place.complete()
    for row in queries.checkpoints(place.run_id):
        if not row["pruned"] and row["checkpoint"] not in complete:
            yield {"checkpoint": row["checkpoint"], "pruned": True}


def _run_of(queries: Queries, data_dir: Path, source: Source) -> Row:
    if source.run is not None:
        row = queries.get_run(source.run)
        if row is None:
            raise CommandRefused("run_unknown", f"There is no run {source.run} to resume.")
        return row
    for summary in queries.list_runs(NEWEST_RUNS):
        if CheckpointPlace(data_dir, summary["id"]).complete():
            row = queries.get_run(summary["id"])
            assert row is not None
            return row
    raise CommandRefused("no_checkpoint", "No run has a complete checkpoint to resume from.")


def _by_score(queries: Queries, run_id: int, complete: list[int]) -> list[int]:
    """Complete checkpoints, the best first; those without a figure last, the newest first among equals."""
    rows = {row["checkpoint"]: row for row in queries.checkpoints(run_id)}
    scores = {row["epoch"] + 1: row["metrics"] for row in queries.epochs(run_id) if row["metrics"]}
    at = {number: scores.get((rows.get(number) or {}).get("epoch")) or {} for number in complete}
    scored = {number: metrics for number, metrics in at.items() if metrics}
    lead = lead_metric(next(iter(scored.values()))) if scored else None

    def key(number: int) -> tuple[bool, float, int]:
        value = at[number].get(lead) if lead else (rows.get(number) or {}).get("loss")
        if value is None:
            return True, 0.0, -number
        lower = lead is None or LOWER_IS_BETTER.search(lead) is not None
        return False, value if lower else -value, -number

    return sorted(complete, key=key)


def lead_metric(metrics: Mapping[str, Any]) -> str:
    """The metric that a job is judged by, the one that the page shows: accuracy, else the first that is no loss."""
    named = next((name for name in ("accuracy", "acc") if name in metrics), None)
    return named or next((name for name in metrics if name != "loss"), "loss")
