"""Every route against every kind of caller that must not pass (reliability 5.3, 'Port and browser')."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from api_harness import BASE, Api, problem_of, routes_of
from starlette.testclient import TestClient, WebSocketDenialResponse

from backend.api import security
from backend.api.security import API_POLICY, MAX_BODY_BYTES, MAX_STRANGER_BODY_BYTES

HOST = BASE.removeprefix("http://")
WS_BASE = BASE.replace("http", "ws", 1)
PUBLIC = {
    *((method, path) for method in ("GET", "HEAD") for path in ("/", "/app/1", "/vendor/1", "/favicon.ico")),
    *(("GET", path) for path in ("/livez", "/healthz", "/readyz", "/version")),
    ("POST", "/api/v1/session"),
    *(("WEBSOCKET", path) for path in ("/ws/join", "/ws/control", "/ws/data")),
}  # fmt: skip
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")


def attempt(api: Api, method: str, path: str, headers: dict[str, str]) -> Any:
    """The answer to a request, or to a websocket handshake that was refused."""
    if method != "WEBSOCKET":
        return api.client.request(method, path, headers=headers)
    with (
        pytest.raises(WebSocketDenialResponse) as denial,
        api.client.websocket_connect(WS_BASE + path, headers=headers),
    ):
        pass  # pragma: no cover
    return denial.value


def test_every_route_but_the_public_ones_demands_a_credential(api: Api) -> None:
    open_to_all = set()
    for method, path in routes_of(api.app):
        if (method, path) in PUBLIC:
            open_to_all.add((method, path))
            continue
        answer = attempt(api, method, path, {})
        assert answer.status_code == 401, (method, path)
        assert answer.headers["www-authenticate"].startswith("Bearer")
        if method not in ("HEAD", "WEBSOCKET"):
            assert problem_of(answer)["code"] == "credential_missing"
    assert open_to_all == PUBLIC


def test_unknown_paths_and_methods_demand_a_credential_too(api: Api) -> None:
    for method in METHODS:
        for path in (
            "/nope",
            "/api/v1",
            "/api/v1/runs/",
            "//api/v1/runs",
            "/api/v2/runs",
            "/ws/join",
            "/docs/",
            "/app",
            "/apps/x",
            "/vendor",
            "/vendors",
        ):
            assert api.anybody(method, path).status_code == 401, (method, path)
    for method in METHODS[2:]:
        for path in ("/", "/livez", "/app/main.js", "/vendor/lib.js", "/version"):
            assert api.anybody(method, path).status_code == 401, (method, path)
    assert attempt(api, "WEBSOCKET", "/ws/other", {}).status_code == 401


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8470", "127.0.0.1.evil.example", "localhost.evil.example", "march.example.evil", "",
     "127.0.0.1:80:80", "[::1", "[::1]x", "127.0.0.1:x", "127.1", "2130706433", "0x7f.1", "a\tb", "127.0.0.1:8470, x"],
)  # fmt: skip
def test_a_foreign_host_reaches_nothing(api: Api, host: str) -> None:
    for method, path in routes_of(api.app):
        answer = attempt(api, method, path, api.bearer | {"Host": host})
        assert answer.status_code == 421, (method, path)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:8470", "localhost", "LOCALHOST:1", "localhost.", "[::1]", "[::1]:8470", "10.0.0.5:8470",
     "march.example", "March.Example:443"],
)  # fmt: skip
def test_loopback_names_ip_literals_and_configured_names_are_ours(api: Api, host: str) -> None:
    assert api.anybody("GET", "/livez", {"Host": host}).status_code == 200


def test_an_unknown_name_is_told_the_cure(api: Api) -> None:
    problem = problem_of(api.anybody("GET", "/livez", {"Host": "gpu-box:8470"}))

    assert problem["code"] == "host_not_allowed"
    assert "--allow-host gpu-box" in problem["detail"]


@pytest.mark.parametrize(
    "origin",
    ["null", "http://evil.example", f"ws://{HOST}", "http://127.0.0.1", "http://127.0.0.1:8471", "",
     "http://localhost:8470", f"{BASE}.evil.example", f"{BASE}/", "file://", "chrome-extension://abc"],
)  # fmt: skip
def test_a_foreign_origin_reaches_nothing(api: Api, origin: str) -> None:
    for method, path in routes_of(api.app):
        answer = attempt(api, method, path, api.bearer | {"Origin": origin})
        assert answer.status_code == 403, (method, path)


def test_our_own_origin_passes(api: Api) -> None:
    assert api.call("GET", "/api/v1/runs", {"Origin": BASE}).status_code == 200
    headers = {"Host": "march.example", "Origin": "http://March.example"}
    assert api.call("GET", "/api/v1/runs", headers).status_code == 200


def test_behind_a_proxy_that_ends_tls_the_browsers_origin_is_ours_but_not_the_other_way_round(api: Api) -> None:
    headers = {"Host": "march.example", "Origin": "https://march.example"}
    answer = api.anybody("POST", "/api/v1/session", headers, json={"ticket": api.controller.issue_ticket()})
    assert answer.status_code == 201
    assert "Secure" in answer.headers["set-cookie"]
    over_tls = TestClient(api.app, base_url="https://march.example")
    assert over_tls.get("/livez", headers={"Origin": "http://march.example"}).status_code == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site", "whatever"])
def test_another_site_may_open_the_page_and_nothing_else(api: Api, site: str) -> None:
    headers = {"Sec-Fetch-Site": site}
    for method, path in routes_of(api.app):
        if path == "/":
            assert attempt(api, method, path, headers).status_code == 200
            continue
        assert attempt(api, method, path, api.bearer | headers).status_code == 403, (method, path)
    assert api.call("GET", "/api/v1/runs", {"Sec-Fetch-Site": "same-origin"}).status_code == 200
    assert api.call("GET", "/api/v1/runs", {"Sec-Fetch-Site": "none"}).status_code == 200


def test_unknown_methods_are_405_and_name_the_known_ones(api: Api) -> None:
    routes = routes_of(api.app)
    known: dict[str, set[str]] = {}
    for method, path in routes:
        known.setdefault(path, set()).add(method)
    for path, methods in known.items():
        if "WEBSOCKET" in methods:
            continue
        for method in set(METHODS) - methods - {"HEAD"}:
            answer = api.call(method, path)
            assert answer.status_code == 405, (method, path)
            assert set(answer.headers["allow"].split(", ")) >= methods - {"HEAD"}, (method, path)
            assert problem_of(answer)["code"] == "method_not_allowed"
        if "HEAD" not in methods:
            assert api.call("HEAD", path).status_code == 405


def test_no_preflight_of_another_origin_ever_succeeds(api: Api) -> None:
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}

    answer = api.anybody("OPTIONS", "/api/v1/runs", headers)

    assert answer.status_code == 403
    for method, path in routes_of(api.app):
        given = attempt(api, method, path, {"Origin": "http://evil.example"}).headers
        assert not [name for name in given if name.startswith("access-control")], path


def test_every_answer_carries_the_security_headers(api: Api) -> None:
    for method, path in [*routes_of(api.app), ("GET", "/nope")]:
        for headers in ({"Host": "evil.example"}, {}, api.bearer):
            if method == "WEBSOCKET" and "Host" not in headers:
                continue
            answer = attempt(api, method, path, headers)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy, (method, path)
            assert "frame-ancestors 'none'" in policy, (method, path)
            assert policy == API_POLICY or path in ("/", "/docs", "/docs/start.js"), (method, path)
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["x-frame-options"] == "DENY"
            assert answer.headers["cross-origin-resource-policy"] == "same-origin"
            assert answer.headers["cache-control"] in ("no-store", "no-cache")


def test_a_change_by_cookie_needs_the_header_whatever_the_method(api: Api) -> None:
    browser = api.browser()
    for method, path in routes_of(api.app):
        if method in ("GET", "HEAD", "WEBSOCKET"):
            continue
        answer = browser.request(method, path)
        assert answer.status_code == 403, (method, path)
        assert problem_of(answer)["code"] == "header_missing"
    assert browser.request("PUT", "/nope").status_code == 403
    assert browser.get("/api/v1/runs").status_code == 200
    answer = browser.post("/api/v1/runs", json={"job": "digits.py:Digits"}, headers={"X-Marchline": "1"})
    assert answer.status_code == 201
    twice = [("X-Marchline", "1"), ("Origin", BASE), ("Origin", BASE)]
    assert browser.post("/api/v1/runs/1/abort", headers=twice).status_code == 403


# ------------------------------------------------------------------------------------------------- credentials


@pytest.mark.parametrize("value", ["Bearer wrong", "Bearer ", "Bearer", "Basic b3A6b3A=", "", "bearer \xff", "Token x"])
def test_a_wrong_credential_is_named_and_never_echoed(api: Api, value: str) -> None:
    answer = api.client.get("/api/v1/runs", headers={"Authorization": value.encode("latin-1")})

    assert answer.status_code == 401
    assert problem_of(answer)["code"] == "credential_wrong"
    assert "wrong" not in answer.text.replace("credential_wrong", "")


def test_a_wrong_bearer_is_refused_though_the_cookie_is_right(api: Api) -> None:
    browser = api.browser()

    assert browser.get("/api/v1/runs", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert browser.get("/api/v1/runs").status_code == 200


def test_two_authorizations_are_none(api: Api) -> None:
    headers = [("Authorization", f"Bearer {api.controller.operator_token}"), ("Authorization", "Bearer x")]

    assert api.client.get("/api/v1/runs", headers=headers).status_code == 401


def test_failures_of_a_source_are_limited_and_the_right_token_still_passes(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "a-wrong-token-that-nobody-may-see"
    answers = [api.anybody("GET", "/api/v1/runs", {"Authorization": f"Bearer {secret}"}) for _ in range(30)]

    assert [answer.status_code for answer in answers] == [401] * 10 + [429] * 20
    assert problem_of(answers[-1])["code"] == "too_many_failures"
    assert 0 < int(answers[-1].headers["retry-after"]) <= 60
    assert api.call("GET", "/api/v1/runs").status_code == 200
    assert api.anybody("GET", "/api/v1/runs").status_code == 401
    assert len([record for record in caplog.records if record.name == "backend.api.security"]) == 2
    assert secret not in caplog.text
    assert api.controller.operator_token not in caplog.text


# ------------------------------------------------------------------------------------------------------ bodies


@pytest.mark.parametrize(("caller", "limit"), [("operator", MAX_BODY_BYTES), ("stranger", MAX_STRANGER_BODY_BYTES)])
def test_bodies_are_capped_whether_they_say_their_length_or_not(api: Api, caller: str, limit: int) -> None:
    path = "/api/v1/runs" if caller == "operator" else "/api/v1/session"
    headers = {"Content-Type": "application/json"} | (api.bearer if caller == "operator" else {})
    fits = b'{"x": "' + b"y" * (limit - 9) + b'"}'
    assert len(fits) == limit

    def parts(body: bytes) -> Any:
        yield from (body[start : start + 1000] for start in range(0, len(body), 1000))

    for body, status in ((fits, 422), (fits + b" ", 413)):
        assert api.client.post(path, content=body, headers=headers).status_code == status
        answer = api.client.post(path, content=parts(body), headers=headers)
        assert answer.status_code == status
        problem_of(answer)


def test_a_length_that_lies_or_is_none_is_refused_before_the_body(api: Api) -> None:
    for length, status in (("99999999999999999999999", 413), ("-1", 400), ("x", 400), ("65537", 413)):
        answer = api.call("POST", "/api/v1/runs", {"Content-Length": length}, content=b"{}")
        assert answer.status_code == status, length


def test_a_body_that_does_not_arrive_is_not_waited_for(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "BODY_SECONDS", 0.05)
    said: list[dict[str, Any]] = []

    async def begin_and_stop() -> None:
        async def send(message: dict[str, Any]) -> None:
            said.append(message)

        first = iter([{"type": "http.request", "body": b"{", "more_body": True}])

        async def receive() -> dict[str, Any]:
            message = next(first, None)
            if message is None:
                await asyncio.Event().wait()
            return message or {}

        scope = {
            "type": "http", "method": "POST", "path": "/api/v1/session", "raw_path": b"/api/v1/session",
            "query_string": b"", "headers": [(b"host", b"127.0.0.1")], "scheme": "http",
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "root_path": "", "http_version": "1.1",
        }  # fmt: skip
        await api.app(scope, receive, send)

    assert api.client.portal is not None
    api.client.portal.call(begin_and_stop)

    assert said[0]["status"] == 408
    assert b'"body_too_slow"' in said[1]["body"]
