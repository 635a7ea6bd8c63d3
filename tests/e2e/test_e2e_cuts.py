"""An upload is cut anywhere: no part of it is in the consensus; a host that reads slowly holds up nobody else."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path

import pytest
from odometers import assert_exact
from stage import THOROUGH, Stage, wait_for

from benchmarks.havoc.proxy import Proxy, proxied

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]
MEGABYTE = 1 << 20


def behind_proxies(marchline: Stage, stack: ExitStack, run: int, hosts: int) -> list[Proxy]:
    """Hosts of one rank each that stream their data, each through a proxy of its own; rank k is behind proxy k."""
    proxies = {}
    for number in range(hosts):
        proxy = stack.enter_context(proxied(marchline.url))
        marchline.worker(f"host-{number}", "cpu:1", "--stream-data", "--run", str(run), join=proxy.url)
        proxies[f"host-{number}"] = proxy
    marchline.started(run, hosts)
    view = marchline.until(run, lambda view: view["round"] >= 1, "a round with everybody")
    return [proxies[rank["host_name"]] for rank in sorted(view["ranks"], key=lambda rank: rank["rank"])]


@THOROUGH
def test_an_upload_is_cut_after_a_megabyte_of_many(marchline: Stage, tmp_path: Path) -> None:
    """200 MB of parameters: the host whose link breaks leaves nothing in the sum, and the other one goes on alone."""
    cut_uploads(marchline, tmp_path, elements=50_000_000, places=[MEGABYTE])


@THOROUGH
def test_uploads_are_cut_at_random_places(marchline: Stage, tmp_path: Path) -> None:
    """Ten of them, with hosts that are played, are in ``tests/runtime``."""
    elements, seed = 2_000_000, random.randrange(1 << 32)
    places = [random.Random(seed + number).randrange(1, 4 * elements) for number in range(2)]
    print(f"seed {seed}: cut after {places} bytes of {4 * elements}")
    cut_uploads(marchline, tmp_path, elements, places)


def cut_uploads(marchline: Stage, tmp_path: Path, elements: int, places: list[int]) -> None:
    ledger = tmp_path / "ledger.txt"
    hosts = len(places) + 1
    run = marchline.create(
        "freight.py:Freight",
        fixed_counts=list(range(hosts, 0, -1)),
        quorum=hosts,
        params={"samples": 10_000, "elements": elements, "path": str(ledger)},
    )
    with ExitStack() as stack:
        proxies = behind_proxies(marchline, stack, run, hosts)
        for victim, place in enumerate(places, start=1):
            proxies[victim].cut_after(place)
            wait_for(proxies[victim].cut.is_set, f"the upload of host {victim} to be cut")
            view = marchline.until(run, lambda view: len(view["deaths"]) >= victim, "the cut host to be lost")  # noqa: B023
            assert victim in {death["rank"] for death in view["deaths"]}
        before = view["round"]
        marchline.until(run, lambda view: view["round"] > before, "the last host to go on")
        marchline.post(f"runs/{run}/stop")
        view = marchline.ended(run)
    assert view["phase"] == "done", marchline.story(run)
    assert sorted(death["rank"] for death in view["deaths"]) == list(range(1, hosts)), "each once"
    rounds = assert_exact(marchline, run, ledger)
    assert [rank for rank, count in rounds[-1]["realized"].items() if count] == ["0"]
    for victim in range(1, hosts):
        accepted = [row["round"] for row in rounds if row["realized"].get(str(victim))]
        assert accepted == list(range(len(accepted))), "in every round up to its end, and in none after it"
        assert accepted, "and in the first"


def test_a_host_that_does_not_read_delays_nobody_else(marchline: Stage, tmp_path: Path) -> None:
    """Host 1 of one run takes nothing from its data link any more: its round stands still, and all else goes on."""
    ledger = tmp_path / "ledger.txt"
    other = marchline.create(
        "odometer.py:Odometer", fixed_counts=[3, 1], params={"samples": 1_000_000, "sleep_ms": 10.0}
    )
    for number in range(2):
        marchline.worker(f"other-{number}", "cpu:1", "--run", str(other))
    marchline.started(other, 2)
    slow = marchline.create(
        "freight.py:Freight",
        fixed_counts=[1, 1],
        params={"samples": 10_000, "elements": 4_000_000, "path": str(ledger)},
    )
    with ExitStack() as stack:
        (_, held) = behind_proxies(marchline, stack, slow, 2)
        held.hold("down", "data")
        stuck = stands_still(marchline, slow)
        passed = marchline.view(other)["round"]
        marchline.until(other, lambda view: view["round"] > passed + 10, "the other run to go on")
        assert marchline.view(slow)["round"] == stuck, "the slow host has held its round up all the while"
        marchline.post(f"runs/{other}/stop")
        assert marchline.ended(other)["phase"] == "done", marchline.story(other)
        assert marchline.view(slow)["round"] == stuck
        figures = marchline.metrics()
        held.release()
        marchline.until(slow, lambda view: view["round"] > stuck + 1, "the rounds to go on")
        marchline.post(f"runs/{slow}/stop")
        view = marchline.ended(slow)
    assert (view["phase"], view["deaths"]) == ("done", []), marchline.story(slow)
    # How late a loaded machine makes them is not for a test to say; a link that waits for the slow host would make them
    # as late as it is slow.
    assert figures["marchline_heartbeat_worst_late_seconds"] < 10
    assert figures["marchline_controller_heartbeat_worst_late_seconds"] < 10
    assert_exact(marchline, slow, ledger)


def stands_still(marchline: Stage, run: int) -> int:
    """The round at which the run stopped moving, which several looks at it agree on."""
    seen: list[int] = []

    def same() -> bool:
        seen.append(marchline.view(run)["round"])
        return len(seen) > 20 and len(set(seen[-20:])) == 1

    wait_for(same, "the round to stand still")
    return seen[-1]
