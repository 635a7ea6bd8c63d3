"""What every answer of the interface must be, whatever was asked."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from typing import Any

from benchmarks.fuzzing.bodies import Headers, Request
from benchmarks.fuzzing.laws import hold

PROBLEM = "application/problem+json"
MEMBERS = {"type", "title", "status", "detail", "instance", "code", "errors"}
DENIED = frozenset({400, 401, 403, 404, 405, 408, 413, 415, 421, 422, 429})
"""how somebody without a credential is answered where nothing is public"""


class Judge:
    """Holds answers against the laws and against the application's own description."""

    def __init__(self, description: dict[str, Any], secrets: tuple[str, ...]) -> None:
        self._secrets = [secret.encode() for secret in secrets]
        self._operations: list[tuple[re.Pattern[str], str, dict[str, Any]]] = []
        self._validators: dict[tuple[str, str], Any] = {}
        self.validated = 0
        for template, operations in description["paths"].items():
            pattern = re.compile("^" + re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(template)) + "$")
            self._operations += [(pattern, method.upper(), operation) for method, operation in operations.items()]
        self._components = description["components"]
        for _, _, operation in self._operations:  # now: their memory is none that requests take
            for status, answer in operation["responses"].items():
                schema = answer.get("content", {}).get("application/json", {}).get("schema")
                if schema is not None:
                    self._validator(operation.get("operationId", ""), status, schema)

    def judge(self, request: Request, status: int, headers: Headers, body: bytes, *, known: bool) -> None:
        """Raises ``Broken``. ``known``: the request had the operator's token."""
        named = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
        hold(status < 500, f"{request.method} answered {status}: {body[:200]!r}")
        hold(
            "content-security-policy" in named and named.get("x-content-type-options") == "nosniff",
            "headers are missing",
        )
        hold(not any(secret in body for secret in self._secrets), "an answer holds the operator's token")
        hold(not any("\n" in value or "\r" in value for value in named.values()), "a header was split")
        if status >= 400:
            self._problem(request, status, named, body)
        elif named.get("content-type") == "application/json" and body:
            value = json.loads(body, parse_constant=_no_constant)
            self._agrees(request, status, value)
        if not known:
            hold(status in DENIED or _is_public(request), f"a stranger's {request.method} was answered {status}")

    def _problem(self, request: Request, status: int, named: dict[str, str], body: bytes) -> None:
        hold(named.get("content-type") == PROBLEM, f"a {status} of type {named.get('content-type')}")
        if request.method == "HEAD" and not body:
            return
        problem = json.loads(body, parse_constant=_no_constant)
        hold(set(problem) - {"phase"} == MEMBERS, f"a problem of {sorted(problem)}")
        hold(problem["status"] == status and problem["code"], f"a problem that says {problem['status']}")
        says = problem["detail"].strip()
        hold(says.endswith((".", "?", "!", "…")) or problem["errors"], f"no sentence: {says[:200]!r}")
        hold(len(body) < 20_000, f"a problem of {len(body)} bytes")
        hold(says.replace("\n", " ").isprintable(), f"a detail that is unfit to be shown: {says[:200]!r}")

    def _agrees(self, request: Request, status: int, value: Any) -> None:
        path = request.path.partition("?")[0]
        for pattern, method, operation in self._operations:
            if method == request.method and pattern.match(path):
                content = operation["responses"].get(str(status), {}).get("content", {})
                schema = content.get("application/json", {}).get("schema")
                if schema is not None and (check := self._validator(operation["operationId"], str(status), schema)):
                    self.validated += 1
                    first = next(iter(check.iter_errors(value)), None)
                    hold(
                        first is None,
                        f"{operation['operationId']} is not as described: {first and first.message[:200]}",
                    )
                return

    def _validator(self, operation: str, status: str, schema: dict[str, Any]) -> Any:
        """None where the library for JSON Schema is not installed."""
        key = operation, status
        if key not in self._validators:
            self._validators[key] = None
            if importlib.util.find_spec("jsonschema_rs") is not None:
                library = importlib.import_module("jsonschema_rs")
                self._validators[key] = library.validator_for({**schema, "components": self._components})
        return self._validators[key]


def _no_constant(name: str) -> float:
    raise ValueError(f"an answer holds {name}")


def _is_public(request: Request) -> bool:
    path = request.path.partition("?")[0]
    public = ("/", "/favicon.ico", "/livez", "/healthz", "/readyz", "/version")
    return request.method in ("GET", "HEAD") and (path in public or path.startswith(("/app/", "/vendor/")))
