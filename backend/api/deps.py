"""What the routes need of the controller, and how they reach it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from fastapi import Depends
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocket

from backend.api.credentials import Failures, OperatorToken, Sessions
from backend.core.config import RunConfig
from backend.runtime.settings import Settings
from backend.store.store import Store


class Feed(Protocol):
    """Live frames: a snapshot, then deltas; see the stream."""

    def subscribe(self, run_id: int | None) -> AsyncIterator[dict[str, Any]]: ...


class Controller(Protocol):
    """The running controller. Its coroutines, and whatever is not ``store``, belong to the event loop."""

    @property
    def settings(self) -> Settings: ...

    @property
    def store(self) -> Store: ...

    @property
    def feed(self) -> Feed: ...

    @property
    def name(self) -> str: ...

    @property
    def join_token(self) -> str: ...

    @property
    def operator_token(self) -> str: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def create_run(self, config: RunConfig) -> int: ...

    async def command(self, run_id: int, act: str, **arguments: Any) -> None: ...

    def live_view(self, run_id: int) -> dict[str, Any] | None: ...

    def live_run_ids(self) -> list[int]: ...

    def issue_ticket(self) -> str: ...

    def redeem_ticket(self, ticket: str) -> bool: ...

    def metrics(self) -> dict[str, float]: ...

    async def join_socket(self, websocket: WebSocket) -> None: ...

    async def control_socket(self, websocket: WebSocket) -> None: ...

    async def data_socket(self, websocket: WebSocket) -> None: ...


@dataclass(frozen=True, slots=True)
class Access:
    """The state of the door, for the routes that sign browsers in and out."""

    token: OperatorToken
    sessions: Sessions
    failures: Failures


def _controller(connection: HTTPConnection) -> Controller:
    controller: Controller = connection.app.state.controller
    return controller


def _access(connection: HTTPConnection) -> Access:
    access: Access = connection.app.state.access
    return access


TheController = Annotated[Controller, Depends(_controller)]
TheAccess = Annotated[Access, Depends(_access)]
