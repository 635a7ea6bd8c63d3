"""The dashboard over canned data, its files served by the controller's own code, policy and all.

One run in every phase (``fixture_states``), a stream that moves, and refusals that explain. For tests, and for looking:
``python tests/frontend/fixture_server.py [--empty]`` prints an address.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from threading import Event, Thread
from typing import Any

import fixture_states as states
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket, WebSocketDisconnect

from backend.api.frontend import Frontend
from backend.api.problems import ApiProblem, response_of

TICKET = "demo-ticket"
FRAME_SECONDS = 0.25
ROUND_FRAMES = 4

VIEWS: dict[int, Callable[[], dict[str, Any]]] = {
    states.WAITING: states.waiting,
    states.STAGING: states.staging,
    states.FORMING: states.forming,
    states.TRAINING: lambda: states.training(states.TRAINING, "swift-badger", 26),
    states.DONE: states.done,
    states.FAILED: states.failed,
    states.STALE: lambda: states.training(states.STALE, "silent-crane", 30),
    states.WIDE: lambda: states.training(states.WIDE, "great-column", 45, ranks=64),
    states.EARLY: lambda: states.training(states.EARLY, "first-light", 0),
    states.HOSTILE: states.hostile,
    states.COLLECTIVE: states.collective,
}
DEAD = {states.FAILED: {1: 31, 2: 37}, states.COLLECTIVE: {5: 31}}
SUMMARY = (
    "id",
    "name",
    "job",
    "mode",
    "phase",
    "reason",
    "created_at",
    "started_at",
    "ended_at",
    "world_size",
    "epochs",
    "loss",
    "emulated",
)


def problem(status: int, code: str, detail: str, errors: list[dict[str, str]] | None = None) -> Response:
    body = {
        "type": "about:blank",
        "title": code.replace("_", " ").capitalize(),
        "status": status,
        "detail": detail,
        "code": code,
        "errors": errors or [],
    }
    return JSONResponse(body, status, media_type="application/problem+json")


def refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiProblem)
    return response_of(error, request.url.path)


def summary(view: dict[str, Any]) -> dict[str, Any]:
    picked = {key: view[key] for key in SUMMARY}
    metrics = view["eval"]["metrics"] if view["eval"] else None
    return {
        **picked,
        "epochs_done": len(view["samples_accepted"]),
        "rounds_done": view["round"],
        "metrics": metrics,
        "deaths": len(view["deaths"]),
    }


def rounds_of(run_id: int) -> list[dict[str, Any]]:
    view = VIEWS[run_id]()
    return [states.round_row(n, len(view["ranks"]), DEAD.get(run_id)) for n in range(view["round"])]


class Fixture:
    """The routes. ``empty`` has no run at all; without a cookie everything is refused as by the controller."""

    def __init__(self, *, empty: bool = False) -> None:
        self.runs = {} if empty else VIEWS
        self.files = Frontend()
        self.posted: list[tuple[str, Any]] = []
        """state changes that were asked for, and their bodies"""
        self.sockets: set[WebSocket] = set()
        self.not_durable = ""
        """what the controller says of its database"""
        self.lose_frames = 0
        """so many frames of the next stream are lost on the way"""
        self.subscriptions = 0
        self.loop: asyncio.AbstractEventLoop | None = None

    def app(self) -> ASGIApp:
        api = "/api/v1"
        return Starlette(
            routes=[
                Route("/", self.page),
                Route("/app/{name}", self.asset),
                Route("/vendor/{name}", self.vendored),
                Route(f"{api}/session", self.session, methods=["GET", "POST", "DELETE"]),
                Route(f"{api}/controller", self.controller),
                Route(f"{api}/jobs", self.jobs),
                Route(f"{api}/jobs/schema", self.schema),
                Route(f"{api}/runs", self.list_or_create, methods=["GET", "POST"]),
                Route(f"{api}/runs/{{run:int}}", self.run),
                Route(f"{api}/runs/{{run:int}}/{{part:path}}", self.part, methods=["GET", "POST", "PATCH", "DELETE"]),
                WebSocketRoute(f"{api}/stream", self.stream),
            ],
            exception_handlers={ApiProblem: refuse},
        )

    async def page(self, request: Request) -> Response:
        return self.files.page(request)

    async def asset(self, request: Request) -> Response:
        return self.files.app(request, request.path_params["name"])

    async def vendored(self, request: Request) -> Response:
        return self.files.vendor(request, request.path_params["name"])

    async def session(self, request: Request) -> Response:
        if request.method == "DELETE":
            gone = Response(status_code=204)
            gone.delete_cookie("session")
            return gone
        if request.method == "POST":
            given = await request.json()
            if TICKET not in given.values():
                return problem(401, "bad_credential", "This token is not the operator's.")
            entered = JSONResponse({"kind": "operator"})
            entered.set_cookie("session", "yes", httponly=True, samesite="strict")
            return entered
        return (
            JSONResponse({"kind": "operator"})
            if request.cookies.get("session")
            else problem(401, "unauthenticated", "Sign in first.")
        )

    async def controller(self, request: Request) -> Response:
        url = str(request.base_url).rstrip("/")
        command = f"python -m worker --join {url} --token 7f3k-example-token --job-dir ."
        return JSONResponse(
            {
                "name": "demo",
                "version": "0.1.0",
                "wire_version": 1,
                "join_url": url,
                "join_command": command,
                "join_token": "7f3k-example-token",
            }
        )

    async def jobs(self, _: Request) -> Response:
        items = [
            {
                "job": "examples/digits.py:Digits",
                "doc": "Handwritten digits, 8 by 8 pixels: a small network that trains in seconds.",
            },
            {"job": "examples/tiny_gpt.py:TinyGPT", "doc": "A byte-level language model on Python's own source text."},
        ]
        broken = [
            {
                "job": "examples/draft.py:Draft",
                "code": "job_method_missing",
                "text": "Draft has no method training_step",
            }
        ]
        return JSONResponse({"items": items, "next_cursor": None, "broken": broken})

    async def schema(self, request: Request) -> Response:
        if "digits" not in request.query_params["job"]:
            return problem(422, "job_syntax_error", "examples/tiny_gpt.py cannot be read: line 12: unexpected indent.")
        properties = {
            "hidden": {
                "type": "integer",
                "default": 64,
                "title": "Hidden",
                "description": "Width of the hidden layer",
                "minimum": 1,
            },
            "learning_rate": {"type": "number", "default": 0.003, "title": "Learning Rate"},
            "activation": {"enum": ["relu", "gelu"], "type": "string", "default": "relu"},
            "augment": {"type": "boolean", "default": False, "description": "Shift each image by up to one pixel"},
        }
        schema = {"type": "object", "properties": properties, "required": []}
        return JSONResponse({"job": request.query_params["job"], "schema": schema})

    async def list_or_create(self, request: Request) -> Response:
        if not request.cookies.get("session"):
            return problem(401, "unauthenticated", "Sign in first.")
        if request.method == "POST":
            body = await request.json()
            self.posted.append(("runs", body))
            if body.get("quorum") == 99:
                return problem(
                    422,
                    "invalid_config",
                    "The configuration has 2 problems.",
                    [
                        {
                            "field": "quorum",
                            "code": "quorum_too_large",
                            "text": "99 ranks are more than this controller takes",
                        },
                        {"field": "params.hidden", "code": "param_range", "text": "hidden must be at most 512"},
                    ],
                )
            if body.get("outer_lr") == 0:
                out_of_range = "outer_lr must lie above 0 and be at most 10, not 0"
                not_whole = "the hinted slow rank must be a rank's number, not 0.5"
                return problem(
                    422,
                    "invalid_config",
                    "The configuration has 2 problems.",
                    [
                        {"field": "outer_lr", "code": "out_of_range", "text": out_of_range},
                        {"field": "speed_hint.0", "code": "rank_invalid", "text": not_whole},
                    ],
                )
            return JSONResponse({"id": states.WAITING}, 201)
        items = [summary(make()) for make in self.runs.values()]
        return JSONResponse({"items": items[::-1], "next_cursor": None})

    async def run(self, request: Request) -> Response:
        run_id = request.path_params["run"]
        if run_id not in self.runs:
            return problem(404, "unknown_run", f"There is no run {run_id}.")
        return JSONResponse(self.runs[run_id]())

    async def part(self, request: Request) -> Response:
        run_id, part = request.path_params["run"], request.path_params["part"]
        if request.method != "GET":
            return await self.act(request, run_id, part)
        after = int(request.query_params.get("after", -1))
        view = self.runs[run_id]()
        if part == "preview":
            return JSONResponse(states.preview(view))
        rows: dict[str, list[dict[str, Any]]] = {
            "rounds": [row for row in rounds_of(run_id) if row["round"] > after],
            "events": [event for event in states.EVENTS if event["id"] > after],
            "epochs": states.epochs(len(view["samples_accepted"])),
            "deaths": view["deaths"],
            "checkpoints": view["checkpoints"],
        }
        return JSONResponse({"items": rows[part][: int(request.query_params.get("limit", 400))], "next_cursor": None})

    async def act(self, request: Request, run_id: int, part: str) -> Response:
        assert request.headers["x-marchline"] == "1"
        body = await request.body()
        self.posted.append((f"{request.method} {run_id} {part}", json.loads(body) if body else None))
        missing = (self.runs[run_id]()["window"] or {}).get("missing", [])
        if part == "start" and missing:
            return problem(
                409,
                missing[0]["code"],
                f"The run cannot start yet: {missing[0]['text']}.",
                [{"field": "", "code": m["code"], "text": m["cure"]} for m in missing],
            )
        return Response(status_code=204)

    async def stream(self, socket: WebSocket) -> None:
        await socket.accept()
        self.loop = asyncio.get_running_loop()
        self.sockets.add(socket)
        self.subscriptions += 1
        run = socket.query_params.get("run")
        frames = self.overview() if run is None else self.frames(int(run))
        sending = asyncio.create_task(self.send_all(socket, frames))
        with contextlib.suppress(WebSocketDisconnect):
            await socket.receive_text()
        sending.cancel()
        self.sockets.discard(socket)

    async def send_all(self, socket: WebSocket, frames: AsyncIterator[dict[str, Any]]) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            async for frame in frames:
                if frame["type"] == "delta" and self.lose_frames:
                    self.lose_frames -= 1
                else:
                    await socket.send_json(frame)

    def drop(self) -> None:
        """Close every stream, as a proxy that restarts would. Called from the test's thread."""

        async def close() -> None:
            for socket in list(self.sockets):
                await socket.close(1011)

        assert self.loop is not None, "nobody has subscribed yet"
        asyncio.run_coroutine_threadsafe(close(), self.loop).result(30)

    async def overview(self) -> AsyncIterator[dict[str, Any]]:
        runs = [summary(make()) for make in self.runs.values()]
        view = {"runs": runs, "controller": {"not_durable": self.not_durable or None}}
        yield {"type": "snapshot", "seq": 1, "view": view, "rounds": [], "events": []}
        async for frame in pings(1):
            yield frame

    async def frames(self, run_id: int) -> AsyncIterator[dict[str, Any]]:
        view = self.runs[run_id]() | {"not_durable": self.not_durable}
        yield {
            "type": "snapshot",
            "seq": 1,
            "view": view,
            "rounds": rounds_of(run_id),
            "events": states.EVENTS if view["ranks"] else states.EVENTS[:1],
        }
        if run_id == states.STALE:
            await asyncio.Event().wait()
        moving = run_id in (states.TRAINING, states.WIDE)
        async for frame in march(run_id, view) if moving else pings(1):
            yield frame


