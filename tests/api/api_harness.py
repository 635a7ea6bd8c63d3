"""Calling the application in every way: as the operator, as a browser, as anybody; and what all answers share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import httpx2
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from starlette.testclient import TestClient

from backend.runtime.controller import Controller

BASE = "http://127.0.0.1:8470"
JOB = """
from dataclasses import dataclass
from worker import Job

class Digits(Job):
    \"\"\"Digits by a small network.\"\"\"
    @dataclass
    class Params:
        hidden: int = 64  # units of the hidden layer
        rate: float = 0.003

    def build_model(self): ...
    def build_optimizer(self, model): ...
    def train_dataset(self): ...
    def training_step(self, model, batch): ...
"""


@dataclass
class Api:
    """The application as the operator and as anybody calls it."""

    client: TestClient
    controller: Controller

    @property
    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.controller.operator_token}"}

    def call(self, method: str, path: str, headers: dict[str, str] | None = None, **more: Any) -> httpx2.Response:
        """As the operator, by token."""
        return self.client.request(method, path, headers=self.bearer | (headers or {}), **more)

    def anybody(self, method: str, path: str, headers: dict[str, str] | None = None, **more: Any) -> httpx2.Response:
        """Without a credential."""
        return self.client.request(method, path, headers=headers or {}, **more)

    def make_run(self, **config: Any) -> dict[str, Any]:
        """A run whose window is open for the operator."""
        answer = self.call("POST", "/api/v1/runs", json={"job": "digits.py:Digits", "start_mode": "manual", **config})
        assert answer.status_code == 201, answer.text
        view: dict[str, Any] = answer.json()
        return view

    def browser(self) -> TestClient:
        """Another client of the same application, signed in by a ticket."""
        client = TestClient(self.client.app, base_url=BASE, raise_server_exceptions=False)
        client.portal = self.client.portal  # the controller's own event loop, not another one
        answer = client.post("/api/v1/session", json={"ticket": self.controller.issue_ticket()})
        assert answer.status_code == 201, answer.text
        return client

    @property
    def app(self) -> FastAPI:
        app = self.client.app
        assert isinstance(app, FastAPI)
        return app


def routes_of(app: FastAPI) -> list[tuple[str, str]]:
    """Every (method, path) that the application routes, parameters filled in; WEBSOCKET for sockets."""
    found = []
    for context in iter_route_contexts(app.router.routes):
        path = re.sub(r"\{[^}]+\}", "1", context.path)
        for method in sorted(context.methods or {"WEBSOCKET"}):
            found.append((method, path))
    return found


def problem_of(response: httpx2.Response) -> dict[str, Any]:
    """The problem in an answer, which must be one in every respect."""
    assert response.headers["content-type"] == "application/problem+json", response.text
    problem: dict[str, Any] = response.json()
    assert set(problem) - {"phase"} == {"type", "title", "status", "detail", "instance", "code", "errors"}
    assert problem["status"] == response.status_code
    assert unquote(problem["instance"]) == unquote(response.request.url.path)
    assert problem["code"].replace("_", "").isalnum()
    assert problem["code"] == problem["code"].lower()
    assert problem["detail"].endswith((".", "?", "!", "…")) or problem["errors"], problem
    for error in problem["errors"]:
        assert set(error) == {"field", "code", "text"}
    return problem
