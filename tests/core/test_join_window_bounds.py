"""The window's bounds and laws: the size of the world, strangers, the log, any order of events (behaviour B4, B7)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from join_hosts import CONFIG, hello, join, report, seated, versions

from backend.core.join_records import Strangers, source_of
from backend.core.join_window import Admission, JoinWindow, Refusal

# -------------------------------------------------------------------------------- the size of the world


def test_a_world_has_a_capacity():
    window = JoinWindow(CONFIG, 0.0, world_capacity=3)
    join(window, 1, hello("gpu-a", 2))

    refusal = join(window, 2, hello("gpu-b", 2))

    assert refusal.code == "world_full"
    assert "would have 4 ranks, but a world holds 3" in refusal.reason
    assert isinstance(join(window, 3, hello("gpu-c", 1)), Admission)


def test_capacity_is_checked_again_after_the_probe():
    window = JoinWindow(CONFIG, 0.0, world_capacity=3)
    window.hello(1, hello("gpu-a", 2), "10.0.0.1", 0.0)
    window.hello(2, hello("gpu-b", 2), "10.0.0.2", 0.0)

    assert isinstance(window.probe(1, report(), 1.0), Admission)
    assert window.probe(2, report(), 1.0).code == "world_full"


def test_forced_counts_set_the_size_of_the_world():
    window = JoinWindow(replace(CONFIG, start_mode="hybrid", target=2, fixed_counts=(6, 2, 1)), 0.0)
    assert (window.quorum, window.target) == (3, 3)
    join(window, 1, hello("gpu-a", 2))
    assert window.verdict(1.0).action == "open"  # the configured target of 2 would not fit the counts

    refusal = join(window, 2, hello("gpu-b", 2))
    assert (refusal.code, "forced counts name 3" in refusal.reason) == ("world_full", True)
    assert window.change(quorum=2).code == "fixed_counts_set_the_world"

    join(window, 3, hello("gpu-c", 1))
    assert window.verdict(1.0).code == "target_reached"


# ------------------------------------------------------------------------- strangers and the refusal log


def test_strangers_are_counted_by_source_and_end_nothing():
    window = seated(1, 1)
    before = window.verdict(1.0)

    first = [window.stranger("10.0.0.9:5000", "bad_magic") for _ in range(3)]
    other = window.stranger("10.0.0.9:5001", "bad_mac")
    for number in range(5000):
        window.stranger(f"192.168.{number // 256}.{number % 256}:1", "bad_magic")

    assert first == [True, False, False]
    assert other
    assert window.verdict(1.0) == before
    assert window.strangers.count == 5004
    sources = window.strangers.sources
    assert len(sources) == 257
    assert sources["10.0.0.9"] == 4
    assert sources["others"] == 5004 - 4 - 255
    assert sum(sources.values()) == window.strangers.count


def test_a_known_source_is_still_told_apart_when_the_table_is_full():
    strangers = Strangers()
    for number in range(300):
        strangers.add(f"10.0.{number // 256}.{number % 256}", "bad_magic")

    strangers.add("10.0.0.0", "bad_magic")

    assert strangers.sources["10.0.0.0"] == 2


def test_one_source_cannot_fill_the_log_with_codes():
    strangers = Strangers()

    assert sum(strangers.add("10.0.0.1", f"code-{number}") for number in range(100)) == 16


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("10.0.0.2:53412", "10.0.0.2"),
        ("10.0.0.2", "10.0.0.2"),
        ("[2001:db8::7]:80", "2001:db8::7"),
        ("::1", "::1"),
        ("", ""),
    ],
)
def test_a_source_is_an_address_without_its_port(address, source):
    assert source_of(address) == source


def test_the_refusal_log_keeps_the_last_fifty():
    window = seated()
    for number in range(60):
        window.hello(number, hello(f"gpu-{number}", 0), f"10.0.0.{number}", float(number))

    assert len(window.refusals) == 50
    assert (window.refusals[0].host, window.refusals[-1].host) == ("gpu-10", "gpu-59")
    assert (window.refusals[-1].address, window.refusals[-1].code, window.refusals[-1].at) == (
        "10.0.0.59",
        "no_devices",
        59.0,
    )


def test_what_a_peer_says_is_clipped_before_it_is_kept():
    window = seated(1)

    window.hello(4, hello("gpu\x1b[2J"), "10.0.0.4", 0.0)
    window.hello(5, hello("x" * 60_000), "10.0.0.5", 0.0)
    refusal = window.hello(6, hello("gpu-6", versions=versions(wire=9, marchline="9" * 60_000)), "10.0.0.6", 0.0)

    assert window.refusals[0].host == "gpu?[2J"
    assert len(window.refusals[1].host) == 253
    assert len(refusal.reason) == len(window.refusals[2].reason) == 1000
    assert refusal.reason.endswith("…")


# --------------------------------------------------------------------------------------------- any order


steps = st.tuples(
    st.sampled_from(["hello", "probe", "leave", "rollback", "turn_away", "expire", "start", "verdict"]),
    st.integers(0, 5),
    st.integers(0, 3),
)


def step_into(window: JoinWindow, step: str, link: int, count: int, now: float) -> None:
    """One event, and what must be true of its answer."""
    match step:
        case "hello":
            window.hello(link, hello(f"gpu-{(link + count) % 6}", count), f"10.0.0.{link}", now)
        case "probe":
            answer = window.probe(link, report(), now)
            assert isinstance(answer, Refusal) or window.members[answer.host].ranks == answer.ranks
        case "leave":
            window.leave(link, "gone", now)
        case "rollback":
            window.rollback(link, now)
        case "turn_away":
            window.turn_away(link, now)
        case "expire":
            assert all(candidate.deadline <= now for candidate, _ in window.expire(now))
        case "start":
            may = window.config.start_mode != "auto" and window.joined_ranks >= window.quorum
            assert (window.start(now) is None) == may


@given(script=st.lists(steps, max_size=60), mode=st.sampled_from(["auto", "manual", "hybrid"]))
def test_no_order_of_events_breaks_the_window(script, mode):
    window = JoinWindow(replace(CONFIG, start_mode=mode), 0.0, probe_seconds=5.0)
    for now, (step, link, count) in enumerate(script):
        before = dict(window.members)
        step_into(window, step, link, count, float(now))
        window.check()
        assert window.next_deadline() is not None  # no window of 300 s ends within this script
        if step in ("hello", "expire", "start", "verdict"):
            assert window.members == before
        if window.verdict(float(now)).action == "form":
            break
    members = window.close(float(len(script)))
    assert [rank for member in members for rank in member.ranks] == list(range(window.joined_ranks))


def test_check_sees_every_broken_law():
    def renumber(window):
        window.members[1] = replace(window.members[1], ranks=(5,))

    def reorder(window):
        window.members = {1: replace(window.members[1], ranks=(0,)), 0: replace(window.members[0], ranks=(1,))}

    def misfile(window):
        window.members[1] = replace(window.members[1], host=7)

    def share_a_link(window):
        window.members[1] = replace(window.members[1], link=0)

    def share_a_name(window):
        window.members[1] = replace(window.members[1], name="gpu-0")

    def lose_devices(window):
        window.members[1] = replace(window.members[1], devices=())

    def forget_reference(window):
        window._reference = None

    def arm_auto(window):
        window.config = replace(window.config, start_mode="auto")
        window.armed = True

    broken = {
        "not contiguous": renumber,
        "not in admission order": reorder,
        "filed as": misfile,
        "a link has two hosts": share_a_link,
        "share a name": share_a_name,
        "a rank per device": lose_devices,
        "first member's": forget_reference,
        "automatic window was armed": arm_auto,
    }
    for message, spoil in broken.items():
        window = seated(1, 1)
        window.check()
        spoil(window)
        with pytest.raises(AssertionError, match=message):
            window.check()
