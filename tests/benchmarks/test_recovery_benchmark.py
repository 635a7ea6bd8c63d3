"""The recovery benchmark's figures, from rows and notes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from benchmarks.recovery_words import Kill, Restart, kill, report, restart, summary

START = 1_800_000_000.0


def at(seconds: float) -> str:
    return datetime.fromtimestamp(START + seconds, UTC).isoformat()


def rounds(*rows: tuple[float, dict[str, int]]) -> list[dict[str, Any]]:
    return [{"round": number, "at": at(seconds), "realized": done} for number, (seconds, done) in enumerate(rows)]


BEFORE = [(seconds, {"0": 5, "1": 5}) for seconds in (1.0, 1.5, 2.0, 2.5)]
DEATH = {"rank": 1, "at": at(2.9), "last_step": 28}


def test_the_next_round_is_the_first_without_the_dead() -> None:
    told = rounds(*BEFORE, (2.8, {"0": 5, "1": 5}), (3.2, {"0": 6}), (3.6, {"0": 6}))
    found = kill(told, [DEATH], START + 2.7)
    assert found is not None
    assert (round(found.detect, 3), round(found.committed, 3), found.window) == (0.2, 0.5, 0.5)
    assert found.redone == 28 - 25, "what no round held"


def test_there_are_no_figures_before_the_others_have_gone_on() -> None:
    assert kill(rounds(*BEFORE, (2.8, {"0": 5, "1": 5})), [DEATH], START + 2.7) is None
    assert kill(rounds(*BEFORE, (3.2, {"0": 6})), [], START + 2.7) is None


def test_a_restart_counts_from_the_kill_until_all_have_done_a_step_again() -> None:
    before = [(0, step, START + step / 10) for step in range(1, 71)]
    again = [(1, step, START + 20 + (step - 51) / 10) for step in range(51, 72)]
    notes = {0: before + again, 1: before[:-1] + [(start, step, when + 0.05) for start, step, when in again]}
    found = restart(notes, START + 7.0)
    assert found is not None
    assert (round(found.stepped, 2), round(found.caught_up, 2)) == (13.05, 15.05)
    assert found.redone == 2 * 20, "of both ranks"
    assert restart({0: before + again[:-1], 1: before}, START + 7.0) is None


def test_the_report_says_whether_the_target_was_met() -> None:
    def found(committed: float) -> dict[str, Any]:
        kills = [Kill(0.1, committed, 0.4, 3), Kill(0.3, committed, 0.4, 5), Kill(0.2, committed, 0.4, 4)]
        return {
            "ranks": 4,
            "mode": "cpu_cadence",
            "ms": 20.0,
            "batch_size": 32,
            "save_every": 50,
            "marchline": {"rank killed": summary(kills)},
            "torchrun": summary([Restart(6.0, 7.0, 100)]),
            "left_out": {"cable out": "no root"},
        }

    lines = report(found(2.3))
    assert "| rank killed | 3 | 0.20 | 2.30 | 0.40 | 4 |" in lines
    assert "| worker killed | 1 | 6.00 | 7.00 | 100 |" in lines
    assert "cable out was left out: no root." in lines
    assert "met at 2.30 s" in lines[-1]
    assert "MISSED at 2.50 s" in report(found(2.5))[-1]
