"""The live stream: a snapshot, then changes whose numbers have no holes; what is over stays as it was."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from api_harness import BASE, Api
from starlette.testclient import WebSocketDenialResponse

from backend.api import schemas, stream

STREAM = BASE.replace("http", "ws", 1) + "/api/v1/stream"


def test_a_run_is_followed_from_its_snapshot_to_its_end(api: Api) -> None:
    run_id = api.make_run()["id"]
    with api.client.websocket_connect(f"{STREAM}?run={run_id}", headers=api.bearer) as socket:
        frame = socket.receive_json()
        assert (frame["type"], frame["seq"]) == ("snapshot", 1)
        assert set(frame["view"]) >= set(schemas.RunView.model_fields)
        assert frame["view"]["phase"] == "waiting"
        api.call("POST", f"/api/v1/runs/{run_id}/abort")
        seq, phase, texts = 1, "waiting", [event["text"] for event in frame["events"]]
        while phase != "failed":
            frame = socket.receive_json()
            assert frame["seq"] == seq + 1
            seq = frame["seq"]
            phase = frame.get("patch", {}).get("phase", phase)
            texts += [event["text"] for event in frame.get("events", [])]
    recorded = api.call("GET", f"/api/v1/runs/{run_id}/events").json()["items"]
    assert set(texts) <= {event["text"] for event in recorded}


def test_the_overview_shows_runs_as_they_come(api: Api) -> None:
    with api.client.websocket_connect(STREAM, headers=api.bearer) as socket:
        frame = socket.receive_json()
        assert frame["view"]["runs"] == []
        run_id = api.make_run()["id"]
        while not frame.get("patch", {}).get("runs"):
            frame = socket.receive_json()
        (summary,) = frame["patch"]["runs"]
        assert summary["id"] == run_id
        assert set(summary) >= set(schemas.RunSummary.model_fields)


def test_a_run_of_the_past_is_one_snapshot(api: Api) -> None:
    run_id = api.make_run()["id"]
    api.call("POST", f"/api/v1/runs/{run_id}/abort")
    with api.client.websocket_connect(f"{STREAM}?run={run_id}", headers=api.bearer) as socket:
        frame = socket.receive_json()
    assert frame["type"] == "snapshot"
    assert frame["view"]["phase"] == "failed"


@pytest.mark.parametrize(
    ("query", "status"), [("run=77", 404), ("run=x", 422), ("run=-1", 422), ("run=" + "9" * 30, 422)]
)
def test_what_cannot_be_followed_is_refused_at_the_handshake(api: Api, query: str, status: int) -> None:
    with (
        pytest.raises(WebSocketDenialResponse) as denial,
        api.client.websocket_connect(f"{STREAM}?{query}", headers=api.bearer),
    ):
        pass  # pragma: no cover
    assert denial.value.status_code == status
    assert denial.value.headers["content-type"] == "application/problem+json"


def test_what_a_browser_says_is_ignored_and_streams_are_counted(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_STREAMS", 1)
    with api.client.websocket_connect(STREAM, headers=api.bearer) as socket:
        socket.receive_json()
        socket.send_text("hello")
        socket.send_bytes(b"\x00")
        assert "marchline_stream_clients 1.0" in api.call("GET", "/metrics").text
        with (
            pytest.raises(WebSocketDenialResponse) as denial,
            api.client.websocket_connect(STREAM, headers=api.bearer),
        ):
            pass  # pragma: no cover
        assert denial.value.status_code == 503
        api.make_run()
        assert socket.receive_json()["seq"] == 2
    assert "marchline_stream_clients 0.0" in api.call("GET", "/metrics").text
    assert api.controller.feed.subscribers == 0


def test_a_browser_that_takes_nothing_is_dropped(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SEND_SECONDS", 0.05)
    said: list[dict[str, Any]] = []

    async def watch_and_take_nothing() -> None:
        stuck = asyncio.Event()

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "websocket.send":
                await stuck.wait()
            said.append(message)

        connected = iter([{"type": "websocket.connect"}])

        async def receive() -> dict[str, Any]:
            message = next(connected, None)
            if message is None:
                await stuck.wait()
            return message or {}

        headers = [(b"host", b"127.0.0.1"), (b"authorization", api.bearer["Authorization"].encode())]
        scope = {
            "type": "websocket", "path": "/api/v1/stream", "raw_path": b"/api/v1/stream", "query_string": b"",
            "headers": headers, "scheme": "ws", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
            "subprotocols": [], "root_path": "", "extensions": {},
        }  # fmt: skip
        await api.app(scope, receive, send)

    assert api.client.portal is not None
    api.client.portal.call(watch_and_take_nothing)

    assert [message["type"] for message in said] == ["websocket.accept", "websocket.close"]
    assert said[-1]["code"] == stream.CLOSE_SLOW
    assert "marchline_stream_dropped_total 1.0" in api.call("GET", "/metrics").text
    assert api.controller.feed.subscribers == 0
