"""Whether this process lives, whether it can do its work, what it is, and its figures for Prometheus."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, PlainTextResponse, Response

from backend.api import schemas
from backend.api.deps import TheController
from backend.api.info import about
from backend.api.metrics import exposition
from backend.runtime.controller import Controller
from backend.store.errors import StoreError

CHECK_SECONDS = 2.0

router = APIRouter(tags=["health"])


@router.get("/livez", operation_id="livez", response_class=PlainTextResponse)
@router.get("/healthz", include_in_schema=False)
async def livez() -> PlainTextResponse:
    """The process answers. It asks neither the disk nor the hosts."""
    return PlainTextResponse("ok\n")


@router.get("/readyz", operation_id="readyz", response_class=PlainTextResponse)
async def readyz(request: Request, controller: TheController) -> PlainTextResponse:
    """The controller can serve runs: its database reads and writes. 503 when it cannot; ``?verbose`` says why."""
    checks = {"database": await _database(controller), "writer": _writer(controller)}
    bad = any(checks.values())
    if "verbose" not in request.query_params:
        return PlainTextResponse("not ready\n" if bad else "ok\n", 503 if bad else 200)
    lines = [f"[-]{name} {why}" if why else f"[+]{name} ok" for name, why in checks.items()]
    return PlainTextResponse("\n".join(lines) + "\n", 503 if bad else 200)


@router.get("/version", operation_id="version", response_model=schemas.Version)
async def version() -> JSONResponse:
    """What answers here."""
    return JSONResponse(about())


@router.get("/metrics", operation_id="metrics", response_class=PlainTextResponse)
async def metrics(request: Request, controller: TheController) -> Response:
    """Figures for Prometheus."""
    body, media_type = exposition(controller, _clients(request))
    return Response(body, media_type=media_type)


async def _database(controller: Controller) -> str:
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            await run_in_threadpool(controller.store.queries.list_runs, 1)
    except StoreError as error:
        return error.text
    except TimeoutError:
        return f"did not answer within {CHECK_SECONDS:g} s"
    return ""


def _writer(controller: Controller) -> str:
    trouble = controller.store.trouble
    return trouble.text if trouble is not None else ""


def _clients(request: Request) -> dict[str, Any]:
    app = request.app
    return {
        "streams": app.state.streams.open,
        "dropped": app.state.streams.dropped,
        "sessions": len(app.state.access.sessions),
        "failures": app.state.access.failures.total,
    }
