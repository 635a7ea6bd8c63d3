"""The live view of a run, or of all: a websocket of JSON frames, and the three sockets of the hosts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, cast

import msgspec
from fastapi import APIRouter, WebSocket
from starlette.websockets import WebSocketDisconnect

from backend.api.deps import Access, TheAccess, TheController
from backend.api.problems import ApiProblem
from backend.api.security import Caller, caller_of
from backend.api.views import unknown
from backend.runtime.controller import Controller
from backend.runtime.errors import UnknownRun

SEND_SECONDS = 10.0
"""A browser that takes no frame for so long is dropped; it reconnects when it is back."""
MAX_STREAMS = 256
CLOSE_SIGNED_OUT = 4401
CLOSE_SLOW = 4408

router = APIRouter()
workers = APIRouter()


class Streams:
    """How many browsers are watching, bounded so that open tabs cannot crowd the hosts out."""

    def __init__(self) -> None:
        self.open = 0
        self.dropped = 0


@router.websocket("/stream")
async def stream(websocket: WebSocket, controller: TheController, access: TheAccess) -> None:
    """``?run=ID`` for a run, without it for the overview. The first frame is a snapshot; ``seq`` has no holes."""
    run_id = _run_id(websocket.query_params.get("run"))
    streams: Streams = websocket.app.state.streams
    if streams.open >= MAX_STREAMS:
        raise ApiProblem(503, "too_many_streams", "Too many live views are open; close some tabs.")
    streams.open += 1
    try:
        await _serve(websocket, controller, access, run_id)
    finally:
        streams.open -= 1


async def _serve(websocket: WebSocket, controller: Controller, access: Access, run_id: int | None) -> None:
    frames = cast("AsyncGenerator[dict[str, Any], None]", controller.feed.subscribe(run_id))
    async with contextlib.aclosing(frames):
        try:
            first = await anext(frames)
        except UnknownRun as error:
            raise unknown(run_id or 0) from error
        await websocket.accept()
        pump = asyncio.create_task(_pump(websocket, first, frames, access), name="stream pump")
        gone = asyncio.create_task(_until_gone(websocket), name="stream reader")
        try:
            done, _ = await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (pump, gone):
                task.cancel()
            await asyncio.wait({pump, gone})
        for task in done:
            task.result()


async def _pump(
    websocket: WebSocket,
    first: dict[str, Any],
    frames: AsyncGenerator[dict[str, Any], None],
    access: Access,
) -> None:
    """Send frames until the browser is gone, signed out, or too slow."""
    caller = caller_of(websocket.scope)
    frame = first
    try:
        while True:
            if not _still_signed_in(caller, access):
                await websocket.close(CLOSE_SIGNED_OUT, "signed out")
                return
            try:
                async with asyncio.timeout(SEND_SECONDS):
                    await websocket.send_text(msgspec.json.encode(frame).decode())
            except TimeoutError:
                websocket.app.state.streams.dropped += 1
                await websocket.close(CLOSE_SLOW, "too slow")
                return
            frame = await anext(frames)
    except WebSocketDisconnect:
        return


async def _until_gone(websocket: WebSocket) -> None:
    """Browsers have nothing to say here; what they say is ignored, that they leave is not."""
    while (await websocket.receive())["type"] != "websocket.disconnect":
        continue


def _still_signed_in(caller: Caller, access: Access) -> bool:
    return caller.session is None or access.sessions.alive(caller.session)


def _run_id(text: str | None) -> int | None:
    if text is None or text == "":
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ApiProblem(422, "invalid_request", "run is the number of a run.")
    return int(text)


@workers.websocket("/ws/join")
async def join(websocket: WebSocket, controller: TheController) -> None:
    """An agent dials in."""
    await controller.join_socket(websocket)


@workers.websocket("/ws/control")
async def control(websocket: WebSocket, controller: TheController) -> None:
    """A relay's control link."""
    await controller.control_socket(websocket)


@workers.websocket("/ws/data")
async def data(websocket: WebSocket, controller: TheController) -> None:
    """A relay's bulk link."""
    await controller.data_socket(websocket)
