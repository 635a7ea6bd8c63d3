"""Worlds as text: what is read, what is refused, and the command line around them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backend.core.round_cost import link_bytes_per_second
from simulation.__main__ import main
from simulation.report import lines
from simulation.script import Script, ScriptError

TEXT = """
# two hosts, one of them far away
run samples=600 batch_size=2 mode=cpu_cadence quorum=3 target=3 model_mb=10 uplink_mbit=1000 verify_consensus=no
run max_failure=0.5 fixed_counts=4,2,1 settle=2
host near 10 20 jitter=0.1
host far 40 uplink_mbit=100 latency_ms=80
at 2.5 speed 2 20.0
at 3 kill 0 SIGTERM
when commit 2 unplug far
until 500
show ChunkDone
"""


def test_a_script_is_read() -> None:
    script = Script.parse(TEXT)
    config = script.config()
    assert (config.batch_size, config.mode, config.max_failure) == (2, "cpu_cadence", 0.5)
    assert (config.verify_consensus, config.fixed_counts) == (False, (4, 2, 1))
    assert [host.name for host in script.hosts] == ["near", "far"]
    assert [(pace.ms, pace.jitter) for pace in script.hosts[0].paces()] == [(10.0, 0.1), (20.0, 0.1)]
    far = script.line(script.hosts[1])
    assert (far.bytes_per_second, far.latency_seconds, far.ranks) == (link_bytes_per_second(100), 0.08, 1)
    assert script.line(script.hosts[0]).ranks == 2
    assert script.cost().model_bytes == 10e6
    assert script.cost().controller_bytes_per_second == link_bytes_per_second(1000), "as the hosts' own"
    assert [(act.at, *act.words) for act in script.acts] == [
        (2.5, "speed", "2", "20.0"),
        (3.0, "kill", "0", "SIGTERM"),
        (("commit", 2), "unplug", "far"),
    ]
    assert (script.until, script.show, script.ranks) == (500.0, {"ChunkDone"}, 3)


def test_what_is_written_is_what_was_read() -> None:
    script = Script.parse(TEXT)
    assert Script.parse(script.text()) == script


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("host a", "line 1 cannot be read: host a (a host needs a rank)"),
        ("host a 10 color=3", "unknown option color"),
        ("host a ten", "could not convert"),
        ("run\n\nat 3 explode 2", "line 3 cannot be read: at 3 explode 2 (no such act: explode)"),
        ("at soon kill 2", "could not convert"),
        ("when over 2 kill 1", "no such line"),
        ("when open 2", "no such act"),
        ("play on", "no such line"),
        ("run samples", "line 1 cannot be read"),
    ],
)
def test_a_line_that_cannot_be_meant_is_named(text: str, says: str) -> None:
    with pytest.raises(ScriptError) as error:
        Script.parse(text)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("run", "says"), [("colour=red", "run has no colour"), ("epochs=two", "run epochs=two"), ("gamma=", "run gamma=")]
)
def test_a_configuration_that_cannot_be_meant_is_named(run: str, says: str) -> None:
    with pytest.raises(ScriptError) as error:
        Script.parse(f"run {run}").config()
    assert says in str(error.value)


def test_acts_that_come_too_late_are_left_out() -> None:
    script = Script.parse(
        "run samples=8 batch_size=1 quorum=2 target=2 reduce=0\nhost a 1\nhost b 1\nat 0.06 kill 7\nat 5 kill 0\n"
        "at 0.001 speed 0 5\n"
    )
    play = script.theatre()
    script.put_on(play)
    play.run()
    assert play.end is not None and play.end.phase == "done"


@pytest.mark.parametrize("stage", ["open", "commit"])
def test_an_act_may_wait_for_a_round(stage: str) -> None:
    script = Script.parse(
        f"run samples=40 batch_size=1 quorum=3 target=3 mode=cpu_sync reduce=0.1\nhost a 1\nhost b 1\nhost c 1\n"
        f"when {stage} 4 kill 2\n"
    )
    play = script.theatre()
    script.put_on(play)
    play.run()
    (death,) = play.rows("deaths")
    rounds = play.rows("rounds")
    in_the_sum = 2 in rounds[4]["realized"]
    assert in_the_sum == (stage == "commit")
    assert rounds[4]["attempt"] == (1 if stage == "open" else 0)
    assert death["returned_samples"] == (1 if stage == "open" else 0)


# ------------------------------------------------------------------------------------------- the command line


def test_a_world_from_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    options = ["--ranks", "3", "--per-host", "2", "--batches", "9000", "--base-ms", "5", "--latency-ms", "2"]

    assert main([*options, "--settle", "2", "--check", "--jitter", "0.02", "--json", str(file)]) == 0

    found = json.loads(file.read_text())
    assert (found["ranks"], found["hosts"], found["phase"], found["mode"]) == (3, 2, "done", "cpu_cadence")
    assert set(found["allotments"]) == set(found["figures"]["idle"]) == {"0", "1", "2"}
    assert len(found["anchors"]) == found["rounds"]
    assert (
        found["figures"]["batches"] + sum(found["figures"]["batches_by_rank"].values())
        == 2 * found["figures"]["batches"]
    )
    assert found["core"]["events"] > 4000
    assert found["core"]["events_per_second"] == pytest.approx(found["core"]["events"] / found["core"]["seconds"])
    assert capsys.readouterr().out.splitlines() == lines(found)
    assert Script.parse(found["script"]).theatre(check=False).config.mode == "cpu_cadence"


def test_the_same_seed_gives_the_same_figures(tmp_path: Path) -> None:
    def figures(seed: str) -> object:
        file = tmp_path / "report.json"
        assert main(["--batches", "1500", "--jitter", "0.3", "--seed", seed, "--json", str(file)]) == 0
        found = json.loads(file.read_text())
        return found["figures"], found["anchors"], found["virtual_seconds"]

    assert figures("4") == figures("4") != figures("5")


def test_a_script_is_played_to_where_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "world.txt"
    file.write_text("run samples=6000 batch_size=1 quorum=2 target=2\nhost a 10\nhost b 20\nat 3 kill 1\nuntil 8\n")

    assert main(["--script", str(file)]) == 0

    printed = capsys.readouterr().out
    assert "2 ranks on 2 hosts, cpu_cadence: training after 8.0 virtual s" in printed


def test_too_short_a_world_has_no_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ranks", "2", "--batches", "10"]) == 0
    assert "Too few rounds to measure: the first 10 are left out." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--set", "epochs=0"], "epochs: epochs must be at least 1"),
        (["--set", "colour=red"], "run has no colour"),
        (["--ranks", "1"], "quorum must be at least 2"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 2
    assert says in capsys.readouterr().err


def test_a_world_that_fails_says_so_with_its_status(tmp_path: Path) -> None:
    file = tmp_path / "world.txt"
    file.write_text("run samples=600 batch_size=1 quorum=2 target=2 max_failure=1\nhost a 10\nhost b 20\nat 1 kill 1\n")
    assert main(["--script", str(file)]) == 1
