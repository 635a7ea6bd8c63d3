"""A controller for each test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from stage import Stage, stage


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One controller for all tests of a module that only ask, and are refused."""
    with stage(tmp_path_factory.mktemp("asked")) as running:
        yield running


@pytest.fixture
def marchline(tmp_path: Path) -> Iterator[Stage]:
    with stage(tmp_path) as running:
        yield running
