"""The window's life: ranks, comings and goings, the operator, deadlines, strangers (behaviour B7, B12 to B14)."""

import math

import pytest
from join_hosts import CONFIG, hello, join, report, seated

from backend.core.join_window import Admission, JoinWindow, Offer


def ranks_by_name(window: JoinWindow) -> dict[str, tuple[int, ...]]:
    return {member.name: member.ranks for member in window.members.values()}


# ----------------------------------------------------------------------------------------------- ranks


def test_ranks_follow_the_order_of_admission_not_of_the_hellos():
    window = seated()
    window.hello(1, hello("early", 2), "10.0.0.1", 0.0)
    window.hello(2, hello("late", 3), "10.0.0.2", 1.0)

    assert window.probe(2, report(), 2.0) == Admission(0, (0, 1, 2))
    assert window.probe(1, report(), 3.0) == Admission(1, (3, 4))
    assert window.joined_ranks == 5
    member = window.member_of_link(1)
    assert (member.name, member.address, member.joined_at, member.emulated) == ("early", "10.0.0.1", 3.0, False)
    assert [device.id for device in member.devices] == ["cuda:0", "cuda:1"]


def test_a_pretended_speed_is_carried():
    window = seated()
    join(window, 1, hello(emulate_ms_per_batch=40.0))

    assert window.member_of_link(1).emulated
    assert window.member_of_link(1).emulate_ms_per_batch == 40.0


def test_a_newest_admission_whose_reply_failed_is_rolled_back():
    window = seated(2, 1)

    member = window.rollback(1, 5.0)

    assert member.name == "gpu-1"
    assert ranks_by_name(window) == {"gpu-0": (0, 1)}
    assert window.refusals[-1].code == "admission_rolled_back"
    assert window.refusals[-1].at == 5.0
    window.check()
    assert join(window, 7, hello("gpu-1")) == Admission(2, (2,))  # its name is free, its number is not used again


def test_ranks_behind_a_rolled_back_host_move_down():
    window = seated(2, 1, 3)

    window.rollback(0, 5.0)

    assert ranks_by_name(window) == {"gpu-1": (0,), "gpu-2": (1, 2, 3)}
    window.check()


def test_ranks_are_contiguous_when_the_world_forms_after_comings_and_goings():
    window = seated(2, 1, 3)
    assert window.leave(1, "the cable was pulled", 5.0).name == "gpu-1"
    join(window, 9, hello("gpu-9", 1))

    members = window.close(6.0)

    assert [(member.name, member.ranks) for member in members] == [
        ("gpu-0", (0, 1)),
        ("gpu-2", (2, 3, 4)),
        ("gpu-9", (5,)),
    ]


def test_losing_a_link_that_has_no_member():
    window = seated(1)
    window.hello(4, hello("gpu-x"), "10.0.0.4", 0.0)

    assert window.leave(4, "link lost", 1.0) is None
    assert window.candidate(4) is None
    assert window.leave(99, "link lost", 1.0) is None
    assert window.rollback(99, 1.0) is None
    assert ranks_by_name(window) == {"gpu-0": (0,)}


def test_links_and_candidates():
    window = seated(1)
    window.hello(4, hello("gpu-x"), "10.0.0.4", 2.0)

    assert window.links() == [0, 4]
    assert [(c.name, c.address, c.since) for c in window.candidates()] == [("gpu-x", "10.0.0.4", 2.0)]
    assert window.candidate(4).name == "gpu-x"
    assert window.candidate(0) is None
    assert window.member_of_link(4) is None


# ------------------------------------------------------------------------------------------- closing it


def test_once_closed_the_world_is_frozen():
    window = seated(1, 1)
    window.hello(4, hello("gpu-x"), "10.0.0.4", 0.0)
    window.close(10.0)

    assert window.hello(5, hello("gpu-y"), "10.0.0.5", 11.0).code == "window_closed"
    assert [candidate.link for candidate in window.candidates()] == [4]  # left behind, for the caller to send away
    assert window.probe(4, report(), 11.0).code == "window_closed"
    assert window.leave(0, "link lost", 12.0) is None
    assert window.rollback(1, 12.0) is None
    assert ranks_by_name(window) == {"gpu-0": (0,), "gpu-1": (1,)}
    for refusal in (window.start(12.0), window.extend(10.0, 12.0), window.change(quorum=2), window.turn_away(0, 12.0)):
        assert refusal.code == "window_closed"
    assert [missing.code for missing in window.missing(12.0)] == ["window_closed"]
    assert window.hello(6, hello("gpu-z"), "10.0.0.6", 12.0).reason.startswith("The join window of run 3 is closed")
    assert window.next_deadline() is None
    assert window.expire(9999.0) == []
    with pytest.raises(ValueError, match="closed already"):
        window.close(13.0)
    window.check()


