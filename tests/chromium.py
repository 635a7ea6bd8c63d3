"""The real browser that tests drive: where it is, how it is started, and why a test is skipped without it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

PATH = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(PATH is None, reason="no Chromium; install it with: apt-get install chromium")
# Without the background flags the browser calls home, which tests forbid.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium that ends with the block."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PATH, args=FLAGS)
        yield browser
        browser.close()
