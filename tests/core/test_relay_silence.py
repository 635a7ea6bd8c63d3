"""A relay that stands still while its agent beats on: its host is lost at a deadline, and nobody else (fault F11)."""

from __future__ import annotations

from typing import Any

import pytest
from rehearsal import Rehearsal

from backend.core.config import RunConfig
from backend.core.vocabulary import Effect, Lagged, OpenRound, RelayHeard

TIMEOUT, BEAT = 30.0, 1.0
"""seconds, as they are by default"""


def formed(*hosts: tuple[float, ...], samples: int = 20_000, **changes: Any) -> Rehearsal:
    world = sum(map(len, hosts))
    values = {"batch_size": 1, "initial_anchor": 2, "quorum": world, "target": world} | changes
    play = Rehearsal(RunConfig("odometer.py:Odometer", **values), samples=samples)
    for index, paces in enumerate(hosts):
        play.join(f"host-{index}", *paces)
    return play


def stops_relay_at_open(play: Rehearsal, name: str, number: int) -> None:
    def strike(effect: Effect) -> bool:
        if isinstance(effect, OpenRound) and (effect.round, effect.attempt) == (number, 0):
            play.stop_relay(name)
        return False

    play.intercept = strike


@pytest.mark.parametrize("mode", ["cpu_sync", "cpu_cadence", "cpu_async"])
def test_its_host_is_lost_and_the_round_commits_without_it(mode: str) -> None:
    play = formed((10.0, 10.0), (10.0,), mode=mode)
    stops_relay_at_open(play, "host-0", 3)
    play.run(until=60.0)
    deaths = play.rows("deaths")
    assert {death["rank"]: death["reason"] for death in deaths} == dict.fromkeys(
        (0, 1), f"its relay was not heard for {TIMEOUT + BEAT:g} s"
    )
    assert all(row["host"] != 1 or row["state"] != "lost" for row in play.rows("hosts"))
    assert [row["attempt"] for row in play.rows("rounds") if row["round"] == 3] == [1], "tried again without it"
    assert play.end is None
    assert play.rows("rounds")[-1]["round"] > 10, "the others go on"


def test_it_is_lost_exactly_a_heartbeat_after_the_timeout() -> None:
    play = formed((10.0,), (10.0,))
    play.run(until=5.0)
    play.stop_relay("host-1")
    march = play.cohort.march
    assert march is not None
    last = play.now - march.relays.silence(1, play.now)
    play.run(until=last + TIMEOUT + BEAT - 0.001)
    assert play.rows("deaths") == []
    play.run(until=last + TIMEOUT + BEAT)
    assert [death["rank"] for death in play.rows("deaths")] == [1]
    assert march.relays.hosts == [0]
    assert march.liveness.hosts == [0]


def test_a_relay_that_has_nothing_to_pass_on_is_heard_all_the_same() -> None:
    """One batch takes longer than the timeout: no rank says a word meanwhile."""
    play = formed((100_000.0,), (100_000.0,), samples=4)
    play.run(until=1000.0)
    assert play.end is not None
    assert (play.end.phase, play.rows("deaths")) == ("done", [])


def test_what_its_ranks_say_shows_that_it_runs() -> None:
    play = formed((10.0,), (10.0,))
    play.relay_beats = lambda host: None  # type: ignore[method-assign]
    play.run(until=100.0)
    assert play.rows("deaths") == []


def test_a_host_that_stands_still_as_a_whole_is_lost_by_that_name() -> None:
    for moment in (4.0, 4.3, 4.9):
        play = formed((10.0,), (10.0,))
        play.at(moment, lambda play=play: play.freeze("host-1"))
        play.run(until=60.0)
        assert [death["reason"] for death in play.rows("deaths")] == ["no sign of life for 30 s"]


def test_time_in_which_the_controller_was_away_is_nobodys_silence() -> None:
    play = formed((10.0,), (10.0,))
    play.run(until=5.0)
    march = play.cohort.march
    assert march is not None
    before = march.relays.next_deadline()
    assert before is not None
    play.feed(Lagged(500.0))
    assert march.relays.next_deadline() == before + 500.0


def test_while_the_world_forms_it_ends_the_run_by_name() -> None:
    play = formed((10.0,), (10.0,), forming_seconds=120.0)
    play.intercept = lambda effect: isinstance(effect, OpenRound)
    play.at(1.0, lambda: play.stop_relay("host-1"))
    play.run(until=100.0)
    assert play.end is not None
    assert play.end.reason.startswith("The cohort could not form: ")
    assert "its relay was not heard" in play.end.reason


def test_the_word_of_a_relay_whose_host_is_out_changes_nothing() -> None:
    play = formed((10.0,), (10.0,))
    play.run(until=5.0)
    play.stop_relay("host-1")
    play.run(until=50.0)
    march = play.cohort.march
    assert march is not None
    assert play.feed(RelayHeard(1)) == []
    march.relay_attached(1, None, play.now)
    assert march.relays.hosts == [0]


def test_a_run_that_tolerates_no_death_is_saved() -> None:
    play = formed((10.0,), (10.0,), max_failure=0.0)
    stops_relay_at_open(play, "host-1", 3)
    play.run(until=60.0)
    assert play.end is not None
    assert play.end.reason.startswith("MaxFailureExceeded: ")
    assert play.rows("checkpoints")