# ------------------------------------------------------------------------------------- the start switch


@pytest.mark.parametrize(
    ("mode", "counts", "closed", "code", "words"),
    [
        ("auto", (2,), False, "start_mode_auto", "by the clock"),
        ("manual", (1,), False, "quorum_not_met", "1 of 2 needed ranks joined"),
        ("hybrid", (), False, "quorum_not_met", "0 of 2 needed ranks joined"),
        ("manual", (2,), True, "window_closed", "closed"),
    ],
)
def test_start_is_refused_by_name(mode, counts, closed, code, words):
    window = seated(*counts, start_mode=mode)
    if closed:
        window.close(1.0)

    refusal = window.start(2.0)

    assert refusal.code == code
    assert words in refusal.reason
    assert not window.armed


@pytest.mark.parametrize("mode", ["manual", "hybrid"])
def test_start_arms_and_the_next_verdict_forms(mode):
    window = seated(1, 1, start_mode=mode)
    assert (window.verdict(1.0).action, window.verdict(1.0).phase) == ("open", "staging")
    assert window.missing(1.0) == []

    assert window.start(2.0) is None
    assert window.start(2.0) is None  # pressing twice is pressing once

    assert window.armed
    assert (window.verdict(2.0).action, window.verdict(2.0).code) == ("form", "operator_start")


def test_an_armed_start_waits_when_the_quorum_is_lost_again():
    window = seated(1, 1)
    window.start(1.0)
    window.leave(1, "link lost", 2.0)
    assert (window.verdict(2.0).action, window.verdict(2.0).phase) == ("open", "waiting")

    join(window, 5, hello("gpu-5"), now=3.0)

    assert window.verdict(3.0).action == "form"


def test_start_leaves_hosts_that_still_probe_behind():
    window = seated(1, 1)
    window.hello(7, hello("slow"), "10.0.0.7", 1.0)

    assert window.missing(1.0) == []
    assert window.start(1.0) is None
    assert [member.name for member in window.close(1.0)] == ["gpu-0", "gpu-1"]
    assert window.probe(7, report(), 2.0).code == "window_closed"


# ------------------------------------------------------------------------------------ the operator's hand


def test_extending_an_open_window():
    window = seated()

    assert window.extend(60.0, 100.0) is None

    assert (window.window_seconds, window.cap_seconds) == (360.0, 660.0)
    assert window.window_remaining(100.0) == 260.0
    assert window.cap_remaining(100.0) == 560.0


def test_extending_a_window_that_is_past_opens_it_again_from_now():
    window = seated(1, 1, start_mode="auto", quorum=3)
    assert window.verdict(590.0).code == "grace"

    assert window.extend(60.0, 590.0) is None

    assert window.verdict(590.0).code == "window_open"
    assert (window.window_seconds, window.cap_seconds) == (650.0, 660.0)
    window.extend(500.0, 650.0)
    assert (window.window_seconds, window.cap_seconds) == (1150.0, 1160.0)


@pytest.mark.parametrize("seconds", [0.0, -5.0, math.nan, math.inf, 86401.0])
def test_a_senseless_extension_is_refused(seconds):
    window = seated()

    assert window.extend(seconds, 1.0).code == "extension_out_of_range"
    assert window.window_seconds == 300.0


def test_changing_quorum_and_target():
    window = seated(1, 1, start_mode="hybrid", quorum=3)

    assert window.change(target=5) is None
    assert (window.quorum, window.target) == (3, 5)
    assert window.change(quorum=2) is None
    assert (window.quorum, window.target) == (2, 5)  # what is not named is kept
    assert window.change(target=0) is None
    assert (window.quorum, window.target) == (2, None)
    assert window.change(quorum=2, target=2) is None
    assert window.verdict(1.0).code == "target_reached"


@pytest.mark.parametrize(
    ("mode", "change", "code"),
    [
        ("hybrid", {"quorum": 1}, "quorum_below_two"),
        ("hybrid", {"quorum": 4, "target": 3}, "target_below_quorum"),
        ("hybrid", {"target": 1}, "target_below_quorum"),
        ("manual", {"target": 4}, "manual_with_target"),
        ("hybrid", {"quorum": 5000}, "quorum_above_capacity"),
    ],
)
def test_a_change_is_refused_like_a_configuration(mode, change, code):
    window = seated(start_mode=mode)

    refusal = window.change(**change)

    assert refusal.code == code
    assert refusal.reason[0].isupper()
    assert refusal.reason.endswith(".")
    assert (window.quorum, window.target) == (2, None)


