"""The description of the interface: stable operation ids, an answer and its errors for every operation."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_harness import Api, routes_of

RECORDED = Path(__file__).parent / "operations.txt"


def test_operations_are_as_recorded(api: Api, request: pytest.FixtureRequest) -> None:
    """Clients are generated from these ids: a change here is a change for them. Record anew with --rewrite."""
    schema = api.call("GET", "/api/v1/openapi.json").json()
    lines = sorted(
        f"{operation['operationId']} {method.upper()} {path}"
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    )
    text = "\n".join(lines) + "\n"
    if request.config.getoption("--rewrite"):
        RECORDED.write_text(text)

    assert text == RECORDED.read_text()
    ids = [line.split()[0] for line in lines]
    assert len(ids) == len(set(ids))


def test_every_operation_is_described(api: Api) -> None:
    schema = api.call("GET", "/api/v1/openapi.json").json()
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            assert operation["description"], (method, path)
            assert operation["tags"], (method, path)
            good = [answer for status, answer in operation["responses"].items() if status.startswith("2")]
            assert len(good) == 1, (method, path)
            body = good[0].get("content", {}).get("application/json", {}).get("schema", {"type": "other"})
            assert body, (method, path)
            for status in ("4XX", "5XX"):
                content = operation["responses"][status]["content"]["application/problem+json"]
                assert content["schema"]["$ref"].endswith("/ProblemDetails")
            assert "422" not in operation["responses"], "FastAPI's own error shape is not ours"
    parts = schema["components"]
    assert {"ProblemDetails", "FieldError", "RunView", "RunCreate"} <= set(parts["schemas"])
    assert set(parts["securitySchemes"]) == {"operator_token", "session"}


def test_every_reference_leads_somewhere(api: Api) -> None:
    schema = api.call("GET", "/api/v1/openapi.json").json()
    references: set[str] = set()

    def walk(node: object) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                references.add(node["$ref"])
            for inner in node.values():
                walk(inner)
        elif isinstance(node, list):
            for inner in node:
                walk(inner)

    walk(schema)
    for reference in references:
        place = schema
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]


def test_everything_below_api_is_in_the_description(api: Api) -> None:
    described = {
        (method.upper(), path)
        for path, operations in api.call("GET", "/api/v1/openapi.json").json()["paths"].items()
        for method in operations
    }
    for method, path in routes_of(api.app):
        if path.startswith("/api/") and method != "WEBSOCKET" and not path.endswith("openapi.json"):
            template = path.replace("runs/1", "runs/{run_id}").replace("members/1", "members/{host}")
            assert (method, template.replace("checkpoints/1", "checkpoints/{checkpoint}")) in described
