"""Signing in and out: tickets are good once, the cookie is for no script's eyes, streams end with their session."""

from __future__ import annotations

import pytest
from api_harness import BASE, Api, problem_of
from starlette.testclient import TestClient, WebSocketDenialResponse

STREAM = BASE.replace("http", "ws", 1) + "/api/v1/stream"


def test_a_ticket_is_traded_for_a_cookie_once(api: Api) -> None:
    ticket = api.controller.issue_ticket()

    answer = api.anybody("POST", "/api/v1/session", json={"ticket": ticket})

    assert answer.status_code == 201
    assert answer.json() == {"kind": "session", "name": api.controller.name, "version": answer.json()["version"]}
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Path=/" in cookie
    assert "Secure" not in cookie
    assert ticket not in cookie
    assert api.client.get("/api/v1/session").json()["kind"] == "session"
    again = api.anybody("POST", "/api/v1/session", {"X-Marchline": "1"}, json={"ticket": ticket})
    assert again.status_code == 401
    assert problem_of(again)["code"] == "credential_wrong"


def test_the_operator_token_signs_a_browser_in_too(api: Api) -> None:
    answer = api.anybody("POST", "/api/v1/session", json={"token": api.controller.operator_token})

    assert answer.status_code == 201
    assert api.controller.operator_token not in answer.text + answer.headers["set-cookie"]
    assert api.client.get("/api/v1/runs").status_code == 200


def test_over_tls_the_cookie_is_secure(api: Api) -> None:
    client = TestClient(api.app, base_url="https://march.example")

    answer = client.post("/api/v1/session", json={"ticket": api.controller.issue_ticket()})

    assert "Secure" in answer.headers["set-cookie"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 422, "credential_missing"),
        ({"ticket": "x", "token": "y"}, 422, "credential_missing"),
        ({"ticket": "wrong"}, 401, "credential_wrong"),
        ({"ticket": ""}, 401, "credential_wrong"),
        ({"token": "wrong"}, 401, "credential_wrong"),
        ({"token": 1}, 422, "invalid_request"),
        ({"ticket": "x" * 300}, 422, "invalid_request"),
        ({"password": "x"}, 422, "invalid_request"),
        ([], 422, "invalid_request"),
    ],
)
def test_wrong_sign_ins_are_named(api: Api, body: object, status: int, code: str) -> None:
    answer = api.anybody("POST", "/api/v1/session", json=body)

    assert answer.status_code == status
    assert problem_of(answer)["code"] == code
    assert "set-cookie" not in answer.headers


def test_a_form_of_another_page_cannot_sign_in(api: Api) -> None:
    """A cross-site form cannot send JSON; text that happens to be JSON is not taken for it."""
    body = '{"token": "' + api.controller.operator_token + '"}'
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = api.anybody("POST", "/api/v1/session", {"Content-Type": content_type}, content=body)
        assert answer.status_code == 415
        assert problem_of(answer)["code"] == "content_type_unsupported"


def test_guessing_tickets_is_limited(api: Api) -> None:
    statuses = [
        api.anybody("POST", "/api/v1/session", json={"ticket": f"guess {number}"}).status_code for number in range(12)
    ]

    assert statuses == [401] * 10 + [429] * 2
    answer = api.anybody("POST", "/api/v1/session", json={"ticket": api.controller.issue_ticket()})
    assert answer.status_code == 201


def test_signing_out_ends_the_session_everywhere(api: Api) -> None:
    browser = api.browser()
    cookies = dict(browser.cookies)

    assert browser.delete("/api/v1/session", headers={"X-Marchline": "1"}).status_code == 204

    assert not dict(browser.cookies)
    for name, value in cookies.items():
        answer = api.anybody("GET", "/api/v1/session", {"Cookie": f"{name}={value}"})
        assert answer.status_code == 401


def test_signing_out_closes_the_open_streams_of_that_session_only(api: Api) -> None:
    leaving, staying = api.browser(), api.browser()
    with staying.websocket_connect(STREAM) as stays, leaving.websocket_connect(STREAM) as leaves:
        assert leaves.receive_json()["type"] == "snapshot"
        assert stays.receive_json()["type"] == "snapshot"
        leaving.delete("/api/v1/session", headers={"X-Marchline": "1"})
        api.make_run()
        assert leaves.receive()["code"] == 4401
        assert stays.receive_json()["seq"] == 2


@pytest.mark.parametrize("cookie", ["", "x=y", "marchline_00000000=x", "=;=;;", "\xff\xfe=1"])
def test_a_foreign_cookie_is_no_session(api: Api, cookie: str) -> None:
    assert api.client.get("/api/v1/session", headers={"Cookie": cookie.encode("latin-1")}).status_code == 401


def test_only_the_token_itself_lets_another_browser_in(api: Api) -> None:
    answer = api.call("POST", "/api/v1/session/ticket")

    assert answer.status_code == 201
    assert answer.json()["url"] == f"{BASE}/#ticket={answer.json()['ticket']}"
    assert api.anybody("POST", "/api/v1/session", json={"ticket": answer.json()["ticket"]}).status_code == 201
    refused = api.browser().post("/api/v1/session/ticket", headers={"X-Marchline": "1"})
    assert problem_of(refused)["code"] == "token_needed"


def test_a_stream_needs_cookie_or_token(api: Api) -> None:
    with pytest.raises(WebSocketDenialResponse) as denial, api.client.websocket_connect(STREAM):
        pass  # pragma: no cover
    assert denial.value.status_code == 401
    with api.browser().websocket_connect(STREAM, headers={"Origin": BASE}) as stream:
        assert stream.receive_json()["type"] == "snapshot"
    with api.client.websocket_connect(STREAM, headers=api.bearer) as stream:
        assert stream.receive_json()["type"] == "snapshot"
