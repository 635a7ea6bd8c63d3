"""A death beside the checkpoints: whole, the newest word, and never a reason for trouble."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from backend.runtime.death_files import SCHEMA_VERSION, DeathFiles, death_file

RUN = {"id": 4, "name": "swift-badger", "job": "a.py:A", "mode": "cpu_cadence", "config": {"epochs": 3}}
ROW: dict[str, Any] = {"id": 9, "run_id": 4, "rank": 2, "reason": "grün", "signal": "SIGKILL", "waited": {"0": 1.5}}


def files(root: Path, tasks: list[asyncio.Task[None]]) -> DeathFiles:
    return DeathFiles(root, RUN, lambda work, name: tasks.append(asyncio.create_task(work, name=name)))


async def test_each_death_has_one_file_with_its_newest_word(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "4" / "checkpoints"
    tasks: list[asyncio.Task[None]] = []
    written = files(root, tasks)
    for recovery in ({"detect": 0.1}, {"detect": 0.1, "decide": 0.0, "resume": 0.5, "first_step": 0.2}):
        written.put(ROW | {"recovery": recovery})
        written.put(ROW | {"rank": 3, "recovery": recovery})
    await written.written()
    assert [await task for task in tasks] == [None]
    assert sorted(path.name for path in root.iterdir()) == ["model.rank2.death.json", "model.rank3.death.json"]
    told = json.loads(death_file(root, 2).read_text())
    assert told["schema_version"] == SCHEMA_VERSION
    assert (told["run_id"], told["run"], told["job"], told["mode"]) == (4, "swift-badger", "a.py:A", "cpu_cadence")
    assert (told["rank"], told["reason"], told["signal"], told["waited"]) == (2, "grün", "SIGKILL", {"0": 1.5})
    assert told["recovery"]["first_step"] == 0.2
    assert "id" not in told


async def test_a_disk_that_refuses_costs_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "runs").write_text("no directory")
    tasks: list[asyncio.Task[None]] = []
    written = files(tmp_path / "runs" / "4", tasks)
    with caplog.at_level(logging.ERROR):
        written.put(ROW)
        written.put(ROW | {"rank": 3})
        await written.written()
    for rank in (2, 3):
        assert f"model.rank{rank}.death.json could not be written" in caplog.text
    assert [await task for task in tasks] == [None]
