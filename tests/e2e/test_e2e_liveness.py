"""Busy is not dead, and silent is not busy: batches that hold the interpreter, links that carry nothing one way or both
(cases F03, F09; faults F28 to F34)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest
from stage import Stage, stage, wait_for

from benchmarks import netns

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]
TIMEOUT = 3.0
"""seconds of silence after which a host is lost; the least that its heartbeat of 1 s allows"""


def test_a_batch_that_holds_the_interpreter_for_longer_than_the_timeout_is_busy(marchline: Stage) -> None:
    """No thread of that rank can say a word for 8 s; its agent says what it is doing, and nobody dies."""
    held = 8
    params = {"samples": 60, "kind": "hold", "rank": 1, "at": 7, "seconds": held}
    run = marchline.create("faulty.py:Faulty", params=params, heartbeat_timeout_seconds=TIMEOUT, stall_seconds=60)
    marchline.worker("quick")
    marchline.worker("busy")
    marchline.started(run, 2)

    def busy(view: dict) -> bool:
        return any(rank["busy"] and rank["doing_seconds"] > TIMEOUT + 1 for rank in view["ranks"])

    view = marchline.until(run, busy, "the rank to be shown as busy for longer than the timeout")
    (rank,) = [rank for rank in view["ranks"] if rank["busy"]]
    assert (rank["rank"], rank["doing"], rank["state"]) == (1, "working", "working")
    assert view["phase"] == "training"
    view = marchline.ended(run)
    assert (view["phase"], view["deaths"]) == ("done", []), marchline.story(run)
    assert view["samples_accepted"] == [60]


WHY_NOT = netns.cannot_block()


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")
def test_links_that_carry_nothing_are_found_within_the_timeout(tmp_path: Path) -> None:
    """A pulled cable, a link on which only the host is heard, and one on which only the controller is: nobody is told
    anything, and no packet comes back. Each host is lost at its timeout, ends by itself and leaves nothing; the one
    that is left trains on."""
    cuts = {"unplugged": "", "mute": "output", "deaf": "input"}
    with netns.Network() as network, stage(tmp_path, "--host", "0.0.0.0", "--allow-host", network.address) as marchline:
        run = marchline.create(
            "odometer.py:Odometer",
            quorum=4,
            params={"samples": 100_000, "sleep_ms": 10.0},
            initial_anchor=5,
            heartbeat_timeout_seconds=TIMEOUT,
            stall_seconds=300,
        )
        marchline.worker("local")
        hosts = {name: network.add() for name in cuts}
        port = marchline.url.rsplit(":", 1)[1]
        join = f"http://{network.address}:{port}"
        workers = {name: marchline.worker(name, inside=host.command(), join=join) for name, host in hosts.items()}
        marchline.started(run, 4)
        marchline.until(run, lambda view: view["round"] >= 2, "two rounds with everybody")
        processes = {name: [psutil.Process(w.process.pid), *w.children()] for name, w in workers.items()}
        began = time.monotonic()
        for name, hook in cuts.items():
            hosts[name].block(hook) if hook else hosts[name].cut()
        view = marchline.until(run, lambda view: len(view["deaths"]) == 3, "the three to be declared lost", 60)
        print(f"all declared {time.monotonic() - began:.1f} s after the cut", file=sys.stderr)
        for death in view["deaths"]:
            print(death["host_name"], death["reason"], file=sys.stderr)
        assert {death["host_name"] for death in view["deaths"]} == set(cuts)
        for name, worker in workers.items():
            code = worker.wait(60)
            print(f"{name} ended with {code} after {time.monotonic() - began:.1f} s", file=sys.stderr)
            assert code != 0, worker.output()
            wait_for(lambda name=name: not any(p.is_running() for p in processes[name]), f"{name}'s processes to end")
        before = marchline.view(run)["round"]
        marchline.until(run, lambda view: view["round"] > before + 1, "the last one to go on")
        for host in hosts.values():
            host.mend()
        marchline.post(f"runs/{run}/stop")
        view = marchline.ended(run)
        assert view["phase"] == "done", marchline.story(run)
        assert len(view["deaths"]) == 3
