"""One browser a module, and a server of canned data for each test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from fixture_server import Fixture, serve

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from chromium import chromium  # it skips whoever imports it where there is no Playwright

    with chromium() as launched:
        yield launched


@pytest.fixture
def fixture() -> Fixture:
    return Fixture()


@pytest.fixture
def origin(fixture: Fixture) -> Iterator[str]:
    with serve(fixture) as address:
        yield address


@pytest.fixture
def empty_origin() -> Iterator[str]:
    with serve(Fixture(empty=True)) as address:
        yield address
