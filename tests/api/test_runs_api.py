"""Runs, their window and their records by REST: what is accepted, what is refused, and how it is said."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from api_harness import Api, problem_of
from bundles import save

from backend.api import bodies, schemas
from backend.api.problems import ApiProblem
from backend.api.strict import parse
from backend.core.config import RunConfig
from backend.runtime.bundle import CheckpointPlace

RUNS = "/api/v1/runs"


def record(api: Api, run_id: int, table: str, row: dict[str, Any]) -> dict[str, Any]:
    return api.controller.store.write(run_id, table, row, durable=True).result(10)


def finished(api: Api, **values: Any) -> int:
    """A run of the past, as the store keeps it."""
    config = RunConfig(job="digits.py:Digits", epochs=2).as_dict()
    row = {"name": "old", "job": "digits.py:Digits", "mode": "cpu_cadence", "phase": "done", "config": config}
    return api.controller.store.create_run(row | values)


def test_a_run_is_made_listed_and_looked_at(api: Api) -> None:
    answer = api.call(
        "POST", RUNS, json={"job": "digits.py:Digits", "params": {"hidden": 8}, "epochs": 3, "start_mode": "manual"}
    )

    assert answer.status_code == 201
    view = answer.json()
    assert answer.headers["location"] == f"{RUNS}/{view['id']}"
    assert view["phase"] == "waiting"
    assert view["name"]
    assert view["params"] == {"hidden": 8, "rate": 0.003}
    assert view["config"]["epochs"] == view["epochs"] == 3
    assert view["window"]["open"]
    assert [item["code"] for item in view["window"]["missing"]]
    assert view["members"] == view["ranks"] == view["deaths"] == []
    assert api.call("GET", f"{RUNS}/{view['id']}").json()["id"] == view["id"]
    listed = api.call("GET", RUNS).json()
    assert [item["id"] for item in listed["items"]] == [view["id"]]
    assert listed["next_cursor"] is None


def test_the_bodys_defaults_are_the_configurations(api: Api) -> None:
    assert bodies.RunCreate(job="x").config() == RunConfig(job="x")
    assert set(bodies.RunCreate.model_fields) - {"resume_from"} == set(RunConfig.__dataclass_fields__)
    assert bodies.RunCreate(job="x", fixed_counts=[3, 1]).config().fixed_counts == (3, 1)
    assert bodies.RunCreate(job="x", speed_hint=[2, 2.5]).config().speed_hint == (2, 2.5)
    assert [problem.code for problem in bodies.RunCreate(job="x", speed_hint=[0.5, 2]).config().problems()] == [
        "rank_invalid"
    ]


def test_the_live_view_and_the_history_have_every_promised_key(api: Api) -> None:
    live, past = api.make_run()["id"], finished(api)
    for run_id in (live, past):
        view = api.call("GET", f"{RUNS}/{run_id}").json()
        assert set(view) >= set(schemas.RunView.model_fields)
        assert set(view["window"]) >= set(schemas.Window.model_fields)


@pytest.mark.parametrize(
    ("body", "field", "code"),
    [
        ({}, "job", "job_missing"),
        ({"job": 3}, "job", "string_type"),
        ({"job": "digits.py:Digits", "epochs": "3"}, "epochs", "int_type"),
        ({"job": "digits.py:Digits", "epochs": True}, "epochs", "int_type"),
        ({"job": "digits.py:Digits", "epochs": 1.5}, "epochs", "int_type"),
        ({"job": "digits.py:Digits", "epochs": 10**30}, "epochs", "less_than_equal"),
        ({"job": "digits.py:Digits", "seed": -1}, "seed", "greater_than_equal"),
        ({"job": "digits.py:Digits", "verify_consensus": 1}, "verify_consensus", "bool_type"),
        ({"job": "digits.py:Digits", "fixed_counts": [1, "2"]}, "fixed_counts.1", "int_type"),
        ({"job": "digits.py:Digits", "params": [1]}, "params", "dict_type"),
        ({"job": "digits.py:Digits", "colour": "red"}, "colour", "extra_forbidden"),
        ({"job": "digits.py:Digits", "name": "n" * 101}, "name", "string_too_long"),
        ({"job": ""}, "job", "job_missing"),
        ({"job": "gone.py:Digits"}, "job", "job_not_found"),
        ({"job": "../digits.py:Digits"}, "job", "job_outside_dir"),
        ({"job": "digits.py:Other"}, "job", "job_class_missing"),
        ({"job": "digits.py:Digits", "params": {"hiden": 1}}, "params.hiden", "param_unknown"),
        ({"job": "digits.py:Digits", "params": {"hidden": "x"}}, "params.hidden", "param_type"),
        ({"job": "digits.py:Digits", "epochs": 0}, "epochs", "below_minimum"),
        ({"job": "digits.py:Digits", "quorum": 1}, "quorum", "quorum_below_two"),
        ({"job": "digits.py:Digits", "quorum": 3, "target": 2}, "target", "target_below_quorum"),
        ({"job": "digits.py:Digits", "start_mode": "manual", "target": 4}, "target", "manual_with_target"),
        ({"job": "digits.py:Digits", "cap_seconds": 10.0}, "cap_seconds", "cap_below_window"),
        ({"job": "digits.py:Digits", "mode": "nccl_async"}, "mode", "async_needs_cpu"),
        ({"job": "digits.py:Digits", "mode": "warp"}, "mode", "mode_unknown"),
    ],
)
def test_bad_configurations_name_their_field_and_make_no_run(
    api: Api, body: dict[str, Any], field: str, code: str
) -> None:
    answer = api.call("POST", RUNS, json=body)

    assert answer.status_code == 422
    assert (field, code) in [(item["field"], item["code"]) for item in problem_of(answer)["errors"]]
    assert api.call("GET", RUNS).json()["items"] == []


def test_every_problem_of_a_configuration_is_told_at_once(api: Api) -> None:
    body = {"job": "gone.py:X", "epochs": 0, "quorum": 1, "heartbeat_seconds": 20.0}

    problem = problem_of(api.call("POST", RUNS, json=body))

    assert {item["field"] for item in problem["errors"]} >= {"job", "epochs", "quorum", "heartbeat_timeout_seconds"}


@pytest.mark.parametrize(
    "text",
    [
        b'{"job": "digits.py:Digits", "gamma": NaN}', b'{"gamma": Infinity}', b'{"gamma": -Infinity}',
        b'{"gamma": 1e999}', b'{"job": "a", "job": "b"}', b"{", b"", b"[" * 30_000, b"{}{}", b"\xff",
        b'{"params": {"a": {"b": 1, "b": 2}}}', b'{"seed": ' + b"9" * 5000 + b"}", b'{"a": "\xff"}',
        b'{"params": ' + b'{"x": ' * 40 + b"1" + b"}" * 41,
        b'{"params": {"\\ud800": 1}}', b'{"params": {"label": "\\uDFFF"}}', b'{"name": "\xed\xa0\x80"}',
        '{"epochs": 1}'.encode("utf-16"), b'\xef\xbb\xbf{"epochs": 1}',
    ],
)  # fmt: skip
def test_json_that_cannot_be_meant_is_refused(api: Api, text: bytes) -> None:
    answer = api.call("POST", RUNS, {"Content-Type": "application/json"}, content=text)

    assert answer.status_code == (422 if text == b"" else 400)
    assert problem_of(answer)["code"] == ("invalid_request" if text == b"" else "json_invalid")


@pytest.mark.parametrize("inner", ["", "1"], ids=["empty", "full"])
def test_bodies_may_be_so_deep_and_no_deeper(inner: str) -> None:
    assert parse(("[" * 32 + inner + "]" * 32).encode()) is not None
    with pytest.raises(ApiProblem, match="more than 32 deep"):
        parse(("[" * 33 + inner + "]" * 33).encode())


def test_whole_characters_may_be_escaped(api: Api) -> None:
    body = b'{"job": "digits.py:Digits", "name": "\\ud83d\\ude00"}'
    assert api.call("POST", RUNS, {"Content-Type": "application/json"}, content=body).json()["name"] == "\U0001f600"


def test_what_a_caller_wrote_steers_no_terminal_and_fills_none(api: Api) -> None:
    for name in ("\x1b[2J", "\u202e", "x" * 50_000):
        answer = api.call("POST", RUNS, json={"job": "digits.py:Digits", name: 1})
        assert answer.status_code == 422
        assert name not in problem_of(answer)["detail"]
        assert len(answer.content) < 8000


def test_json_of_another_type_is_refused(api: Api) -> None:
    for content_type in ("text/plain", "application/xml", ""):
        answer = api.call("POST", RUNS, {"Content-Type": content_type}, content=b'{"job": "x"}')
        assert answer.status_code == 415
        problem_of(answer)


@pytest.mark.parametrize("number", ["0", "-1", "x", "1.5", str(1 << 63), "9" * 40, "1%00", "%2e%2e"])
def test_a_run_is_a_number(api: Api, number: str) -> None:
    answer = api.call("GET", f"{RUNS}/{number}")

    assert answer.status_code == 422
    assert problem_of(answer)["errors"][0]["field"] == "run_id"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""), ("POST", "/start"), ("POST", "/stop"), ("POST", "/abort"), ("GET", "/window"), ("GET", "/members"),
        ("GET", "/rounds"), ("GET", "/epochs"), ("GET", "/events"), ("GET", "/deaths"), ("GET", "/checkpoints"),
        ("GET", "/checkpoints/1/model"), ("DELETE", "/members/1"), ("PATCH", "/window"), ("POST", "/window/extend"),
    ],
)  # fmt: skip
def test_an_unknown_run_is_named_everywhere(api: Api, method: str, path: str) -> None:
    body = {"PATCH": {"quorum": 2}, "POST": {"seconds": 5.0} if "extend" in path else None}.get(method)

    answer = api.call(method, f"{RUNS}/77{path}", json=body)

    assert answer.status_code == 404
    assert problem_of(answer)["code"] == "run_unknown"
    assert "77" in answer.text


def test_start_is_refused_with_what_is_missing_and_the_phase(api: Api) -> None:
    run_id = api.make_run()["id"]

    answer = api.call("POST", f"{RUNS}/{run_id}/start")

    assert answer.status_code == 409
    problem = problem_of(answer)
    assert problem["phase"] == "waiting"
    missing = api.call("GET", f"{RUNS}/{run_id}/window").json()["missing"]
    assert problem["code"] in [item["code"] for item in missing]
    assert missing[0]["cure"]


def test_the_window_is_changed_and_extended_while_it_is_open(api: Api) -> None:
    view = api.make_run(start_mode="hybrid", target=4)
    base = f"{RUNS}/{view['id']}"

    changed = api.call("PATCH", f"{base}/window", json={"quorum": 3}).json()
    assert (changed["quorum"], changed["target"]) == (3, 4)
    changed = api.call("PATCH", f"{base}/window", json={"target": None}).json()
    assert (changed["quorum"], changed["target"]) == (3, None)
    before = changed["window_remaining_seconds"]
    extended = api.call("POST", f"{base}/window/extend", json={"seconds": 100}).json()
    assert extended["window_remaining_seconds"] > before + 90
    for body in ({"quorum": 1}, {"quorum": 5, "target": 4}, {"target": 2}):
        answer = api.call("PATCH", f"{base}/window", json=body)
        assert answer.status_code == 409, answer.text
        assert problem_of(answer)["phase"] == "waiting"
    for path, body in (
        ("window/extend", {"seconds": 0}), ("window/extend", {"seconds": -5}), ("window/extend", {"seconds": "9"}),
        ("window/extend", {}),
    ):  # fmt: skip
        assert api.call("POST", f"{base}/{path}", json=body).status_code == 422
    assert problem_of(api.call("PATCH", f"{base}/window", json={}))["code"] == "nothing_to_change"
    assert problem_of(api.call("PATCH", f"{base}/window", json={"quorum": None}))["code"] == "quorum_needed"
    window = api.call("GET", f"{base}/window").json()
    assert (window["quorum"], window["target"]) == (3, None)


def test_a_host_that_is_not_there_cannot_be_turned_away(api: Api) -> None:
    run_id = api.make_run()["id"]

    answer = api.call("DELETE", f"{RUNS}/{run_id}/members/5")

    assert answer.status_code == 409
    assert "5" in problem_of(answer)["detail"]
    assert api.call("GET", f"{RUNS}/{run_id}/members").json() == {"items": [], "next_cursor": None}


def test_abort_ends_a_run_and_what_follows_is_a_conflict(api: Api) -> None:
    run_id = api.make_run()["id"]

    view = api.call("POST", f"{RUNS}/{run_id}/abort").json()

    assert view["phase"] == "failed"
    assert "operator" in view["reason"]
    for act in ("start", "stop", "abort"):
        answer = api.call("POST", f"{RUNS}/{run_id}/{act}")
        assert answer.status_code == 409
        problem = problem_of(answer)
        assert (problem["code"], problem["phase"]) == ("run_over", "failed")
    kinds = [item["kind"] for item in api.call("GET", f"{RUNS}/{run_id}/events").json()["items"]]
    assert kinds


def test_runs_are_paged_newest_first(api: Api) -> None:
    made = [finished(api, name=f"run {number}") for number in range(5)]

    seen: list[int] = []
    cursor = ""
    while True:
        page = api.call("GET", f"{RUNS}?limit=2{cursor}").json()
        seen += [item["id"] for item in page["items"]]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert seen == made[::-1]
    for query in ("limit=0", "limit=1001", "limit=x", "cursor=-1", "cursor=x", "cursor=" + "9" * 30):
        assert api.call("GET", f"{RUNS}?{query}").status_code == 422, query


def test_rounds_and_events_are_paged_by_what_they_count(api: Api) -> None:
    run_id = finished(api)
    for number in range(5):
        record(api, run_id, "rounds", {"round": number, "planned": {0: 4, 1: 2}, "realized": {0: 4, 1: 2}})
        record(api, run_id, "events", {"kind": "note", "level": "info", "text": f"event {number}"})

    first = api.call("GET", f"{RUNS}/{run_id}/rounds?limit=3").json()
    assert [row["round"] for row in first["items"]] == [0, 1, 2]
    assert first["items"][0]["planned"] == {"0": 4, "1": 2}
    rest = api.call("GET", f"{RUNS}/{run_id}/rounds?limit=3&after={first['next_cursor']}").json()
    assert [row["round"] for row in rest["items"]] == [3, 4]
    assert rest["next_cursor"] is None
    first = api.call("GET", f"{RUNS}/{run_id}/events?limit=3").json()
    rest = api.call("GET", f"{RUNS}/{run_id}/events?limit=3&after={first['next_cursor']}").json()
    texts = [row["text"] for row in first["items"] + rest["items"]]
    assert texts == [f"event {number}" for number in range(5)]
    newest = api.call("GET", f"{RUNS}/{run_id}/events?limit=2&newest=true").json()
    assert [row["text"] for row in newest["items"]] == ["event 3", "event 4"]


def test_epochs_and_deaths_are_listed(api: Api) -> None:
    run_id = finished(api)
    record(api, run_id, "epochs", {"epoch": 0, "samples_accepted": 1437, "metrics": {"accuracy": 0.9}})
    record(api, run_id, "deaths", {"rank": 2, "host_name": "b", "reason": "no heartbeat", "signal": "SIGKILL"})

    assert api.call("GET", f"{RUNS}/{run_id}/epochs").json()["items"][0]["metrics"] == {"accuracy": 0.9}
    death = api.call("GET", f"{RUNS}/{run_id}/deaths").json()["items"][0]
    assert (death["rank"], death["host_name"], death["signal"]) == (2, "b", "SIGKILL")


# ------------------------------------------------------------------------------------------------- checkpoints


def saved(api: Api, run_id: int, number: int, path: str, content: bytes = b"model") -> None:
    sha = hashlib.sha256(content).hexdigest()
    record(api, run_id, "checkpoints", {"checkpoint": number, "path": path, "bytes": len(content), "sha256": sha})


def test_a_checkpoint_is_listed_and_downloaded(api: Api) -> None:
    run_id = finished(api)
    content = os.urandom(3 << 20)
    file = api.controller.settings.data_dir / "runs/1/model.safetensors"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    saved(api, run_id, 0, "runs/1/model.safetensors", content)
    saved(api, run_id, 1, str(file), content)
    saved(api, run_id, 2, str(file.parent), content)

    listed = api.call("GET", f"{RUNS}/{run_id}/checkpoints").json()["items"]
    assert [item["checkpoint"] for item in listed] == [0, 1, 2]
    for number in range(3):
        answer = api.call("GET", f"{RUNS}/{run_id}/checkpoints/{number}/model")
        assert answer.status_code == 200
        assert answer.content == content
        assert answer.headers["content-length"] == str(len(content))
        assert answer.headers["content-disposition"].endswith(f'checkpoint{number}.safetensors"')
        assert answer.headers["content-type"] == "application/octet-stream"


@pytest.mark.parametrize(
    "ranges", ["bytes=0-1", "bytes=5-2", "bytes=" + ",".join(f"{n}-{n + 1}" for n in range(10_000)), "bytes=-1", "x"]
)
def test_ranges_are_not_served_however_many_are_asked_for(api: Api, ranges: str) -> None:
    """Merging ten thousand ranges once took a server minutes (CVE-2025-62727); the whole file takes one pass."""
    run_id, content = finished(api), os.urandom(5000)
    (api.controller.settings.data_dir / "model").write_bytes(content)
    saved(api, run_id, 0, "model", content)
    answer = api.call("GET", f"{RUNS}/{run_id}/checkpoints/0/model", {"Range": ranges})
    assert (answer.status_code, answer.content) == (200, content)
    assert "accept-ranges" not in answer.headers
    for path in ("/app/main.js", "/"):
        assert api.anybody("GET", path, {"Range": ranges}).status_code == 200


def test_a_checkpoint_is_never_read_from_elsewhere(api: Api, tmp_path: Path) -> None:
    run_id = finished(api)
    data_dir = api.controller.settings.data_dir
    (tmp_path / "secret").write_bytes(b"secret")
    (data_dir / "link").symlink_to(tmp_path / "secret")
    (data_dir / "folder").symlink_to(tmp_path)
    (data_dir / "empty").mkdir()
    places = ["../secret", str(tmp_path / "secret"), "link", "folder/secret", "gone", "empty", "x" * 300]
    for number, place in enumerate(places):
        saved(api, run_id, number, place)
        answer = api.call("GET", f"{RUNS}/{run_id}/checkpoints/{number}/model")
        assert answer.status_code == 410, place
        assert problem_of(answer)["code"] == "checkpoint_gone"
        assert b"secret" not in answer.content.replace(place.encode(), b"")
    answer = api.call("GET", f"{RUNS}/{run_id}/checkpoints/99/model")
    assert problem_of(answer)["code"] == "checkpoint_unknown"


# ------------------------------------------------------------------------------------------------ going on from one


def with_bundle(api: Api, number: int = 4, **values: Any) -> int:
    """A run of the past with a checkpoint after its first epoch."""
    run_id = finished(api, phase="interrupted", **values)
    place = CheckpointPlace(api.controller.settings.data_dir, run_id)
    save(place, number, [1.0, 2.0], job="digits.py:Digits", run_id=run_id)
    record(api, run_id, "rounds", {"round": 7, "epoch": 0, "loss": 0.5})
    record(api, run_id, "rounds", {"round": 9, "epoch": 1, "loss": 0.4})
    record(api, run_id, "epochs", {"epoch": 0, "samples_accepted": 64})
    return run_id


def test_a_run_goes_on_from_a_checkpoint_with_the_old_configuration(api: Api) -> None:
    old = with_bundle(api, job_hash="other")
    answer = api.call("POST", RUNS, json={"resume_from": f"{old}:last", "batch_size": 7})
    assert answer.status_code == 201, answer.text
    view = answer.json()
    assert view["resumed_from"] == {"run": old, "checkpoint": 4, "round": 7, "epochs": 1}
    assert (view["config"]["batch_size"], view["config"]["epochs"], view["job"]) == (7, 2, "digits.py:Digits")
    assert [(row["checkpoint"], row["reason"]) for row in view["checkpoints"]] == [(4, f"from run {old}")]
    model = api.call("GET", f"{RUNS}/{view['id']}/checkpoints/4/model")
    assert model.status_code == 200
    rounds = api.call("GET", f"{RUNS}/{view['id']}/rounds").json()["items"]
    assert [(row["round"], row["run_id"]) for row in rounds] == [(7, old)], "the rest is superseded"
    assert api.call("GET", f"{RUNS}/{view['id']}/rounds?own=true").json()["items"] == []
    assert [row["epoch"] for row in api.call("GET", f"{RUNS}/{view['id']}/epochs").json()["items"]] == [0]
    again = api.call("POST", RUNS, json={"resume_from": f"{view['id']}"})
    assert problem_of(again)["code"] == "run_live"


@pytest.mark.parametrize(
    ("body", "status", "code", "field"),
    [
        ({"epochs": 1}, 422, "nothing_left", "epochs"),
        ({"seed": 7}, 422, "seed_differs", "seed"),
        ({"batch_size": 0}, 422, "below_minimum", "batch_size"),
        ({"resume_from": "5:9"}, 409, "run_unknown", None),
        ({"resume_from": "../../x"}, 409, "checkpoint_unreadable_name", None),
        ({"resume_from": 3}, 422, "string_type", "resume_from"),
        ({"resume_from": "x" * 41}, 422, "string_too_long", "resume_from"),
    ],
)
def test_what_cannot_be_resumed_is_named(
    api: Api, body: dict[str, Any], status: int, code: str, field: str | None
) -> None:
    old = with_bundle(api)
    answer = api.call("POST", RUNS, json={"resume_from": str(old)} | body)
    assert answer.status_code == status, answer.text
    problem = problem_of(answer)
    if field is None:
        assert problem["code"] == code
    else:
        assert {"field": field, "code": code}.items() <= problem["errors"][0].items()


def test_saving_is_for_runs_that_train(api: Api) -> None:
    old = with_bundle(api)
    assert problem_of(api.call("POST", f"{RUNS}/{old}/checkpoints"))["code"] == "run_over"
    waiting = api.call("POST", RUNS, json={"job": "digits.py:Digits"}).json()["id"]
    answer = api.call("POST", f"{RUNS}/{waiting}/checkpoints")
    assert answer.status_code == 409
    assert (problem_of(answer)["code"], problem_of(answer)["phase"]) == ("nothing_to_save", "waiting")
