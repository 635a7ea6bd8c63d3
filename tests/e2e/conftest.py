"""A controller for each test that asks for one, or for all of the modules whose tests leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from stage import Stage, stage

SHARING = ("async", "exactness", "faults", "non_finite", "reduce", "relay_only", "schedule")
"""modules whose tests end no controller and look at nothing but their own runs"""


@pytest.fixture(scope="session")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One controller for many tests."""
    with stage(tmp_path_factory.mktemp("controller")) as running:
        yield running


@pytest.fixture
def marchline(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    shares = request.module.__name__.removeprefix("test_e2e_") in SHARING
    with ExitStack() as stack:
        if shares:
            running = replace(request.getfixturevalue("controller"), tmp=tmp_path, workers=[])
            stack.callback(running.leave)
        else:
            running = stack.enter_context(stage(tmp_path))
        yield running
