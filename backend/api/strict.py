"""JSON bodies read strictly: UTF-8, no NaN, no repeated keys, no deep nests; what is refused is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from backend.api.problems import ApiProblem

MAX_DEPTH = 32
_SURROGATE = "\\ud"
"""how an escape begins that may be half of a character"""


def parse(body: bytes) -> Any:
    """The value of a JSON text. Raises ``ApiProblem`` json_invalid."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise _invalid("it is not UTF-8") from error
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_unrepeated)
    except RecursionError as error:
        raise _invalid("it is nested too deeply") from error
    except ValueError as error:
        raise _invalid(str(error)) from error
    if _depth_exceeds(value, MAX_DEPTH):
        raise _invalid(f"it is nested more than {MAX_DEPTH} deep")
    if _SURROGATE in text.lower() and not _is_writable(value):
        raise _invalid("it has half of a surrogate pair, which is no character")
    return value


def _is_writable(value: Any) -> bool:
    """Whether all text in it can be stored and sent on: a lone surrogate can be neither."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _invalid(why: str) -> ApiProblem:
    return ApiProblem(400, "json_invalid", f"The body is not JSON that can be used: {why}.")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is out of range")
    return value


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is there twice")
    return value


def _depth_exceeds(value: Any, limit: int) -> bool:
    """Whether lists and objects are nested more than so many deep, empty ones included."""
    level = _nested([value])
    for _ in range(limit):
        if not level:
            return False
        level = _nested(inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer))
    return bool(level)


def _nested(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, dict | list)]


class _StrictRequest(Request):
    """A request whose JSON was read strictly before anybody asked for it."""

    value: Any = None

    async def json(self) -> Any:
        return self.value


class StrictRoute(APIRoute):
    """A route whose body, if there is one, is JSON read by ``parse``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            request = _StrictRequest(request.scope, request.receive)
            body = await request.body()
            if body:
                _check_content_type(request)
                request.value = parse(body)
            return await handle(request)

        return strict


def _check_content_type(request: Request) -> None:
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        shown = given[:60] or "no Content-Type"
        raise ApiProblem(415, "content_type_unsupported", f"Send the body as application/json, not {shown}.")
