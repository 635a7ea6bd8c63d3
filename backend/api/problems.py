"""Errors as browser, command line and scripts see them: RFC 9457 problem details with a stable ``code``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import compile_path

from backend.core.config import Problem as FieldProblem
from backend.runtime.errors import CommandRefused, UnknownRun
from backend.runtime.jobs import JobProblem
from backend.store.errors import LocalError, StoreError

MEDIA_TYPE = "application/problem+json"
MAX_SHOWN = 2000
"""characters of a problem's sentence"""
_CODES = {400: "bad_request", 404: "not_found", 405: "method_not_allowed", 408: "body_too_slow"}

log = logging.getLogger(__name__)


class FieldError(BaseModel):
    """One thing wrong with one field."""

    field: str
    code: str
    text: str


class ProblemDetails(BaseModel):
    """RFC 9457, with ``code`` to decide on and ``errors`` for single fields."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str
    code: str
    errors: list[FieldError] = Field(default_factory=list)
    phase: str | None = Field(default=None, description="the run's phase, when it is the reason for a refusal")


class ApiProblem(Exception):
    """A request that is answered with a problem."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        errors: Sequence[FieldError] = (),
        headers: Mapping[str, str] | None = None,
        phase: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.errors = list(errors)
        self.headers = dict(headers or {})
        self.phase = phase


def refusal(refused: CommandRefused, status: int = 409, phase: str | None = None) -> ApiProblem:
    """A command that the core or the runtime refused, as a problem."""
    return ApiProblem(status, refused.code, refused.reason, errors=field_errors(refused.errors), phase=phase)


def field_errors(problems: Sequence[FieldProblem]) -> list[FieldError]:
    """The configuration's own problems in the API's shape."""
    return [FieldError(field=item.field, code=item.code, text=item.text) for item in problems]


def response_of(problem: ApiProblem, path: str) -> Response:
    """The HTTP answer, which is one for a refused websocket handshake as well. ``path`` is decoded."""
    errors = [{name: _shown(text) for name, text in error.model_dump().items()} for error in problem.errors]
    body: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(problem.status).phrase,
        "status": problem.status,
        "detail": _shown(problem.detail),
        "instance": quote(path, safe="/:@!$&'()*+,;=~"),
        "code": problem.code,
        "errors": errors,
    }
    if problem.phase is not None:
        body["phase"] = problem.phase
    return Response(msgspec.json.encode(body), problem.status, problem.headers, media_type=MEDIA_TYPE)


def _shown(text: str) -> str:
    """A caller's own words in an answer: nothing that steers a terminal, and no more than anybody reads."""
    shown = "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
    return shown if len(shown) <= MAX_SHOWN else f"{shown[: MAX_SHOWN - 1]}…"


def internal(error: Exception, method: str, path: str) -> ApiProblem:
    """A fault of ours: the whole story in the log, none of it in the answer."""
    log.error("%s %s failed", method, path, exc_info=error)
    return ApiProblem(500, "internal_error", "The controller failed on this request; its log has the details.")


def install(app: FastAPI) -> None:
    """Answer every error of the app as a problem."""
    app.add_exception_handler(ApiProblem, _on_problem)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(UnknownRun, _on_unknown_run)
    app.add_exception_handler(JobProblem, _on_job)
    app.add_exception_handler(StoreError, _on_store)


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiProblem)
    return response_of(error, request.scope["path"])


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, headers, detail = request.scope["path"], dict(error.headers or {}), str(error.detail)
    if error.status_code == 404:
        detail = f"There is nothing at {path}; /docs lists what there is."
    elif error.status_code == 405:
        headers["Allow"] = _allowed(request, headers.get("Allow", ""))
        detail = f"{path} does not take {request.method}; it takes {headers['Allow'] or 'another method'}."
    code = _CODES.get(error.status_code, "http_error")
    return response_of(ApiProblem(error.status_code, code, detail, headers=headers), path)


def _allowed(request: Request, one_route: str) -> str:
    """All methods of this path; a route knows its own only, and a path has several."""
    methods = {method.strip() for method in one_route.split(",") if method.strip()}
    for template, operations in request.app.openapi()["paths"].items():
        if compile_path(template)[0].match(request.scope["path"]):
            methods.update(name.upper() for name in operations)
    return ", ".join(sorted(methods))


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = [
        FieldError(field=_field_name(item["loc"]), code=str(item["type"]), text=str(item["msg"]))
        for item in error.errors()
    ]
    detail = "; ".join(f"{item.field}: {item.text}" if item.field else item.text for item in errors[:3])
    return response_of(
        ApiProblem(422, "invalid_request", detail or "The request is not valid.", errors=errors),
        request.scope["path"],
    )


def _field_name(place: Sequence[Any]) -> str:
    """``("body", "params", "hidden")`` is the field ``params.hidden``."""
    return ".".join(str(part) for part in place[1:])


async def _on_unknown_run(request: Request, error: Exception) -> Response:
    assert isinstance(error, UnknownRun)
    return response_of(ApiProblem(404, "run_unknown", f"There is no run {error.run_id}."), request.scope["path"])


async def _on_job(request: Request, error: Exception) -> Response:
    assert isinstance(error, JobProblem)
    status = 404 if error.code in ("job_not_found", "job_class_missing") else 422
    field = f"params.{error.field}" if error.field else "job"
    errors = [FieldError(field=field, code=error.code, text=error.text)]
    return response_of(ApiProblem(status, error.code, error.text, errors=errors), request.scope["path"])


async def _on_store(request: Request, error: Exception) -> Response:
    assert isinstance(error, StoreError)
    if isinstance(error, LocalError):
        return response_of(internal(error, request.method, request.scope["path"]), request.scope["path"])
    log.error("%s %s failed: %s", request.method, request.scope["path"], error)
    detail = f"The database is in trouble: {error.text}. {error.cure}".strip().rstrip(".") + "."
    return response_of(ApiProblem(503, error.code, detail, headers={"Retry-After": "5"}), request.scope["path"])


def schemas() -> dict[str, Any]:
    """The problem's JSON Schemas, for the API's description."""
    whole = ProblemDetails.model_json_schema(ref_template="#/components/schemas/{model}")
    parts: dict[str, Any] = whole.pop("$defs", {})
    return {**parts, "ProblemDetails": whole}
