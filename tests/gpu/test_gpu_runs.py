"""The whole product over NCCL: controller, agents, relays, and ranks on GPUs. Ranks have a GPU each where there are
enough, else they share the first."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from collective_runs import MODES, bring, freight, of_rank, rounds, sessions
from odometers import armed, assert_exact, injected
from stage import Stage

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(GPUS == 0, reason="there is no CUDA device here"),
]
HOSTS = ({"left": 1, "right": 1}, {"left": 2, "right": 2})


def name_of(hosts: dict[str, int]) -> str:
    return f"{sum(hosts.values())} ranks"


def is_live_over_nccl(view: dict[str, Any]) -> bool:
    session = view["session"]
    return session["state"] == "live" and all(text.startswith("NCCL") for text in session["transports"].values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hosts", HOSTS, ids=name_of)
def test_every_consensus_is_exact(marchline: Stage, tmp_path: Path, mode: str, hosts: dict[str, int]) -> None:
    run, ledger = freight(marchline, tmp_path, hosts, samples=240, mode=mode)
    bring(marchline, run, hosts, gpus=GPUS)
    assert is_live_over_nccl(rounds(marchline, run, 1))
    view = marchline.ended(run)
    assert view["phase"] == "done", marchline.story(run)
    assert view["samples_accepted"] == [240]
    assert len(sessions(marchline, run)) == 1
    assert_exact(marchline, run, ledger)


def test_the_cpu_reduce_does_the_same_for_gpus(marchline: Stage, tmp_path: Path) -> None:
    hosts = HOSTS[0]
    run, ledger = freight(marchline, tmp_path, hosts, samples=240, mode="cpu_cadence")
    bring(marchline, run, hosts, gpus=GPUS)
    view = marchline.ended(run)
    assert view["phase"] == "done", marchline.story(run)
    assert view["samples_accepted"] == [240]
    assert_exact(marchline, run, ledger)


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_killed_in_its_window_costs_one_rebuild(marchline: Stage, tmp_path: Path, mode: str) -> None:
    hosts = {"left": 2, "right": 1}
    samples = 2000 if mode == "nccl_cadence" else 600
    run, ledger = freight(marchline, tmp_path, hosts, samples=samples, mode=mode)
    left, _ = bring(marchline, run, hosts, gpus=GPUS)
    view = rounds(marchline, run, 2)
    victim = next(rank["rank"] for rank in view["ranks"] if rank["host_name"] == "left")
    of_rank(left, victim).send_signal(signal.SIGKILL)
    view = marchline.ended(run, 120)
    assert view["phase"] == "done", marchline.story(run)
    assert [death["signal"] for death in view["deaths"]] == ["SIGKILL"]
    assert view["samples_accepted"] == [samples]
    assert len(sessions(marchline, run)) == 2, marchline.story(run)
    assert_exact(marchline, run, ledger)


@pytest.mark.parametrize("site", ["rank.pack", "rank.snapshot.before", "rank.snapshot.after", "rank.adopt"])
def test_a_rank_killed_in_a_round_costs_one_rebuild(marchline: Stage, tmp_path: Path, site: str) -> None:
    """Before everybody has the sum, the round is made again without it; after, its work counts."""
    hosts, journal = {"left": 1, "right": 2}, tmp_path / "injections"
    run, ledger = freight(marchline, tmp_path, hosts, samples=400)
    bring(marchline, run, hosts, armed(f"{site}?rank=2&round=3=kill", journal), gpus=GPUS)
    view = marchline.ended(run, 120)
    assert injected(journal) == [site]
    assert view["phase"] == "done", marchline.story(run)
    assert view["samples_accepted"] == [400]
    assert len(sessions(marchline, run)) == 2, marchline.story(run)
    done = assert_exact(marchline, run, ledger)
    if site != "rank.snapshot.after":  # there its last word and the news of its death race each other
        assert bool(done[3]["realized"].get("2")) == (site == "rank.adopt"), done[3]
