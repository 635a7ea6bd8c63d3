"""Runs: make, list, look at, start, stop, abort; and what is recorded of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Path, Query, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from backend.api import bodies, schemas, views
from backend.api.deps import TheController
from backend.api.problems import ApiProblem, refusal
from backend.api.schemas import Page
from backend.api.strict import StrictRoute
from backend.runtime.controller import Controller
from backend.runtime.errors import CommandRefused
from backend.runtime.view import overview

RunId = Annotated[int, Path(ge=1, le=1 << 62, description="the run's number")]
Limit = Annotated[int, Query(ge=1, le=1000, description="most items in the answer")]
Number = Annotated[int, Path(ge=0, le=1 << 31)]

_READ_BYTES = 1 << 20

router = APIRouter(prefix="/runs", tags=["runs"], route_class=StrictRoute)


@router.post("", status_code=201, operation_id="create_run", response_model=schemas.RunView)
async def create_run(body: bodies.RunCreate, response: Response, controller: TheController) -> dict[str, Any]:
    """Make a run, new or going on from a checkpoint, and open its join window."""
    try:
        if body.resume_from is None:
            run_id = await controller.create_run(body.config())
        else:
            run_id = await controller.resume_run(body.resume_from, body.changes())
    except CommandRefused as refused:
        raise refusal(refused, status=422 if refused.errors else 409) from refused
    response.headers["Location"] = f"/api/v1/runs/{run_id}"
    return await views.view_of(controller, run_id)


@router.get("", operation_id="list_runs", response_model=Page[schemas.RunSummary])
async def list_runs(
    controller: TheController,
    limit: Limit = 50,
    cursor: Annotated[str | None, Query(max_length=20, pattern=r"^[0-9]{1,18}$")] = None,
) -> dict[str, Any]:
    """All runs, newest first."""
    before = int(cursor) if cursor is not None else None
    rows = await run_in_threadpool(controller.store.queries.list_runs, limit + 1, before)
    more = len(rows) > limit
    live = {run_id: view for run_id in controller.live_run_ids() if (view := controller.live_view(run_id)) is not None}
    items = overview(rows[:limit], live)
    return {"items": items, "next_cursor": str(items[-1]["id"]) if more else None}


@router.get("/{run_id}", operation_id="get_run", response_model=schemas.RunView)
async def get_run(run_id: RunId, controller: TheController) -> dict[str, Any]:
    """All of a run as it is now, or as it ended."""
    return await views.view_of(controller, run_id)


@router.post("/{run_id}/start", operation_id="start_run", response_model=schemas.RunView)
async def start_run(run_id: RunId, controller: TheController) -> dict[str, Any]:
    """Close the join window and form the world. Refused with what is missing."""
    return await views.command(controller, run_id, "start")


@router.post("/{run_id}/stop", operation_id="stop_run", response_model=schemas.RunView)
async def stop_run(run_id: RunId, controller: TheController) -> dict[str, Any]:
    """Finish the window of work, save, and end as done."""
    return await views.command(controller, run_id, "stop", by="operator")


@router.post("/{run_id}/abort", operation_id="abort_run", response_model=schemas.RunView)
async def abort_run(run_id: RunId, controller: TheController) -> dict[str, Any]:
    """End at once, without another round."""
    return await views.command(controller, run_id, "abort", by="operator")


@router.get("/{run_id}/rounds", operation_id="list_rounds", response_model=Page[schemas.Round])
def list_rounds(
    run_id: RunId,
    controller: TheController,
    after: Annotated[int, Query(ge=-1, le=1 << 62, description="only rounds above this one")] = -1,
    limit: Limit = 400,
    own: Annotated[bool, Query(description="only this run's own, superseded ones included")] = False,
) -> dict[str, Any]:
    """Closed rounds, oldest first; of a resumed run also those that it goes on from, each number once."""
    views.known_run(controller, run_id)
    return _page(controller.store.queries.rounds(run_id, after, limit + 1, own=own), limit, "round")


@router.get("/{run_id}/epochs", operation_id="list_epochs", response_model=Page[schemas.Epoch])
def list_epochs(run_id: RunId, controller: TheController) -> dict[str, Any]:
    """Finished epochs."""
    views.known_run(controller, run_id)
    return _whole(controller.store.queries.epochs(run_id))


@router.get("/{run_id}/events", operation_id="list_events", response_model=Page[schemas.Event])
def list_events(
    run_id: RunId,
    controller: TheController,
    after: Annotated[int, Query(ge=0, le=1 << 62, description="only events with a higher id")] = 0,
    limit: Limit = 200,
    newest: Annotated[bool, Query(description="the last ones instead of the first ones")] = False,
) -> dict[str, Any]:
    """What happened, oldest first."""
    views.known_run(controller, run_id)
    if newest:
        return _whole(controller.store.queries.events(run_id, after, limit, newest=True))
    return _page(controller.store.queries.events(run_id, after, limit + 1), limit, "id")


@router.get("/{run_id}/deaths", operation_id="list_deaths", response_model=Page[schemas.Death])
def list_deaths(run_id: RunId, controller: TheController) -> dict[str, Any]:
    """Ranks that were lost, with what is known of why."""
    views.known_run(controller, run_id)
    return _whole(controller.store.queries.deaths(run_id))


@router.post("/{run_id}/checkpoints", operation_id="save_run", response_model=schemas.RunView)
async def save_run(run_id: RunId, controller: TheController) -> dict[str, Any]:
    """Save when the round at hand is closed, and go on."""
    return await views.command(controller, run_id, "save", by="operator")


@router.get("/{run_id}/checkpoints", operation_id="list_checkpoints", response_model=Page[schemas.Checkpoint])
def list_checkpoints(run_id: RunId, controller: TheController) -> dict[str, Any]:
    """Saved models."""
    views.known_run(controller, run_id)
    return _whole(controller.store.queries.checkpoints(run_id))


@router.get(
    "/{run_id}/checkpoints/{checkpoint}/model",
    operation_id="download_checkpoint",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/octet-stream": {}}, "description": "a safetensors file"}},
)
def download_checkpoint(run_id: RunId, checkpoint: Number, controller: TheController) -> StreamingResponse:
    """The model of a checkpoint, as a safetensors file."""
    views.known_run(controller, run_id)
    rows = controller.store.queries.checkpoints(run_id)
    row = next((row for row in rows if row["checkpoint"] == checkpoint), None)
    if row is None:
        raise ApiProblem(404, "checkpoint_unknown", f"Run {run_id} has no checkpoint {checkpoint}.")
    file = _open_model(controller, row)
    headers = {
        "Content-Length": str(os.fstat(file.fileno()).st_size),
        "Content-Disposition": f'attachment; filename="run{run_id}-checkpoint{checkpoint}.safetensors"',
        "ETag": f'"{row["sha256"]}"',
    }
    return StreamingResponse(_chunks(file), headers=headers, media_type="application/octet-stream")


def _open_model(controller: Controller, row: dict[str, Any]) -> BinaryIO:
    """The file that the database names, opened only when it really lies below the data directory and is no link."""
    root = controller.settings.data_dir.resolve()
    path = root / FilePath(row["path"])
    try:
        if path.is_dir():
            path = path / "model.safetensors"
        if not path.parent.resolve().is_relative_to(root):
            raise PermissionError("it lies outside the data directory")
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        why = error.strerror or str(error)
        detail = f"The file of checkpoint {row['checkpoint']} cannot be read: {why}."
        raise ApiProblem(410, "checkpoint_gone", detail) from error
    return os.fdopen(descriptor, "rb")


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while chunk := file.read(_READ_BYTES):
            yield chunk


def _page(rows: list[dict[str, Any]], limit: int, key: str) -> dict[str, Any]:
    """``rows`` holds one more than asked for when there are more."""
    more = len(rows) > limit
    return {"items": rows[:limit], "next_cursor": str(rows[limit - 1][key]) if more else None}


def _whole(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"items": rows, "next_cursor": None}
