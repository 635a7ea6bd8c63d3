"""A page that does not arrive whole asks again by itself, and says what keeps it when that does not help."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

import fixture_states as states
import pytest
from chromium import needs_chromium
from fixture_server import TICKET, Fixture
from playwright.sync_api import Browser, Page, Route, expect
from watched import PHONE, Watched

from backend.api.frontend import FRONTEND_DIR, Frontend

pytestmark = [pytest.mark.browser, needs_chromium]
LOST = "Failed to load resource: net::ERR_FAILED"


def lose(page: Page, path: str, times: int, method: str = "GET") -> Callable[[], int]:
    """The first answers for that path get lost; returns how often it was asked for."""
    asked = count()

    def handle(route: Route) -> None:
        if route.request.method == method and next(asked) < times:
            route.abort()
        else:
            route.continue_()

    page.route(re.compile(rf"{re.escape(path)}(\?.*)?$"), handle)
    return lambda: next(asked)


def only_losses(watched: Watched) -> None:
    assert [wrong for wrong in watched.wrongs if LOST not in wrong] == []


@pytest.mark.parametrize(
    "path",
    ["/app/main.js", "/app/heat_draw.js", "/app/style.css", "/vendor/preact.js", "/vendor/htm.js", "/vendor/uplot.css"],
)
def test_a_file_that_was_lost_is_asked_for_again(browser: Browser, origin: str, path: str) -> None:
    with Watched(browser, origin) as watched:
        asked = lose(watched.page, path, 1)
        page = watched.sign_in()
        assert asked() >= 2
        expect(page.locator(".topbar")).to_have_css("display", "flex")
        assert page.evaluate("history.state") is None, "the next load has all its tries again"
        only_losses(watched)


@pytest.mark.parametrize("path", ["/app/store.js", "/app/style.css"])
def test_a_page_that_does_not_come_says_so_and_keeps_the_ticket(browser: Browser, origin: str, path: str) -> None:
    with Watched(browser, origin) as watched:
        page = watched.page
        asked = lose(page, path, 4)
        page.goto(f"{origin}/#ticket={TICKET}")
        expect(page.get_by_role("status")).to_contain_text("A part of this page did not arrive.")
        assert asked() == 4
        only_losses(watched)
        watched.wrongs.clear()
        page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        page.get_by_role("button", name="Reload").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
        watched.check()


def test_what_is_not_installed_is_said_with_its_cure(
    browser: Browser, fixture: Fixture, origin: str, tmp_path: Path
) -> None:
    folder = tmp_path / "frontend"
    shutil.copytree(FRONTEND_DIR, folder, ignore=shutil.ignore_patterns("node_modules"))
    fixture.files = Frontend(folder)
    with Watched(browser, origin) as watched:
        page = watched.page
        page.goto(f"{origin}/#ticket={TICKET}")
        expect(page.get_by_role("status")).to_contain_text(re.compile("is not installed; run `make setup`"))
        for place in json.loads((folder / "vendor.json").read_text()).values():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(FRONTEND_DIR / place, folder / place)
        page.get_by_role("button", name="Reload").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Runs")


def test_a_browser_that_cannot_run_it_is_told_why(browser: Browser, origin: str) -> None:
    with Watched(browser, origin) as watched:
        body = "throw new TypeError('no such method');"
        watched.page.route("**/app/main.js", lambda route: route.fulfill(body=body, content_type="text/javascript"))
        watched.page.goto(origin)
        expect(watched.page.get_by_role("status")).to_contain_text(
            "cannot start in this browser: Uncaught TypeError: no such method"
        )
        expect(watched.page.get_by_role("button", name="Reload")).to_be_visible()


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_who_is_not_answered_at_the_door_goes_on_asking(browser: Browser, origin: str, method: str) -> None:
    with Watched(browser, origin) as watched:
        page = watched.page
        if method == "GET":
            watched.sign_in()
        asked = lose(page, "/api/v1/session", 3, method)
        if method == "GET":
            page.reload()
        else:
            page.goto(f"{origin}/#ticket={TICKET}")
        expect(page.get_by_role("alert")).to_contain_text("The controller does not answer. Is it still running?")
        expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
        expect(page.get_by_role("alert")).to_have_count(0)
        assert asked() == 4
        only_losses(watched)


@pytest.mark.parametrize(
    ("face", "path", "shown"),
    [
        ("#/", "/api/v1/runs", "History"),
        (f"#/runs/{states.DONE}", f"/api/v1/runs/{states.DONE}", "Loss"),
        (f"#/runs/{states.DONE}", f"/api/v1/runs/{states.DONE}/events", "Loss"),
        (f"#/runs/{states.DONE}", f"/api/v1/runs/{states.DONE}/rounds", "Loss"),
        (f"#/runs/{states.TRAINING}", f"/api/v1/runs/{states.TRAINING}", "Loss"),
    ],
)
def test_what_a_page_shows_first_is_asked_until_it_is_answered(
    browser: Browser, origin: str, face: str, path: str, shown: str
) -> None:
    with Watched(browser, origin) as watched:
        asked = lose(watched.page, path, 3)
        page = watched.page
        page.goto(f"{origin}/#ticket={TICKET}")
        expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
        page.goto(f"{origin}/{face}")
        expect(page.get_by_role("heading", name=shown, exact=True)).to_be_visible()
        if face != "#/":
            expect(page.locator(".plot").first).to_be_visible()
        expect(page.get_by_role("alert")).to_have_count(0)
        assert asked() >= 4
        only_losses(watched)


@pytest.mark.parametrize(("status", "again"), [(502, True), (503, True), (504, True), (500, False)])
def test_who_says_later_is_asked_again_and_who_failed_is_not(
    browser: Browser, origin: str, status: int, again: bool
) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in()
        asked = count()

        def answer(route: Route) -> None:
            if next(asked) == 0:
                route.fulfill(status=status, json={"title": "Trouble", "detail": "It cannot be said now."})
            else:
                route.continue_()

        page.route(f"**/api/v1/runs/{states.DONE}", answer)
        page.goto(f"{origin}/#/runs/{states.DONE}")
        if again:
            expect(page.get_by_role("heading", name="Loss", exact=True)).to_be_visible()
        else:
            expect(page.get_by_role("alert")).to_contain_text("It cannot be said now.")
            page.get_by_role("link", name="All runs", exact=True).click()
            expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
            assert next(asked) == 1


def test_the_form_and_the_command_are_asked_until_they_are_answered(browser: Browser, origin: str) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in()
        for path in ("jobs", "jobs/schema", "controller"):
            lose(page, f"/api/v1/{path}", 2)
        page.goto(f"{origin}/#/runs/new")
        expect(page.get_by_role("textbox", name="Hidden")).to_be_visible()
        page.goto(f"{origin}/#/runs/{states.WAITING}")
        expect(page.locator(".command code")).to_contain_text("python -m worker --join")
        only_losses(watched)


def test_a_sign_out_that_does_not_arrive_is_said(browser: Browser, origin: str) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in()
        lose(page, "/api/v1/session", 1, "DELETE")
        page.get_by_role("button", name="Sign out").click()
        expect(page.locator(".toast")).to_contain_text("The controller does not answer.")
        expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        only_losses(watched)
