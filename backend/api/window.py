"""The join window and the hosts in it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from backend.api import bodies, schemas, views
from backend.api.deps import TheController
from backend.api.problems import ApiProblem
from backend.api.runs import Number, RunId
from backend.api.strict import StrictRoute
from backend.api.world_schemas import Member

router = APIRouter(prefix="/runs/{run_id}", tags=["join window"], route_class=StrictRoute)


@router.get("/window", operation_id="get_window", response_model=schemas.Window)
async def get_window(run_id: RunId, controller: TheController) -> Any:
    """Who decides, how long still, what is missing to start, who was refused."""
    return (await views.view_of(controller, run_id))["window"]


@router.patch("/window", operation_id="change_window", response_model=schemas.Window)
async def change_window(run_id: RunId, body: bodies.WindowChange, controller: TheController) -> Any:
    """Change quorum or target while the window is open; fields that are left out stay."""
    changes = body.model_dump(exclude_unset=True)
    if not changes:
        raise ApiProblem(422, "nothing_to_change", "Give a quorum, a target or both.")
    if "quorum" in changes and changes["quorum"] is None:
        raise ApiProblem(422, "quorum_needed", "A window always has a quorum; only the target may be taken away.")
    if "target" in changes:
        changes["target"] = changes["target"] or 0  # the core's word for no target; none there means unchanged
    return (await views.command(controller, run_id, "change", **changes))["window"]


@router.post("/window/extend", operation_id="extend_window", response_model=schemas.Window)
async def extend_window(run_id: RunId, body: bodies.WindowExtension, controller: TheController) -> Any:
    """Keep the window open for longer."""
    return (await views.command(controller, run_id, "extend", seconds=body.seconds))["window"]


@router.get("/members", operation_id="list_members", response_model=schemas.Page[Member])
async def list_members(run_id: RunId, controller: TheController) -> dict[str, Any]:
    """The hosts of the run, in the order of admission."""
    return {"items": (await views.view_of(controller, run_id))["members"], "next_cursor": None}


@router.delete("/members/{host}", operation_id="turn_away_member", response_model=schemas.Page[Member])
async def turn_away_member(run_id: RunId, host: Number, controller: TheController) -> dict[str, Any]:
    """Turn a host away while the window is open; the others keep their places in the queue."""
    view = await views.command(controller, run_id, "turn_away", host=host)
    return {"items": view["members"], "next_cursor": None}
