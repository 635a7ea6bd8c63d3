"""What a controller is started with: plain values, checked once, before anything is opened."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from backend.core.config import RunConfig
from backend.runtime.errors import SettingsError

MIN_TIME_SCALE = 0.1
STRETCHED = (
    "window_seconds",
    "cap_seconds",
    "heartbeat_timeout_seconds",
    "forming_seconds",
    "stall_seconds",
    "reattach_seconds",
)
"""waits of a run that the time scale stretches"""


@dataclass(frozen=True, slots=True)
class Settings:
    """Addresses, places and the one factor that stretches every wait (design section 11).

    Raises ``SettingsError`` naming the setting, when one can't work.
    """

    host: str = "127.0.0.1"
    port: int = 8470
    """0 takes a free one"""
    data_dir: Path = Path("var")
    """tokens, the SQLite file and checkpoints; made with mode 0700"""
    job_dir: Path = Path(".")
    """runs name their job by a path below it"""
    database_url: str = ""
    """any SQLAlchemy URL; empty uses a SQLite file in ``data_dir``"""
    allowed_hosts: tuple[str, ...] = ()
    """names, besides loopback and IP literals, by which browsers may call the controller"""
    time_scale: float = 1.0
    join_token: str = ""
    """given from outside (a secret of the deployment); empty uses the file in ``data_dir``, made at first start"""
    operator_token: str = ""

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise SettingsError(problem)

    def scaled(self, config: RunConfig, only: Container[str] = STRETCHED) -> RunConfig:
        """The run's configuration with its waits stretched; heartbeats keep their beat (behaviour B3). ``only`` these
        of them: what a resumed run inherits was stretched before."""
        if self.time_scale == 1.0:
            return config
        waits = {
            name: getattr(config, name) * self.time_scale
            for name in STRETCHED
            if name in only and getattr(config, name) is not None
        }
        return replace(config, **waits)

    def _problems(self) -> Iterator[str]:
        if not 0 <= self.port <= 65535:
            yield f"port must lie between 0 and 65535, not {self.port}"
        if not math.isfinite(self.time_scale) or self.time_scale < MIN_TIME_SCALE:
            yield f"the time scale must be a number of at least {MIN_TIME_SCALE}, not {self.time_scale}"
        for name in ("join_token", "operator_token"):
            token = getattr(self, name)
            if token and len(token) < 16:
                yield f"{name} must have at least 16 characters, or be left out to have one made"
        if not self.job_dir.is_dir():
            yield f"the job directory {self.job_dir} does not exist; name one with --job-dir"
