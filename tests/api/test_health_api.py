"""Health, version and figures."""

from __future__ import annotations

import re

from api_harness import Api, problem_of
from prometheus_client.parser import text_string_to_metric_families

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
