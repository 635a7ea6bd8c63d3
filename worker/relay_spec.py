"""The orders that an agent writes to its host's relay: one JSON line on stdin."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import msgspec

_SCHEMES = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}


class SpecError(Exception):
    """The agent's orders cannot be followed; the text names the field."""


class RelaySpec(msgspec.Struct, frozen=True):
    """What a relay needs to know. ``specs.line`` writes it."""

    url: str
    """the controller as the agent's own join dialled it, with any path prefix: ``ws://host:8470``"""
    host_id: int
    ranks: list[int]
    run_id: int
    run_secret: str
    """hex, 32 bytes"""
    shm_dir: str
    heartbeat_seconds: float = 1.0
    heartbeat_timeout_seconds: float = 30.0
    connect_seconds: float = 60.0
    """one budget for both dials"""
    reattach_seconds: float = 0.0
    """how long to dial a controller that was lost, with the ranks waiting; 0: not at all"""
    shared_memory: bool = True
    """use the controller's memory if it is on this machine; false streams there too"""
    proxy: str | None = None
    """an HTTP or SOCKS proxy's URL; none dials directly, whatever the environment says"""

    @property
    def directory(self) -> Path:
        return Path(self.shm_dir)

    @property
    def secret(self) -> bytes:
        return bytes.fromhex(self.run_secret)

    def endpoint(self, channel: str) -> str:
        """The websocket URL of ``control`` or ``data``."""
        parts = urlsplit(self.url)
        return parts._replace(scheme=_SCHEMES[parts.scheme], path=f"{parts.path.rstrip('/')}/ws/{channel}").geturl()


def read_spec(line: bytes) -> RelaySpec:
    """Parse the agent's line. Raises ``SpecError``; its text never holds the secret."""
    try:
        spec = msgspec.json.decode(line, type=RelaySpec)
    except msgspec.MsgspecError as error:
        raise SpecError(f"the agent's orders cannot be read: {error}") from None
    if problem := _problem(spec):
        raise SpecError(problem)
    return spec


def _problem(spec: RelaySpec) -> str:
    parts = urlsplit(spec.url)
    if parts.scheme not in _SCHEMES or not parts.hostname:
        return f"url {spec.url!r} is not of the form ws://host:port"
    try:
        length = len(spec.secret)
    except ValueError:
        return "run_secret is not hexadecimal"
    if length != 32:
        return f"run_secret has {length} bytes, it must have 32"
    if not spec.ranks or len(set(spec.ranks)) != len(spec.ranks):
        return f"ranks {spec.ranks} must be given, each once"
    if not spec.directory.is_dir():
        return f"shm_dir {spec.shm_dir} is not a directory"
    if min(spec.heartbeat_seconds, spec.heartbeat_timeout_seconds, spec.connect_seconds) <= 0:
        return "heartbeat_seconds, heartbeat_timeout_seconds and connect_seconds must be above 0"
    return ""
