"""What a run will be like, before it starts or as it goes on."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from backend.api import views
from backend.api.answer import Answer
from backend.api.deps import TheController
from backend.api.problems import ApiProblem
from backend.api.runs import RunId
from backend.api.strict import StrictRoute
from backend.core.preview import preview

router = APIRouter(prefix="/runs/{run_id}", tags=["runs"], route_class=StrictRoute)


class RankPreview(Answer):
    """One rank in a full window; ``source`` says where its speed comes from."""

    rank: int
    ms_per_batch: float
    source: Literal["measured", "declared", "guessed"]
    batches: int
    share: float
    idle_share: float = Field(description="of an epoch: waiting for the others, the rounds themselves aside")


class Expectation(Answer):
    """An epoch, once the allotments have settled. Shares are of the epoch's time."""

    anchor: int
    anchor_rank: int | None
    window_batches: int
    window_seconds: float = Field(description="with as much of the round as does not overlap work")
    round_seconds: float
    windows: int
    epoch_seconds: float
    idle_share: float
    round_share: float
    batches_per_second: float
    efficiency: float = Field(description="against the sum of what each rank does alone")
    gain: float = Field(description="how many times as fast as the fastest rank alone")


class Preview(Answer):
    """What to expect; ``expectation`` is null while there is nothing to, and ``reason`` says why."""

    ranks: list[RankPreview]
    expectation: Expectation | None
    guess: bool = Field(description="some rank's speed is neither measured nor declared by its host")
    round_assumed: bool = Field(description="no round was timed: its duration follows from the model's size")
    reason: str


@router.get("/preview", operation_id="preview_run", response_model=Preview)
async def preview_run(run_id: RunId, controller: TheController) -> dict[str, Any]:
    """Expected allotments, idle time, rounds, and the gain over the fastest device alone, from the speeds of the ranks
    that have joined."""
    outlook = controller.live_outlook(run_id)
    if outlook is None:
        phase = (await views.view_of(controller, run_id))["phase"]
        detail = f"Run {run_id} is over ({phase}); there is nothing left to foresee."
        raise ApiProblem(409, "run_over", detail, phase=phase)
    return asdict(await run_in_threadpool(preview, outlook))
