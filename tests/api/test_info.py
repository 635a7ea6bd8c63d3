"""The address that other hosts are told, and faults of our own."""

from __future__ import annotations

import shlex

import pytest
from api_harness import Api, problem_of

from backend.api.info import is_loopback, join_command, join_url, lan_address


@pytest.mark.parametrize(
    ("bound", "seen", "told"),
    [
        ("127.0.0.1", "http://127.0.0.1:8470", "http://127.0.0.1:8470"),
        ("127.0.0.1", "http://localhost:9000", "http://localhost:9000"),
        ("0.0.0.0", "http://10.0.0.5:8470", "http://10.0.0.5:8470"),
        ("0.0.0.0", "https://march.example", "https://march.example"),
        ("10.0.0.7", "http://127.0.0.1:8470", "http://10.0.0.7:8470"),
        ("fd00::7", "http://[::1]:8470", "http://[fd00::7]:8470"),
        ("10.0.0.7", "http://localhost", "http://10.0.0.7"),
        ("box.lan", "http://localhost:8470", "http://box.lan:8470"),
        ("0.0.0.0", "http://127.0.0.1:8470", f"http://{lan_address()}:8470"),
        ("::", "http://[::1]:8470", f"http://{lan_address()}:8470"),
    ],
)
def test_others_are_told_the_address_that_can_work_for_them(bound: str, seen: str, told: str) -> None:
    assert join_url(bound, seen) == told


def test_loopback_is_known_by_name_and_number() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.8.8", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "box.lan", "")))


def test_the_command_survives_a_shell() -> None:
    command = join_command("http://10.0.0.5:8470", "a token; rm -rf 'x'")

    words = shlex.split(command)
    assert words[0] == "MARCHLINE_JOIN_TOKEN=a token; rm -rf 'x'"
    assert words[1:] == ["python", "-m", "worker", "--join", "http://10.0.0.5:8470"]


def test_our_own_fault_is_in_the_log_and_not_in_the_answer(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise ZeroDivisionError("the inner story")

    api.app.add_api_route("/fails", fails)

    answer = api.call("GET", "/fails")

    assert answer.status_code == 500
    assert problem_of(answer)["code"] == "internal_error"
    assert "inner story" not in answer.text
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "the inner story" in caplog.text
    assert api.controller.operator_token not in caplog.text
