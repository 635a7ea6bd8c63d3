"""The composition root: settings, store, controller, app, server. Nothing else constructs any of them."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from backend.api.app import create_app
from backend.runtime.controller import Controller, Ports
from backend.runtime.errors import SettingsError
from backend.runtime.limits import Limits
from backend.runtime.server import Server, bind, guarded
from backend.runtime.settings import Settings
from backend.store import OpenError, Store, sqlite_url
from wire import failpoints
from wire.allocator import keep_freed_memory

DATABASE_FILE = "marchline.sqlite3"
EXIT_SETTINGS = 2
"""the controller can't start as it was asked to"""
EXIT_FAILED = 1
"""it could not start for a fault of its own, which its log has whole"""
MOST_DESCRIPTORS = 1 << 16

log = logging.getLogger(__name__)

Announce = Callable[[Controller, str], None]
"""Called once the controller answers, with its base URL."""

_ENVIRONMENT: dict[str, tuple[str, Callable[[str], Any]]] = {
    "MARCHLINE_HOST": ("host", str),
    "MARCHLINE_PORT": ("port", int),
    "MARCHLINE_DATA_DIR": ("data_dir", Path),
    "MARCHLINE_JOB_DIR": ("job_dir", Path),
    "MARCHLINE_DATABASE_URL": ("database_url", str),
    "MARCHLINE_ALLOWED_HOSTS": ("allowed_hosts", lambda text: tuple(filter(None, map(str.strip, text.split(","))))),
    "MARCHLINE_TIME_SCALE": ("time_scale", float),
    "MARCHLINE_JOIN_TOKEN": ("join_token", str),
    "MARCHLINE_OPERATOR_TOKEN": ("operator_token", str),
}


def settings_from(environment: Mapping[str, str] = os.environ, **given: Any) -> Settings:
    """Settings from the environment, under what was ``given`` (none counts as not given). Raises ``SettingsError``."""
    values: dict[str, Any] = {}
    for variable, (name, convert) in _ENVIRONMENT.items():
        text = environment.get(variable, "").strip()
        if text:
            try:
                values[name] = convert(text)
            except ValueError as error:
                raise SettingsError(f"{variable} is {text!r}, which is no {convert.__name__}") from error
    return Settings(**(values | {name: value for name, value in given.items() if value is not None}))


def build(settings: Settings, ports: Ports | None = None) -> tuple[Controller, Starlette]:
    """Everything but the server. The app starts and closes the controller with its lifespan.

    Raises ``SettingsError`` and ``OpenError`` for a data directory, token file or database that can't be used.
    """
    try:
        settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"the data directory {settings.data_dir} can't be made: {error.strerror}") from error
    store = Store.open(settings.database_url or sqlite_url(settings.data_dir / DATABASE_FILE))
    try:
        controller = Controller(settings, store, ports)
    except BaseException:
        store.close()
        raise
    return controller, create_app(controller)


def serve(settings: Settings, announce: Announce | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Answers the exit code; a start that can't be is told on stderr, in one line."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("uvicorn.error", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    failpoints.arm_or_exit(os.environ)
    try:
        # The port first: of two controllers by mistake, the second must not get as far as the database.
        with bind(settings.host, settings.port) as listener:
            return _serve(listener, replace(settings, port=listener.getsockname()[1]), announce or print_addresses)
    except (SettingsError, OpenError) as error:
        print(f"marchline: {error}", file=sys.stderr)
        return EXIT_SETTINGS


def _serve(listener: socket.socket, settings: Settings, announce: Announce) -> int:
    keep_freed_memory()
    limits = Limits().within(_descriptors())
    controller, app = build(settings)
    log.info("the store is %(where)s (%(dialect)s %(version)s)", controller.store.describe())
    url = base_url(settings)
    server = Server(guarded(app, limits), ready=lambda: announce(controller, url), goodbye=controller.close)
    server.run(sockets=[listener])
    return 0 if server.started else EXIT_FAILED


def _descriptors() -> int:
    """How many files this process may open, once it has asked for as many as it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def base_url(settings: Settings) -> str:
    """The address for a browser on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(settings.host, settings.host)
    shown = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"http://{shown}:{settings.port}"


def is_exposed(host: str) -> bool:
    """Whether other machines can reach what listens on this address."""
    return not (host == "localhost" or host == "::1" or host.startswith("127."))


def print_addresses(controller: Controller, url: str) -> None:
    """Where the controller is, and a way in for one browser."""
    print(f"Marchline's controller is at {url}", flush=True)
    if is_exposed(controller.settings.host):
        listening = f"{controller.settings.host}:{controller.settings.port}"
        print(f"It listens on {listening}: whoever reaches that needs a token to join or to operate.", flush=True)
    print(f"Open it once, within ten minutes: {url}/#ticket={controller.issue_ticket()}", flush=True)
