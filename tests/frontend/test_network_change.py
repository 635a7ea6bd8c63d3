"""The network changes while a page loads, as when a container starts on the machine. Browsers drop what waits then."""

from __future__ import annotations

import asyncio
import re
import subprocess

import pytest
from chromium import chromium, needs_chromium
from fixture_server import TICKET, Fixture, serve
from playwright.sync_api import expect
from starlette.types import ASGIApp, Receive, Scope, Send
from watched import Watched

from benchmarks import netns

WHY_NOT = netns.unavailable()
pytestmark = [pytest.mark.browser, needs_chromium, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")]
MAIN = "/app/main.js"
"""asks for the others"""
CONNECTIONS = 6
"""that Chromium opens to one origin; further requests wait in the browser, and those are dropped"""


class Interrupted(Fixture):
    """The network changes when a page waits for as many files as it may ask for at once; they come when it noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.noticed = asyncio.Event()

    def app(self) -> ASGIApp:
        inner = super().app()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and re.fullmatch(r"/app/\w+\.js", scope["path"]) and scope["path"] != MAIN:
                self.loop = asyncio.get_running_loop()
                self.asked += 1
                if self.asked == CONNECTIONS:
                    address = ("ip", "addr", "add", "10.65.0.1/24", "dev", netns.BRIDGE)
                    await asyncio.to_thread(subprocess.run, address, check=True)
                await self.noticed.wait()
            await inner(scope, receive, send)

        return app

    def go_on(self) -> None:
        """Called from the test's thread."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.noticed.set)


def test_the_page_comes_all_the_same() -> None:
    fixture = Interrupted()
    with netns.Network(), serve(fixture) as origin, chromium() as browser, Watched(browser, origin) as watched:
        with watched.page.expect_event("requestfailed", timeout=30_000):
            watched.page.goto(f"{origin}/#ticket={TICKET}", wait_until="commit")
        fixture.go_on()
        expect(watched.page.get_by_role("heading", level=1)).to_have_text("Runs")
        assert watched.ear.network_changes
        assert watched.wrongs == []
