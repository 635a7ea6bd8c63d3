"""Sessions and failures by a hand clock."""

from __future__ import annotations

from backend.api import credentials
from backend.api.credentials import (
    FAILURE_WINDOW_SECONDS,
    FREE_FAILURES,
    IDLE_SECONDS,
    MAX_SESSIONS,
    MAX_SOURCES,
    SESSION_SECONDS,
    Failures,
    OperatorToken,
    Sessions,
)


class HandClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_session_opens_by_its_value_and_closes() -> None:
    sessions = Sessions(HandClock())
    value = sessions.open()

    key = sessions.find(value)

    assert key is not None
    assert value.encode() not in key
    assert sessions.alive(key)
    assert sessions.find(value + "x") is None
    assert sessions.find("\udcff") is None
    sessions.close(key)
    assert sessions.find(value) is None
    assert not sessions.alive(key)


def test_a_session_ends_when_idle_and_at_the_latest_after_a_week() -> None:
    clock = HandClock()
    sessions = Sessions(clock)
    value = sessions.open()
    key = credentials.digest(value)

    clock.now += IDLE_SECONDS - 1
    assert sessions.find(value) == key
    clock.now += IDLE_SECONDS - 1
    assert sessions.alive(key)
    clock.now += 1
    assert not sessions.alive(key)
    assert sessions.find(value) is None

    value = sessions.open()
    opened = clock.now
    while clock.now - opened < SESSION_SECONDS - IDLE_SECONDS:
        clock.now += IDLE_SECONDS / 2
        assert sessions.find(value) is not None
    clock.now = opened + SESSION_SECONDS
    assert sessions.find(value) is None
    assert len(sessions) == 0


def test_the_session_unused_for_longest_gives_way() -> None:
    clock = HandClock()
    sessions = Sessions(clock)
    values = [sessions.open() for _ in range(MAX_SESSIONS)]
    assert sessions.find(values[0]) is not None

    sessions.open()

    assert len(sessions) == MAX_SESSIONS
    assert sessions.find(values[0]) is not None
    assert sessions.find(values[1]) is None


def test_failures_are_counted_by_source_within_their_window() -> None:
    clock = HandClock()
    failures = Failures(clock)

    counts = [failures.count("10.0.0.1") for _ in range(FREE_FAILURES + 2)]
    assert [count for count, _ in counts] == list(range(1, FREE_FAILURES + 3))
    assert failures.count("10.0.0.2")[0] == 1
    clock.now += FAILURE_WINDOW_SECONDS / 2
    assert failures.count("10.0.0.1") == (FREE_FAILURES + 3, FAILURE_WINDOW_SECONDS / 2)
    clock.now += FAILURE_WINDOW_SECONDS / 2
    assert failures.count("10.0.0.1") == (1, FAILURE_WINDOW_SECONDS)
    assert failures.total == FREE_FAILURES + 5


def test_one_ipv6_site_is_one_source_and_sources_are_bounded() -> None:
    failures = Failures(HandClock())

    assert failures.count("2001:db8::1")[0] == 1
    assert failures.count("2001:db8::ffff:2")[0] == 2
    for number in range(MAX_SOURCES):
        failures.count(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert failures.count("2001:db8::1")[0] == 1


def test_the_token_is_compared_whole_and_names_a_cookie_without_telling() -> None:
    token = OperatorToken("correct horse battery staple")

    assert token.matches("correct horse battery staple")
    for wrong in ("", "correct horse battery stapl", "correct horse battery staple ", "\udcff", "é"):
        assert not token.matches(wrong)
    assert not any(token.matches(f"guess {number}") for number in range(2000))
    assert token.cookie_name != OperatorToken("another").cookie_name
    assert token.cookie_name == OperatorToken("correct horse battery staple").cookie_name
    assert "horse" not in token.cookie_name
