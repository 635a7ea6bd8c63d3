"""The rigs of ranks and agents, and of whole runs, lie beside the other tests of workers and of the product."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "worker"), str(TESTS / "e2e")]

from stage import Stage, stage  # noqa: E402 found by that path


@pytest.fixture
def marchline(tmp_path: Path) -> Iterator[Stage]:
    with stage(tmp_path) as running:
        yield running
