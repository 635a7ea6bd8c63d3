"""Strangers are counted by source, slowed, and can't crowd an honest peer out (reliability H2, 5.3)."""

from __future__ import annotations

import pytest

from backend.runtime.limits import Gate, Limits, Slot, is_nearby, source_of

LIMITS = Limits(strangers=4, strangers_per_source=2, free_failures=2, delay_seconds=0.5, delay_cap_seconds=3.0)


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::1", "::/64"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::9", "2001:db8:1:2::/64"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("testclient", "testclient"),
    ],
)
def test_a_source_is_an_address_or_a_site(address: str, source: str) -> None:
    assert source_of(address) == source


@pytest.mark.parametrize(
    ("address", "nearby"),
    [
        ("127.0.0.1", True),
        ("10.1.2.3", True),
        ("192.168.7.7", True),
        ("172.16.0.1", True),
        ("169.254.1.1", True),
        ("100.64.0.9", True),
        ("::1", True),
        ("fe80::1", True),
        ("fd00::5", True),
        ("::ffff:192.168.1.1", True),
        ("8.8.8.8", False),
        ("2a00:1450::1", False),
        ("::ffff:8.8.8.8", False),
        ("testclient", True),
    ],
)
def test_an_address_of_a_public_network_is_known_as_one(address: str, nearby: bool) -> None:
    assert is_nearby(address) is nearby


def test_delays_begin_after_the_free_failures_double_and_are_capped() -> None:
    gate = Gate(LIMITS)
    assert [gate.failed("a", now=float(n)) for n in range(7)] == [0.0, 0.0, 0.5, 1.0, 2.0, 3.0, 3.0]
    assert gate.failures_total == 7


def test_a_source_is_forgiven_after_a_quiet_while_and_others_never_pay_for_it() -> None:
    gate = Gate(LIMITS)
    for n in range(5):
        gate.failed("a", now=float(n))
    assert gate.failed("b", now=5.0) == 0.0
    assert gate.failed("a", now=4.0 + LIMITS.failure_memory_seconds + 0.1) == 0.0


def test_only_so_many_sources_are_remembered() -> None:
    gate = Gate(Limits(remembered_sources=3, free_failures=0))
    for source in "abcd":
        gate.failed(source, now=0.0)
    assert gate.failed("a", now=1.0) == Limits().delay_seconds, "the oldest was forgotten"
    assert gate.failed("d", now=1.0) == 2 * Limits().delay_seconds, "the newest was not"


class Guests:
    """Slots by name, and who was evicted."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.slots: dict[str, Slot] = {}
        self.evicted: list[str] = []

    def enter(self, name: str, source: str) -> None:
        self.slots[name] = self.gate.enter(source, lambda: self.evicted.append(name))


def test_a_full_source_loses_its_oldest_silent_connection() -> None:
    gate = Gate(LIMITS)
    guests = Guests(gate)
    for name in ("first", "second", "third"):
        guests.enter(name, "a")
    assert guests.evicted == ["first"]
    assert gate.strangers == 2


def test_a_full_house_evicts_from_the_greediest_source() -> None:
    gate = Gate(LIMITS)
    guests = Guests(gate)
    for name, source in (("a1", "a"), ("b1", "b"), ("b2", "b"), ("c1", "c")):
        guests.enter(name, source)
    guests.enter("honest", "d")
    assert guests.evicted == ["b1"]
    assert gate.strangers == LIMITS.strangers


def test_leaving_gives_the_slot_back_once() -> None:
    gate = Gate(LIMITS)
    guests = Guests(gate)
    guests.enter("one", "a")
    guests.enter("two", "a")
    gate.leave(guests.slots["one"])
    gate.leave(guests.slots["one"])
    guests.enter("three", "a")
    assert guests.evicted == []
    assert gate.strangers == 2
    for name in ("two", "three"):
        gate.leave(guests.slots[name])
    assert gate.strangers == 0
