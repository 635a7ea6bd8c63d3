"""Signing a browser in and out. The secret travels once, in a body; afterwards a cookie that no script can read."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from backend.api import bodies, schemas
from backend.api.credentials import SESSION_SECONDS
from backend.api.deps import TheAccess, TheController
from backend.api.info import base_url, over_tls
from backend.api.problems import ApiProblem
from backend.api.security import caller_of, failure
from backend.api.strict import StrictRoute
from backend.api.version import VERSION

router = APIRouter(prefix="/session", tags=["session"], route_class=StrictRoute)


@router.post("", status_code=201, operation_id="sign_in", response_model=schemas.SessionState)
async def sign_in(
    body: bodies.SignIn, request: Request, response: Response, controller: TheController, access: TheAccess
) -> dict[str, Any]:
    """Trade a one-time ticket, or the operator token, for a session cookie."""
    if (body.ticket is None) == (body.token is None):
        raise ApiProblem(422, "credential_missing", "Give either a ticket or a token.")
    if body.token is not None:
        good = access.token.matches(body.token)
        detail = "This is not the operator token; it is in operator.token in the controller's data directory."
    else:
        good = controller.redeem_ticket(body.ticket or "")
        detail = "This ticket is not valid: it was used, or is older than ten minutes. Use the operator token."
    if not good:
        raise failure(access.failures, request.scope, detail)
    response.set_cookie(
        access.token.cookie_name,
        access.sessions.open(),
        max_age=int(SESSION_SECONDS),
        path="/",
        secure=over_tls(request),
        httponly=True,
        samesite="strict",
    )
    return {"kind": "session", "name": controller.name, "version": VERSION}


@router.get("", operation_id="get_session", response_model=schemas.SessionState)
async def get_session(request: Request, controller: TheController) -> dict[str, Any]:
    """Whether, and how, this caller is signed in; 401 when it is not."""
    return {"kind": caller_of(request.scope).kind, "name": controller.name, "version": VERSION}


@router.delete("", status_code=204, operation_id="sign_out")
async def sign_out(request: Request, response: Response, access: TheAccess) -> None:
    """End this browser's session; its open streams close with it."""
    key = caller_of(request.scope).session
    if key is not None:
        access.sessions.close(key)
    response.delete_cookie(access.token.cookie_name, path="/", httponly=True, samesite="strict")


@router.post("/ticket", status_code=201, operation_id="issue_ticket", response_model=schemas.Ticket)
async def issue_ticket(request: Request, controller: TheController) -> dict[str, Any]:
    """A one-time address that signs one browser in: for the terminal to print. Needs the operator token itself."""
    if caller_of(request.scope).kind != "token":
        raise ApiProblem(403, "token_needed", "Only the holder of the operator token may let another browser in.")
    ticket = controller.issue_ticket()
    # In the fragment: it is never sent, so it is in no log of anybody's.
    return {"ticket": ticket, "url": f"{base_url(request)}/#ticket={ticket}"}
