"""The collective benchmark: where ranks are, figures and tables, and once each part at its smallest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import collective_words
from benchmarks.collective_ranks import HOSTID_VARIABLE, Layout
from benchmarks.collective_training import run_figures
from benchmarks.entries import Played
from benchmarks.figures import EntryFailed
from benchmarks.waiting import Waiting, durations

THOROUGH = pytest.mark.skipif(
    not os.environ.get("MARCHLINE_TEST_THOROUGH"),
    reason="the other parts of the benchmark, half a minute; MARCHLINE_TEST_THOROUGH=1",
)


def test_ranks_share_a_gpu_only_where_there_are_too_few() -> None:
    one, two, none = Layout("cuda", 1), Layout("cuda", 2), Layout("cpu", 0)
    assert [one.shared(2), two.shared(2), two.shared(4), none.shared(4)] == [True, False, True, False]
    assert [two.device_of(rank) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    apart = [one.environment(rank, 2) for rank in range(2)]
    assert apart[0]["NCCL_HOSTID"] != apart[1]["NCCL_HOSTID"]
    assert apart[0]["NCCL_P2P_DISABLE"] == apart[0]["NCCL_SHM_DISABLE"] == "1"
    assert "NCCL_HOSTID" not in two.environment(0, 2)
    assert one.agent_environment(2)[HOSTID_VARIABLE] == "1"
    assert HOSTID_VARIABLE not in two.agent_environment(2)
    assert (one.backend, none.backend) == ("nccl", "gloo")


def test_a_repetition_lasts_from_the_last_to_begin_to_the_last_to_end() -> None:
    answers = [{"begun": [1.0, 5.0], "ended": [2.0, 6.5]}, {"begun": [1.5, 4.0], "ended": [1.75, 6.0]}]
    assert durations(answers) == [0.5, 1.5]


def test_a_process_that_fails_says_why() -> None:
    program = (
        "import sys; print('{}', flush=True); sys.stdin.readline(); print('{\"failed\": \"no room\"}', flush=True)"
    )
    with Waiting("nccl") as ranks:
        assert ranks.start([([sys.executable, "-c", program], {})]) == [{}]
        with pytest.raises(EntryFailed, match="no room"):
            ranks.ask({"act": "ours"})
        with pytest.raises(EntryFailed, match="ended"):
            ranks.ask({"act": "ours"})


def rounds(count: int) -> list[dict[str, Any]]:
    row = {
        "realized": {"0": 2, "1": 4},
        "samples": 48,
        "seconds": 0.5,
        "reduce_seconds": 0.01,
        "planned": {"0": 2, "1": 4},
    }
    return [row] * count


def test_a_run_comes_to_figures_by_its_rounds_alone_and_fastest_first() -> None:
    ranks = [{"rank": 0, "emulated_ms": 200.0}, {"rank": 1, "emulated_ms": 100.0}]
    view = {"ranks": ranks, "eval": {"epoch": 1, "metrics": {"loss": 1.25}}}
    found = run_figures(Played(view, rounds(6), Path()), (100.0, 200.0), 8)
    assert found["batches"] == (12, 6)
    assert found["seconds"] == pytest.approx(1.5)
    assert found["fraction"] == pytest.approx(96.0 / 120.0)
    assert found["idle"] == pytest.approx((0.2, 0.2))
    assert (found["loss"], found["round_ms"], found["samples"]) == (1.25, 10.0, 288)
    with pytest.raises(EntryFailed, match="evaluated"):
        run_figures(Played(view | {"eval": None}, rounds(6), Path()), (100.0, 200.0), 8)


def test_the_tables_have_a_line_for_each_row() -> None:
    times = {"median_ms": 12.0, "min_ms": 11.0, "max_ms": 30.0, "times": 20}
    row = {"ranks": 2, "shared": True, "params": 25e6, "bytes": 1e8, "ours": times, "bare": times, "torch": times}
    row |= {"ratio": 1.0, "ratio_torch": 1.0, "split_ms": {"sum": 10.0, "adopt": 2.0}, "transport": "NCCL 2.28.9 on lo"}
    lines = collective_words.sync({"rows": [row]})
    assert lines[-1].startswith("| 2, one GPU shared | 25 | 100 | 12.0 (11.0 to 30.0) |")
    assert lines[-3].count("|") == lines[-2].count("|") == lines[-1].count("|")

    notes = {"resident": 5e8, "threads": 7.0, "files": 20.0}
    told = {"rank": 0, "first": notes, "last": notes | {"threads": 8.0}, "most": notes | {"threads": 9.0}}
    lines = collective_words.memory({"rounds": 500, "params": 25e6, "transport": "gloo on lo", "rows": [told]})
    assert lines[-1] == "| 0 | 500, 500, 500 | 7, 8, 9 | 20, 20, 20 |"
    assert lines[-3].count("|") == lines[-2].count("|") == lines[-1].count("|")

    run = {"samples_per_second": 96.0, "fraction": 0.8, "idle": (0.2, 0.1), "round_ms": 9.5, "rounds": 12, "loss": 1.2}
    modes = {"nccl_cadence": [run, run | {"loss": 1.4}], "nccl_sync": [{"failed": "it was not through in time"}]}
    course = {"job": "x", "parameters": 1e6, "step_ms": 3.0, "ms": (50.0, 100.0), "ideal": 120.0, "samples": 288}
    lines = collective_words.training(course | {"seeds": 2, "modes": modes})
    assert lines[-3].startswith("| nccl_cadence | 96 (96 to 96) | 0.800 (0.800 to 0.800) | 20% 10% |")
    assert lines[-3].endswith("| 1.3000 (1.2000 to 1.4000) |")
    assert lines[-1] == "nccl_sync did not come to figures: it was not through in time"


def measured(tmp_path: Path, *options: str, seconds: float = 110) -> tuple[dict[str, Any], str]:
    target = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "collective", "--device", "cpu", *options, "--json", str(target)],
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(target.read_text()), done.stdout


SMALL = ("--ranks", "2", "--millions", "0.01", "--turns", "1", "--times", "2", "--again", "0", "--rounds", "20")


@pytest.mark.slow
def test_rounds_are_measured_against_sums(tmp_path: Path) -> None:
    found, told = measured(tmp_path, "--only", "sync", *SMALL)
    assert found["backend"] == "gloo"
    (row,) = found["sync"]["rows"]
    assert row["ratio"] > 0 and row["ours"]["times"] == row["bare"]["times"] == row["torch"]["times"] == 2
    assert "gloo" in row["transport"]
    assert "| 2 | 0.01 |" in told


@THOROUGH
@pytest.mark.slow
def test_memory_is_noted_from_the_first_round_to_the_last(tmp_path: Path) -> None:
    found, told = measured(tmp_path, "--only", "memory", *SMALL)
    for rank in found["memory"]["rows"]:
        assert rank["last"]["files"] <= rank["first"]["files"] + 1
    assert "Memory over 20 rounds" in told


@THOROUGH
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_job_trains_through_the_whole_product(tmp_path: Path) -> None:
    small = ("--epochs", "1", "--base-ms", "10", "--params", '{"width": 16}', "--batch-size", "128")
    found, told = measured(tmp_path, "--only", "training", "--modes", "nccl_cadence", *small, seconds=220)
    (run,) = found["training"]["modes"]["nccl_cadence"]
    assert run["fraction"] > 0 and run["loss"] > 0, run
    assert "| nccl_cadence |" in told
