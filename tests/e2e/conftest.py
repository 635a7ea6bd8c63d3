"""A controller for each test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from stage import Stage, stage


@pytest.fixture
def marchline(tmp_path: Path) -> Iterator[Stage]:
    with stage(tmp_path) as running:
        yield running
