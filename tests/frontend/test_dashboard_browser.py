"""The dashboard in a real browser, over canned data: every face in both themes, and what it does when pressed.

No console error, no request off the origin, nothing that the policy refuses or axe finds, no sideways scrolling.
"""

from __future__ import annotations

import re

import fixture_states as states
import pytest
from chromium import needs_chromium
from fixture_server import TICKET, Fixture
from playwright.sync_api import Browser, Locator, Page, expect
from watched import PHONE, Watched

pytestmark = [pytest.mark.browser, needs_chromium]
FACES = {
    "runs": "#/",
    "new": "#/runs/new",
    "waiting": f"#/runs/{states.WAITING}",
    "staging": f"#/runs/{states.STAGING}",
    "forming": f"#/runs/{states.FORMING}",
    "early": f"#/runs/{states.EARLY}",
    "training": f"#/runs/{states.TRAINING}",
    "wide": f"#/runs/{states.WIDE}",
    "done": f"#/runs/{states.DONE}",
    "failed": f"#/runs/{states.FAILED}",
    "hostile": f"#/runs/{states.HOSTILE}",
    "collective": f"#/runs/{states.COLLECTIVE}",
}


def tile(page: Page, label: str) -> Locator:
    """The figure under one label of the strip."""
    return page.locator(".tile", has=page.locator("dt", has_text=re.compile(f"^{label}$"))).locator(".tile-value")