async def pings(seq: int) -> AsyncIterator[dict[str, Any]]:
    while True:
        await asyncio.sleep(2)
        seq += 1
        yield {"type": "ping", "seq": seq}


async def march(run_id: int, view: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Training that goes on: a round a second, four frames each."""
    rounds, ranks, seq = view["round"], len(view["ranks"]), 1
    while True:
        for step in range(ROUND_FRAMES):
            await asyncio.sleep(FRAME_SECONDS)
            seq += 1
            closed = step == ROUND_FRAMES - 1
            rows = [states.round_row(rounds, ranks)] if closed else []
            rounds += closed
            following = states.training(
                run_id, view["name"], rounds, ranks=ranks, progress=(step + 1) % ROUND_FRAMES / ROUND_FRAMES
            )
            patch = {key: value for key, value in following.items() if value != view[key]}
            view |= following
            yield {"type": "delta", "seq": seq, "patch": patch, "rounds": rows, "events": []}


@contextlib.contextmanager
def serve(fixture: Fixture, port: int = 0) -> Iterator[str]:
    """Serve in a thread until the block ends; yields the origin."""
    server = uvicorn.Server(
        uvicorn.Config(
            fixture.app(), port=port, log_level="critical", ws="websockets-sansio", timeout_graceful_shutdown=1
        )
    )
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the fixture server did not start")
        thread.join(0.02)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


if __name__ == "__main__":
    with serve(Fixture(empty="--empty" in sys.argv)) as origin:
        print(f"{origin}/#ticket={TICKET}  (runs 1 to {len(VIEWS)})", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            Event().wait()
