"""A controller that was killed and started again: which of its runs may go on, with whom, and how they are served."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from backend.core.cohort import Cohort
from backend.core.config import RunConfig
from backend.core.returning import Kept, read_kept
from backend.runtime import resuming
from backend.runtime.perform import LiveRun, Services
from backend.store import Queries
from wire.errors import LocalProtocolError
from wire.session import run_secret

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Continuation:
    """A run whose cohort may still live. ``row`` is its own, ``secret`` that of its links."""

    row: dict[str, Any]
    config: RunConfig
    kept: Kept
    secret: bytes


def find(queries: Queries, join_secret: bytes) -> dict[int, Continuation]:
    """By run. One that cannot be read is left out, and says so in the log. Blocks on the database."""
    found = {}
    for row in queries.unserved():
        states = {each["slot"]: each["state"] for each in queries.continuations(row["id"])}
        try:
            kept = read_kept(states, queries.deaths(row["id"]))
            if kept is not None:
                secret = kept.run_secret or run_secret(join_secret, kept.run_salt)
                found[row["id"]] = Continuation(row, resuming.config_of(row, {}), kept, secret)
        except (ValueError, TypeError, LocalProtocolError) as error:
            log.error("run %d cannot go on with its cohort: %s", row["id"], error)
    return found


def take_back(queries: Queries, found: Continuation, services: Services) -> tuple[LiveRun, list[dict[str, Any]]]:
    """The run, waiting for its cohort, and its rounds up to now. Blocks on the database; belongs to the event loop."""
    row, config, kept = found.row, found.config, found.kept
    checkpoints = queries.checkpoints(row["id"])
    core = Cohort(
        row["id"],
        config,
        run_salt=kept.run_salt,
        run_secret=found.secret if config.open_admission else None,
        job_hash=row["job_hash"] or "",
        now=services.clock(),
    )
    core.take_back(kept.beyond(max((each["checkpoint"] for each in checkpoints), default=0)), services.clock())
    run = LiveRun(row, config, core, found.secret, services)
    run.deaths += queries.deaths(row["id"])
    run.checkpoints += checkpoints
    return run, queries.rounds(row["id"], newest=True)
