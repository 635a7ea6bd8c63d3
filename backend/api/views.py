"""A run's view wherever it is: live from its core, or from history. Shared by the routes of a run."""

from __future__ import annotations

from typing import Any

from starlette.concurrency import run_in_threadpool

from backend.api.problems import ApiProblem, refusal
from backend.runtime.controller import Controller
from backend.runtime.errors import CommandRefused, UnknownRun
from backend.runtime.view import history_view


async def view_of(controller: Controller, run_id: int) -> dict[str, Any]:
    """The ``RunView`` of a run. Raises ``ApiProblem`` 404 run_unknown."""
    view = controller.live_view(run_id)
    if view is None:
        view = await run_in_threadpool(history_view, controller.store.queries, run_id)
    if view is None:
        raise unknown(run_id)
    return view


async def command(controller: Controller, run_id: int, act: str, **arguments: Any) -> dict[str, Any]:
    """Have the run do something; its view afterwards. A refusal is a conflict that carries the phase."""
    try:
        await controller.command(run_id, act, **arguments)
    except CommandRefused as refused:
        view = await view_of(controller, run_id)
        raise refusal(refused, phase=view["phase"]) from refused
    except UnknownRun as error:
        view = await view_of(controller, run_id)
        detail = f"Run {run_id} is over ({view['phase']}); nothing about it can change any more."
        raise ApiProblem(409, "run_over", detail, phase=view["phase"]) from error
    return await view_of(controller, run_id)


def unknown(run_id: int) -> ApiProblem:
    """No run has this number."""
    return ApiProblem(404, "run_unknown", f"There is no run {run_id}.")


def known_run(controller: Controller, run_id: int) -> dict[str, Any]:
    """The run's stored row, for a route that reads the store in its thread. Raises 404 run_unknown."""
    row = controller.store.queries.get_run(run_id)
    if row is None:
        raise unknown(run_id)
    return row
