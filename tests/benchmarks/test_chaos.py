"""The chaos campaign's own judgement: what it draws, and that it would see each thing that it looks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import chaos_words
from benchmarks.havoc import exact, expected
from benchmarks.havoc.exact import Reading, Saved, Trace
from benchmarks.havoc.expected import End, Struck
from benchmarks.havoc.plans import KINDS, STALLS, Fault, Plan, draw
from wire.failpoints import parse

REPOSITORY = Path(__file__).parent.parent.parent
ROOT = frozenset({"namespaces", "tmpfs"})
NOBODY: frozenset[str] = frozenset()
PLANS = [draw(seed, able) for able in (ROOT, NOBODY) for seed in range(400)]


class TestPlans:
    def test_a_seed_is_a_world(self) -> None:
        assert [draw(seed, ROOT) for seed in range(50)] == [draw(seed, ROOT) for seed in range(50)]
        assert len({draw(seed, ROOT).story()[-1] for seed in range(50)}) > 40

    def test_every_kind_is_drawn_and_what_needs_root_only_where_it_may_be(self) -> None:
        drawn = [{fault.kind for plan in half for life in plan.lives for fault in life} for half in _halves()]
        assert drawn[0] == KINDS.keys()
        assert drawn[1] == {name for name, kind in KINDS.items() if kind.needs not in ("cabled", "tmpfs")}
        assert all(host.way != "cabled" for plan in PLANS[400:] for host in plan.hosts)

    def test_faults_are_about_eight_a_world(self) -> None:
        assert 6 < sum(len(life) for plan in PLANS for life in plan.lives) / len(PLANS) < 10

    def test_a_plan_can_be_played_and_judged(self) -> None:
        for plan in PLANS:
            assert plan.ranks >= 2, plan.seed
            assert len(plan.lives) <= 2, plan.seed
            for number, life in enumerate(plan.lives):
                killed = [fault for fault in life if fault.kind.startswith("controller killed")]
                assert len(killed) == (number + 1 < len(plan.lives)), plan.seed
                assert killed in ([], list(life[-1:])), f"{plan.seed}: nothing can strike after it"
                assert sum(fault.kind in STALLS for fault in life) <= 1, plan.seed
                assert all(count == 1 for count in _doomed(plan, life).values()), f"{plan.seed}: a cause is open"
                times = [fault.at for fault in life if not fault.points]
                assert times == sorted(times), plan.seed


def _doomed(plan: Plan, life: tuple[Fault, ...]) -> Counter[tuple[str, int]]:
    """How many faults doom each rank; what they are aimed at is there."""
    found: Counter[tuple[str, int]] = Counter()
    for fault in life:
        kind = KINDS[fault.kind]
        parse(fault.points)
        if kind.aim in ("rank", "host"):
            host = plan.host(fault.host)
            assert fault.slot < host.ranks
            assert kind.needs in ("", host.way)
            if kind.dooms:
                found.update((host.name, slot) for slot in (range(host.ranks) if kind.aim == "host" else [fault.slot]))
    return found


def _halves() -> list[list[Plan]]:
    return [PLANS[:400], PLANS[400:]]


# ------------------------------------------------------------------------------------------------- what happened


def done_to(rank: int, kind: str, at: float = 0.0, *, hit: bool = True, life: int = 0) -> Struck:
    return Struck(Fault(kind, "host0"), life, at, hit, (rank,))


def died(rank: int, reason: str, signal: str = "") -> dict[str, Any]:
    return {"rank": rank, "reason": reason, "signal": signal}


def ended(
    *deaths: dict[str, Any], phase: str = "done", reason: str = "Stopped by operator", ends: int = 1, at: float = 60.0
) -> End:
    return End(phase, reason, at, (0, 1, 2), deaths, [{"kind": "run_ended", "text": reason}] * ends)


KILLED = died(1, "killed by SIGKILL", "SIGKILL")


class TestDeaths:
    def test_one_that_was_injected_is_recorded_once_with_its_cause(self) -> None:
        assert expected.deaths([done_to(1, "rank killed")], ended(KILLED)) == []

    @pytest.mark.parametrize(
        ("struck", "end", "words"),
        [
            ([done_to(1, "rank killed")], ended(), "rank 1 is not recorded dead"),
            ([done_to(1, "rank killed")], ended(KILLED, KILLED), "recorded dead 2 times"),
            ([], ended(KILLED), "nothing was done to it"),
            ([done_to(1, "rank killed", hit=False)], ended(KILLED), "nothing was done to it"),
            ([done_to(1, "rank stopped briefly")], ended(died(1, "no sign of life for 3 s")), "nothing was done to it"),
            ([done_to(1, "rank killed")], ended(died(1, "no sign of life for 3 s")), "of something else"),
            ([done_to(1, "rank killed")], ended(died(1, "killed by SIGSEGV", "SIGSEGV")), "of something else"),
            ([done_to(1, "host stopped")], ended(died(1, "TrainStall: no batch within 30 s")), "of something else"),
        ],
    )
    def test_everything_else_is_seen(self, struck: list[Struck], end: End, words: str) -> None:
        (problem,) = expected.deaths(struck, end)
        assert words in problem

    def test_what_a_dying_controller_could_not_know_is_no_fault(self) -> None:
        end = ended(phase="interrupted", reason="", at=60.0)
        assert expected.deaths([done_to(1, "rank killed", 59.0)], end) == []
        assert expected.deaths([done_to(1, "rank killed", 50.0)], end) != []

    def test_who_dies_on_the_way_out_may_be_on_record(self) -> None:
        late = [done_to(1, "rank killed", 60.5)]
        assert expected.deaths(late, ended(at=60.0)) == []
        assert expected.deaths(late, ended(KILLED, at=60.0)) == []
        assert expected.deaths([done_to(1, "rank killed", 59.5)], ended(at=60.0)) != []

    def test_causes_are_known_for_all_that_dooms(self) -> None:
        assert expected.CAUSES.keys() == {name for name, kind in KINDS.items() if kind.dooms}


class TestEnds:
    @pytest.mark.parametrize(
        ("struck", "end"),
        [
            ([], ended()),
            ([done_to(1, "controller killed")], ended(phase="interrupted", reason="its controller stopped")),
            (
                [done_to(rank, "relay killed") for rank in (0, 1, 2)],
                ended(phase="failed", reason="AllRanksLost: All 3 ranks are dead"),
            ),
            (
                [done_to(1, "rank stopped")],
                ended(phase="failed", reason="ReduceStall: round 7 did not close"),
            ),
        ],
    )
    def test_what_was_done_explains_it(self, struck: list[Struck], end: End) -> None:
        assert expected.ending(struck, end) == []

    @pytest.mark.parametrize(
        ("struck", "end", "words"),
        [
            ([], ended(phase="failed", reason="ReduceStall: round 7 did not close"), "nothing that was done explains"),
            (
                [done_to(1, "relay stopped in a fold")],
                ended(phase="failed", reason="ReduceStall: round 7 did not close"),
                "nothing that was done explains",
            ),
            ([], ended(phase="training", reason=""), "nothing that was done explains"),
            ([done_to(1, "controller killed")], ended(phase="done"), "nothing that was done explains"),
            ([done_to(rank, "relay killed") for rank in (0, 1, 2)], ended(phase="done"), "nothing that was done"),
            ([done_to(1, "rank stopped")], ended(), "ranks [1] stood still beyond the ceiling"),
            ([], ended(ends=0), "0 ends on record"),
            ([], ended(ends=2), "2 ends on record"),
        ],
    )
    def test_everything_else_is_seen(self, struck: list[Struck], end: End, words: str) -> None:
        (problem,) = expected.ending(struck, end)
        assert words in problem


# ------------------------------------------------------------------------------------------------- exact values

LINES = """\
0 0 0.0 0.0 0.0 0.0 0 1
1 0 0.0 0.0 0.0 0.0 2 3
0 0 1.0 1.0 1.0 1.0 4 5
1 0 1.6666666 1.6666666 1.5 1.5 6 7
0 0 1.6666666 1.6666666 1.5 1.5 6 7
"""
"""Rank 0 does two batches and rank 1 one; rank 1 dies over the next, and rank 0 does that one, too."""
ROUNDS = [
    {"round": 0, "samples": 6, "realized": {"0": 2, "1": 1}},
    {"round": 1, "samples": 2, "realized": {"0": 1}},
]


def trace(text: str = LINES, **changes: Any) -> Trace:
    whole = Trace(ROUNDS, exact.read_batches(text), Reading(0.0, 0.0), overlaps=False, whole=True)
    return replace(whole, **changes)


def test_what_is_right_is_found_right() -> None:
    assert exact.consensus(trace()) == [Reading(0, 0), Reading(5 / 3, 1.5), Reading(5 / 3 + 1, 2.5)]
    assert exact.odometer(trace()) == []
    assert exact.ledger([(trace(), None)], 8, [8]) == []
    assert exact.checkpoint(trace(), Saved(3, 1, Reading(8 / 3, 2.5))) == []
    assert exact.checkpoint(trace(), None) == []


@pytest.mark.parametrize(
    ("was", "would_be", "words"),
    [
        ("1.0 1.0 1.0 1.0 4 5", "1.0 1.5 1.0 1.0 4 5", "held parts of two consensus before its batch 1"),
        ("0 0 1.6666666 1.6666666", "0 0 2.0 2.0", "rank 0, round 1, batch 0: it held"),
        ("1 0 1.6666666 1.6666666", "1 0 1.0 1.0", "rank 1 went on from"),
        ("0 0 1.6666666 1.6666666 1.5 1.5 6 7\n", "", "accepts a batch of rank 0 that it never did"),
    ],
)
def test_a_wrong_value_is_seen(was: str, would_be: str, words: str) -> None:
    assert was in LINES
    problems = exact.odometer(trace(LINES.replace(was, would_be)))
    assert any(words in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("text", "finished", "words"),
    [
        (LINES.replace("4 5", "2 3"), [], "accepted more than once: 2, 3"),
        (LINES.replace("4 5", "4 9"), [8], "epoch 0 is over, and never accepted: 5"),
        (LINES, [6], "epoch 0 is over, and 6 samples of 8 are said to be accepted"),
        (LINES.replace("4 5", "4"), [], "the rounds say that 8 samples are accepted, 7 were"),
        (LINES.replace("0 0 1.0", "0 1 1.0"), [], "accepted in epochs that had not begun: 1"),
    ],
)
def test_a_sample_that_is_lost_or_doubled_is_seen(text: str, finished: list[int], words: str) -> None:
    problems = exact.ledger([(trace(text), None)], 8, finished)
    assert any(words in problem for problem in problems), problems


def test_of_a_run_that_was_resumed_only_what_its_checkpoint_holds_counts() -> None:
    again = "0 0 1.6666666 1.6666666 1.5 1.5 6 7\n"
    rounds = [{"round": 1, "samples": 2, "realized": {"0": 1}}]
    second = Trace(rounds, exact.read_batches(again), Reading(5 / 3, 1.5), overlaps=False, whole=True)
    assert exact.odometer(second) == []
    assert exact.ledger([(trace(), 0), (second, None)], 8, [8]) == []
    assert exact.ledger([(trace(), 1), (second, None)], 8, None) == ["epoch 0: accepted more than once: 6, 7"]
    assert exact.checkpoint(second, Saved(2, 0, Reading(5 / 3, 1.5))) == [], "the one that it came with"


def test_of_ranks_that_work_ahead_only_what_no_round_overwrites_is_known() -> None:
    ahead = trace(LINES.replace("0 0 1.6666666 1.6666666", "0 0 2.0 2.0"), overlaps=True)
    assert exact.odometer(ahead) == []
    assert exact.checkpoint(ahead, Saved(3, 1, Reading(8 / 3, 2.0))) == [], "buffers are overwritten"
    assert exact.checkpoint(ahead, Saved(3, 1, Reading(9 / 3, 2.5))) != []
    torn = trace(LINES.replace("1.0 1.0 1.0 1.0 4 5", "1.0 1.5 1.0 1.0 4 5"), overlaps=True)
    assert exact.odometer(torn) != []


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (Saved(3, 1, Reading(5 / 3, 2.5)), "checkpoint 3 holds"),
        (Saved(3, 7, Reading(5 / 3, 2.5)), "of round 7, of which there is no row"),
        (Saved(3, 1, Reading(8 / 3, 2.5), whole=False), "parts of two consensus"),
        (Saved(3, -1, Reading(0, 0), error="its checksum differs"), "does not load: its checksum differs"),
    ],
)
def test_a_wrong_checkpoint_is_seen(saved: Saved, words: str) -> None:
    (problem,) = exact.checkpoint(trace(), saved)
    assert words in problem


# ------------------------------------------------------------------------------------------------------- worlds


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(
    not os.environ.get("MARCHLINE_TEST_THOROUGH"),
    reason="two worlds of real processes: a minute; MARCHLINE_TEST_THOROUGH=1",
)
def test_two_worlds_are_struck_and_are_as_they_should_be(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    options = ["--no-root", "--seed", "2", "--faults", "7", "--workers", "1", "--json", str(told)]
    done = subprocess.run([sys.executable, "-m", "benchmarks", "chaos", *options], cwd=REPOSITORY, text=True)
    assert done.returncode == 0
    worlds = json.loads(told.read_text())["worlds"]
    assert worlds and all(world["ends"] for world in worlds)
    assert sum(fault["hit"] for world in worlds for fault in world["faults"]) >= 7


# ------------------------------------------------------------------------------------------------------- words


def test_the_report_counts_hits_and_names_what_is_broken() -> None:
    faults = [{"kind": "rank killed", "hit": True}, {"kind": "rank killed", "hit": False}]
    sound = {"seed": 1, "faults": faults, "problems": [], "place": "", "ends": ["done: Stopped"], "rounds": 9}
    broken = sound | {"seed": 2, "problems": ["hung: waited"], "place": "/somewhere", "ends": ["failed: TrainStall: x"]}
    found = {
        "worlds": [sound, broken],
        "detected": [("rank killed", 0.2), ("rank killed", 0.4)],
        "left_out": {"tmpfs": "no root"},
        "seconds": 12.0,
    }
    lines = chaos_words.report(found)
    assert "| rank killed | 2 | 2 | 0.3 (0.4) |" in lines
    assert "| **all** | **2** | 2 | |" in lines
    assert "2 worlds, 2 runs, 18 rounds: 1 done, 1 failed (TrainStall)." in lines
    assert "Left out, tmpfs: no root." in lines
    assert lines[-2:] == ["seed 2, /somewhere:", "  - hung: waited"]
