"""A page of a real browser, signed in to canned data, and everything that goes wrong in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chromium import Ear
from fixture_server import TICKET
from playwright.sync_api import Browser, Page, expect

AXE = Path(__file__).resolve().parents[2] / "frontend" / "node_modules" / "axe-core" / "axe.min.js"
RULES = ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa", "best-practice"]
DESK = (1440, 900)
PHONE = (360, 740)

expect.set_options(timeout=15_000)


class Watched:
    """A page of its own, and everything that went wrong in it."""

    def __init__(self, browser: Browser, origin: str, *, scheme: str = "light", size: tuple[int, int] = DESK) -> None:
        self.origin = origin
        viewport = {"width": size[0], "height": size[1]}
        self.context = browser.new_context(color_scheme=scheme, viewport=viewport)  # type: ignore[arg-type]
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(15_000)
        self.ear = Ear(self.page, origin)
        self.wrongs = self.ear.wrongs

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: Any) -> None:
        self.context.close()

    def sign_in(self, face: str = "#/") -> Page:
        self.page.goto(f"{self.origin}/#ticket={TICKET}")
        expect(self.page.get_by_role("heading", level=1)).to_have_text("Runs")
        if face != "#/":
            self.page.goto(f"{self.origin}/{face}")
        return self.page

    def check(self) -> None:
        """Nothing went wrong, axe finds nothing, and nothing sticks out to the side."""
        assert self.wrongs == []
        assert self.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        self.page.evaluate("scrollTo(0, 0)")  # or the bar at the top covers half a control, which axe calls too small
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate(
            "rules => axe.run(document, {runOnly: rules})"
            ".then(r => r.violations.map(v => [v.id, v.nodes.slice(0, 3).map(n => n.target.join(' '))]))",
            RULES,
        )
        assert found == []
