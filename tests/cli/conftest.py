"""One real controller for the command line's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cli_harness import Served, start_server, stop_server


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = start_server(tmp_path_factory.mktemp("served"))
    try:
        yield server
    finally:
        stop_server(server)
