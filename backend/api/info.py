"""What this controller is, and the command with which another host joins it."""

from __future__ import annotations

import ipaddress
import platform
import shlex
import socket
from typing import Any

from fastapi import APIRouter, Request

from backend.api import schemas
from backend.api.deps import TheController
from backend.api.strict import StrictRoute
from backend.api.version import VERSION
from wire.messages import WIRE_VERSION

router = APIRouter(tags=["controller"], route_class=StrictRoute)


@router.get("/controller", operation_id="get_controller", response_model=schemas.ControllerInfo)
def get_controller(request: Request, controller: TheController) -> dict[str, Any]:
    """Name, versions, and how another host joins. The answer holds the join token, so it is the operator's only."""
    url = join_url(controller.settings.host, base_url(request))
    return {
        "name": controller.name,
        "version": VERSION,
        "wire_version": WIRE_VERSION,
        "join_url": url,
        "join_command": join_command(url, controller.join_token),
        "join_token": controller.join_token,
        "loopback_only": is_loopback(controller.settings.host),
    }


def about() -> dict[str, Any]:
    """What ``/version`` says to anybody."""
    return {
        "product": "marchline",
        "version": VERSION,
        "wire_version": WIRE_VERSION,
        "python": platform.python_version(),
    }


def base_url(request: Request) -> str:
    """The address by which this caller reached us, whether or not a proxy ends TLS in front of us."""
    return f"{'https' if over_tls(request) else 'http'}://{request.headers['host']}"


def over_tls(request: Request) -> bool:
    """Whether the caller came over TLS, as far as one can see from behind a proxy. Good for words, not for trust."""
    says_so = request.headers.get("x-forwarded-proto") == "https"
    return request.url.scheme == "https" or says_so or request.headers.get("origin", "").startswith("https://")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def join_url(bound: str, seen: str) -> str:
    """The address for other hosts: the one the caller used, unless that is loopback and others can do better.

    ``bound`` is what the controller listens on, ``seen`` the base URL of the request.
    """
    scheme, _, authority = seen.partition("://")
    name, _, port = authority.rpartition(":") if ":" in authority.rpartition("]")[2] else (authority, "", "")
    if is_loopback(bound) or not is_loopback(name.strip("[]")):
        return seen
    try:
        wildcard = ipaddress.ip_address(bound).is_unspecified
    except ValueError:
        wildcard = False
    address = lan_address() if wildcard else bound
    shown = f"[{address}]" if ":" in address else address
    return f"{scheme}://{shown}:{port}" if port else f"{scheme}://{shown}"


def lan_address() -> str:
    """The address that this machine would use towards the world; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def join_command(url: str, token: str) -> str:
    """What to paste on another host. The token is in the environment, not in the argument list that ``ps`` shows."""
    return f"MARCHLINE_JOIN_TOKEN={shlex.quote(token)} python -m worker --join {shlex.quote(url)}"
