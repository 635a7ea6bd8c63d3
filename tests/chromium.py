"""The real browser that tests drive: how it is started, why a test is skipped without it, what goes wrong in a page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright; make setup installs it")
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
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PATH, args=FLAGS)
        yield browser
        browser.close()


class Ear:
    """Hears what goes wrong in a page: its console, its scripts, requests off its origin. ``pardon`` is a part of the
    messages that the test provokes."""

    def __init__(self, page: Page, origin: str, pardon: str | None = None) -> None:
        self.wrongs: list[str] = []
        self.network_changes = 0
        """requests that were dropped for it: the machine's doing, which no page is to be blamed for"""
        self._origin = origin
        self._pardon = pardon
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.wrongs.append(f"script error: {error}"))
        page.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        if "net::ERR_NETWORK_CHANGED" in message.text:
            self.network_changes += 1
        elif message.type in ("error", "warning") and not (self._pardon and self._pardon in message.text):
            self.wrongs.append(f"console {message.type}: {message.text}")

    def _request(self, request: Request) -> None:
        if not request.url.startswith((f"{self._origin}/", "data:", "blob:")):
            self.wrongs.append(f"request off the origin: {request.url}")
