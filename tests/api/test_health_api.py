"""Health, version and figures."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from api_harness import BASE, Api, problem_of
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from backend.api.app import create_app
from backend.runtime.controller import Controller
from backend.runtime.settings import Settings
from backend.store import Store, WriterOptions, engine, sqlite_url
from wire.messages import WIRE_VERSION


def test_it_lives_and_is_ready(api: Api) -> None:
    assert api.anybody("GET", "/livez").text == "ok\n"
    assert api.anybody("GET", "/healthz").text == "ok\n"
    assert api.anybody("GET", "/readyz").text == "ok\n"
    assert api.anybody("GET", "/readyz?verbose").text == "[+]database ok\n[+]writer ok\n"


def test_without_its_database_it_lives_and_is_not_ready(api: Api) -> None:
    api.controller.store.close()

    assert api.anybody("GET", "/livez").status_code == 200
    answer = api.anybody("GET", "/readyz?verbose")
    assert answer.status_code == 503
    assert answer.text.startswith("[-]database the store is closed")
    assert api.anybody("GET", "/readyz").text == "not ready\n"
    answer = api.call("GET", "/api/v1/runs")
    assert answer.status_code == 503
    assert problem_of(answer)["code"] == "store_closed"


def test_a_locked_database_is_told_to_whoever_asks(
    settings: Settings, frontend_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "WRITER_BUSY_MS", 20)
    path = settings.data_dir / "marchline.sqlite3"
    store = Store.open(sqlite_url(path), options=WriterOptions(patience_seconds=0.1, retry_seconds=0.01))
    controller = Controller(settings, store)
    with TestClient(create_app(controller, frontend_dir), base_url=BASE, raise_server_exceptions=False) as client:
        api = Api(client, controller)
        run = api.make_run()["id"]
        with closing(sqlite3.connect(path, isolation_level=None)) as shell:
            shell.execute("begin immediate")
            answer = api.call("POST", "/api/v1/runs", json={"job": "digits.py:Digits"})
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "5"
            problem = problem_of(answer)
            assert problem["code"] == "database_locked"
            assert "Close the program that has it open (a sqlite3 shell, a backup)" in problem["detail"]
            ready = api.anybody("GET", "/readyz?verbose")
            assert ready.status_code == 503
            assert "[-]writer another program holds the database locked" in ready.text
            assert "[+]database ok" in ready.text, "it can be read"
            assert "a sqlite3 shell" in api.call("GET", f"/api/v1/runs/{run}").json()["not_durable"]
            shell.execute("rollback")
        assert api.make_run()["not_durable"] == ""
        assert api.anybody("GET", "/readyz").status_code == 200
        assert [item["id"] for item in api.call("GET", "/api/v1/runs").json()["items"]] == [run + 1, run]


def test_it_says_what_it_is(api: Api) -> None:
    about = api.anybody("GET", "/version").json()

    assert about["product"] == "marchline"
    assert about["wire_version"] == WIRE_VERSION
    assert re.fullmatch(r"\d+\.\d+\.\d+", about["version"])


def test_it_says_how_a_host_joins(api: Api) -> None:
    about = api.call("GET", "/api/v1/controller").json()

    assert about["join_url"] == "http://127.0.0.1:8470"
    assert about["join_token"] == api.controller.join_token
    command = f"MARCHLINE_JOIN_TOKEN={about['join_token']} python -m worker --join http://127.0.0.1:8470"
    assert about["join_command"] == command
    assert about["loopback_only"] is True


def test_figures_are_what_prometheus_reads(api: Api) -> None:
    first, second = api.make_run(name="one"), api.make_run(name='two "quoted" \n\\')
    api.anybody("GET", "/api/v1/runs", {"Authorization": "Bearer wrong"})
    api.browser()

    answer = api.call("GET", "/metrics")

    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    for name, family in families.items():
        assert name.startswith("marchline_")
        assert family.documentation, name
        assert not re.search(r"_(ms|s|kb|mb|percent)$", name), f"{name} is not in base units"
    phases = {
        (sample.labels["run_id"], sample.labels["state"]): sample.value
        for sample in families["marchline_run_state"].samples
    }
    assert phases[str(first["id"]), "waiting"] == 1
    assert phases[str(first["id"]), "done"] == 0
    names = {sample.labels["run_id"]: sample.labels["name"] for sample in families["marchline_run_info"].samples}
    assert names[str(second["id"])] == 'two "quoted" \n\\'
    assert families["marchline_runs_live"].samples[0].value == 2
    assert families["marchline_failed_logins"].samples[0].value == 1
    assert families["marchline_sessions"].samples[0].value == 1
    assert api.controller.operator_token not in answer.text
    assert api.controller.join_token not in answer.text
