"""The dashboard's files: pure parts under ``node --test``, libraries pinned and present, budgets, nothing unsafe."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from backend.api.frontend import inline_script_hashes

ROOT = Path(__file__).resolve().parents[2]
FRONTEND = ROOT / "frontend"
SCRIPTS = sorted((FRONTEND / "app").glob("*.js"))
MAX_LINES = 300
MAX_STYLE_LINES = 600
FIRST_LOAD_BYTES = 250 * 1024


def test_the_pure_parts_pass_their_own_tests() -> None:
    node = shutil.which("node")
    assert node, "Node 20 or newer is needed for the dashboard's tests"
    tests = sorted(str(path) for path in Path(__file__).parent.glob("*.test.mjs"))
    done = subprocess.run([node, "--test", *tests], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert len(tests) >= 8


def test_every_library_is_pinned_and_the_lock_names_no_registry() -> None:
    package = json.loads((FRONTEND / "package.json").read_text())
    lock = (FRONTEND / "package-lock.json").read_text()
    pinned = package["dependencies"] | package["devDependencies"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in pinned.values()), pinned
    assert "resolved" not in lock
    installed = json.loads(lock)["packages"]
    for name, version in pinned.items():
        assert installed[f"node_modules/{name}"]["version"] == version
        assert installed[f"node_modules/{name}"]["integrity"].startswith("sha512-")


def test_every_import_is_served() -> None:
    vendor = json.loads((FRONTEND / "vendor.json").read_text())
    for place in vendor.values():
        assert (FRONTEND / place).is_file(), f"{place} is missing: run npm ci in frontend/"
    page = (FRONTEND / "index.html").read_text()
    assert len(inline_script_hashes(page)) == 2
    imports = json.loads(re.search(r'<script type="importmap">(.*?)</script>', page, re.S)[1])["imports"]  # type: ignore[index]
    assert all(place.removeprefix("/vendor/") in vendor for place in imports.values())
    for script in SCRIPTS:
        for name in re.findall(r'^(?:import|export) .*?from "([^"]+)"', script.read_text(), re.M):
            assert name in imports or (script.parent / name).is_file(), f"{script.name} imports {name}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_short_and_safe(script: Path) -> None:
    text = script.read_text()
    assert text.count("\n") <= MAX_LINES
    for forbidden in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "eval(",
        "new Function",
        "document.write",
        "http://",
    ):
        assert forbidden not in text, f"{script.name} uses {forbidden}"
    assert not re.search(r'\sstyle="', text), f"{script.name}: a style attribute, which the policy refuses"


def test_the_style_sheet_is_short_and_loads_nothing() -> None:
    text = (FRONTEND / "app" / "style.css").read_text()
    assert text.count("\n") <= MAX_STYLE_LINES
    assert "url(" not in text
    assert "@import" not in text


def test_every_colour_that_scripts_ask_for_exists() -> None:
    style = (FRONTEND / "app" / "style.css").read_text()
    for script in SCRIPTS:
        for name in re.findall(r'"(--[a-z0-9-]+)"', script.read_text()):
            assert f"  {name}:" in style, f"{script.name} asks for {name}"


def test_the_first_load_fits_its_budget() -> None:
    vendor = json.loads((FRONTEND / "vendor.json").read_text())
    needed = [FRONTEND / place for name, place in vendor.items() if not name.startswith("swagger")]
    files = [FRONTEND / "index.html", *(FRONTEND / "app").iterdir(), *needed]
    assert sum(len(gzip.compress(path.read_bytes())) for path in files) <= FIRST_LOAD_BYTES
