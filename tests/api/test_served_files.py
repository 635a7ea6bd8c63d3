"""The page and its files: exactly what is listed, with the right types and a policy that allows nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest
from api_harness import Api, problem_of

from backend.api.frontend import FRONTEND_DIR, inline_script_hashes


def test_the_page_is_served_with_a_policy_that_knows_its_scripts(api: Api, frontend_dir: Path) -> None:
    answer = api.anybody("GET", "/")

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    policy = answer.headers["content-security-policy"]
    expected = base64.b64encode(hashlib.sha256(b'\n{"imports": {}}\n').digest()).decode()
    assert f"script-src 'self' 'sha256-{expected}';" in policy
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    for directive in ("frame-ancestors 'none'", "base-uri 'none'", "form-action 'self'", "connect-src 'self'"):
        assert directive in policy
    (frontend_dir / "index.html").write_text('<script type="importmap">{"imports": {"a": "/b"}}</script>')
    assert api.anybody("GET", "/").headers["content-security-policy"] != policy


def test_only_inline_import_maps_and_the_script_of_the_arrival_are_let_in() -> None:
    page = """<script src="/a.js"></script><script>alert(1)</script><script type="importmap" src="x"></script>
        <script id="arrival">\nif (1 < 2) say("</p>");</script><script id="arrival" src="x">no()</script>
        <SCRIPT TYPE="importmap">{"a": "&amp;"}</SCRIPT><script type="module">let x = 1</script>
        <p id="arrival" onclick="no()">no()</p>"""

    hashes = inline_script_hashes(page)

    texts = (b'\nif (1 < 2) say("</p>");', b'{"a": "&amp;"}')
    assert hashes == [base64.b64encode(hashlib.sha256(text).digest()).decode() for text in texts]


@pytest.mark.parametrize(
    ("path", "media_type"),
    [
        ("/app/main.js", "text/javascript; charset=utf-8"),
        ("/app/icon.svg", "image/svg+xml"),
        ("/favicon.ico", "image/svg+xml"),
        ("/vendor/lib.js", "text/javascript; charset=utf-8"),
    ],
)
def test_files_come_with_their_type_and_are_asked_for_again_by_tag(api: Api, path: str, media_type: str) -> None:
    answer = api.anybody("GET", path)

    assert answer.status_code == 200
    assert answer.headers["content-type"] == media_type
    assert answer.headers["cache-control"] == "no-cache"
    again = api.anybody("GET", path, {"If-None-Match": f'"other", {answer.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == answer.headers["etag"]
    head = api.anybody("HEAD", path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == answer.headers["content-length"]


def test_a_changed_file_is_served_anew(api: Api, frontend_dir: Path) -> None:
    before = api.anybody("GET", "/app/main.js").headers["etag"]
    (frontend_dir / "app/main.js").write_text("export const x = 'longer';\n")

    answer = api.anybody("GET", "/app/main.js", {"If-None-Match": before})

    assert answer.status_code == 200
    assert b"longer" in answer.content


def test_nothing_else_is_served(api: Api, frontend_dir: Path, tmp_path: Path) -> None:
    app = frontend_dir / "app"
    (app / "notes.md").write_text("no type")
    (app / ".hidden.js").write_text("hidden")
    (app / "link.js").symlink_to(tmp_path / "secret.js")
    (app / "folder.js").mkdir()
    (frontend_dir / "index.js").write_text("beside, not below")
    paths = [
        "/app/", "/app/gone.js", "/app/notes.md", "/app/.hidden.js", "/app/link.js", "/app/folder.js",
        "/app/../index.js", "/app/%2e%2e/index.js", "/app/..%2findex.js", "/app/..%5cindex.js", "/app//etc/passwd",
        "/app/%2fetc%2fpasswd.js", "/app/x%00.js", "/app/" + "x" * 5000 + ".js",
        "/vendor/out.js", "/vendor/gone.js", "/vendor/other.js", "/vendor/node_modules/lib/lib.mjs",
        "/vendor/..%2findex.js", "/node_modules/lib/lib.mjs", "/index.html", "/vendor.json",
    ]  # fmt: skip
    for path in paths:
        answer = api.call("GET", path)
        assert answer.status_code == 404, path
        problem_of(answer)
    assert "npm ci" in problem_of(api.anybody("GET", "/vendor/gone.js"))["detail"]


def test_without_the_dashboards_files_the_page_says_so(api: Api, frontend_dir: Path) -> None:
    (frontend_dir / "index.html").unlink()

    answer = api.anybody("GET", "/")

    assert answer.status_code == 503
    assert problem_of(answer)["code"] == "frontend_missing"


def test_the_documentation_page_loads_nothing_from_elsewhere(api: Api) -> None:
    answer = api.call("GET", "/docs")

    assert answer.status_code == 200
    assert not re.search(r"(src|href)=\"(?!/)", answer.text)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    start = api.call("GET", "/docs/start.js")
    assert start.headers["content-type"] == "text/javascript; charset=utf-8"
    assert "/api/v1/openapi.json" in start.text


def test_the_real_page_asks_only_for_files_that_are_served() -> None:
    """The map in the page, the list of libraries and the page's links agree."""
    page = (FRONTEND_DIR / "index.html").read_text()
    listed = re.findall(r'"([^"]+)":', (FRONTEND_DIR / "vendor.json").read_text())
    wanted = set(re.findall(r'"/vendor/([^"]+)"', page))

    assert wanted
    assert wanted <= set(listed)
    assert {"swagger-ui.js", "swagger-ui.css"} <= set(listed)
    assert len(inline_script_hashes(page)) == 2
    for place in re.findall(r'(?:src|href)="/app/([^"]+)"', page):
        assert (FRONTEND_DIR / "app" / place).is_file(), place
