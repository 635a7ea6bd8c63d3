"""kill -9 at every stage of a round: the consensus is that of what was accepted, whole, and the others go on."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from odometers import armed, assert_exact, injected, readings
from stage import PATHS, PATIENCE, THOROUGH, Stage, stage

from wire.failpoints import injections

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

ELEMENTS = 600_000
"""three chunks of parameters"""
RANK_STAGES = ("rank.pack", "rank.snapshot.before", "rank.snapshot.after", "rank.adopt.block", "rank.ack.after")
RELAY_STAGES = (
    "relay.contribution.before",
    "relay.contribution.after",
    "relay.commit.before",
    "relay.commit.after",
)
STREAM_STAGES = ("relay.chunk.up", "relay.chunk.staged")
CONTROLLER_STAGES = {
    "plane.contribution": "before",
    "plane.summed": "before",
    "plane.finished.before": "before",
    "plane.finished.after": "before",
    "driver.commit.before": "before",
    "driver.commit.after": "after",
}
"""where the controller dies -> whether the round's commit was announced"""
ALWAYS = ("plane.summed", "driver.commit.after")


def cohort(marchline: Stage, ledger: Path, counts: list[int], samples: int, **config: Any) -> int:
    """A run with forced allotments, so that every subset of its ranks averages to something else."""
    params = {"samples": samples, "elements": ELEMENTS, "path": str(ledger)}
    return marchline.create("freight.py:Freight", fixed_counts=counts, quorum=len(counts), params=params, **config)


@pytest.mark.parametrize("path", ["shared memory", pytest.param("stream", marks=THOROUGH)])
def test_a_rank_is_killed_at_each_stage(marchline: Stage, tmp_path: Path, path: str) -> None:
    """Rank k dies in round k; rank 0 is left."""
    ledger, journal = tmp_path / "ledger.txt", tmp_path / "injections"
    points = ";".join(f"{site}@1?rank={k}&round={k}=kill" for k, site in enumerate(RANK_STAGES, start=1))
    run = cohort(marchline, ledger, [6, 5, 4, 3, 2, 1], 100)
    for number in range(2):
        marchline.worker(f"host-{number}", "cpu:3", *PATHS[path], env=armed(points, journal))
    marchline.started(run, 6)
    view = marchline.ended(run)
    assert view["phase"] == "done", marchline.story(run)
    assert injected(journal) == sorted(RANK_STAGES), marchline.story(run)
    assert [(death["rank"], death["signal"]) for death in view["deaths"]] == [(k, "SIGKILL") for k in range(1, 6)]
    rounds = assert_exact(marchline, run, ledger)
    assert view["samples_accepted"] == [100]
    for k, site in enumerate(RANK_STAGES, start=1):
        # Up to its declaration it counts only in the rounds before; once it was declared, the round may have it.
        accepted = [row["round"] for row in rounds if row["realized"].get(str(k))]
        assert accepted[:k] == list(range(k)), site
        if site in ("rank.adopt.block", "rank.ack.after"):
            assert accepted[k:] == [k], f"{site}: the round was committed, and stays"
        elif site == "rank.snapshot.after":
            assert accepted[k:] in ([], [k]), site
        else:
            assert accepted[k:] == [], f"{site}: nobody knew of its work"


@pytest.mark.parametrize(
    ("path", "stages"),
    [
        ("stream", (*STREAM_STAGES, "relay.commit.before")),
        pytest.param("stream", RELAY_STAGES, marks=THOROUGH),
        pytest.param("shared memory", RELAY_STAGES, marks=THOROUGH),
    ],
)
def test_a_relay_is_killed_at_each_stage(marchline: Stage, tmp_path: Path, path: str, stages: tuple[str, ...]) -> None:
    """The k-th host's relay dies in round k; host 0 is left."""
    ledger, journal = tmp_path / "ledger.txt", tmp_path / "injections"
    sites = ["", *stages]
    counts = list(range(len(sites), 0, -1))
    run = cohort(marchline, ledger, counts, len(sites) * sum(counts))
    for number, site in enumerate(sites):
        offset = "&offset=262144" if site in STREAM_STAGES else ""
        env = armed(f"{site}?round={number}{offset}=kill", journal) if site else None
        marchline.worker(f"host-{number}", "cpu:1", *PATHS[path], env=env)
    marchline.started(run, len(sites))
    view = marchline.ended(run)
    assert view["phase"] == "done", marchline.story(run)
    assert injected(journal) == sorted(sites[1:]), marchline.story(run)
    ranks = {int(rank["host_name"].removeprefix("host-")): rank["rank"] for rank in view["ranks"]}
    assert {death["rank"] for death in view["deaths"]} == set(ranks.values()) - {ranks[0]}
    rounds = assert_exact(marchline, run, ledger)
    assert view["samples_accepted"] == [len(sites) * sum(counts)]
    for number, site in enumerate(sites[1:], start=1):
        accepted = [row["round"] for row in rounds if row["realized"].get(str(ranks[number]))]
        assert accepted[:number] == list(range(number)), site
        if site.startswith("relay.commit"):
            assert accepted[number:] == [number], f"{site}: the round was committed, and stays"
        elif site in ("relay.contribution.before", "relay.chunk.up"):
            assert accepted[number:] == [], f"{site}: not all of its work was here"
        else:
            assert accepted[number:] in ([], [number]), site


@pytest.mark.parametrize(
    "site", [site if site in ALWAYS else pytest.param(site, marks=THOROUGH) for site in CONTROLLER_STAGES]
)
def test_the_controller_is_killed_at_each_stage(tmp_path: Path, site: str) -> None:
    """In round 2. What was not announced nobody adopts; what was, is the whole consensus of that round."""
    ledger, journal = tmp_path / "ledger.txt", tmp_path / "injections"
    fatal = 2
    with stage(tmp_path, env=armed(f"{site}@1?round={fatal}=kill", journal)) as marchline:
        run = cohort(marchline, ledger, [3, 1], 400, reattach_seconds=0)
        for number in range(2):
            watch = armed(f"rank.adopt?round={fatal}=delay:0", journal)
            options = PATHS["stream" if number else "shared memory"]
            marchline.worker(f"host-{number}", "cpu:1", *options, env=watch)
        marchline.started(run, 2)
        assert marchline.process.wait(PATIENCE) == -signal.SIGKILL
        codes = [worker.wait() for worker in marchline.workers]
        assert codes == [5, 5], [worker.output() for worker in marchline.workers]
    assert injected(journal) == [site]
    adopted = [line["where"]["rank"] for line in injections(journal) if line["site"] == "rank.adopt"]
    assert len(set(adopted)) <= (1 if CONTROLLER_STAGES[site] == "after" else 0), "adopted before it was committed"
    with stage(tmp_path) as again:
        view = again.view(run)
        assert view["phase"] == "interrupted"
        rounds = again.items(run, "rounds")
        # A round's row is written behind the round: the last of them may be lost, but none is there too many.
        assert [row["realized"] for row in rounds] == [{"0": 3, "1": 1}] * len(rounds)
        assert len(rounds) <= fatal
    for rank, seen in readings(ledger).items():
        per_window = (3, 1)[rank]
        exact = [2.5 * window + own for window in range(fatal + 1) for own in range(per_window)]
        assert [reading.params for reading in seen] == exact[: len(seen)]
        assert len(seen) == len(exact), "everybody had done the window whose round was never finished"
