"""What an event costs the core does not grow with the world: counted in calls, which no busy machine changes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.core import measure_world

TRAINING = ("BatchDone", "ChunkDone", "SyncAck")
"""the events of which a run of a thousand ranks is made"""


class Calls:
    """A stopwatch that counts calls of functions, Python's and built in ones, a millionth each."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> float:
        return self.count * 1e-6

    def note(self, _frame: FrameType, event: str, _argument: Any) -> None:
        self.count += event in ("call", "c_call")


@contextmanager
def counted() -> Iterator[Calls]:
    calls = Calls()
    before = sys.getprofile()
    sys.setprofile(calls.note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize(("mode", "per_host"), [("cpu_cadence", 8), ("cpu_cadence", 1), ("cpu_sync", 8)])
def test_what_an_event_costs_does_not_grow_with_the_world(mode: str, per_host: int) -> None:
    costs = []
    for ranks in (32, 1024):
        with counted() as calls:
            found = measure_world(ranks, per_host=per_host, mode=mode, events=6_000, stopwatch=calls)
        costs.append({kind: found["us_by_kind"][kind]["us"] for kind in TRAINING})
    small, large = costs
    assert all(large[kind] <= 1.25 * small[kind] for kind in TRAINING), costs


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
