"""The fault catalogue in docs/reliability.md tells the truth: every fault has its row, and what rows name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from benchmarks.havoc.plans import KINDS
from simulation.probes import NAMES

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "reliability.md").read_text()
ROWS = re.findall(r"^\| F(\d+) \| (.+?) \| (.+) \|$", TEXT, re.MULTILINE)


def test_every_fault_has_one_row() -> None:
    assert [int(number) for number, _, _ in ROWS] == list(range(1, 97))
    assert all(where.strip() for _, _, where in ROWS)


def test_the_tests_that_it_names_exist() -> None:
    for name in re.findall(r"`(\S+\.py::\S+)`", TEXT):
        file, *path = name.split("::")
        tree: ast.AST = ast.parse((ROOT / "tests" / file).read_text())
        for part in path:
            found = [node for node in ast.walk(tree) if getattr(node, "name", None) == part]
            assert found, f"{name} does not exist"
            tree = found[0]


def test_the_sites_that_rows_name_must_be_reached() -> None:
    named = {site for _, _, where in ROWS for site in re.findall(r"ordeals: \*(.+?)\*", where)}
    assert named <= NAMES


def test_the_faults_of_the_campaign_that_rows_name_exist_and_each_is_named() -> None:
    told = [part for _, _, where in ROWS for part in where.split("; ") if part.startswith("chaos: ")]
    assert {name for part in told for name in re.findall(r"\*(.+?)\*", part)} == KINDS.keys()
