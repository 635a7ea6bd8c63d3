"""The REST interface as the command line uses it: one connection, errors as sentences with a cure.

CliError        exit code 1: refused, or nobody there
    UsageError      2: it cannot be meant like this
    NotSignedIn     4: no token, or not this controller's
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2

DEFAULT_URL = "http://127.0.0.1:8470"
DEFAULT_TOKEN_FILE = Path("var/operator.token")
TIMEOUT_SECONDS = 30.0
PAGE = 400


class CliError(Exception):
    """What to tell the person, on stderr. ``code`` is the problem's, empty when there was no answer."""

    exit_code = 1

    def __init__(self, text: str, *, code: str = "", errors: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.text = text
        self.code = code
        self.errors = errors


class UsageError(CliError):
    """The command line itself is wrong."""

    exit_code = 2


class NotSignedIn(CliError):
    """The controller does not accept what was shown to it."""

    exit_code = 4


class Client:
    """One controller. Nothing is sent before the first request; the token only to what says it is Marchline."""

    def __init__(self, url: str = "", token_file: Path | None = None, environ: Mapping[str, str] = os.environ) -> None:
        self.url = _checked_url(url or environ.get("MARCHLINE_URL", "") or DEFAULT_URL)
        self._token_file = token_file
        self._environ = environ
        # trust_env would send loopback requests, and with them the token, to whatever http_proxy names.
        self._http = httpx2.Client(base_url=self.url, trust_env=False, timeout=TIMEOUT_SECONDS)
        self._greeted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str, **params: Any) -> Any:
        """GET below /api/v1. Raises ``CliError``."""
        return self.request("GET", path, params=params)

    def post(self, path: str, body: Any = None) -> Any:
        """POST below /api/v1. Raises ``CliError``."""
        return self.request("POST", path, body=body)

    def request(self, method: str, path: str, *, params: Mapping[str, Any] | None = None, body: Any = None) -> Any:
        """Any request below /api/v1: its JSON, or none for an empty answer. Raises ``CliError``."""
        if not self._greeted:
            self.about()
            self._http.headers["Authorization"] = f"Bearer {self._token()}"
            self._greeted = True
        response = self._send(method, f"/api/v1/{path}", params=params, json=body)
        if response.is_error:
            raise self._problem(response)
        return _json(response) if response.content else None

    def pages(self, path: str, *, after: int, key: str) -> Iterator[list[dict[str, Any]]]:
        """Rows of a growing list above ``after``, page by page."""
        while True:
            items = self.get(path, after=after, limit=PAGE)["items"]
            if items:
                yield items
            if len(items) < PAGE:
                return
            after = items[-1][key]

    def about(self) -> dict[str, Any]:
        """What answers at the address. Raises ``CliError`` when nothing does, or not Marchline."""
        response = self._send("GET", "/version")
        if response.status_code == 421:
            raise self._problem(response)
        about = _json(response) if response.is_success else None
        if not isinstance(about, dict) or about.get("product") != "marchline":
            raise CliError(f"What answers at {self.url} is not a Marchline controller; name the right one with --url.")
        return about

    def is_ready(self) -> bool:
        """Whether a controller answers there and can serve."""
        try:
            self.about()
            return self._send("GET", "/readyz").is_success
        except CliError:
            return False

    def _send(self, method: str, path: str, **extra: Any) -> httpx2.Response:
        try:
            return self._http.request(method, path, **extra)
        except httpx2.TimeoutException as error:
            raise CliError(f"The controller at {self.url} did not answer within {TIMEOUT_SECONDS:g} s.") from error
        except httpx2.ConnectError as error:
            raise CliError(
                f"No controller answers at {self.url}; start one with `python -m backend serve`, or name it with --url."
            ) from error
        except httpx2.HTTPError as error:
            raise CliError(f"What answers at {self.url} is not a Marchline controller ({error}); see --url.") from error

    def _token(self) -> str:
        """The operator token: the file that was named, the environment, the usual file."""
        if self._token_file is None and self._environ.get("MARCHLINE_TOKEN"):
            return self._environ["MARCHLINE_TOKEN"].strip()
        path = self._token_file or DEFAULT_TOKEN_FILE
        try:
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise NotSignedIn(
                f"The operator token cannot be read from {path} ({why}); name its file with --token-file, or set "
                "MARCHLINE_TOKEN. The controller keeps it in operator.token in its data directory."
            ) from error
        if not token or not token.isascii() or not token.isprintable():
            raise NotSignedIn(f"There is no operator token in {path}.")
        return token

    def _problem(self, response: httpx2.Response) -> CliError:
        problem = _json(response)
        if not isinstance(problem, dict) or "code" not in problem:
            return CliError(f"The controller at {self.url} answered {response.status_code} and did not say why.")
        kind = NotSignedIn if response.status_code in (401, 429) else CliError
        code, detail = str(problem["code"]), str(problem.get("detail") or problem.get("title") or problem["code"])
        errors = tuple(f"{item['field']}: {item['text']}" for item in problem.get("errors", []) if item.get("field"))
        if kind is NotSignedIn:
            detail = f"{detail} The token came from {self._token_source()}."
        return kind(detail, code=code, errors=errors)

    def _token_source(self) -> str:
        if self._token_file is None and self._environ.get("MARCHLINE_TOKEN"):
            return "MARCHLINE_TOKEN"
        return str(self._token_file or DEFAULT_TOKEN_FILE)


def _checked_url(url: str) -> str:
    url = url.rstrip("/")
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError) as error:
        raise UsageError(f"{url!r} is no address of a controller: {error}; write it like {DEFAULT_URL}.") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(f"{url!r} is no address of a controller; write it like {DEFAULT_URL}.")
    return url


def _json(response: httpx2.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None