def settle(page: Page, face: str) -> None:
    """Wait until the face shows what it is about."""
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    if face == "new":
        expect(page.get_by_role("textbox", name="Hidden")).to_be_visible()
    elif face == "runs":
        expect(page.get_by_role("heading", name="History")).to_be_visible()
    elif face in ("done", "failed"):
        expect(page.locator("[data-connection=history]")).to_be_visible()
        expect(page.locator(".plot").first).to_be_visible()
    else:
        expect(page.locator("[data-connection=live]")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("face", FACES)
def test_every_face_is_clean(browser: Browser, origin: str, face: str, scheme: str) -> None:
    with Watched(browser, origin, scheme=scheme) as watched:
        settle(watched.sign_in(FACES[face]), face)
        watched.check()
        watched.page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
        watched.check()


def test_without_runs_the_first_steps_are_taught(browser: Browser, empty_origin: str) -> None:
    with Watched(browser, empty_origin) as watched:
        page = watched.sign_in()
        expect(page.get_by_role("heading", name="No runs yet")).to_be_visible()
        expect(page.locator(".command code")).to_contain_text("python -m worker --join")
        watched.check()


def test_a_ticket_is_traded_once_and_leaves_the_address(browser: Browser, origin: str) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in()
        assert "ticket" not in page.url
        assert TICKET not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        watched.check()


def test_signing_in_with_the_token_says_what_is_wrong(browser: Browser, origin: str) -> None:
    with Watched(browser, origin) as watched:
        page = watched.page
        page.goto(origin)
        page.get_by_label("Operator token").fill("not it")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_contain_text("not the operator's")
        page.get_by_label("Operator token").fill(TICKET)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
        assert all("401" in wrong for wrong in watched.wrongs), watched.wrongs


def test_start_explains_what_is_missing(browser: Browser, origin: str, fixture: Fixture) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in(FACES["waiting"])
        expect(page.get_by_text("2 more ranks must join")).to_be_visible()
        page.get_by_role("button", name="Start training").click()
        expect(page.get_by_role("alert")).to_contain_text("cannot start yet: 2 more ranks must join")
        assert fixture.posted == [(f"POST {states.WAITING} start", None)]


def test_turning_a_host_away_asks_first_and_names_the_effect(browser: Browser, origin: str, fixture: Fixture) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in(FACES["staging"])
        page.get_by_role("button", name="Turn away birch").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("1 rank leaves with it")
        page.keyboard.press("Escape")
        expect(dialog).not_to_be_visible()
        assert fixture.posted == []
        page.get_by_role("button", name="Turn away birch").click()
        dialog.get_by_role("button", name="Turn away").click()
        expect(dialog).not_to_be_visible()
        assert fixture.posted == [(f"DELETE {states.STAGING} members/1", None)]
        assert watched.wrongs == []


def test_the_window_can_be_changed_and_extended(browser: Browser, origin: str, fixture: Fixture) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in(FACES["staging"])
        page.get_by_role("button", name="Keep the window open").click()
        page.get_by_text("Change the quorum").click()
        page.get_by_role("textbox", name="Quorum").fill("1")
        page.get_by_role("button", name="Change", exact=True).click()
        expect(page.get_by_text("Quorum must be at least 2")).to_be_visible()
        page.get_by_role("textbox", name="Quorum").fill("3")
        page.get_by_role("button", name="Change", exact=True).click()
        expect(page.get_by_text("The window was changed.")).to_be_visible()
        assert fixture.posted == [
            (f"POST {states.STAGING} window/extend", {"seconds": 300}),
            (f"PATCH {states.STAGING} window", {"quorum": 3}),
        ]


def test_stopping_names_its_effect(browser: Browser, origin: str, fixture: Fixture) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in(FACES["training"])
        page.get_by_role("button", name="Stop …").click()
        expect(page.get_by_role("dialog")).to_contain_text("averages it and saves a checkpoint")
        page.get_by_role("button", name="Stop the run").click()
        expect(page.get_by_role("dialog")).not_to_be_visible()
        assert fixture.posted == [(f"POST {states.TRAINING} stop", None)]


def test_a_run_that_trains_is_saved_when_asked(browser: Browser, origin: str, fixture: Fixture) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in(FACES["training"])
        page.get_by_role("button", name="Save now").click()
        expect(page.get_by_text("Saving when the round at hand is closed.")).to_be_visible()
        assert fixture.posted == [(f"POST {states.TRAINING} checkpoints", None)]


def test_a_run_that_is_over_is_resumed_from_its_last_checkpoint(
    browser: Browser, origin: str, fixture: Fixture
) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in(FACES["failed"])
        page.get_by_role("button", name="Resume …").click()
        expect(page.get_by_role("dialog")).to_contain_text("goes on from checkpoint 0 (round 37")
        page.get_by_role("button", name="Open the run").click()
        expect(page).to_have_url(re.compile(rf"#/runs/{states.WAITING}$"))
        assert fixture.posted == [("runs", {"resume_from": f"{states.FAILED}:last"})]


def test_a_run_whose_epochs_are_all_trained_is_asked_for_more(browser: Browser, origin: str, fixture: Fixture) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in(FACES["done"])
        page.get_by_role("button", name="Train on …").click()
        page.get_by_role("spinbutton", name="Epochs in all").fill("20")
        page.get_by_role("button", name="Open the run").click()
        expect(page).to_have_url(re.compile(rf"#/runs/{states.WAITING}$"))
        assert fixture.posted == [("runs", {"resume_from": f"{states.DONE}:last", "epochs": 20})]


def test_a_new_run_is_made_from_the_jobs_own_parameters(browser: Browser, origin: str, fixture: Fixture) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in(FACES["new"])
        page.get_by_role("textbox", name="Hidden").fill("many")
        page.get_by_role("button", name="Create run").click()
        expect(page.get_by_text("Hidden must be a number, such as 64")).to_be_visible()
        expect(page.get_by_role("textbox", name="Hidden")).to_be_focused()
        assert fixture.posted == [], "what the page can see is wrong is not sent"
        page.get_by_role("textbox", name="Hidden").fill("128")
        page.get_by_role("textbox", name="Epochs").fill("3")
        page.get_by_role("textbox", name="Quorum").fill("99")
        page.get_by_role("button", name="Create run").click()
        expect(page.get_by_text("99 ranks are more than this controller takes")).to_be_visible()
        expect(page.get_by_text("hidden must be at most 512")).to_be_visible()
        page.get_by_text("Auto", exact=True).click()
        page.get_by_role("textbox", name="Quorum").fill("2")
        page.get_by_role("textbox", name="Target").fill("3")
        page.get_by_role("button", name="Create run").click()
        expect(page).to_have_url(re.compile(rf"#/runs/{states.WAITING}$"))
        body = {"job": "examples/digits.py:Digits", "name": "", "mode": "cpu_cadence", "start_mode": "auto"}
        settings = {"epochs": 3, "quorum": 2, "target": 3, "params": {"hidden": 128}}
        assert fixture.posted[-1] == ("runs", body | settings)


def test_advanced_settings_appear_where_they_count_and_problems_stand_at_them(
    browser: Browser, origin: str, fixture: Fixture
) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in(FACES["new"])
        settle(page, "new")
        page.get_by_role("heading", name="Advanced").click()
        rate = page.get_by_role("textbox", name="Outer learning rate")
        expect(rate).to_have_count(0)
        page.get_by_role("combobox", name="Outer optimizer").select_option(label="Nesterov (DiLoCo)")
        rate.fill("0")
        page.get_by_role("textbox", name="Speed hint").fill("[0.5, 2]")
        page.get_by_role("combobox", name="Guard").select_option("growth")
        expect(page.get_by_role("textbox", name="Guard's threshold")).to_have_count(0)
        page.get_by_role("checkbox", name="Meta-controller").uncheck()
        expect(page.get_by_text("5 changed")).to_be_visible()
        watched.check()
        page.get_by_role("heading", name="Advanced").click()
        expect(rate).not_to_be_visible()
        page.get_by_role("button", name="Create run").click()
        expect(page.get_by_text("outer_lr must lie above 0")).to_be_visible()
        expect(page.get_by_text("the hinted slow rank must be a rank's number")).to_be_visible()
        expect(page.get_by_role("textbox", name="Speed hint")).to_be_focused()
        assert [wrong for wrong in watched.wrongs if "status of 422" not in wrong] == []
        watched.wrongs.clear()
        watched.check()
        page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
        watched.check()
        rate.fill("0.5")
        page.get_by_role("textbox", name="Speed hint").fill("[1, 2.5]")
        page.get_by_role("button", name="Create run").click()
        expect(page).to_have_url(re.compile(rf"#/runs/{states.WAITING}$"))
        body = {"job": "examples/digits.py:Digits", "name": "", "mode": "cpu_cadence", "start_mode": "manual"}
        settings = {"outer_optimizer": "nesterov", "outer_lr": 0.5, "speed_hint": [1, 2.5], "guard": "growth"}
        assert fixture.posted[-1] == ("runs", body | settings | {"meta_controller": False, "params": {}})


def test_what_a_collective_mode_leaves_without_effect_is_barred_with_the_reason(
    browser: Browser, origin: str, fixture: Fixture
) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in(FACES["new"])
        settle(page, "new")
        page.get_by_role("heading", name="Advanced").click()
        page.get_by_role("checkbox", name="Parameters travel as bf16").check()
        page.get_by_role("combobox", name="Outer optimizer").select_option("nesterov")
        page.get_by_text("NCCL cadence", exact=True).click()
        narrow = page.get_by_role("checkbox", name="Parameters travel as bf16")
        expect(narrow).to_be_disabled()
        expect(narrow).not_to_be_checked()
        expect(narrow).to_have_accessible_description(re.compile("The devices sum in f32"))
        for name in ("Outer optimizer", "Write-back"):
            expect(page.get_by_role("combobox", name=name)).to_be_disabled()
        expect(page.get_by_role("textbox", name="Outer learning rate")).to_have_count(0)
        expect(page.get_by_text("Sensible as they are")).to_be_visible()
        watched.check()
        page.get_by_role("button", name="Create run").click()
        expect(page).to_have_url(re.compile(rf"#/runs/{states.WAITING}$"))
        body = {"job": "examples/digits.py:Digits", "name": "", "mode": "nccl_cadence", "start_mode": "manual"}
        assert fixture.posted[-1] == ("runs", body | {"params": {}})


def test_the_session_says_who_is_in_it_and_by_which_way(browser: Browser, origin: str) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in(FACES["collective"])
        panel = page.get_by_role("region", name="Session")
        expect(panel).to_contain_text("rank 5 died")
        expect(panel).to_contain_text("NCCL 2.28.9 on eth0r0 to r4, r6, r7")
        ranks = page.get_by_role("table", name="Ranks")
        expect(ranks.get_by_role("row", name=re.compile("^r8 "))).to_contain_text("NCCL 2.28.9 on ens5")
        page.goto(f"{origin}/{FACES['training']}")
        expect(page.get_by_role("table", name="Ranks")).to_be_visible()
        expect(page.get_by_role("region", name="Session")).to_have_count(0)
        assert watched.wrongs == []


def test_the_log_of_decisions_says_why_a_guard_objected(browser: Browser, origin: str) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in(FACES["done"])
        settle(page, "done")
        log = page.get_by_role("list", name="Decisions, newest first")
        entry = log.locator("li", has_text=re.compile("^round 42"))
        expect(entry).to_contain_text("Anchor 18 batches on rank 2")
        expect(entry).to_contain_text("No growth: The replicas were 0.081 apart")
        expect(log.locator("li", has_text=re.compile("^round 45"))).to_contain_text("Shorter window: The learning rate")
        expect(log.locator(".objection")).to_have_count(5)
        watched.check()


def test_a_job_that_cannot_be_read_says_so(browser: Browser, origin: str) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in(FACES["new"])
        page.get_by_text("TinyGPT", exact=True).click()
        expect(page.get_by_text("line 12: unexpected indent")).to_be_visible()
        page.get_by_text("1 file looks like a job").click()
        expect(page.get_by_text("Draft has no method training_step")).to_be_visible()


def test_live_figures_move_and_the_layout_does_not(browser: Browser, origin: str) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in(FACES["training"])
        expect(page.locator(".u-over").first).to_be_visible()
        where = (
            "[...document.querySelectorAll('.tile, .panel, th')].map(e => JSON.stringify(e.getBoundingClientRect()))"
        )
        number = tile(page, "Round")
        before, places = number.inner_text(), page.evaluate(where)
        expect(number).not_to_have_text(before)
        assert page.evaluate(where) == places
        assert watched.wrongs == []


def test_a_lost_frame_heals_itself(browser: Browser, origin: str, fixture: Fixture) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in()
        fixture.lose_frames = 1
        watched.page.goto(f"{origin}/{FACES['training']}")
        number = tile(page, "Round")
        expect(number).to_be_visible()
        before, subscriptions = number.inner_text(), fixture.subscriptions
        expect(number).not_to_have_text(before)
        assert fixture.subscriptions > subscriptions, "it subscribed afresh"
        expect(page.locator("[data-connection=live]")).to_be_visible()
        assert watched.wrongs == []


def test_a_lost_connection_is_said_and_heals(browser: Browser, origin: str, fixture: Fixture) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in(FACES["training"])
        expect(page.locator("[data-connection=live]")).to_be_visible()
        expect(page.locator(".u-over").first).to_be_visible()
        page.evaluate(
            "new MutationObserver(() => {"
            " if (document.querySelector('.veiled')) document.documentElement.dataset.seen = 'veil' })"
            ".observe(document.body, {subtree: true, childList: true, attributes: true})"
        )
        fixture.drop()
        expect(page.locator("html[data-seen=veil]")).to_have_count(1)
        expect(page.locator("[data-connection=live]")).to_be_visible()
        expect(page.locator(".veiled")).to_have_count(0)


def test_silence_is_called_stale_and_dims_the_page(browser: Browser, origin: str) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in(f"#/runs/{states.STALE}")
        expect(page.locator("[data-connection=stale]")).to_contain_text("Stale since")
        expect(page.get_by_text("No word from the controller.", exact=True)).to_be_visible()
        expect(page.locator(".veiled")).to_be_visible()
        watched.check()


@pytest.mark.parametrize("face", ["runs", "training"])
def test_a_database_in_trouble_is_a_banner_with_the_cure(
    browser: Browser, fixture: Fixture, origin: str, face: str
) -> None:
    fixture.not_durable = "/var/m.sqlite3: no space is left on its disk. Free space on that disk"
    with Watched(browser, origin) as watched:
        page = watched.sign_in(FACES[face])
        banner = page.get_by_role("alert").filter(has_text="Nothing is recorded right now")
        expect(banner).to_contain_text("no space is left on its disk. Free space on that disk. Training goes on")
        watched.check()


def test_names_are_text_and_nothing_else(browser: Browser, origin: str) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in(FACES["hostile"])
        expect(page.get_by_role("heading", level=1)).to_contain_text("<img src=x onerror=alert(1)>")
        expect(page.locator("img")).to_have_count(0)
        page.goto(f"{origin}/{FACES['failed']}")
        page.get_by_text("Last lines it wrote").first.click()
        expect(page.locator("pre").first).to_contain_text("<script>alert('no')</script>")
        assert watched.wrongs == []


def test_drawings_can_be_read_by_keyboard_and_as_tables(browser: Browser, origin: str) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in(FACES["done"])
        settle(page, "done")
        page.locator(".heat-canvas canvas[tabindex]").focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowDown")
        expect(page.locator("[role=status]").last).to_contain_text("Round 47, rank 1 (birch cpu:0):")
        expect(page.locator(".tip")).to_contain_text("batches")
        page.get_by_role("img", name=re.compile("^Loss")).focus()
        page.keyboard.press("Home")
        expect(page.locator("[role=status]").last).to_contain_text("round 0: Training loss 2.290")
        as_table = page.get_by_role("button", name="As a table")
        for left in (3, 2, 1):
            expect(as_table).to_have_count(left)
            as_table.first.click()
        for name in ("Allotments", "Loss", "Throughput"):
            expect(page.get_by_role("region", name=f"{name} as a table")).to_be_visible()
        watched.check()


def test_the_theme_is_remembered(browser: Browser, origin: str) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in()
        dark = "getComputedStyle(document.documentElement).colorScheme"
        page.get_by_role("radio", name="Dark").check(force=True)
        assert page.evaluate(dark) == "dark"
        page.reload()
        assert page.evaluate(dark) == "dark"
        expect(page.get_by_role("radio", name="Dark")).to_be_checked()


def test_an_unknown_run_is_said_to_be_unknown(browser: Browser, origin: str) -> None:
    with Watched(browser, origin) as watched:
        page = watched.sign_in("#/runs/99")
        expect(page.get_by_role("alert")).to_contain_text("There is no run 99.")
        page.get_by_role("link", name="All runs", exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
