"""How the routes reach the controller and the door's state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends
from starlette.requests import HTTPConnection

from backend.api.credentials import Failures, OperatorToken, Sessions
from backend.runtime.controller import Controller


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
