"""Options and fixtures that all tests share."""

from __future__ import annotations

import pytest
from hypothesis import settings

# How long an example takes says something of the machine, and nothing of the code.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="record the scenario transcripts anew")
