"""Links that flap, lose packets, come back all at once, or speak IPv6 (F35, F37, F41, F48)."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from stage import THOROUGH, Stage, stage, wait_for

from benchmarks import netns
from worker.agent import Agent, Patience
from worker.join_link import Target
from worker.membership import Offer, Waits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(590)]
WHY_NOT = netns.cannot_block()
needs_packets = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")
STORM = 50


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@THOROUGH
@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_a_run_over_ipv6(tmp_path: Path) -> None:
    with stage(tmp_path, "--host", "::1") as marchline:
        assert re.fullmatch(r"http://\[::1\]:\d+", marchline.url)
        run = marchline.create("odometer.py:Odometer", params={"samples": 24})
        marchline.worker("near", "cpu:1")
        marchline.worker("far", "cpu:1", "--stream-data")
        marchline.started(run, 2)
        view = marchline.ended(run)
        assert view["phase"] == "done", marchline.story(run)
        assert view["samples_accepted"] == [24]
        assert {member["address"] for member in view["members"]} == {"::1"}


@THOROUGH
@needs_packets
def test_a_link_that_flaps_costs_nobody(tmp_path: Path) -> None:
    """A second on, a second off, ten times, under a timeout of six: the host goes on or is dead, and is never stuck."""
    with netns.Network() as network, stage(tmp_path, "--host", "0.0.0.0", "--allow-host", network.address) as marchline:
        run, host, _ = _far_and_near(marchline, network)
        for _ in range(10):
            host.cut()
            _pass(1.0)
            host.mend()
            _pass(1.0)
        _still_at_it(marchline, run)


@THOROUGH
@needs_packets
def test_a_link_that_loses_packets_costs_nobody(tmp_path: Path) -> None:
    """Three packets of ten, in both directions; the kernel counts them."""
    with netns.Network() as network, stage(tmp_path, "--host", "0.0.0.0", "--allow-host", network.address) as marchline:
        run, host, _ = _far_and_near(marchline, network)
        chains = "".join(
            f"chain {hook} {{ type filter hook {hook} priority 0; numgen random mod 100 < 30 counter drop; }}; "
            for hook in ("input", "output")
        )
        subprocess.run(host.command("nft", f"table inet lossy {{ {chains} }}"), check=True)
        before = marchline.view(run)["round"]
        marchline.until(run, lambda view: view["round"] >= before + 5 or view["deaths"], "five rounds, or a death")
        listed = subprocess.run(
            host.command("nft", "-j", "list", "table", "inet", "lossy"), capture_output=True, check=True
        )
        lost = [int(count) for count in re.findall(rb'"packets": (\d+)', listed.stdout)]
        assert len(lost) == 2
        assert min(lost) >= 10, f"{lost} packets were lost"
        print(f"{lost} packets lost in {marchline.view(run)['round'] - before} rounds")
        subprocess.run(host.command("nft", "delete", "table", "inet", "lossy"), check=True)
        _still_at_it(marchline, run)


def _far_and_near(marchline: Stage, network: netns.Network) -> tuple[int, netns.Host, object]:
    run = marchline.create(
        "odometer.py:Odometer",
        params={"samples": 100_000, "sleep_ms": 10.0},
        initial_anchor=5,
        heartbeat_timeout_seconds=6,
        stall_seconds=60,
    )
    host = network.add()
    port = marchline.url.rpartition(":")[2]
    marchline.worker("near")
    far = marchline.worker("far", inside=host.command(), join=f"http://{network.address}:{port}")
    marchline.started(run, 2)
    marchline.until(run, lambda view: view["round"] >= 2, "two rounds")
    return run, host, far


def _pass(seconds: float) -> None:
    until = time.monotonic() + seconds
    wait_for(lambda: time.monotonic() >= until, "time to pass")


def _still_at_it(marchline: Stage, run: int) -> None:
    """The run goes on with whoever is left, and ends when it is told to."""
    before = marchline.view(run)["round"]
    view = marchline.until(run, lambda view: view["round"] > before + 2, "the run to go on")
    print(f"round {view['round']}, deaths: {[death['reason'] for death in view['deaths']]}")
    marchline.post(f"runs/{run}/stop")
    view = marchline.ended(run)
    assert view["phase"] == "done", marchline.story(run)


# ---------------------------------------------------------------------------------------------------- a storm


@asynccontextmanager
async def controller(tmp_path: Path, *options: str) -> AsyncIterator[Stage]:
    """A controller in a process of its own, beside this event loop."""
    context = stage(tmp_path, *options)
    running = await asyncio.to_thread(context.__enter__)
    try:
        yield running
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


@THOROUGH
async def test_fifty_hosts_that_come_back_at_once_all_come_in(tmp_path: Path) -> None:
    """Their controller is killed, and is back a second later: each dials by itself, from one address."""
    patience = Patience(persist=True, first_back_off_seconds=0.5)
    agents: list[asyncio.Task[object]] = []
    try:
        async with controller(tmp_path) as first:
            run = await asyncio.to_thread(first.create, "odometer.py:Odometer")
            token = (first.data_dir / "join.token").read_text().strip()
            target = Target(first.url.replace("http", "ws"), token)
            offer = Offer(name="", devices=(), job_dir=tmp_path, relay_only=True)
            for number in range(STORM):
                agent = Agent(target, replace(offer, name=f"host-{number}"), patience, Waits())
                agents.append(asyncio.create_task(agent.run()))
            await _all_in(first, run)
            first.process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(first.process.wait)
        async with controller(tmp_path, "--port", target.base.rpartition(":")[2]) as again:
            began, process = time.monotonic(), psutil.Process(again.process.pid)
            before = process.memory_info().rss
            run = await asyncio.to_thread(again.create, "odometer.py:Odometer")
            await _all_in(again, run)
            seconds, grown = time.monotonic() - began, process.memory_info().rss - before
            print(f"{STORM} hosts were back after {seconds:.1f} s; the controller grew by {grown >> 20} MiB")
            assert seconds < 30
            assert grown < 64 << 20
            assert (await asyncio.to_thread(again.view, run))["window"]["refusals"] == []
    finally:
        for task in agents:
            task.cancel()
        await asyncio.gather(*agents, return_exceptions=True)


async def _all_in(marchline: Stage, run: int) -> None:
    def look() -> bool:
        return len(marchline.view(run)["members"]) == STORM

    await asyncio.to_thread(wait_for, look, f"{STORM} hosts to be in", 60)
