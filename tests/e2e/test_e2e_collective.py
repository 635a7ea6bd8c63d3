"""Ranks that sum among themselves, over gloo: exact at any death, a new session each, a named end for the last."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from collective_runs import MODES, bring, freight, of_rank, rounds, sessions
from odometers import armed, assert_exact, injected
from safetensors.numpy import load_file
from stage import THOROUGH, Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_a_rank_killed_in_its_window_costs_one_session_and_no_exactness(marchline: Stage, tmp_path: Path) -> None:
    hosts = {"left": 2, "right": 2}
    run, ledger = freight(marchline, tmp_path, hosts, samples=400)
    left, right = bring(marchline, run, hosts)
    view = rounds(marchline, run, 2)
    session = view["session"]
    assert (session["state"], session["generation"], session["rebuilds"]) == ("live", 0, 0)
    assert session["transports"].keys() == {"0", "1", "2", "3"}
    assert all(text.startswith("gloo") for text in session["transports"].values()), session
    victim = next(rank["rank"] for rank in view["ranks"] if rank["host_name"] == "right")
    of_rank(right, victim).send_signal(signal.SIGKILL)
    view = marchline.ended(run)
    assert view["phase"] == "done", marchline.story(run)
    assert [death["signal"] for death in view["deaths"]] == ["SIGKILL"]
    assert view["samples_accepted"] == [400]
    assert [text[:9] for text in sessions(marchline, run)] == ["Session 0", "Session 1"], marchline.story(run)
    done = assert_exact(marchline, run, ledger)
    assert all(row["params_hash"] for row in done), "every rank reported one and the same checksum"
    without = [row for row in done if not row["realized"].get(str(victim))]
    assert 0 < len(without) < len(done), "rounds with it, and rounds without"
    assert left.wait() == 0


def survived_by_one(marchline: Stage, tmp: Path) -> int:
    """Two of three ranks are killed at the same time; the run that ended so."""
    hosts = {"pair": 2, "other": 1}
    run, ledger = freight(marchline, tmp, hosts, samples=1200)
    pair, _ = bring(marchline, run, hosts)
    view = rounds(marchline, run, 2)
    for rank in [rank["rank"] for rank in view["ranks"] if rank["host_name"] == "pair"]:
        of_rank(pair, rank).send_signal(signal.SIGKILL)
    view = marchline.ended(run, 60)
    assert view["phase"] == "failed", marchline.story(run)
    assert len(view["deaths"]) == 2
    assert_exact(marchline, run, ledger)
    return run


def assert_sums_to(marchline: Stage, run: int) -> None:
    """The newest checkpoint loads and is all rounds' work, those of the run that this one goes on from included."""
    w = 0.0
    for row in marchline.items(run, "rounds"):
        counts = [count for count in row["realized"].values() if count]
        w += sum(n * n for n in counts) / sum(counts)
    model = load_file(marchline.data_dir / marchline.items(run, "checkpoints")[-1]["path"])
    assert model.keys() == {"w", "b"}
    assert model["w"] == pytest.approx(w, rel=1e-5)


def test_a_single_survivor_saves_and_the_run_ends_by_name(marchline: Stage, tmp_path: Path) -> None:
    run = survived_by_one(marchline, tmp_path)
    assert marchline.items(run, "checkpoints")[-1]["reason"].startswith("SingleSurvivor"), marchline.story(run)
    assert "one is left" in marchline.view(run)["reason"]
    assert_sums_to(marchline, run)


@THOROUGH
@pytest.mark.parametrize("mode", [*MODES, "cpu_cadence"])
def test_what_a_single_survivor_saved_is_resumed(marchline: Stage, tmp_path: Path, mode: str) -> None:
    run = survived_by_one(marchline, tmp_path)
    again = marchline.post("runs", {"resume_from": f"{run}:last", "mode": mode}, expect=201)["id"]
    bring(marchline, again, {"new-a": 1, "new-b": 1, "new-c": 1})
    view = marchline.ended(again)
    assert view["phase"] == "done", marchline.story(again)
    assert view["samples_accepted"] == [1200]
    assert len(marchline.items(again, "rounds")) > len(marchline.items(run, "rounds"))
    assert_sums_to(marchline, again)


@THOROUGH
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hosts", [{"left": 2, "right": 2}, {"one": 3}, {"a": 1, "b": 1, "c": 1}])
def test_every_consensus_is_exact(marchline: Stage, tmp_path: Path, mode: str, hosts: dict[str, int]) -> None:
    run, ledger = freight(marchline, tmp_path, hosts, samples=240, mode=mode)
    bring(marchline, run, hosts)
    view = marchline.ended(run)
    assert view["phase"] == "done", marchline.story(run)
    assert view["samples_accepted"] == [240]
    assert len(sessions(marchline, run)) == 1
    done = assert_exact(marchline, run, ledger)
    if mode == "nccl_sync":
        assert {count for row in done for count in row["realized"].values()} <= {0, 1}


@THOROUGH
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "site", ["rank.pack", "rank.snapshot.before", "rank.snapshot.after", "rank.adopt", "rank.ack.after"]
)
def test_a_rank_killed_in_a_round_is_in_the_sum_or_it_is_not(
    marchline: Stage, tmp_path: Path, mode: str, site: str
) -> None:
    """Before everybody has the sum, the round is made again without it; after, its work counts."""
    hosts, journal = {"left": 2, "right": 2}, tmp_path / "injections"
    run, ledger = freight(marchline, tmp_path, hosts, samples=400, mode=mode)
    bring(marchline, run, hosts, armed(f"{site}?rank=2&round=3=kill", journal))
    view = marchline.ended(run)
    assert injected(journal) == [site]
    assert view["phase"] == "done", marchline.story(run)
    assert view["samples_accepted"] == [400]
    assert [death["rank"] for death in view["deaths"]] == [2]
    assert len(sessions(marchline, run)) == 2, marchline.story(run)
    done = assert_exact(marchline, run, ledger)
    if site != "rank.snapshot.after":  # there its last word and the news of its death race each other
        assert bool(done[3]["realized"].get("2")) == (site in ("rank.adopt", "rank.ack.after")), done[3]


@THOROUGH
@pytest.mark.parametrize(("first", "then"), [("nccl_cadence", "cpu_cadence"), ("cpu_cadence", "nccl_cadence")])
def test_a_run_goes_on_in_the_other_kind_of_mode(marchline: Stage, tmp_path: Path, first: str, then: str) -> None:
    hosts = {"left": 1, "right": 1}
    run, ledger = freight(marchline, tmp_path, hosts, samples=120, mode=first)
    bring(marchline, run, hosts)
    assert marchline.ended(run)["phase"] == "done", marchline.story(run)
    held = assert_exact(marchline, run, ledger)
    more = {"resume_from": f"{run}:last", "mode": then, "epochs": 2}
    again = marchline.post("runs", more, expect=201)["id"]
    bring(marchline, again, {"new-left": 1, "new-right": 1})
    view = marchline.ended(again)
    assert view["phase"] == "done", marchline.story(again)
    assert view["samples_accepted"] == [120, 120]
    assert len(marchline.items(again, "rounds")) > len(held)
    assert_sums_to(marchline, again)
