"""Relay-only hosts in the core: admitted without ranks, counted by nothing, lost without a death of their own."""

from __future__ import annotations

from join_hosts import CONFIG, LAYOUT, devices, hello, join, report
from rehearsal import Rehearsal

from backend.core.config import RunConfig
from backend.core.join_window import Admission, JoinWindow, Refusal
from backend.core.vocabulary import ExpectRelays, LinkLost, RelayAttached, RelayLost, RoundBroken, SendHost
from wire.messages import RunEnded, WorldFormed

QUICK = RunConfig(job="odometer.py:Odometer", batch_size=1, initial_anchor=2, max_anchor=2, start_mode="auto", target=2)


def relay(host: str = "site", **changes: object) -> object:
    return hello(host, 0, relay_only=True, **changes)


def test_it_is_admitted_at_once_and_without_ranks() -> None:
    window = JoinWindow(CONFIG, 0.0)
    assert window.hello(1, relay(), "10.0.0.1", 0.0) == Admission(0, ())
    window.check()
    assert not window.candidates()
    assert window.joined_ranks == 0
    assert window.members[0].relay_only
    assert window.missing(0.0)[0].code == "quorum_not_met"


def test_the_first_host_with_ranks_sets_the_reference_and_gets_rank_0() -> None:
    window = JoinWindow(CONFIG, 0.0)
    window.hello(1, relay(), "10.0.0.1", 0.0)
    assert join(window, 2, hello("gpu-a", 2)) == Admission(1, (0, 1))
    refused = join(window, 3, hello("gpu-b"), report(layout=LAYOUT[:2]))
    assert isinstance(refused, Refusal)
    assert "gpu-a" in refused.reason
    assert "site" not in refused.reason


def test_the_reference_goes_with_the_last_host_that_has_ranks() -> None:
    window = JoinWindow(CONFIG, 0.0)
    window.hello(1, relay(), "10.0.0.1", 0.0)
    join(window, 2, hello("gpu-a", 2))
    window.leave(2, "gone", 1.0)
    window.check()
    assert join(window, 3, hello("gpu-b"), report(layout=LAYOUT[:2], dataset_size=9)) == Admission(2, (0,))


def test_it_offers_no_device_and_keeps_a_name_of_its_own() -> None:
    window = JoinWindow(CONFIG, 0.0)
    with_device = window.hello(1, relay("site", devices=devices(1)), "10.0.0.1", 0.0)
    assert isinstance(with_device, Refusal)
    assert (with_device.code, with_device.permanent) == ("relay_with_devices", True)
    join(window, 2, hello("gpu-a"))
    same = window.hello(3, relay("GPU-A"), "10.0.0.1", 0.0)
    assert isinstance(same, Refusal)
    assert same.code == "duplicate_host"
    without = window.hello(4, hello("gpu-b", 0), "10.0.0.1", 0.0)
    assert isinstance(without, Refusal)
    assert without.code == "no_devices"


def test_it_leaves_the_open_window_like_anybody() -> None:
    window = JoinWindow(CONFIG, 0.0)
    window.hello(1, relay(), "10.0.0.1", 0.0)
    join(window, 2, hello("gpu-a", 2))
    left = window.leave(1, "gone", 1.0)
    window.check()
    assert left is not None
    assert left.name == "site"
    assert window.members[1].ranks == (0, 1)


# ------------------------------------------------------------------------------------------- a world with one


def world() -> Rehearsal:
    play = Rehearsal(QUICK, samples=400)
    play.join("site", relay_only=True)
    play.join("a", 10)
    play.join("b", 10)
    return play


def test_a_run_with_one_trains_as_without() -> None:
    play = world()
    play.run()
    assert play.cohort.phase == "done"
    expected = [effect for _, _, effect in play.log if isinstance(effect, ExpectRelays)]
    assert expected == [ExpectRelays({0: (), 1: (0,), 2: (1,)})]
    told = [(e.link, e.message) for _, _, e in play.log if isinstance(e, SendHost)]
    formed = {link: m.assignments for link, m in told if isinstance(m, WorldFormed)}
    assert formed[play.hosts["site"].link] == []
    assert {link for link, m in told if isinstance(m, RunEnded)} == {host.link for host in play.hosts.values()}
    plain = Rehearsal(QUICK, samples=400)
    plain.join("a", 10)
    plain.join("b", 10)
    plain.run()
    assert play.consensus == plain.consensus


def test_its_loss_is_nobodys_death_and_the_hosts_behind_it_are_lost_by_name() -> None:
    play = world()
    play.run(0.5)
    assert play.cohort.phase == "training"
    play.feed(LinkLost(play.hosts["site"].link, "it was unplugged"))
    assert not play.rows("deaths")
    assert "relay_lost" in play.events()
    assert any("site, a relay without ranks, was lost" in row["text"] for row in play.rows("events"))
    play.feed(RelayLost(2, "the relay-only host 0 was lost"))
    play.run()
    assert play.cohort.phase == "done"
    (death,) = play.rows("deaths")
    assert (death["host_name"], death["rank"]) == ("b", 1)
    assert "relay-only host 0 was lost" in death["reason"]
    site = play.cohort.snapshot(play.now)["members"][0]
    assert (site["name"], site["state"], site["relay_only"]) == ("site", "lost", True)


def test_its_loss_while_the_world_forms_does_not_fail_the_run() -> None:
    play = world()
    play.spawns = False
    play.run(0.01)
    assert play.cohort.phase == "forming"
    play.feed(LinkLost(play.hosts["site"].link, "it was unplugged"))
    assert play.cohort.phase == "forming"
    assert "site" not in play.cohort.march.forming.missing()


def test_a_refused_contribution_of_its_own_loses_it_and_nobody_else_yet() -> None:
    play = world()
    play.run(0.5)
    for _ in range(100):
        opened = play.cohort.march.cycle.open
        if opened is not None and opened.finished is None:
            break
        play.run(play.now + 0.001)
    assert opened is not None
    play.feed(RoundBroken(opened.round, opened.attempt, "it brought rank 7", host=0))
    assert not play.rows("deaths")
    play.feed(RelayLost(1, "the relay-only host 0 was lost"))
    assert (opened.round, opened.attempt, opened.ranks) == (opened.round, 1, {1})
    assert [row["rank"] for row in play.rows("deaths")] == [0]
    play.run()
    assert play.cohort.phase == "done"


def test_the_roster_says_by_way_of_whom() -> None:
    play = world()
    play.spawns = False
    play.run(0.01)
    play.feed(RelayAttached(1, via=0))
    play.feed(RelayAttached(2))
    members = {member["name"]: member for member in play.cohort.snapshot(play.now)["members"]}
    assert {name: (m["relay_only"], m["via"]) for name, m in members.items()} == {
        "site": (True, None),
        "a": (False, 0),
        "b": (False, None),
    }
