"""The dashboard's files as they are: no build, nothing from elsewhere, a policy that lets nothing else run.

``/app/*`` is ``frontend/app``. ``/vendor/*`` is exactly what ``frontend/vendor.json`` lists; npm put that
below ``frontend/``. The import map must stand inside the page, and so must the script that watches whether the others
arrive, ``#arrival``: the policy holds the hashes of these two.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from backend.api.problems import ApiProblem

FRONTEND_DIR = Path(__file__).resolve().parents[2] / "frontend"
PAGES_DIR = Path(__file__).resolve().parent / "pages"
SETUP_CURE = "run `make setup`, or `npm ci` in frontend/"

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}
"""What is served, and as what; a file of any other kind is not."""

DOCS_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
"""Swagger UI runs under it whole; it sends no forms."""

log = logging.getLogger(__name__)


def page_policy(script_hashes: list[str]) -> str:
    """The dashboard's Content-Security-Policy. ``script_hashes`` are those of what may run inside of it."""
    scripts = " ".join(["'self'", *(f"'sha256-{value}'" for value in script_hashes)])
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; font-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
    )


class _InlineScripts(HTMLParser):
    """Collects the text of import maps and of the script ``#arrival`` that stand in the page, to the byte."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.texts: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        known = given.get("type") == "importmap" or given.get("id") == "arrival"
        self._inside = tag == "script" and known and "src" not in given
        if self._inside:
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[-1] += data


def inline_script_hashes(html: str) -> list[str]:
    """sha256 of each script inside a page that may run there, in base64, as a policy wants it."""
    parser = _InlineScripts()
    parser.feed(html)
    parser.close()
    return [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in parser.texts]


@dataclass(frozen=True, slots=True)
class _File:
    stamp: tuple[int, int]
    content: bytes
    etag: str


class Frontend:
    """Finds and holds the dashboard's files. A file that changes on disk is read again."""

    def __init__(self, folder: Path = FRONTEND_DIR) -> None:
        self._folder = folder.resolve()
        self._files: dict[Path, _File] = {}
        self._vendor = self._read_vendor_map()

    def page(self, request: Request) -> Response:
        """The dashboard's one page."""
        file = self._load(self._folder / "index.html", self._folder)
        if file is None:
            raise ApiProblem(503, "frontend_missing", "The dashboard's files are not beside this controller.")
        policy = page_policy(inline_script_hashes(file.content.decode()))
        return _answer(request, file, MEDIA_TYPES[".html"], policy)

    def app(self, request: Request, path: str) -> Response:
        """A file of the dashboard's own code."""
        return self._serve(request, self._folder / "app" / path, self._folder / "app")

    def vendor(self, request: Request, name: str) -> Response:
        """A file of a library, by its name in the map."""
        place = self._vendor.get(name)
        if place is None:
            raise _nothing(request)
        if self._load(self._folder / place, self._folder) is None:
            raise ApiProblem(404, "vendor_missing", f"The library file {name} is not installed; {SETUP_CURE}.")
        return self._serve(request, self._folder / place, self._folder)

    def own_page(self, request: Request, name: str, policy: str) -> Response:
        """A page of the API's own."""
        file = self._load(PAGES_DIR / name, PAGES_DIR)
        if file is None:
            raise _nothing(request)
        return _answer(request, file, MEDIA_TYPES[Path(name).suffix], policy)

    def _serve(self, request: Request, path: Path, below: Path) -> Response:
        media_type = MEDIA_TYPES.get(path.suffix)
        file = self._load(path, below) if media_type else None
        if file is None or media_type is None:
            raise _nothing(request)
        return _answer(request, file, media_type, None)

    def _load(self, path: Path, below: Path) -> _File | None:
        """The file, when it really is one below that folder; links that lead out and dot files are not."""
        try:
            real = path.resolve()
            if not real.is_relative_to(below) or any(part.startswith(".") for part in real.relative_to(below).parts):
                return None
            stat = real.stat()
            held = self._files.get(real)
            if held is not None and held.stamp == (stat.st_mtime_ns, stat.st_size):
                return held
            content = real.read_bytes()
        except (OSError, ValueError, RuntimeError):
            return None
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        self._files[real] = _File((stat.st_mtime_ns, stat.st_size), content, etag)
        return self._files[real]

    def _read_vendor_map(self) -> dict[str, str]:
        try:
            listed = json.loads((self._folder / "vendor.json").read_bytes())
        except (OSError, ValueError) as error:
            log.warning("the dashboard's library map cannot be read, so its page will not run: %s", error)
            return {}
        return {str(name): str(place) for name, place in listed.items()}


def _answer(request: Request, file: _File, media_type: str, policy: str | None) -> Response:
    headers = {"ETag": file.etag, "Cache-Control": "no-cache"}
    if policy is not None:
        headers["Content-Security-Policy"] = policy
    if file.etag in [tag.strip() for tag in request.headers.get("if-none-match", "").split(",")]:
        return Response(None, 304, headers)
    return Response(file.content, 200, headers, media_type)


def _nothing(request: Request) -> ApiProblem:
    return ApiProblem(404, "not_found", f"There is nothing at {request.scope['path']}.")


def router(frontend: Frontend) -> APIRouter:
    """The page, its files, and the page of the API's documentation."""
    routes = APIRouter(include_in_schema=False)

    @routes.api_route("/", methods=["GET", "HEAD"])
    def page(request: Request) -> Response:
        return frontend.page(request)

    @routes.api_route("/app/{path:path}", methods=["GET", "HEAD"])
    def app(request: Request, path: str) -> Response:
        return frontend.app(request, path)

    @routes.api_route("/vendor/{name}", methods=["GET", "HEAD"])
    def vendor(request: Request, name: str) -> Response:
        return frontend.vendor(request, name)

    @routes.api_route("/favicon.ico", methods=["GET", "HEAD"])
    def favicon(request: Request) -> Response:
        return frontend.app(request, "icon.svg")

    @routes.api_route("/docs", methods=["GET", "HEAD"])
    def docs(request: Request) -> Response:
        return frontend.own_page(request, "docs.html", DOCS_POLICY)

    @routes.api_route("/docs/start.js", methods=["GET", "HEAD"])
    def docs_start(request: Request) -> Response:
        return frontend.own_page(request, "docs.js", DOCS_POLICY)

    return routes
