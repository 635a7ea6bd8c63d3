"""Ranks that sum among themselves, as the simulator plays them: who holds up whom, and what gets them out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backend.core import collective
from backend.core.collective import Collectives
from simulation.ordeals import draw
from simulation.script import Script
from simulation.syncing import JOIN_SECONDS, SUM_SECONDS
from simulation.theatre import Theatre
from simulation.trial import hold
from simulation.worlds import draw as draw_world
from wire.messages import SessionLost, SyncNow

WORLD = """
run samples=60 batch_size=1 mode=nccl_cadence quorum=3 target=3 initial_anchor=4 reduce=0.05
host a 10
host b 10
host c 10
"""


def play(*lines: str) -> Theatre:
    script = Script.parse(WORLD + "\n".join(lines))
    theatre = script.theatre()
    script.put_on(theatre)
    return theatre


def until(theatre: Theatre, condition: Callable[[], object]) -> None:
    while not condition():
        assert theatre.end is None and theatre.stage.next_at is not None
        theatre.run(until=theatre.stage.next_at + 1e-6)


def in_a_sum(theatre: Theatre) -> None:
    """All ranks are in the same sum."""
    until(theatre, lambda: len(theatre.ranks) == 3 and all(_sums(theatre, rank) for rank in theatre.ranks))


def _sums(theatre: Theatre, rank: int) -> bool:
    inside = theatre.ranks[rank].syncing.inside
    return inside is not None and isinstance(inside[1], tuple)


def dead(theatre: Theatre) -> set[int]:
    return {row["rank"] for row in theatre.rows("deaths")}


def rebuilds(theatre: Theatre) -> int:
    assert theatre.cohort.march is not None
    plane = theatre.cohort.march.plane
    assert isinstance(plane, Collectives)
    return plane.session.rebuilds


def test_a_stopped_member_holds_up_all_others_until_it_runs_again() -> None:
    theatre = play()
    in_a_sum(theatre)
    theatre.ranks[2].stop()
    theatre.run(until=theatre.now + 20.0)
    assert all(_sums(theatre, rank) for rank in theatre.ranks)
    theatre.ranks[2].go_on()
    theatre.run()
    assert theatre.end and theatre.end.phase == "done"
    assert rebuilds(theatre) == 0


def test_a_dead_member_holds_them_up_until_they_are_told() -> None:
    theatre = play()
    in_a_sum(theatre)
    theatre.ranks[2].alive = False  # nobody is told
    theatre.run(until=theatre.now + 20.0)
    assert _sums(theatre, 0) and _sums(theatre, 1)
    theatre.ranks[2].alive = True
    theatre.kill(2)
    theatre.run()
    assert theatre.end and theatre.end.phase == "done"
    assert rebuilds(theatre) == 1


@pytest.mark.parametrize("notice", [0.0, 0.5, 3.0])
def test_they_may_find_out_by_themselves(notice: float) -> None:
    """Before or after the controller: it costs one session either way."""
    theatre = play(f"run notice={notice}")
    in_a_sum(theatre)
    theatre.ranks[2].alive = False
    theatre.at(theatre.now + 0.7, lambda: (setattr(theatre.ranks[2], "_alive", True), theatre.kill(2)))
    theatre.run()
    assert theatre.end and theatre.end.phase == "done"
    assert rebuilds(theatre) == 1
    broke = [row for row in theatre.rows("events") if row["kind"] == "session_failed"]
    assert len(broke) == (1 if notice < 0.7 else 0)


def test_ranks_have_the_patience_of_real_ones_and_the_controller_has_less() -> None:
    """They can only say that somebody did not come; the controller sees who does not even try."""
    real = (Path(__file__).parents[2] / "worker" / "communicator.py").read_text()  # without the library behind it
    assert f"\nJOIN_SECONDS = {JOIN_SECONDS}\n" in real and f"\nCOLLECTIVE_SECONDS = {SUM_SECONDS}\n" in real
    assert collective.JOIN_SECONDS < JOIN_SECONDS


def test_nobody_is_heard_twice_of_a_session_that_is_over() -> None:
    theatre = play("when open 0 kill 2")
    heard: list[SessionLost] = []
    said = theatre.say
    theatre.say = lambda played, message, when: (  # type: ignore[method-assign]
        heard.append(message) if isinstance(message, SessionLost) else said(played, message, when)
    )
    theatre.run()
    assert theatre.end and theatre.end.phase == "done"
    assert heard == []


@pytest.mark.parametrize(
    ("act", "end"),
    [
        ("when open 1 mute 0", "done"),
        ("when open 0 outcast 1 1", "done"),
        ("when open 0 broken 1 2", "done"),
        ("when open 0 broken 1 3", "failed"),
        ("when open 0 crooked 1 2", "done"),
        ("when open 0 crooked 1 3", "failed"),
        ("when open 0 echo 1", "done"),
        ("when open 0 nan 1 1", "done"),
        ("when summed 1 kill 0", "done"),
        ("when joined 0 kill 0", "failed"),
        ("when name 0 kill 1", "failed"),
    ],
)
def test_what_a_rank_may_do_wrong(act: str, end: str) -> None:
    theatre = play(act)
    theatre.run()
    assert theatre.end and theatre.end.phase == end, theatre.end
    if end == "done":
        assert len({played.w for played in theatre.ranks.values() if played.rank not in dead(theatre)}) == 1


def test_a_third_of_all_worlds_is_of_the_collective_modes() -> None:
    for draw_one in (draw, draw_world):
        modes = [draw_one(seed).run["mode"] for seed in range(600)]
        assert 0.28 < sum(mode.startswith("nccl") for mode in modes) / len(modes) < 0.40
        assert {"nccl_sync", "nccl_cadence", "cpu_sync", "cpu_cadence", "cpu_async"} == set(modes)
        assert all(draw_one(seed).config().problems() == [] for seed in range(200))


def test_a_controller_that_dies_ends_a_run_in_sessions() -> None:
    """A session ends with its controller, so nobody waits for another one."""
    crashed = 0
    for seed in range(200):
        script = draw(seed)
        if script.config().collective and any(act.words[0] == "crash" for act in script.acts):
            trial = hold(script)
            crashed += trial.theatre.end is not None and trial.theatre.end.reason == "controller stopped"
            assert trial.failure is None
    assert crashed >= 3


def test_ranks_ask_for_nothing_that_no_session_gives() -> None:
    """The law behind it: a sum is asked for of exactly those who have joined."""
    theatre = play("when open 1 kill 1")
    asked: dict[tuple[int, int], set[int]] = {}
    theatre.intercept = lambda effect: bool(
        isinstance(getattr(effect, "message", None), SyncNow)
        and asked.setdefault((effect.message.round, effect.message.generation), set()).add(effect.rank)  # type: ignore[union-attr, func-returns-value]
    )
    theatre.run()
    assert {len(ranks) for (_, generation), ranks in asked.items() if generation == 0} == {3}
    assert {len(ranks) for (_, generation), ranks in asked.items() if generation == 1} == {2}
