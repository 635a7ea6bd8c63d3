"""A controller that was killed and started again: which of its runs may go on, with whom, and how they are served."""

from __future__ import annotations

import logging
from typing import Any

from backend.core.cohort import Cohort
from backend.core.returning import Kept, read_kept
from backend.runtime import resuming
from backend.runtime.perform import LiveRun, Services
from backend.store import Queries
from wire.session import run_secret

log = logging.getLogger(__name__)


def find(queries: Queries) -> dict[int, Kept]:
    """By run, what is kept of each whose cohort may still live. Blocks on the database."""
    found = {}
    for row in queries.unserved():
        states = {each["slot"]: each["state"] for each in queries.continuations(row["id"])}
        try:
            kept = read_kept(states, queries.deaths(row["id"]))
            resuming.config_of(row, {})
        except (ValueError, TypeError) as error:
            log.error("run %d cannot go on with its cohort: %s", row["id"], error)
            continue
        if kept is not None:
            found[row["id"]] = kept
    return found


def take_back(
    queries: Queries, run_id: int, kept: Kept, join_secret: bytes, services: Services
) -> tuple[LiveRun, list[dict[str, Any]]]:
    """The run, waiting for its cohort, and its rounds up to now. Blocks on the database; belongs to the event loop."""
    row = queries.get_run(run_id)
    assert row is not None, f"run {run_id} was found a moment ago"
    config = resuming.config_of(row, {})
    secret = kept.run_secret or run_secret(join_secret, kept.run_salt)
    checkpoints = queries.checkpoints(run_id)
    core = Cohort(
        run_id,
        config,
        run_salt=kept.run_salt,
        run_secret=secret if config.open_admission else None,
        job_hash=row["job_hash"] or "",
        now=services.clock(),
    )
    core.take_back(kept.beyond(max((each["checkpoint"] for each in checkpoints), default=0)), services.clock())
    run = LiveRun(row, config, core, secret, services)
    run.deaths += queries.deaths(run_id)
    run.checkpoints += checkpoints
    return run, queries.rounds(run_id, newest=True)
