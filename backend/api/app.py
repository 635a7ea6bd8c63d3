"""The REST interface, the live stream, the hosts' sockets and the page, behind one door."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI

from backend.api import frontend, health, info, jobs, preview, problems, runs, session, stream, window
from backend.api.credentials import Failures, OperatorToken, Sessions
from backend.api.deps import Access
from backend.api.security import Gatekeeper
from backend.api.version import VERSION
from backend.runtime.controller import Controller

DESCRIPTION = """Train one PyTorch model over unequal devices on unequal hosts.

Everything the dashboard does is here. Send the operator token as a bearer token, or trade it (or a one-time ticket) for
a session cookie; a change by cookie needs the header `X-Marchline: 1`. Errors are RFC 9457 problems: decide on `code`.
"""
_PROBLEM: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "description": "Refused; `code` says why",
        "content": {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}},
    },
    "5XX": {
        "description": "The controller failed",
        "content": {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}},
    },
}


def create_app(controller: Controller, frontend_dir: Path = frontend.FRONTEND_DIR) -> FastAPI:
    """The whole application around one controller, which it starts and closes with itself."""
    app = _App(
        title="Marchline",
        version=VERSION,
        description=DESCRIPTION,
        openapi_url="/api/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan(controller),
        responses=_PROBLEM,
    )
    token = OperatorToken(controller.operator_token)
    access = Access(token, Sessions(), Failures())
    app.state.controller = controller
    app.state.access = access
    app.state.streams = stream.Streams()
    problems.install(app)
    _route(app, frontend_dir)
    app.add_middleware(
        Gatekeeper,
        token=token,
        sessions=access.sessions,
        failures=access.failures,
        allowed_hosts=controller.settings.allowed_hosts,
    )
    return app


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """FastAPI's own description, with what it cannot see: how errors look and how callers prove themselves."""
        if not self.openapi_schema:
            schema = super().openapi()
            parts = schema.setdefault("components", {})
            parts.setdefault("schemas", {}).update(problems.schemas())
            parts["securitySchemes"] = {
                "operator_token": {"type": "http", "scheme": "bearer"},
                "session": {"type": "apiKey", "in": "cookie", "name": self.state.access.token.cookie_name},
            }
            schema["security"] = [{"operator_token": []}, {"session": []}]
        return self.openapi_schema or {}


def _lifespan(controller: Controller) -> Any:
    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await controller.start()
        try:
            yield
        finally:
            await controller.close()

    return lifespan


def _route(app: FastAPI, frontend_dir: Path) -> None:
    api = APIRouter(prefix="/api/v1")
    for part in (runs, window, preview, jobs, session, info, stream):
        api.include_router(part.router)
    app.include_router(api)
    app.include_router(stream.workers)
    app.include_router(health.router)
    app.include_router(frontend.router(frontend.Frontend(frontend_dir)))
