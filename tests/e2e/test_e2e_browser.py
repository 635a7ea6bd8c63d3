"""A person with a browser: three hosts arrive, Start is explained and pressed, allotments move, the history stays."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Ear, chromium, needs_chromium
from playwright.sync_api import Browser, Page, expect
from stage import ROOT, Stage, environment, stage

SPEEDS = {"swift": 20, "steady": 40, "slow": 80}
SCREENSHOTS = os.environ.get("MARCHLINE_SCREENSHOTS")
"""a directory for the README's pictures; none in an ordinary test run"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.timeout(300),
    needs_chromium,
]


class Watched:
    """A page, and what went wrong in it."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        # The browser itself reports an HTTP 409 as an error: that is Start being refused, which the test provokes.
        self.wrongs = Ear(page, origin, pardon="status of 409").wrongs

    def picture(self, name: str) -> None:
        if SCREENSHOTS:
            Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
            self.page.set_viewport_size({"width": 1280, "height": 1560 if name == "run" else 900})
            self.page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as launched:
        yield launched


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Stage]:
    """A controller whose jobs are the repository's, as in the demo."""
    with stage(tmp_path, job_dir=ROOT) as running:
        yield running


def sign_in(browser: Browser, marchline: Stage) -> Watched:
    """Open the one-time address that the command line prints."""
    command = [sys.executable, "-m", "backend", "link", "--url", marchline.url]
    token = ["--token-file", str(marchline.data_dir / "operator.token")]
    done = subprocess.run([*command, *token], cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
    watched = Watched(page, marchline.url)
    page.goto(done.stdout.strip())
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    assert "ticket" not in page.url, "the ticket does not stay in the address"
    return watched


def test_from_dial_in_to_history(browser: Browser, repository: Stage) -> None:
    run = repository.create(
        "examples/digits.py:Digits",
        name="first march",
        quorum=3,
        batch_size=16,
        epochs=12 if SCREENSHOTS else 6,
        initial_anchor=4,
    )
    watched = sign_in(browser, repository)
    page = watched.page
    page.get_by_role("link", name="first march").first.click()
    expect(page.get_by_role("heading", name="first march")).to_be_visible()

    # Too early: Start is there, and says why not.
    page.get_by_role("button", name="Start", exact=False).first.click()
    expect(page.get_by_text("0 of 3 needed ranks joined", exact=False).first).to_be_visible()

    for name, ms in SPEEDS.items():
        repository.worker(name, "cpu:1", "--emulate-ms-per-batch", str(ms))
    for name in SPEEDS:
        expect(page.get_by_text(name, exact=True).first).to_be_visible(timeout=60_000)
    repository.joined(run, 3)
    expect(page.get_by_text("Ready to start")).to_be_visible()
    expect(page.get_by_text("emulated", exact=False).first).to_be_visible()
    watched.picture("staging")

    page.get_by_role("button", name="Start", exact=False).first.click()
    expect(page.get_by_text("sets the pace", exact=False).first).to_be_visible(timeout=90_000)
    rounds = repository.view(run)["round"]
    repository.until(run, lambda view: view["round"] >= max(rounds + 2, 30 if SCREENSHOTS else 6), "more rounds")
    watched.picture("run")

    expect(page.get_by_text("Done", exact=True).first).to_be_visible(timeout=120_000)
    view = repository.ended(run)
    assert view["phase"] == "done"

    page.reload()
    expect(page.get_by_role("heading", name="first march")).to_be_visible()
    expect(page.get_by_text("sets the pace", exact=False).first).to_be_visible()
    page.goto(f"{repository.url}/#/")
    expect(page.get_by_role("link", name="first march").first).to_be_visible()
    assert watched.wrongs == []


def test_a_death_is_on_the_page(browser: Browser, repository: Stage) -> None:
    run = repository.create(
        "tests/jobs/odometer.py:Odometer", name="unlucky", quorum=2, params={"samples": 900, "sleep_ms": 10.0}
    )
    watched = sign_in(browser, repository)
    for name in ("left", "right"):
        repository.worker(name, "cpu:1", job_dir=ROOT)
    repository.started(run, 2)
    watched.page.goto(f"{repository.url}/#/runs/{run}")
    repository.until(run, lambda view: view["round"] >= 2, "two rounds")
    repository.workers[1].child("worker.rank").kill()
    repository.until(run, lambda view: view["deaths"], "the death", 35)
    expect(watched.page.locator(".death").get_by_text("killed by SIGKILL")).to_have_count(1)
    expect(watched.page.get_by_text("right", exact=False).first).to_be_visible()
    repository.ended(run)
    expect(watched.page.get_by_text("Done", exact=True).first).to_be_visible()
    watched.picture("death")
    assert watched.wrongs == []


def test_a_stranger_is_asked_to_sign_in(browser: Browser, repository: Stage) -> None:
    page = browser.new_context().new_page()
    page.goto(repository.url)
    expect(page.get_by_text("one-time", exact=False).first).to_be_visible()