def test_a_changed_quorum_counts_against_a_later_target():
    window = seated(start_mode="hybrid")
    window.change(quorum=4)

    assert window.change(target=3).code == "target_below_quorum"


def test_a_quorum_may_be_as_large_as_the_world():
    window = JoinWindow(CONFIG, 0.0, world_capacity=8)

    assert window.change(quorum=8) is None
    assert window.change(quorum=9).code == "quorum_above_capacity"
    assert window.quorum == 8


def test_turning_a_host_away():
    window = seated(1, 1, 1)

    member = window.turn_away(1, 5.0)

    assert member.link == 1
    assert ranks_by_name(window) == {"gpu-0": (0,), "gpu-2": (1,)}
    assert (window.refusals[-1].host, window.refusals[-1].code) == ("gpu-1", "turned_away")
    again = window.hello(8, hello("GPU-1"), "10.0.0.8", 6.0)
    assert (again.code, again.permanent) == ("turned_away", True)
    assert window.turn_away(1, 7.0).code == "unknown_member"
    window.check()


# ------------------------------------------------------------------------------------------- its deadlines


def test_deadlines_are_the_window_and_then_the_cap():
    window = seated(1)
    assert window.next_deadline() == 300.0

    window.expire(300.0)
    assert window.next_deadline() == 600.0

    window.expire(600.0)
    assert window.verdict(600.0).action == "fail"
    assert window.next_deadline() is None


def test_looking_at_the_window_makes_nobody_oversleep():
    window = seated(1)

    window.verdict(301.0)
    window.missing(301.0)
    window.window_remaining(301.0)

    assert window.next_deadline() == 300.0


def test_every_time_counts_from_the_opening():
    window = JoinWindow(CONFIG, 1000.0)
    assert [window.verdict(at).code for at in (1000.0, 1299.9, 1300.0, 1599.9, 1600.0)] == [
        "window_open",
        "window_open",
        "grace",
        "grace",
        "quorum_not_met",
    ]
    assert window.next_deadline() == 1300.0

    assert window.extend(0.5, 1590.0) is None

    assert (window.window_seconds, window.cap_seconds) == (590.5, 600.5)
    assert window.extend(86400.0, 1590.0) is None
    assert window.window_seconds == 86990.5


def test_a_silent_candidate_is_refused_in_time():
    window = JoinWindow(CONFIG, 10.0, probe_seconds=30.0)
    window.hello(1, hello("slow"), "10.0.0.1", 11.0)
    window.hello(2, hello("slower"), "10.0.0.2", 12.0)
    assert window.next_deadline() == 41.0
    assert window.expire(40.9) == []

    ((candidate, refusal),) = window.expire(41.0)

    assert (candidate.link, refusal.code, refusal.permanent) == (1, "probe_timeout", False)
    assert "slow did not report on the job within 30 s" in refusal.reason
    assert window.refusals[-1].code == "probe_timeout"
    assert window.next_deadline() == 42.0
    assert window.probe(1, report(), 41.5).code == "probe_without_offer"
    assert isinstance(window.hello(1, hello("slow"), "10.0.0.1", 42.0), Offer)  # its name is free again


def test_a_late_candidate_stays_due_until_it_is_expired():
    window = JoinWindow(CONFIG, 0.0, probe_seconds=30.0)
    window.hello(1, hello(), "10.0.0.1", 0.0)

    assert window.next_deadline() == 30.0
    window.expire(100.0)
    assert window.next_deadline() == 300.0


def test_the_controllers_own_lag_is_given_to_candidates():
    window = JoinWindow(CONFIG, 0.0, probe_seconds=30.0)
    window.hello(1, hello(), "10.0.0.1", 0.0)

    window.lagged(25.0)
    window.lagged(-3.0)

    assert window.expire(54.0) == []
    assert len(window.expire(55.0)) == 1


def test_remaining_times_end():
    window = JoinWindow(CONFIG, 100.0)

    assert (window.window_remaining(150.0), window.cap_remaining(150.0)) == (250.0, 550.0)
    assert (window.window_remaining(400.0), window.cap_remaining(400.0)) == (None, 300.0)
    assert (window.window_remaining(900.0), window.cap_remaining(900.0)) == (None, 0.0)
