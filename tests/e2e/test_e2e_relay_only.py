"""Relays above relays as real processes: exact, one model a round on the uplink, and lost by name."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from stage import THOROUGH, Stage, wait_for
from test_e2e_exactness import final_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
COUNTS = (6, 2, 1, 3, 1)
MODEL_BYTES = 4
"""the odometer is one f32"""


def odometer(marchline: Stage, windows: int) -> int:
    return marchline.create(
        "odometer.py:Odometer",
        fixed_counts=list(COUNTS),
        quorum=len(COUNTS),
        params={"samples": windows * sum(COUNTS)},
    )


def members(view: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {member["name"]: member for member in view["members"]}


def test_two_hosts_behind_one_and_one_beside_it_are_as_exact_as_all_of_them_alone(
    marchline: Stage, tmp_path: Path
) -> None:
    windows, results = 3, {}
    for relayed in (True, False):
        run = odometer(marchline, windows)
        site, through = marchline.relay(f"site-{run}") if relayed else (None, "")
        for number, (devices, join) in enumerate((("cpu:2", through), ("cpu:2", through), ("cpu:1", ""))):
            marchline.worker(f"host-{run}-{number}", devices, "--stream-data", join=join)
            marchline.joined(run, (2, 4, 5)[number])
        marchline.post(f"runs/{run}/start")
        view = marchline.ended(run, 240)
        assert view["phase"] == "done", marchline.story(run)
        rounds = marchline.items(run, "rounds")
        assert [row["realized"] for row in rounds] == [{str(rank): n for rank, n in enumerate(COUNTS)}] * windows
        assert all(row["params_hash"] for row in rounds), "every rank reported one and the same hash"
        uplinks = 2 if relayed else 3
        assert [(row["bytes_up"], row["bytes_down"]) for row in rounds] == [(uplinks * MODEL_BYTES,) * 2] * windows
        results[relayed] = final_model(marchline, run, tmp_path)["w"]
        if site is not None:
            assert site.wait() == 0, site.output()
            assert view["window"]["joined_hosts"] == 3
            assert [member["relay_only"] for member in members(view).values()] == [True, False, False, False]
    assert results[True].tobytes() == results[False].tobytes()  # type: ignore[attr-defined]
    expected = windows * sum(n * n for n in COUNTS) / sum(COUNTS)
    assert float(results[True]) == pytest.approx(expected, rel=1e-6)  # type: ignore[arg-type]


def test_a_relay_only_host_behind_another(marchline: Stage, tmp_path: Path) -> None:
    windows = 2
    run = odometer(marchline, windows)
    _, upper = marchline.relay("upper")
    wait_for(lambda: "upper" in members(marchline.view(run)), "upper to join")
    _, lower = marchline.relay("lower", join=upper)
    wait_for(lambda: "lower" in members(marchline.view(run)), "lower to join")
    for number, (devices, join) in enumerate((("cpu:2", lower), ("cpu:2", lower), ("cpu:1", upper))):
        marchline.worker(f"host-{number}", devices, join=join)
        marchline.joined(run, (2, 4, 5)[number])
    marchline.post(f"runs/{run}/start")
    view = marchline.ended(run, 240)
    assert view["phase"] == "done", marchline.story(run)
    rounds = marchline.items(run, "rounds")
    assert all(row["params_hash"] for row in rounds)
    assert [row["bytes_up"] for row in rounds] == [MODEL_BYTES] * windows, "one uplink carries five ranks"
    expected = windows * sum(n * n for n in COUNTS) / sum(COUNTS)
    assert float(final_model(marchline, run, tmp_path)["w"]) == pytest.approx(expected, rel=1e-6)  # type: ignore[arg-type]


def long_run(marchline: Stage) -> tuple[int, Any]:
    """Two hosts behind a relay-only one, one beside it, some rounds in."""
    params = {"samples": 4000, "sleep_ms": 10.0}
    run = marchline.create("odometer.py:Odometer", params=params, initial_anchor=5, quorum=3)
    site, through = marchline.relay("site")
    for name, join in (("left", through), ("right", through), ("beside", "")):
        marchline.worker(name, join=join)
    marchline.started(run, 3)
    roster = members(marchline.until(run, lambda view: view["round"] >= 2, "two rounds to close"))
    number = roster["site"]["host"]
    via = {name: member["via"] for name, member in roster.items()}
    assert via == {"site": None, "left": number, "right": number, "beside": None}
    return run, site


def goes_on(marchline: Stage, run: int) -> None:
    before = marchline.view(run)["round"]
    marchline.until(run, lambda view: view["round"] > before + 1, "the others to go on")
    marchline.post(f"runs/{run}/stop")
    assert marchline.ended(run)["phase"] == "done", marchline.story(run)


def test_a_host_behind_it_is_killed_and_the_others_go_on(marchline: Stage) -> None:
    run, site = long_run(marchline)
    (victim,) = [worker for worker in marchline.workers if worker.name == "right"]
    for child in victim.children():
        child.send_signal(signal.SIGKILL)
    victim.process.send_signal(signal.SIGKILL)
    view = marchline.until(run, lambda view: view["deaths"], "the death to be recorded", 35)
    assert {death["host_name"] for death in view["deaths"]} == {"right"}
    goes_on(marchline, run)
    assert site.wait() == 0, site.output()


def test_it_is_killed_and_its_hosts_are_lost_by_name(marchline: Stage) -> None:
    run, site = long_run(marchline)
    site.process.send_signal(signal.SIGKILL)
    expected = {"site": "lost", "left": "lost", "right": "lost", "beside": "training"}

    def as_expected(view: dict[str, Any]) -> bool:
        return {name: member["state"] for name, member in members(view).items()} == expected

    view = marchline.until(run, as_expected, "all three to be lost", 35)
    assert {death["host_name"] for death in view["deaths"]} == {"left", "right"}
    goes_on(marchline, run)
    for worker in marchline.workers:
        if worker.name in ("left", "right"):
            assert worker.wait() != 0


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=THOROUGH)])
def test_its_operator_ends_it_and_it_goes_at_once(marchline: Stage, number: signal.Signals) -> None:
    run, site = long_run(marchline)
    site.process.send_signal(number)
    assert site.wait(15) == 0, site.output()
    view = marchline.until(run, lambda view: len(view["deaths"]) == 2, "both hosts to be lost", 35)
    assert any(
        re.search(r"the operator of \S+ ended its agent \(SIG", row["text"]) for row in marchline.items(run, "events")
    )
    assert members(view)["site"]["state"] == "lost"
    goes_on(marchline, run)


def test_it_serves_run_after_run(marchline: Stage) -> None:
    site, through = marchline.relay("site", "--persist")
    workers = [marchline.worker(name, "cpu:1", "--persist", join=through) for name in ("left", "right")]
    for _ in range(2):
        run = marchline.create("odometer.py:Odometer", fixed_counts=[3, 1], params={"samples": 8})
        marchline.joined(run, 2)
        marchline.post(f"runs/{run}/start")
        view = marchline.ended(run, 240)
        assert view["phase"] == "done", marchline.story(run)
        assert [row["bytes_up"] for row in marchline.items(run, "rounds")] == [MODEL_BYTES] * 2, marchline.story(run)
    assert site.process.poll() is None
    assert all(worker.process.poll() is None for worker in workers)
