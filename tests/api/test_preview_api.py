"""``GET /runs/{id}/preview``: what is expected of a run from the hosts that have joined, and when it is a guess."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from api_harness import BASE, Api, problem_of
from starlette.testclient import WebSocketTestSession
from starlette.websockets import WebSocketDisconnect

from backend.api import preview as preview_api
from backend.core import preview
from wire.messages import (
    WIRE_VERSION,
    Accept,
    Device,
    Hello,
    JobOffer,
    Leaving,
    Message,
    ProbeReport,
    TensorSpec,
    Versions,
)
from wire.session import Channel, Received, Session, join_secret

RUNS = "/api/v1/runs"
JOIN = BASE.replace("http", "ws", 1) + "/ws/join"
LAYOUT = [TensorSpec("w", "params", "float32", [1000, 1000], 0), TensorSpec("steps", "local", "int64", [], -1)]


class JoinedHost:
    """An agent's join link, as far as its admission."""

    def __init__(self, socket: WebSocketTestSession, secret: bytes) -> None:
        self.socket = socket
        self.session = Session.client(Channel.JOIN, secret)
        socket.send_bytes(self.session.opening())
        while not self.session.established:
            self.session.receive(socket.receive_bytes())

    def say(self, message: Message) -> None:
        self.socket.send_bytes(self.session.seal(message))

    def leave(self) -> None:
        """Say so, and wait for the controller to close the link."""
        self.say(Leaving("the test is over"))
        with contextlib.suppress(WebSocketDisconnect):
            while True:
                self.socket.receive_bytes()

    def hear(self, kind: type[Message]) -> Message:
        while True:
            for event in self.session.receive(self.socket.receive_bytes()):
                if isinstance(event, Received) and isinstance(event.message, kind):
                    return event.message


@contextlib.contextmanager
def joined(api: Api, name: str, ranks: int, emulate: float | None, dataset_size: int = 3200) -> Iterator[None]:
    """A host is in the run's window for as long as this lasts."""
    with api.client.websocket_connect(JOIN) as socket:
        host = JoinedHost(socket, join_secret(api.controller.join_token))
        versions = Versions(marchline="0.1.0", wire=WIRE_VERSION, python="3.11", torch="2.13")
        host.say(Hello(name, [Device(f"cpu:{n}", "cpu") for n in range(ranks)], versions, None, emulate))
        offer = host.hear(JobOffer)
        assert isinstance(offer, JobOffer)
        report = ProbeReport(
            job_hash=offer.job_hash,
            sources_hash="s" * 64,
            layout=LAYOUT,
            dataset_signature="d" * 64,
            dataset_size=dataset_size,
        )
        host.say(report)
        host.hear(Accept)
        yield
        host.leave()


def test_the_answer_has_the_fields_of_the_core() -> None:
    pairs = [
        (preview_api.Preview, preview.Preview),
        (preview_api.Expectation, preview.Expectation),
        (preview_api.RankPreview, preview.RankPreview),
    ]
    for answer, value in pairs:
        assert list(answer.model_fields) == list(value.__dataclass_fields__)


def test_an_empty_window_expects_nothing_and_says_why(api: Api) -> None:
    run_id = api.make_run()["id"]

    found = api.call("GET", f"{RUNS}/{run_id}/preview").json()

    assert found["ranks"] == []
    assert found["expectation"] is None
    assert found["reason"].startswith("No rank has joined yet")


def test_declared_speeds_give_an_expectation(api: Api) -> None:
    run_id = api.make_run(batch_size=1)["id"]
    with joined(api, "fast", 1, 10.0), joined(api, "slow", 2, 40.0):
        answer = api.call("GET", f"{RUNS}/{run_id}/preview")

    assert answer.status_code == 200
    found = answer.json()
    assert not found["guess"]
    assert found["round_assumed"]
    assert [(rank["ms_per_batch"], rank["source"]) for rank in found["ranks"]] == [
        (10.0, "declared"),
        (40.0, "declared"),
        (40.0, "declared"),
    ]
    fast, slow, other = (rank["batches"] for rank in found["ranks"])
    assert fast == pytest.approx(4 * slow, rel=0.02)
    assert slow == other
    expected = found["expectation"]
    assert expected["anchor_rank"] == 1
    assert 1.0 < expected["gain"] < 1.5
    assert expected["efficiency"] == pytest.approx(expected["gain"] / 1.5)
    assert "Of the 3 ranks' speeds 3 are declared by their hosts." in found["reason"]


def test_unknown_speeds_are_a_guess_and_said_to_be(api: Api) -> None:
    run_id = api.make_run()["id"]
    with joined(api, "a", 2, None):
        found = api.call("GET", f"{RUNS}/{run_id}/preview").json()

    assert found["guess"]
    assert {rank["source"] for rank in found["ranks"]} == {"guessed"}
    assert "all count as equally fast" in found["reason"]


def test_a_run_that_is_over_has_no_preview(api: Api) -> None:
    run_id = api.make_run()["id"]
    api.call("POST", f"{RUNS}/{run_id}/abort")

    answer = api.call("GET", f"{RUNS}/{run_id}/preview")

    assert answer.status_code == 409
    problem = problem_of(answer)
    assert (problem["code"], problem["phase"]) == ("run_over", "failed")


def test_an_unknown_run_has_none_either(api: Api) -> None:
    assert problem_of(api.call("GET", f"{RUNS}/77/preview"))["code"] == "run_unknown"
