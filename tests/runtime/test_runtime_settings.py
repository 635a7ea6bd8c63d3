"""Settings are checked at once, and read from the environment in one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backend.core.config import RunConfig
from backend.main import base_url, is_exposed, settings_from
from backend.runtime.errors import SettingsError
from backend.runtime.limits import Limits
from backend.runtime.settings import Settings


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"port": 65536}, "port"),
        ({"port": -1}, "port"),
        ({"time_scale": 0.05}, "time scale"),
        ({"time_scale": float("nan")}, "time scale"),
        ({"time_scale": float("inf")}, "time scale"),
        ({"join_token": "short"}, "join_token"),
        ({"operator_token": "short"}, "operator_token"),
        ({"job_dir": Path("/nowhere/at/all")}, "/nowhere/at/all"),
    ],
)
def test_what_cannot_work_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        Settings(**values)


def test_the_environment_fills_in_and_arguments_win(tmp_path: Path) -> None:
    environment = {
        "MARCHLINE_PORT": "9000",
        "MARCHLINE_TIME_SCALE": " 2.5 ",
        "MARCHLINE_ALLOWED_HOSTS": "gpu.example, ,lab.example",
        "MARCHLINE_DATA_DIR": str(tmp_path),
        "MARCHLINE_HOST": "",
    }
    settings = settings_from(environment, port=0, job_dir=None)
    assert settings.port == 0
    assert settings.time_scale == 2.5
    assert settings.allowed_hosts == ("gpu.example", "lab.example")
    assert settings.data_dir == tmp_path
    assert settings.host == "127.0.0.1"


@pytest.mark.parametrize("variable", ["MARCHLINE_PORT", "MARCHLINE_TIME_SCALE"])
def test_a_variable_that_is_no_number_is_named(variable: str) -> None:
    with pytest.raises(SettingsError, match=variable):
        settings_from({variable: "many"})


def test_the_scale_stretches_waits_and_leaves_the_beat() -> None:
    config = Settings(time_scale=2.0).scaled(RunConfig(job="a.py:A"))
    assert (config.window_seconds, config.cap_seconds) == (600.0, 1200.0)
    assert (config.heartbeat_timeout_seconds, config.stall_seconds, config.forming_seconds) == (60.0, 600.0, 240.0)
    assert config.heartbeat_seconds == 1.0
    assert config.problems() == []
    assert Limits().scaled(2.0).hello_seconds == 20.0


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:9"),
        ("0.0.0.0", "http://127.0.0.1:9"),
        ("::", "http://[::1]:9"),
        ("fd00::5", "http://[fd00::5]:9"),
        ("box", "http://box:9"),
    ],
)
def test_the_address_for_a_browser_on_this_machine(host: str, url: str) -> None:
    assert base_url(Settings(host=host, port=9)) == url


@pytest.mark.parametrize(
    ("host", "exposed"),
    [("127.0.0.1", False), ("127.1.2.3", False), ("localhost", False), ("::1", False), ("0.0.0.0", True), ("::", True)],
)
def test_what_other_machines_can_reach_is_known(host: str, exposed: bool) -> None:
    assert is_exposed(host) is exposed
