"""What an event costs the core does not grow with the world: measured, with room for a busy machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.core import LIMITS, measure_world


@pytest.mark.parametrize("ranks", sorted(LIMITS))
@pytest.mark.parametrize("mode", ["cpu_cadence", "cpu_sync"])
def test_an_event_costs_what_it_may(ranks: int, mode: str) -> None:
    cost = measure_world(ranks, per_host=8, mode=mode, events=20_000)
    assert cost["us_per_event"] <= LIMITS[ranks], cost["us_by_kind"]


def test_hosts_of_one_rank_each_cost_no_more() -> None:
    cost = measure_world(1024, per_host=1, mode="cpu_cadence", events=20_000)
    assert cost["us_per_event"] <= LIMITS[1024], cost["us_by_kind"]


def test_the_benchmark_prints_and_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "core.json"

    assert main(["core", "--sizes", "2,5", "--events", "400", "--json", str(file)]) == 0

    found = json.loads(file.read_text())
    assert [world["ranks"] for world in found["worlds"]] == [2, 5]
    assert all(world["us_per_event"] > 0 for world in found["worlds"])
    assert (found["benchmark"], found["mode"]) == ("core", "cpu_cadence")
    assert found["machine"]["python"]
    header, *rows = capsys.readouterr().out.splitlines()
    assert "us/event" in header
    assert [row.split()[0] for row in rows] == ["2", "5"]


def test_an_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["warp"])
    assert "core" in capsys.readouterr().err
