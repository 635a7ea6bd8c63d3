"""The reduce benchmark: turns, figures and tables, and once the whole thing at its smallest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import pairs, reduce_words
from benchmarks.cohorts import pulse_of
from benchmarks.pairs import Turns, alternate, summary
from benchmarks.processes import Use, others


def test_contenders_go_in_turns() -> None:
    order: list[str] = []

    def contender(name: str) -> pairs.Repeat:
        def repeat(times: int) -> list[float]:
            order.extend([name] * times)
            return [0.001] * times

        return repeat

    found = alternate({"ours": contender("a"), "gloo": contender("b")}, Turns(turns=2, times=2))
    assert "".join(order) == "aabbaabb"
    assert found["seconds"] == {"ours": [0.001] * 4, "gloo": [0.001] * 4}


def test_disturbed_turns_are_done_again_and_the_quietest_count(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = iter([0.9, 0.1, 0.5, 0.0, 0.8, 0.7])
    seen = {"at": 0.0, "machine": 0.0}

    def use() -> Use:
        return Use(**seen, ours=0.0)

    def repeat(times: int) -> list[float]:
        disturbed = next(noise)
        seen["at"] += 1.0
        seen["machine"] += disturbed
        return [disturbed] * times

    monkeypatch.setattr(pairs, "use", use)
    found = alternate({"ours": repeat}, Turns(turns=2, times=1, again=3))
    assert found["seconds"]["ours"] == [0.0, 0.1]
    assert found["dropped"] == 2
    assert next(noise) == 0.8  # it stopped once two turns were quiet


def test_what_others_used_is_the_machine_less_ours() -> None:
    assert others(Use(0.0, 10.0, 4.0), Use(2.0, 14.0, 5.0)) == 1.5
    assert others(Use(0.0, 10.0, 4.0), Use(2.0, 11.0, 6.0)) == 0.0


def test_a_summary_is_in_milliseconds() -> None:
    assert summary([0.001, 0.010, 0.002]) == {"median_ms": 2.0, "min_ms": 1.0, "max_ms": 10.0, "times": 3}


def test_the_pulse_is_the_worst_of_all_hosts() -> None:
    text = """# HELP marchline_run_tick_latency_seconds Tick latency of a live run
marchline_run_tick_latency_seconds{quantile="0.5",run_id="1"} 0.001
marchline_run_tick_latency_seconds{quantile="0.99",run_id="1"} 0.004
marchline_event_loop_lag_worst_seconds 0.02
marchline_host_heartbeat_worst_late_seconds{host="a",run_id="1"} 0.1
marchline_host_heartbeat_worst_late_seconds{host="b",run_id="1"} 0.3
"""
    assert pulse_of(text) == {
        "tick_p50": 0.001,
        "tick_p99": 0.004,
        "loop_lag_max": 0.02,
        "heartbeat_late_max": 0.3,
    }


def test_a_part_that_cannot_be_done_says_why() -> None:
    assert reduce_words.links({"skipped": "network namespaces need root"}) == [
        "Limited links were left out: network namespaces need root."
    ]


@pytest.mark.slow
def test_it_runs_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    options = ["--only", "one-host", "--worlds", "2", "--sizes", "0.1", "--turns", "1", "--again", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "reduce", *options, "--json", str(target)],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(target.read_text())["one-host"]["rows"][0]
    assert row["ratio"] > 0 and row["ours"]["times"] == row["gloo"]["times"] == 10
    assert "| 2 | 0.1 |" in done.stdout
