"""No decision rests on the wall clock: it is set back and forth while runs go on, and hosts disagree about it (case
K10)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WALL = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today")}
READERS = {
    "backend/runtime/controller.py": "the one port through which the controller stamps what people read",
    "backend/runtime/view.py": "the default of the same stamp",
    "backend/store/store.py": "stamps rows",
    "worker/agent.py": "compared with times of the file system, to tidy up what a killed agent left",
}


@pytest.mark.parametrize("package", ["wire", "backend", "worker"])
def test_only_what_stamps_rows_and_files_reads_the_wall_clock(package: str) -> None:
    found = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if named and (node.value.id, node.attr) in WALL:
                found.add(path.relative_to(ROOT).as_posix())
    assert found == {name for name in READERS if name.startswith(package)}
